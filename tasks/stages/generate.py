"""generate: answers the iteration's prompts with the rollout engine, shard by shard."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import JsonValue

from ratchet.infra.execution.driver import Driver
from ratchet.infra.workers.calls import (
    C,
    Call,
    Context,
    Experience,
    ExpertExperience,
    ReplayedAnswer,
    ShardOutput,
    ShardStart,
    ShardSummary,
)
from ratchet.rlhf.agents.agent_loop import Rules
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import DynamicSamplingConfig, RunConfig
from ratchet.rlhf.config.engines import RolloutEngine
from ratchet.rlhf.config.sections import AgentConfig, DrawingConfig, EnvironmentConfig, PromptConfig, SamplingConfig
from ratchet.rlhf.data.formats import tools_column
from ratchet.rlhf.data.images import of_data_url
from ratchet.rlhf.data.prompts import Prompt, PromptDataset, encode
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import CONTINUED, Beginning, Dialogue
from ratchet.rlhf.environments.environment import EnvironmentFailed
from ratchet.rlhf.environments.guarded_calls import check_continues
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.schema import IMAGES, ROUTES, TRAJECTORY, TURN_IMAGES
from ratchet.rlhf.stage_config import StageConfig, key, section
from ratchet.tasks.curriculum import solve_rates
from ratchet.tasks.experience_replay import draw_experience
from ratchet.tasks.stage import RowsStage, Until
from ratchet.tasks.stages.score import ScoreSummary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_COLUMNS = (
    "prompt_id",
    "messages",
    "tools",
    "prompt_is_text",
    "prompt",
    "prompt_ids",
    IMAGES,
    "data_source",
    "ground_truth",
    "ground_truth_is_json",
    "extra_info",
)
"""The columns of a prompt, for stages that answer it again."""
TURN_COLUMNS = ("turns", "turn_starts", "turn_ends", "turn_rewards", "turn_states", TURN_IMAGES)
FIRST_TURN_CLIP_RATIO = "rollout/first_turn_clip_ratio"


class GenerateConfig(StageConfig):
    seed: int = key("run.seed")
    dtype: str = key("model.dtype")
    drawing: DrawingConfig = section("data")
    prompt: PromptConfig = section("data")
    engine: RolloutEngine = key("rollout.engine")
    n: int = key("rollout.n")
    sampling: SamplingConfig = section("rollout")
    environment: EnvironmentConfig | None = section("rollout.environment")
    agent: AgentConfig | None = section("rollout.agent")
    prompts_per_shard: int = key("rollout.prompts_per_shard")
    dynamic_sampling: DynamicSamplingConfig | None = key("algorithm.dynamic_sampling")
    router_replay: bool = key("rollout.router_replay")
    # operational: the assigned weights cover it
    partial: bool = key("rollout.partial", operational=True)


class GenerateSummary(ShardSummary):
    tokens: int
    oldest_version: int | None = None
    """The oldest version of the policy that drew any of the tokens; None: there are no tokens."""
    errors: int = 0
    tool_errors: int = 0
    conversations: int = 0
    """Trajectories that may take several turns."""
    cut_in_first_turn: int = 0
    """Conversations that reached `rollout.max_response_tokens` in the first turn of the policy."""
    num_turns: dict[int, int] = {}
    """Number of conversations by number of turns, with an environment or an agent."""
    num_branches: dict[int, int] = {}
    """Number of trajectories by number of branches, with an agent."""
    replayed: int = 0
    """Number of trajectories that repeat earlier ones, or that experts wrote."""


def shards_of(driver: Driver) -> int:
    """Returns the number of shards; the maximum, with dynamic sampling."""
    return -(-driver.config.max_prompts // driver.config.rollout.prompts_per_shard)


def samples_dynamically(config: RunConfig) -> bool:
    return config.algorithm.dynamic_sampling is not None


def expected_share(config: RunConfig) -> float:
    """Returns the share of the prompts that a shard gives if the scores of all its prompts differ."""
    return config.rollout.prompts_per_shard / config.data.prompts_per_iteration


def share_that_differs(config: RunConfig, scored: Sequence[Mapping[str, JsonValue]]) -> float:
    """Returns the share of the prompts that dynamic sampling has; `scored` has a summary per scored shard."""
    differ = sum(ScoreSummary.model_validate(shard).prompts_that_differ for shard in scored)
    return differ / config.data.prompts_per_iteration


def generation_metrics(summaries: Sequence[GenerateSummary]) -> dict[str, float]:
    errors = sum(shard.errors for shard in summaries)
    tool_errors = sum(shard.tool_errors for shard in summaries)
    metrics = {"perf/generated_tokens": float(sum(shard.tokens for shard in summaries))}
    if conversations := sum(shard.conversations for shard in summaries):
        metrics[FIRST_TURN_CLIP_RATIO] = sum(shard.cut_in_first_turn for shard in summaries) / conversations
    if turns := [turns for shard in summaries for turns in Counter(shard.num_turns).elements()]:
        mean = sum(turns) / len(turns)
        metrics |= {"num_turns/min": float(min(turns)), "num_turns/max": float(max(turns)), "num_turns/mean": mean}
    if branches := [count for shard in summaries for count in Counter(shard.num_branches).elements()]:
        metrics["num_branches/mean"] = sum(branches) / len(branches)
    replayed = sum(shard.replayed for shard in summaries)
    metrics |= {"rollout/replayed": float(replayed)} if replayed else {}
    metrics |= {"rollout/tool_errors": float(tool_errors)} if tool_errors else {}
    return metrics | ({"rollout/errors": float(errors)} if errors else {})


@dataclass(frozen=True)
class Prompts:
    """The prompts of a shard, and how the policy answers them."""

    dataset: PromptDataset
    rows: list[tuple[int, int]]
    """For each prompt, its number in the iteration and its row in the dataset."""
    config: PromptConfig
    n: int
    """Trajectories per prompt."""
    sampling: Sampling
    environment: EnvironmentConfig | None
    agent: AgentConfig | None
    router_replay: bool = False
    """True if the trajectories have the experts of their tokens."""

    @property
    def partner(self) -> EnvironmentConfig | AgentConfig | None:
        """The environment or agent that the policy takes turns with."""
        return self.environment or self.agent

    @property
    def max_turns(self) -> int:
        return 1 if self.partner is None else self.partner.most_turns


def _numbers(config: GenerateConfig, shard: int) -> range:
    """Returns the numbers of a shard's prompts in the iteration."""
    sampling = config.dynamic_sampling
    limit = config.drawing.prompts_per_iteration if sampling is None else sampling.max_prompts
    first = shard * config.prompts_per_shard
    return range(first, min(first + config.prompts_per_shard, limit))


