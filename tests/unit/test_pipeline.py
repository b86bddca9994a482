"""The table of stages, and the config that each depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ratchet.rlhf.config import ActorConfig, ModelConfig, RunConfig, load_config, parse_config
from ratchet.rlhf.config.section import Section
from ratchet.rlhf.config.sections import (
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    EnvironmentConfig,
    ReferenceConfig,
    RolloutConfig,
)
from ratchet.rlhf.schema import TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key, section
from ratchet.tasks.pipeline import STAGES, dependencies, names_of, update_of
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.stages.update_actor import UPDATE_ACTOR
from tests.tiers import sampled

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("**/*.yaml"))
MINIMAL: dict[str, Any] = {"model": {"path": "somewhere"}, "data": {"train": ["prompts.parquet"]}}


class Everything(StageConfig):
    model: ModelConfig = key("model")
    data: DataConfig = key("data")
    rollout: RolloutConfig = key("rollout")
    algorithm: AlgorithmConfig = key("algorithm")
    actor: ActorConfig = key("actor")
    critic: CriticConfig | None = key("critic")
    reference: ReferenceConfig = key("reference")


class WarmUp(StageConfig):
    warmup_iterations: int | None = key("critic.warmup_iterations")
    workers: int = key("reward.workers", operational=True)


SINGLE_CHANGES: list[tuple[str, Any]] = [
    ("actor.lr", 0.25),
    ("actor.lr_schedule.warmup_iterations", 7),
    ("actor.lr_schedule", {"type": "linear", "decay_iterations": 10}),
    ("actor.lr_schedule", {"type": "cosine", "decay_iterations": 10}),
    ("actor.lr_schedule", {"type": "constant", "decay_iterations": 10}),
    ("actor.grad_clip", None),
    ("critic", None),
    ("critic.model", {"path": "another"}),
    ("reference.model", {"path": "another"}),
    ("data.train", ["another"]),
    ("data.weights", [2.0]),
    ("actor.micro_batch_tokens", 7),
    ("rollout.top_p", 0.75),
    ("algorithm.loss", {"type": "gspo"}),
    ("algorithm.loss", {"type": "ppo"}),
    ("algorithm.advantage", {"type": "grpo"}),
    ("algorithm.advantage", {"type": "gae", "lam": 0.5}),
    ("algorithm.rollout_correction", {}),
    ("algorithm.rollout_correction", {"weights": {}}),
    ("algorithm.rollout_correction", {"weights": {"level": "sequence"}}),
    ("algorithm.dynamic_sampling", {"max_prompts": 4096}),
    ("algorithm.overlong_penalty", {"buffer_tokens": 3}),
    ("algorithm.kl.controller", {"type": "adaptive", "target": 1.0, "horizon": 10}),
]


def without_operational(value: Any) -> Any:
    """A section as plain values, without the keys that may change."""
    if not isinstance(value, BaseModel):
        return value
    left_out = value.operational if isinstance(value, Section) else frozenset()
    names = type(value).model_fields.keys() - left_out
    return {name: without_operational(getattr(value, name)) for name in names}


@sampled(4)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_differences_tell_configs_apart(path: Path) -> None:
    """Two configs differ in a line if, and only if, they are not the same, operational keys aside."""
    config = load_config(path)
    others = [load_config(other) for other in EXAMPLES]
    others += [config.as_committed({name: value}) for name, value in SINGLE_CHANGES]
    plain = [{name: without_operational(getattr(other, name)) for name in Everything.model_fields} for other in others]
    for number, other in enumerate(others):
        stored = json.loads(json.dumps(Everything.values(other)))
        for before in range(number + 1):
            assert (Everything.differences(stored, others[before]) == []) == (plain[number] == plain[before])


def test_a_change_is_named() -> None:
    config = parse_config(MINIMAL, "here")
    stored = Everything.values(config)
    changed = config.with_values(
        {"actor.lr": 0.5, "algorithm.advantage": "grpo", "algorithm.loss": {"type": "ppo", "clip_ratio_low": 0.1}}
    )
    assert Everything.differences(stored, changed) == [
        "algorithm.advantage: gae -> grpo",
        "algorithm.loss.clip_ratio_low: 0.2 -> 0.1",
        "actor.lr: 1e-06 -> 0.5",
    ]


def test_arguments_of_another_program_count_unless_they_only_change_speed() -> None:
    of_vllm = {"rollout.engine": {"type": "vllm", "args": {"max_num_seqs": 8}}}
    config = parse_config(MINIMAL, "here").with_values(of_vllm)
    stored = json.loads(json.dumps(Everything.values(config)))
    faster = config.with_values({"rollout.engine.args": {"max_num_seqs": 16, "optimization_level": 3}})
    assert Everything.differences(stored, faster) == []
    drafts = config.with_values({"rollout.engine.args": {"speculative_config": {"method": "ngram"}}})
    assert Everything.differences(stored, drafts) == ["rollout.engine.args.speculative_config.method: null -> ngram"]
    before = json.loads(json.dumps(Everything.values(drafts)))
    del stored["rollout"]["engine"]["args"]  # it is younger than what is stored
    assert Everything.differences(stored, config) == []
    other = config.with_values({"rollout.engine.args": {"speculative_config": {"method": "suffix"}}})
    changed = ["rollout.engine.args.speculative_config.method: ngram -> suffix"]
    assert Everything.differences(before, other) == changed

    update = UPDATE_ACTOR.config
    stored = json.loads(json.dumps(update.values(config)))
    zero = {"overlap_comm": False, "zero_quantized_gradients": True}
    sharded = config.with_values({"actor.engine": {"type": "deepspeed", "args": {"zero_optimization": zero}}})
    changed = ["actor.engine.args.zero_optimization.zero_quantized_gradients: null -> True"]
    assert update.differences(stored, sharded) == changed


def test_a_key_that_is_younger_than_what_is_stored_counts_as_its_default() -> None:
    config = parse_config(MINIMAL, "here")
    stored = json.loads(json.dumps(Everything.values(config)))
    del stored["actor"]["lr"], stored["algorithm"]["advantage"]["lam"], stored["reference"]
    assert Everything.differences(stored, config) == []
    assert Everything.differences(stored, config.with_values({"actor.lr": 0.5})) == ["actor.lr: 1e-06 -> 0.5"]


def test_a_section_that_is_null_holds_its_defaults() -> None:
    config = parse_config(MINIMAL, "here")
    without = config.as_committed({"critic": None})
    assert WarmUp.values(without) == {"critic": None, "reward.workers": 2}
    assert WarmUp.of(without).warmup_iterations is None
    assert WarmUp.differences(WarmUp.values(without), config) == []
    warm = config.with_values({"critic.warmup_iterations": 2})
    assert WarmUp.differences(WarmUp.values(without), warm) == ["critic.warmup_iterations: 0 -> 2"]
    assert WarmUp.differences(WarmUp.values(warm), without) == ["critic.warmup_iterations: 2 -> 0"]


class Talks(StageConfig):
    talk: EnvironmentConfig | None = section("rollout.environment")


def test_a_section_that_is_null_differs_from_any_other() -> None:
    config = parse_config(MINIMAL, "here")
    talking = config.as_committed({"rollout.environment": {"name": "calculator"}})
    assert Talks.of(config).talk is None
    assert Talks.differences(Talks.values(config), talking) == ["rollout.environment: null -> set"]
    assert Talks.differences(Talks.values(talking), config) == ["rollout.environment: set -> null"]
    assert Talks.differences(Talks.values(talking), talking) == []
    assert Talks.differences({}, config) == [], "there was no such section"


def test_an_operational_key_may_change() -> None:
    config = parse_config(MINIMAL, "here")
    assert WarmUp.differences(WarmUp.values(config), config.with_values({"reward.workers": 7})) == []


def test_a_stage_reads_only_what_comes_before_it() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names)
    for number, stage in enumerate(STAGES):
        assert set(stage.reads) <= set(names[:number]), stage.name
        for other, columns in stage.reads.items():
            assert set(columns) <= set(TRAJECTORY.names(other)), f"{stage.name} reads {other}"


def test_every_column_of_the_schema_is_written_by_its_stage() -> None:
    written = {stage.name: stage.writes for stage in STAGES if isinstance(stage, RowsStage)}
    for name in TRAJECTORY.stages:
        assert written[name] == TRAJECTORY.of(name)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_stage_sees_the_config_that_it_declares(path: Path) -> None:
    config = load_config(path)
    for stage in STAGES:
        if stage.exists(config):
            seen = stage.config.of(config)
            assert stage.config.differences(stage.config.values(config), config) == []
            with pytest.raises(AttributeError):
                seen.run  # noqa: B018


def names(**changes: Any) -> set[str]:
    return set(
        names_of(parse_config(MINIMAL, "here").with_values({k.replace("__", "."): v for k, v in changes.items()}))
    )


def test_which_stages_exist() -> None:
    always = {"generate", "score", "advantages", "update_actor"}
    ppo = always | {"old_log_probs", "values", "update_critic"}
    assert names() == ppo
    assert names(algorithm__advantage="grpo") == ppo - {"values", "update_critic"}
    assert names(algorithm__kl__in_loss=0.0) == ppo | {"ref_log_probs"}
    assert names(algorithm__advantage="remax") == always | {"old_log_probs", "greedy_baseline"}
    assert names(algorithm__dynamic_sampling={"max_prompts": 200}) == ppo | {"select"}
    assert names(validation__data="held-out.parquet") == ppo | {"validate"}
    assert names(train__updates=False) == {"generate", "score", "update_actor"}


def test_a_run_depends_on_what_its_stages_read() -> None:
    config = parse_config(MINIMAL, "here")
    assert dependencies(config).outside == {
        *("dataset", "experts", "tokenizer", "environment", "reward", "loss", "advantage"),
    }
    assert "validation" in dependencies(config.with_values({"validation.data": "held-out.parquet"})).outside


def test_why_an_actor_does_not_learn() -> None:
    config = parse_config(MINIMAL, "here")
    warm = config.with_values({"critic.warmup_iterations": 2})
    assert [UPDATE_ACTOR.skipped(warm, k) for k in range(3)] == ["the critic warms up"] * 2 + [None]
    assert UPDATE_ACTOR.skipped(config.with_values({"train.updates": False}), 0) == "this run only scores"
    assert UPDATE_ACTOR.skipped(config, 0) is None
    assert update_of("actor") is UPDATE_ACTOR
    assert update_of("reward") is None


def test_when_a_run_is_validated() -> None:
    config = parse_config(MINIMAL, "here")
    assert not any(config.validates(k) for k in range(4))
    ends: RunConfig = config.with_values({"validation.data": "held-out.parquet"})
    assert [ends.validates(k) for k in range(4)] == [True, False, False, False]
    assert [ends.with_values({"validation.every": 2}).validates(k) for k in range(4)] == [True, False, True, False]
