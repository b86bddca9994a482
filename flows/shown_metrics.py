"""Lists the metrics that are shown, and where; `rlhf/metrics.py` has all. docs/metrics.md is generated from both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto

from ratchet.rlhf.metrics import BY_NAME


class Shown(Flag):
    """The places where metrics are shown."""

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
class Display:
    """The format and the places of a metric that is shown."""

    name: str
    shown: Shown
    format: str = ".4g"

    def text(self, value: float) -> str:
        """Formats a value; never as -0.00, and empty if there is none."""
        return "" if math.isnan(value) else f"{value:z{self.format}}"

    @property
    def heading(self) -> str:
        metric = BY_NAME[self.name]
        return f"{self.name}: {metric.meaning}{f' ({metric.unit})' if metric.unit else ''}"


CATALOGUE = (
    Display("critic/score/mean", LINE | STATUS | PAGES | REPORT, ".3f"),
    Display("reward/mean", PAGES),
    Display("rollout/errors", LINE | STATUS | PAGES, ".0f"),
    Display("rollout/tool_errors", LINE | STATUS | PAGES, ".0f"),
    Display("reward/errors", LINE | STATUS | PAGES, ".0f"),
    Display("reward/greedy_errors", LINE | STATUS | PAGES, ".0f"),
    Display("critic/rewards/mean", REPORT),
    Display("actor/ref_kl", LINE | STATUS | PAGES | REPORT, ".4f"),
    Display("actor/kl_loss", REPORT),
    Display("actor/ppo_kl", REPORT),
    Display("rollout_corr/k3_kl", REPORT),
    Display("actor/entropy", LINE | STATUS | PAGES | REPORT, ".3f"),
    Display("response_length/mean", LINE | STATUS | PAGES | REPORT, ".1f"),
    Display("response_length/clip_ratio", REPORT),
    Display("num_turns/mean", PAGES | REPORT),
    Display("actor/pg_loss", PAGES | REPORT),
    Display("critic/vf_loss", PAGES | REPORT),
    Display("actor/pg_clipfrac", LINE | PAGES | REPORT, ".3f"),
    Display("critic/vf_clipfrac", REPORT),
    Display("critic/vf_explained_var", LINE | PAGES | REPORT, ".2f"),
    Display("actor/grad_norm", REPORT),
    Display("critic/grad_norm", REPORT),
    Display("actor/lr", REPORT),
    Display("critic/lr", REPORT),
    Display("perf/throughput", PAGES | REPORT, ".0f"),
    Display("perf/mfu/actor", PAGES | REPORT, ".3f"),
    Display("perf/max_memory_allocated_gb", PAGES | REPORT, ".1f"),
    Display("perf/response_tokens_per_s", REPORT),
    Display("perf/time_per_step", REPORT),
    Display("timing_s/update_weights", PAGES | REPORT),
    Display("perf/weight_sync_bytes", REPORT),
    Display("canary/difference", REPORT),
    Display("timing_s/stages", LINE | STATUS, ".1f"),
)


def shown_in(place: Shown) -> tuple[Display, ...]:
    """Returns the metrics that a place shows, in order."""
    return tuple(display for display in CATALOGUE if place in display.shown)


def line(metrics: Mapping[str, float]) -> str:
    """Formats the main metrics of an iteration in one line, such as `critic/score/mean 0.346`."""
    shown = (display for display in shown_in(LINE) if display.name in metrics)
    return "  ".join(f"{display.name} {display.text(metrics[display.name])}" for display in shown)
