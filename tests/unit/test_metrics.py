"""The catalogue of metrics: what it names, turns, and the FLOPs behind the utilization."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from ratchet.flows.shown_metrics import CATALOGUE, line
from ratchet.rlhf.metrics import BY_NAME, METRICS, STAGES, timer
from ratchet.rlhf.train.performance import TrainingFlops
from ratchet.tasks import pipeline
from ratchet.tasks.stages.generate import GenerateSummary, generation_metrics
from ratchet.tasks.stages.score import ScoreSummary, score_metrics
from tests import tiny


def test_the_catalogue_names_each_metric_once_and_each_stage() -> None:
    assert len(BY_NAME) == len(METRICS)
    assert tuple(stage.name for stage in pipeline.STAGES) == STAGES
    assert {display.name for display in CATALOGUE} <= set(BY_NAME)


def test_the_line_has_full_names() -> None:
    metrics = {"critic/score/mean": 0.3456, "timing_s/stages": 8.12, "actor/lr": 1e-6}
    assert line(metrics) == "critic/score/mean 0.346  timing_s/stages 8.1"


def test_turns_are_those_of_all_shards() -> None:
    shards = [GenerateSummary(tokens=1, num_turns={2: 3, 4: 1}), GenerateSummary(tokens=1, num_turns={8: 1})]
    stored = [GenerateSummary.model_validate_json(shard.model_dump_json()) for shard in shards]
    metrics = generation_metrics(stored)
    assert [metrics[f"num_turns/{name}"] for name in ("min", "max", "mean")] == [2.0, 8.0, 18 / 5]
    assert "num_turns/mean" not in generation_metrics([GenerateSummary(tokens=1)])


def test_conversations_that_their_budget_ends_at_once_are_a_share() -> None:
    shards = [GenerateSummary(tokens=1, conversations=4, cut_in_first_turn=n, tool_errors=n) for n in (0, 1)]
    metrics = generation_metrics(shards)
    assert metrics["rollout/first_turn_clip_ratio"] == 1 / 8 and metrics["rollout/tool_errors"] == 1
    assert "rollout/first_turn_clip_ratio" not in generation_metrics([GenerateSummary(tokens=1)])


def test_named_parts_of_the_reward_are_means_over_the_responses_that_have_them() -> None:
    shards = [
        ScoreSummary(sum_of_scores=1.0, scored=2, parts={"length": (1.0, 2), "rare": (3.0, 1)}),
        ScoreSummary(sum_of_scores=1.0, scored=2, parts={"length": (2.0, 2)}),
        ScoreSummary.model_validate_json('{"sum_of_scores": 0.0, "scored": 0}'),  # as older runs have it
    ]
    metrics = score_metrics([ScoreSummary.model_validate_json(shard.model_dump_json()) for shard in shards])
    assert (metrics["reward/length/mean"], metrics["reward/rare/mean"], metrics["reward/mean"]) == (0.75, 3.0, 0.5)


def test_stages_have_verls_names_in_timings() -> None:
    assert (timer("generate"), timer("update_actor"), timer("budget")) == (
        "timing_s/gen",
        "timing_s/update_actor",
        "timing_s/budget",
    )


def test_flops_of_an_update_by_hand(tmp_path: Path) -> None:
    """Four heads of 8, two of them with keys; two layers; the embedding is looked up, which takes none."""
    model = AutoModelForCausalLM.from_pretrained(tiny.model_folder(tmp_path))
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64
    weights, head = 2 * layer, 32 * model.config.vocab_size
    lengths = np.array([5 + 3 - 1, 2 + 1 - 1])
    pairs = (lengths * (lengths + 1) / 2).sum()
    expected = 6 * weights * lengths.sum() + 6 * head * 4 + 3 * 4 * 2 * 32 * pairs
    assert TrainingFlops.of(model)(np.array([5, 2]), np.array([3, 1])) == pytest.approx(expected, rel=1e-12)
    model.requires_grad_(False)
    assert TrainingFlops.of(model).per_token == 4 * weights, "a frozen weight has no gradient"


def test_of_experts_those_that_a_token_is_routed_to_count(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.moe_folder(tmp_path, "mixtral"))
    attention = 32 * 32 * 2 + 32 * 8 * model.config.num_key_value_heads * 2
    layer = attention + 32 * 4 + 2 * 3 * 32 * 16
    assert TrainingFlops.of(model).per_token == 6 * 2 * layer
