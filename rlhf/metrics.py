"""The metrics of an iteration: name, meaning, unit, and the stage that reports each.

A metric that verl also has is named as in verl (docs/decisions/030-metric-names.md). Every metrics file of a run has a
column for each of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

STEP = "training/global_step"
"""The number of iterations, or another trainer's own number of its step, by verl's name. Runs of Ratchet's own have it
only in trackers."""
CLOSE = "close"
"""The stage of metrics that are measured when the iteration closes."""

Statistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
"""Statistics that a rejection of `algorithm.rollout_correction` may bound."""


@dataclass(frozen=True)
class Metric:
    """A metric, a double. It is null in iterations without its stage, and in those that `only` excludes."""

    name: str
    stage: str
    meaning: str
    unit: str = ""
    only: str = ""
    """The metric's requirement beyond its stage; empty: none."""


TIMERS = {
    "validate": "testing",
    "generate": "gen",
    "score": "reward",
    "greedy_baseline": "gen_max",
    "old_log_probs": "old_log_prob",
    "ref_log_probs": "ref",
    "teacher_log_probs": "teacher",
    "advantages": "adv",
}
"""verl's names of the stages in `timing_s/`. Stages that verl lacks, or names alike, keep their names."""

STAGES = (
    *("validate", "generate", "reward_model", "score", "select", "greedy_baseline", "turn_values", "old_log_probs"),
    *(
        "ref_log_probs",
        "teacher_log_probs",
        "values",
        "advantages",
        "update_critic",
        "update_actor",
        "update_reference",
        "update_ema",
    ),
)


def timer(stage: str) -> str:
    """Returns the metric with a stage's compute time."""
    return f"timing_s/{TIMERS.get(stage, stage)}"


def _spread(name: str, stage: str, meaning: str, unit: str = "", only: str = "") -> tuple[Metric, ...]:
    return tuple(
        Metric(f"{name}/{key}", stage, f"{meaning}, {word}", unit, only)
        for key, word in (("mean", "mean"), ("max", "largest"), ("min", "smallest"))
    )


_ERRORS = "anything failed"
_NEW_LOG_PROBS = "the iteration has `old_log_probs`"
_WEIGHTS = "`algorithm.rollout_correction.weights`"
_GPU = "the actor is on GPUs"
_PEAK = "the GPU's peak FLOP/s are known"
_ALL_OWN = "`advantages`, and no stage that another run computed"