def draws(driver: Driver, iteration: int, shard: int, config: GenerateConfig, cursor: int) -> tuple[int, ...] | None:
    """Draws a shard's prompts from the position `cursor` with `data.curriculum`; None without it: the worker draws."""
    curriculum, numbers = config.drawing.curriculum, _numbers(config, shard)
    if curriculum is None:
        return None
    rates, weight = solve_rates(driver, iteration, curriculum), curriculum.weight
    dataset = driver.groups.local.worker.resources.dataset(config.drawing.train)
    drawn = dataset.draw(
        config.seed,
        cursor + numbers.start,
        len(numbers),
        config.drawing.weights,
        lambda row: weight if rates.get(row) in (0.0, 1.0) else 1.0,
        shuffle=config.drawing.shuffle,
    )
    return tuple(drawn)


def replays(
    driver: Driver, iteration: int, shard: int, config: GenerateConfig
) -> Mapping[int, Experience | ExpertExperience]:
    """Draws prompts of a shard together with answers; none without `data.replay`."""
    if config.drawing.replay is None:
        return {}
    return draw_experience(
        driver,
        iteration,
        _numbers(config, shard),
        config.drawing.replay,
        seed=config.seed,
        prompts=config.drawing.prompts_per_iteration,
        n=config.n,
        limit=config.sampling.max_response_tokens,
    )


def prompts_of(context: Context[GenerateConfig]) -> Prompts:
    config = context.config
    dataset = context.resources.dataset(config.drawing.train)
    numbers = _numbers(config, context.shard)
    drawn: Sequence[int] | None = context.call.drawn
    if drawn is None:
        first, source = context.call.cursor + numbers.start, config.drawing
        drawn = dataset.draw(config.seed, first, len(numbers), source.weights, shuffle=source.shuffle)
    sampling = Sampling.of_rollout(config.sampling, config.seed)
    rows = dict(zip(numbers, drawn, strict=True))
    # prompts that are drawn with their answers replace others
    rows |= {number: dataset.index_of(experience.row) for number, experience in context.call.replayed.items()}
    return Prompts(
        dataset,
        list(rows.items()),
        config.prompt,
        config.n,
        sampling,
        config.environment,
        config.agent,
        config.router_replay,
    )


