"""The main metrics: name, title, unit, format, and the places where each is shown.

Stages may report other metrics, which are stored, tracked and queried in the same way. docs/metrics.md is generated
from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto


class Shown(Flag):
    """Where a metric is shown."""

    LINE = auto()
    """The line printed when an iteration closes."""
    STATUS = auto()
    """The table of `ratchet status`."""
    PAGES = auto()
    """An iteration's page in Prefect."""
    REPORT = auto()
    """A curve of `ratchet ui` and `ratchet report`."""


LINE, STATUS, PAGES, REPORT = Shown


@dataclass(frozen=True)
class Metric:
    name: str
    title: str
    unit: str
    shown: Shown
    label: str = ""
    """Short name, where there is little space."""
    format: str = ".4g"

    @property
    def heading(self) -> str:
        """Heading of a curve."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def text(self, metrics: Mapping[str, float]) -> str:
        """Label and formatted value, such as `score 0.346`."""
        return f"{self.label} {metrics[self.name]:{self.format}}"


CATALOGUE = (
    Metric("critic/score/mean", "score", "", LINE | STATUS | PAGES | REPORT, "score", ".3f"),
    Metric("reward/mean", "mean score of all responses, also of those left out", "score", PAGES),
    Metric("critic/rewards/mean", "reward, KL penalty included", "score", REPORT),
    Metric("actor/ref_kl", "KL to the reference", "nats per token", LINE | STATUS | PAGES | REPORT, "kl", ".4f"),
    Metric("actor/ppo_kl", "KL of the update", "nats per token", REPORT),
    Metric("actor/entropy", "entropy", "nats per token", LINE | STATUS | PAGES | REPORT, "entropy", ".3f"),
    Metric("response_length/mean", "response length", "tokens", LINE | STATUS | PAGES | REPORT, "length", ".1f"),
    Metric("response_length/clip_ratio", "responses cut off at the limit", "share", REPORT),
    Metric("actor/pg_loss", "policy loss", "", PAGES | REPORT),
    Metric("critic/vf_loss", "value loss", "", PAGES | REPORT),
    Metric("actor/pg_clipfrac", "clip fraction, policy", "share of tokens", LINE | PAGES | REPORT, "clipped", ".3f"),
    Metric("critic/vf_clipfrac", "clip fraction, value", "share of tokens", REPORT),
    Metric(
        "critic/vf_explained_var", "explained variance of returns", "share", LINE | PAGES | REPORT, "explained", ".2f"
    ),
    Metric("actor/grad_norm", "gradient norm, actor", "", REPORT),
    Metric("critic/grad_norm", "gradient norm, critic", "", REPORT),
    Metric("actor/lr", "learning rate, actor", "", REPORT),
    Metric("critic/lr", "learning rate, critic", "", REPORT),
    Metric("perf/response_tokens_per_s", "throughput", "response tokens per second of compute", REPORT),
    Metric("perf/iteration_s", "wall-clock time of an iteration", "seconds", REPORT),
    Metric("perf/weight_sync_s", "time to give the rollout new weights", "seconds", PAGES | REPORT),
    Metric("perf/weight_sync_bytes", "weights that each process of the rollout received", "bytes", REPORT),
    Metric("timing_s/stages", "compute time of all stages", "seconds", LINE | STATUS, "s", ".1f"),
)


def shown_in(place: Shown) -> tuple[Metric, ...]:
    """The metrics that a place shows, in order."""
    return tuple(metric for metric in CATALOGUE if place in metric.shown)


def line(metrics: Mapping[str, float]) -> str:
    """The main metrics of an iteration, in one line."""
    return "  ".join(metric.text(metrics) for metric in shown_in(LINE) if metric.name in metrics)