METRICS = (
    Metric("val/reward_errors", "validate", "answers whose reward failed", "trajectories", _ERRORS),
    Metric("val/rollout_errors", "validate", "answers whose environment or agent failed", "trajectories", _ERRORS),
    Metric("val/tool_errors", "validate", "answers in which a tool failed", "trajectories", _ERRORS),
    Metric("perf/generated_tokens", "generate", "tokens that the model wrote, also in what is left out", "tokens"),
    *_spread(
        "num_turns",
        "generate",
        "turns of a dialogue, the prompt included",
        "turns",
        "`rollout.environment`",
    ),
    Metric(
        "rollout/replayed",
        "generate",
        "trajectories that repeat earlier ones, or that experts wrote",
        "trajectories",
        "`data.replay`",
    ),
    Metric(
        "rollout/first_turn_clip_ratio",
        "generate",
        "conversations that were at rollout.max_response_tokens after one turn",
        "share",
        "several turns are possible",
    ),
    Metric("rollout/errors", "generate", "trajectories whose environment or agent failed", "trajectories", _ERRORS),
    Metric("rollout/tool_errors", "generate", "trajectories in which a tool failed", "trajectories", _ERRORS),
    Metric("reward/mean", "score", "score of all responses, also of those left out, mean"),
    Metric("reward/errors", "score", "responses whose reward failed", "trajectories", _ERRORS),
    Metric("sampling/dropped", "select", "trajectories left out because something failed", "trajectories", _ERRORS),
    *(
        Metric(f"sampling/{name}", "select", meaning, "prompts", "`algorithm.dynamic_sampling`")
        for name, meaning in (
            ("prompts_drawn", "prompts that were drawn"),
            ("prompts_that_differ", "prompts whose scores differ"),
            ("prompts_filled_up", "prompts with equal scores that fill up the iteration"),
        )
    ),
    Metric("reward/greedy_errors", "greedy_baseline", "greedy answers whose reward failed", "prompts", _ERRORS),
    Metric(
        "turn_values/continuations",
        "turn_values",
        "trajectories played on from a turn to estimate values",
        "trajectories",
    ),
    Metric("turn_values/turns", "turn_values", "turns of these that the environment answered", "turns"),
    Metric("turn_values/errors", "turn_values", "those whose environment or reward failed", "trajectories", _ERRORS),
    *_spread("critic/score", "advantages", "score", only="from `score`, over all rows, without `advantages`"),
    *_spread("critic/rewards", "advantages", "score less length and KL penalties"),
    *_spread("critic/advantages", "advantages", "advantage of a token"),
    *_spread("critic/returns", "advantages", "return of a token"),
    *_spread("critic/values", "advantages", "value of a token before the update", "", "a critic"),
    Metric("critic/vf_explained_var", "advantages", "explained variance of the returns", "share", "a critic"),
    Metric(
        "critic/overlong_penalty/mean",
        "advantages",
        "length penalty, mean",
        "",
        "`algorithm.overlong_penalty`",
    ),
    *_spread("response_length", "advantages", "tokens of a response that the model wrote", "tokens"),
    Metric("response_length/clip_ratio", "advantages", "responses cut off at the limit", "share"),
    *_spread("prompt_length", "advantages", "tokens of a prompt", "tokens"),
    Metric("perf/prompt_tokens", "advantages", "tokens of the prompts, once per trajectory", "tokens"),
    Metric("perf/response_tokens", "advantages", "tokens that the model wrote", "tokens"),
    Metric("actor/ref_kl", "advantages", "KL to the reference, mean over tokens", "nats per token", "a reference"),
    Metric("experts/score/mean", "advantages", "score of experts' answers, mean", only="`data.replay.files`"),
    Metric(
        "experts/log_probs/mean",
        "advantages",
        "log-probs of experts' tokens under the policy before the update, mean",
        "nats per token",
        "`data.replay.files`",
    ),
    Metric("actor/teacher_kl", "advantages", "KL to the teacher, mean over tokens", "nats per token", "a teacher"),
    Metric(
        "actor/reward_kl_penalty",
        "advantages",
        "KL to the reference, mean over the responses' means",
        "nats per token",
        "`algorithm.kl.in_reward`",
    ),
    Metric(
        "actor/reward_kl_penalty_coeff",
        "advantages",
        "coefficient of the KL in the reward",
        "score per nat",
        "`algorithm.kl.in_reward`",
    ),
    Metric("actor/entropy", "advantages", "entropy of the policy", "nats per token", _NEW_LOG_PROBS),
    Metric("actor/loss_tokens_share", "advantages", "tokens that enter the losses", "share"),
    *(
        Metric(f"rollout_corr/{name}", "advantages", meaning, unit, _NEW_LOG_PROBS)
        for name, meaning, unit in (
            ("training_ppl", "perplexity of the responses under the trainer", ""),
            ("training_log_ppl", "its logarithm", "nats per token"),
            ("rollout_ppl", "perplexity of the responses under the rollout", ""),
            ("rollout_log_ppl", "its logarithm", "nats per token"),
            ("kl", "KL from the rollout to the trainer, k1", "nats per token"),
            ("k3_kl", "KL from the rollout to the trainer, k3", "nats per token"),
            ("log_ppl_diff", "log-perplexity of the trainer less the rollout's, mean", "nats per token"),
            ("log_ppl_abs_diff", "absolute difference of the log-perplexities, mean", "nats per token"),
            ("log_ppl_diff_max", "difference of the log-perplexities, largest", "nats per token"),
            ("log_ppl_diff_min", "difference of the log-perplexities, smallest", "nats per token"),
            ("ppl_ratio", "ratio of the perplexities, mean", ""),
            ("chi2_token", "chi-square divergence of tokens", ""),
            ("chi2_seq", "chi-square divergence of responses", ""),
        )
    ),
    *(
        Metric(f"rollout_corr/{name}", "advantages", meaning, unit, _WEIGHTS)
        for name, meaning, unit in (
            ("rollout_is_mean", "importance weight, mean", ""),
            ("rollout_is_max", "importance weight, largest", ""),
            ("rollout_is_min", "importance weight, smallest", ""),
            ("rollout_is_std", "importance weight, standard deviation", ""),
            ("rollout_is_ratio_fraction_high", "tokens whose ratio is above the upper bound", "share"),
            ("rollout_is_ratio_fraction_low", "tokens whose ratio is below the lower bound", "share"),
            ("rollout_is_eff_sample_size", "effective sample size", "share"),
        )
    ),
    *(
        Metric(
            f"rollout_corr/rollout_rs_{statistic}_masked_fraction",
            "advantages",
            f"tokens that the bound on `{statistic}` rejects",
            "share",
            "this `algorithm.rollout_correction.rejection`",
        )
        for statistic in get_args(Statistic)
    ),
    Metric("critic/vf_loss", "update_critic", "value loss"),
    Metric("critic/vf_clipfrac", "update_critic", "clip fraction, value", "share of tokens"),
    Metric("critic/vpred_mean", "update_critic", "value of a token during the update, mean"),
    Metric("critic/grad_norm", "update_critic", "gradient norm, critic"),
    Metric("critic/lr", "update_critic", "learning rate, critic"),
    Metric("perf/mfu/critic", "update_critic", "model FLOPs utilization of the update", "share", _PEAK),
    Metric("actor/pg_loss", "update_actor", "policy loss"),
    Metric("actor/pg_clipfrac", "update_actor", "clip fraction, policy", "share of tokens", "a loss that clips"),
    Metric(
        "actor/pg_clipfrac_lower",
        "update_actor",
        "clip fraction of the lower bound (dual clip)",
        "share of tokens",
        "a loss that clips",
    ),
    Metric("actor/ppo_kl", "update_actor", "KL of the update", "nats per token", "a loss with a ratio"),
    Metric(
        "actor/vespo_weight", "update_actor", "weight of a response, mean over tokens", "", "`algorithm.loss` vespo"
    ),
    Metric("actor/entropy_loss", "update_actor", "entropy in the loss", "nats", "`algorithm.entropy_coef` is not 0"),
    Metric("actor/kl_loss", "update_actor", "KL to the reference in the loss", "nats", "`algorithm.kl.in_loss`"),
    Metric(
        "actor/distillation_loss",
        "update_actor",
        "divergence from the teacher in the loss",
        "nats",
        "`algorithm.distillation.divergence` is not sampled",
    ),
    Metric("actor/router_aux_loss", "update_actor", "auxiliary loss of the router", "", "`output_router_logits`"),
    Metric("actor/grad_norm", "update_actor", "gradient norm, actor"),
    Metric("actor/lr", "update_actor", "learning rate, actor"),
    Metric("perf/mfu/actor", "update_actor", "model FLOPs utilization of the update", "share", _PEAK),
    Metric("perf/max_memory_allocated_gb", "update_actor", "largest GPU memory in tensors so far", "GiB", _GPU),
    Metric("perf/max_memory_reserved_gb", "update_actor", "largest GPU memory that torch held so far", "GiB", _GPU),
    Metric("perf/cpu_memory_used_gb", "update_actor", "host memory in use on the actor's first machine", "GiB"),
    *(Metric(timer(stage), stage, f"compute time of `{stage}`", "seconds") for stage in STAGES),
    Metric(
        "timing_s/update_weights",
        CLOSE,
        "time to give the rollout new weights",
        "seconds",
        "the rollout does not share the actor's tensors",
    ),
    Metric("timing_s/save_checkpoint", CLOSE, "time to take the snapshot", "seconds", "a snapshot is due"),
    Metric("timing_s/stages", CLOSE, "compute time of all stages that this run computed", "seconds"),
    Metric(
        "timing_s/step",
        CLOSE,
        "time from the start of the first stage that this run computed to the end of the last, without pauses between "
        "drivers",
        "seconds",
    ),
    Metric("perf/time_per_step", CLOSE, "the same as `timing_s/step`", "seconds"),
    Metric(
        "perf/weight_sync_bytes",
        CLOSE,
        "weights that each process of the rollout received",
        "bytes",
        "the rollout does not share the actor's tensors",
    ),
    Metric(
        "canary/difference",
        CLOSE,
        "mean difference of rollout and trainer on fixed texts, over 1 + abs(log-prob); the largest of the engines",
        "nat/nat",
        "the rollout got new weights, and does not share the actor's tensors",
    ),
    Metric(
        "canary/problem",
        CLOSE,
        "1: the rollout had other weights than the actor, by the check after the newest transfer",
        "0 or 1",
        "`canary/difference`",
    ),
    Metric(
        "canary/tolerance",
        CLOSE,
        "the `canary/difference` above which the rollout has other weights",
        "nat/nat",
        "`canary/difference`",
    ),
    Metric("perf/total_num_tokens", CLOSE, "tokens of prompts and responses", "tokens", "`advantages`"),
    Metric("perf/throughput", CLOSE, "total_num_tokens per second and device", "tokens per second", _ALL_OWN),
    Metric(
        "perf/response_tokens_per_s",
        CLOSE,
        "response tokens per second of compute time",
        "tokens per second",
        _ALL_OWN,
    ),
)
"""All metrics but those of validation, whose names contain the data source."""