def begin(context: Context[GenerateConfig]) -> ShardStart:
    return begin_trajectories(context, prompts_of(context))


def generate(context: Context[GenerateConfig]) -> ShardOutput[GenerateSummary]:
    """Turns the complete trajectories of a shard into rows."""
    prompts = prompts_of(context)
    batch = trajectories(context, prompts)
    generated = [dialogue for dialogue in context.dialogues if dialogue.replayed_from is None]
    talks, conversations = prompts.partner is not None, [part for all in generated for part in all.conversations]
    summary = GenerateSummary(
        tokens=sum(sum(dialogue.mask) for dialogue in conversations),
        replayed=len(context.dialogues) - len(generated),
        oldest_version=min((version for dialogue in conversations for version in dialogue.versions), default=None),
        errors=sum(dialogue.error is not None for dialogue in context.dialogues),
        tool_errors=sum(dialogue.tool_error is not None for dialogue in generated),
        conversations=len(generated) if prompts.max_turns > 1 else 0,
        cut_in_first_turn=sum(map(_is_cut_in_first_turn, generated)) if prompts.max_turns > 1 else 0,
        num_turns=Counter(dialogue.num_turns for dialogue in conversations) if talks else {},
        num_branches=Counter(len(dialogue.branches) for dialogue in context.dialogues) if prompts.agent else {},
        cursor=context.call.cursor + prompts.rows[-1][0] + 1,
    )
    return ShardOutput(batch, summary)


def _is_cut_in_first_turn(trajectory: Dialogue) -> bool:
    turns = sum(len(dialogue.turn_ends) for dialogue in trajectory.conversations)
    return trajectory.finish_reason == "length" and turns == 1


def begin_trajectories(context: Context[C], prompts: Prompts) -> ShardStart:
    """Starts `n` trajectories for each prompt, without tokens, prompt by prompt."""
    dialogues: list[Dialogue] = []
    for number, row in prompts.rows:
        prompt = prompts.dataset[row]
        _, ids = _encoded(context, prompts, row)
        messages = prompt.after(prompts.config.system_prompt)
        answers = context.replayed.get(number, ())
        for sample in range(prompts.n):
            request = Request(f"{_prompt_id(context, number)}-s{sample:02d}", tuple(ids), images=prompt.images)
            beginning = Beginning(
                messages, prompt.ground_truth, prompt.ground_truth_is_json, prompt.extra_info, prompt.tools
            )
            dialogue = Dialogue(request, beginning)
            if prompt.continues is not None:
                dialogue = Dialogue.continuing(request, beginning, _continued(context, prompts, prompt))
            if sample < len(answers):
                _repeat(dialogue, answers[sample], with_routes=prompts.router_replay)
            dialogues.append(dialogue)
    environment, agent = prompts.environment, prompts.agent
    if agent is not None:
        programs = context.resources.agents(
            agent.name,
            agent.options,
            host=agent.host,
            max_calls=agent.max_calls,
            timeout_s=agent.timeout_s,
            on_error=agent.on_error,
        )
        return ShardStart(tuple(dialogues), Rules(prompts.sampling, agents=programs, partner=agent.name))
    if environment is None:
        return ShardStart(tuple(dialogues), Rules(prompts.sampling))
    return ShardStart(tuple(dialogues), environment_rules(context, environment, prompts.sampling))


def environment_rules(context: Context[C], environment: EnvironmentConfig, sampling: Sampling) -> Rules:
    """Returns the rules of trajectories that an environment answers."""
    calls = context.resources.environments(environment)
    return Rules(sampling, calls, environment.max_turns, partner=environment.name)


