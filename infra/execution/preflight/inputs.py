"""Checks a config's packages, models, rewards and prompts."""

from __future__ import annotations

from functools import partial

from ratchet.infra.execution.preflight.engine_args import check_engine_args
from ratchet.infra.execution.preflight.mistakes import check_all
from ratchet.infra.execution.preflight.models import check_models
from ratchet.infra.execution.preflight.packages import check_packages
from ratchet.infra.execution.preflight.prompts import check_files, check_metric
from ratchet.infra.progress import note
from ratchet.rlhf.agents.agent import check_agent
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.user_algorithms import UserAdvantage, UserLoss
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.environments.dialogues import is_prefix_stable
from ratchet.rlhf.environments.environment import check_environment
from ratchet.rlhf.environments.policy_tokenizer import policy_tokenizer
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.loading import check_reward_model
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.rewards.registry import check_rewards


def check_inputs(config: RunConfig) -> None:
    """Checks everything that the config names, and raises one `UserError` for all mistakes."""
    held_out = [] if config.validation.data is None else [config.validation.data]
    paths = (*config.data.train, *held_out)
    greedy = config.algorithm.advantage.type if config.needs_greedy_scores else None
    played_on_by = f"algorithm.advantage {config.algorithm.advantage.type}" if config.needs_turn_values else None
    environment, agent = config.rollout.environment, config.rollout.agent
    chosen = (config.algorithm.loss, config.algorithm.advantage)
    if config.only_scores:
        _check_reward(config)
        return
    check_all(
        partial(check_packages, config),
        partial(check_engine_args, config),
        partial(_check_server, config),
        partial(check_rewards, config.reward, greedy),
        *(
            []
            if environment is None
            else [
                partial(
                    check_environment,
                    environment.name,
                    environment.options,
                    played_on_by,
                    shared=config.rollout.workers,
                )
            ]
        ),
        *([] if agent is None else [partial(check_agent, agent.name, agent.options)]),
        *(algorithm.check for algorithm in chosen if isinstance(algorithm, UserLoss | UserAdvantage)),
        partial(check_models, config),
        *(partial(PromptDataset, (path,)) for path in paths),
    )
    tokenizer = policy_tokenizer(config.model, environment)
    if (environment is not None or agent is not None) and not is_prefix_stable(tokenizer):
        note(
            f"the chat template of {config.model.path} renders earlier messages differently when others follow (it may "
            "leave out reasoning): the policy sees and learns from what it wrote"
        )
    _check_reward_model(config)
    # prompts are tried once the rest is right
    check_files(
        paths,
        config.model,
        config.data,
        config.reward.model_dump_json(),
        None if environment is None else environment.model_dump_json(),
    )
    check_metric(config)


def _check_reward(config: RunConfig) -> None:
    """Checks all that a run without prompts computes."""
    check_all(partial(check_packages, config), partial(check_rewards, config.reward))
    _check_reward_model(config)


def _check_reward_model(config: RunConfig) -> None:
    if config.reward.model is not None:
        check_reward_model(config.reward.model)
        load_tokenizer(config.reward.model, writes=False)


def _check_server(config: RunConfig) -> None:
    if config.train.updates and not config.rollout.engine.takes_weights:
        raise UserError(
            "rollout.engine.weights_folder is null, so the servers would keep generating with the first weights: "
            "name a folder that they can read, or only evaluate"
        )