VALIDATION = ("val-core/", "val-aux/", "val/")
"""Prefixes of validation metrics."""

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def validation_metrics(source: str, statistics: Mapping[str, float], n: int) -> dict[str, float]:
    """Names the statistics of a data source's validation as in verl: `acc` is the share of solved answers."""
    verls = {
        "mean_score": f"val-core/{source}/reward/mean@{n}",
        "pass@1": f"val-core/{source}/acc/mean@{n}",
        "mean_score_stderr": f"val-aux/{source}/reward/stderr@{n}",
        "pass@1_stderr": f"val-aux/{source}/acc/stderr@{n}",
    }
    return {
        verls.get(statistic, f"val-core/{source}/reward/{statistic}"): value for statistic, value in statistics.items()
    }


def stderr_of(metric: str) -> str:
    """Returns the name of the standard error of a validation's mean, such as of `val-core/gsm8k/acc/mean@4`."""
    of, _, n = metric.rpartition("/mean@")
    return f"val-aux/{of.removeprefix('val-core/')}/stderr@{n}"


def validation_scores(
    validations: Mapping[int, Mapping[str, float]], metric: str | None
) -> dict[int, tuple[str, float]]:
    """Finds the values that say how good the weights were: the metric's name and its value, by iteration.

    `metric` None: the mean score of the first data source. Iterations without it are left out.
    """
    scores: dict[int, tuple[str, float]] = {}
    for iteration, metrics in validations.items():
        means = (name for name in metrics if re.fullmatch(r"val-core/.*/reward/mean@\d+", name, re.DOTALL))
        name = min(means, default=None) if metric is None else metric
        if name is not None and name in metrics:
            scores[iteration] = (name, metrics[name])
    return scores


def names(validation: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns all metrics that an iteration may have, in the order of the columns."""
    return (*validation, *BY_NAME)