def _continued(context: Context[C], prompts: Prompts, prompt: Prompt) -> dict[str, Any]:
    """Returns the stored turns with which a prompt's trajectories begin, whose tokens count as the environment's.

    Raises UserError if there is no room for more turns, or no environment that can be brought to the state after them.
    """
    assert prompt.continues is not None
    prefix, assigned = json.loads(prompt.continues), context.call.weights
    count, kept = len(prefix["ids"]), len(prefix["turn_ends"])
    environment = prompts.environment
    if environment is None:
        raise UserError(f"{prompt.where}: continues a trajectory with an environment: set rollout.environment")
    check_continues(prompt, environment.name, context.resources.environments(environment).make)
    if kept >= prompts.max_turns:
        raise UserError(
            f"{prompt.where}: continues after {kept} turns, and rollout.environment.max_turns is {prompts.max_turns}: "
            "raise it"
        )
    if count >= prompts.sampling.max_tokens:
        raise UserError(
            f"{prompt.where}: continues after {count} tokens, and rollout.max_response_tokens, which counts them, is "
            f"{prompts.sampling.max_tokens}: raise it"
        )
    assert assigned is not None, "the rollout has weights"
    nothing = {"log_probs": [0.0] * count, "mask": [0] * count, "versions": [assigned.version] * count}
    images = [of_data_url(url) for url in prefix.get("images", ())]
    given = {name: prefix.get(name, []) for name in ("ids", "states", *CONTINUED)}
    return given | nothing | {"images": images}


def _repeat(dialogue: Dialogue, answer: ReplayedAnswer, *, with_routes: bool) -> None:
    """Completes a trajectory with an answer that its prompt is drawn with.

    Raises UserError if the answer lacks the routes that the trainer needs. Those of an expert's answer are not known.
    """
    routes = np.asarray(answer.routes or (), dtype=np.int16)
    if with_routes and answer.routes is None and not answer.by_expert:
        raise UserError(
            f"data.replay draws {answer.source}, which was generated without rollout.router_replay and has no "
            f"{ROUTES}: set rollout.router_replay: false, or leave that run or iteration out"
        )
    dialogue.restore(
        {
            "ids": answer.ids,
            "log_probs": answer.log_probs,
            "mask": answer.mask,
            "versions": answer.versions,
            "turn_starts": [0],
            "turn_ends": [len(answer.ids)],
            "turn_rewards": [],
            "finish_reason": answer.finish_reason,
            "tool_error": None,
            "routes": routes.tobytes(),
            "slots": len(routes) // (len(dialogue.request.prompt_ids) + max(len(answer.ids) - 1, 0)),
        }
    )
    dialogue.replayed_from, dialogue.by_expert = answer.source, answer.by_expert


def trajectories(context: Context[C], prompts: Prompts) -> TrajectoryBatch:
    """Builds the rows of a shard's complete trajectories, one each, or with an agent one for each of its conversations.

    Raises `EnvironmentFailed` if too many of the environments failed; see `rollout.environment.max_error_share`.
    """
    tokenizer, dialogues = context.resources.tokenizer, context.dialogues
    talks, assigned = prompts.partner is not None, context.call.weights
    assert assigned is not None, "the rollout has weights"
    if prompts.partner is not None:
        check_errors(context.call, dialogues, prompts.partner)
    columns: dict[str, list[Any]] = {name: [] for name in ("trajectory_id", *TRAJECTORY.names("generate"))}
    digests: dict[bytes, str] = {}
    for place, trajectory in enumerate(dialogues):
        # trajectories are in the order of the prompts, `n` of each
        number, row = prompts.rows[place // prompts.n]
        prompt = prompts.dataset[row]
        text, ids = _encoded(context, prompts, row)
        for branch, dialogue in enumerate(trajectory.conversations):
            has_own_prompt = dialogue is not trajectory
            images = (*dialogue.request.images, *dialogue.images)
            new = {*prompt.images, *images} - digests.keys()
            digests |= {image: context.images.put(image) for image in new}
            values = {
                "trajectory_id": dialogue.request.trajectory_id,
                "prompt_id": _prompt_id(context, number),
                "sample": place % prompts.n,
                "dataset_row": prompts.dataset.row(row),
                "data_source": prompt.data_source,
                "messages": json.dumps(prompt.after(prompts.config.system_prompt), ensure_ascii=False),
                "tools": tools_column(prompt.tools),
                "prompt_is_text": prompt.is_text,
                "prompt": tokenizer.decode(dialogue.request.prompt_ids) if has_own_prompt else text,
                "prompt_ids": dialogue.request.prompt_ids if has_own_prompt else ids,
                "ground_truth": prompt.ground_truth,
                "ground_truth_is_json": prompt.ground_truth_is_json,
                "extra_info": prompt.extra_info,
                "seed": prompts.sampling.seed,
                "response": response_text(dialogue.ids, tokenizer),
                "response_ids": dialogue.ids,
                "rollout_log_probs": dialogue.log_probs,
                "response_mask": dialogue.mask,
                "finish_reason": trajectory.finish_reason,
                "policy_version": dialogue.versions[0] if dialogue.versions else assigned.version,
                "replayed_from": trajectory.replayed_from,
                "by_expert": trajectory.by_expert,
                "token_versions": dialogue.versions if len(set(dialogue.versions)) > 1 else None,
                "rollout_error": trajectory.error,
                "tool_error": trajectory.tool_error,
                "environment_reward": _environment_reward(trajectory, prompts),
                IMAGES: [digests[image] for image in images] or None,
                ROUTES: dialogue.routed_experts if prompts.router_replay else None,
                "turn_seconds": dialogue.turn_seconds[: len(dialogue.turn_ends)] if talks else None,
                "branch": None if prompts.agent is None else branch,
                "calls": None if prompts.agent is None else [asdict(call) for call in dialogue.calls],
                "agent_parts": list(_parts(trajectory).items()) if talks else None,
                **(turn_columns(dialogue, tokenizer) if talks else dict.fromkeys(TURN_COLUMNS)),
            }
            if prompts.agent is not None:
                values["turn_rewards"] = None
            for name, value in values.items():
                columns[name].append(value)
    return TrajectoryBatch.of(columns)


def turn_columns(dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the values of `TURN_COLUMNS` for a conversation."""
    # the environment has not rewarded the turns that it has not answered
    unanswered = len(dialogue.turn_ends) - dialogue.answered
    rewards = [*dialogue.turn_rewards, *[0.0] * unanswered]
    turns, states = dialogue.turns(tokenizer), dialogue.states or None
    images = [*dialogue.turn_images, *[0] * (len(dialogue.turn_ends) - len(dialogue.turn_images))]
    values = turns, dialogue.turn_starts, dialogue.turn_ends, rewards, states, images if dialogue.images else None
    return dict(zip(TURN_COLUMNS, values, strict=True))


def _parts(trajectory: Dialogue) -> Mapping[str, float]:
    """Returns the named parts of the agent's result, or of the environment's observations."""
    return trajectory.sums_of_parts if trajectory.result is None else trajectory.result.parts


def _environment_reward(trajectory: Dialogue, prompts: Prompts) -> float | None:
    """Returns the reward of the environment, or the one that the agent returned."""
    if prompts.agent is None:
        return None if prompts.environment is None else trajectory.reward
    return None if trajectory.result is None else trajectory.result.reward


def check_errors(call: Call[C], dialogues: Sequence[Dialogue], partner: EnvironmentConfig | AgentConfig) -> None:
    """Raises EnvironmentFailed if too many of a shard's environments or agents failed."""
    errors = [dialogue.error for dialogue in dialogues if dialogue.error is not None]
    if len(errors) > partner.max_error_share * len(dialogues):
        raise EnvironmentFailed(
            f"{partner.noun} failed for {len(errors)} of the {len(dialogues)} trajectories of shard "
            f"{call.shard} ({call.stage}, iteration {call.iteration}), more than {partner.key}.max_error_share "
            f"{partner.max_error_share:g}: nothing of the shard is committed. Fix what it needs and resume; if its "
            f"code changes and other shards are committed, resume names the fork that continues. The first error: "
            f"{errors[0]}"
        )


def _encoded(context: Context[C], prompts: Prompts, row: int) -> tuple[str, list[int]]:
    return encode(
        prompts.dataset[row],
        context.resources.tokenizer,
        max_tokens=prompts.config.max_prompt_tokens,
        truncation=prompts.config.truncation,
        system_prompt=prompts.config.system_prompt,
    )


def _prompt_id(context: Context[C], number: int) -> str:
    return f"it{context.iteration:06d}-p{number:05d}"


def exists(config: RunConfig) -> bool:
    return True


GENERATE = RowsStage(
    name="generate",
    label="gen",
    config=GenerateConfig,
    exists=exists,
    writes=TRAJECTORY.of("generate"),
    compute=generate,
    begin=begin,
    summary=GenerateSummary,
    metrics=generation_metrics,
    count=shards_of,
    draws=draws,
    replays=replays,
    until=Until(
        applies=samples_dynamically,
        follow=("reward_model", "score"),
        expected=expected_share,
        share=share_that_differs,
    ),
    outside=("dataset", "experts", "tokenizer", "environment"),
    role="rollout",
    shared=True,
)
