"""prime-rl's rollouts and metrics, as its file monitor writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.infra.observe.sources.lines import Digests, complete_lines, is_cut, parsed, parsed_file
from ratchet.infra.observe.sources.source import Content, Unit, finite
from ratchet.infra.observe.sources.traces import TRACES, content_of_episodes, episode_of
from ratchet.rlhf.errors import UserError

CONFIGS = ("rl", "trainer", "orchestrator", "inference")
TRAINED = "time/forward_backward"
"""A metric that the trainer logs at the end of a step; the orchestrator logs its own before."""
NAMES = {
    "optim/lr": "actor/lr",
    "optim/grad_norm": "actor/grad_norm",
    "loss/mean": "actor/pg_loss",
    "entropy/mean": "actor/entropy",
    "entropy/all/mean": "actor/entropy",
    "mismatch_kl/mean": "rollout_corr/k3_kl",
    "mismatch_kl/all/mean": "rollout_corr/k3_kl",
    "perf/throughput_per_gpu": "perf/throughput",
    "perf/peak_memory": "perf/max_memory_reserved_gb",
    "time/step": "timing_s/step",
    "time/broadcast_weights": "timing_s/update_weights",
    "time/save_ckpt": "timing_s/save_checkpoint",
    "time/forward_backward": "timing_s/update_actor",
    **{f"train/agg/effective/num_output_tokens/{name}": f"response_length/{name}" for name in ("mean", "max", "min")},
}
"""Ratchet's names of metrics. The others are called ``prime-rl/…``."""
REWARD = re.compile(r"train/agg/all/[^/]+/(reward/mean|rewards/.+/mean)")
"""The mean reward of an agent, and those of its parts."""
STEP = re.compile(r"step_(\d+)")


class PrimeRL:
    """The folder of a run, with ``rollouts/step_N/{train,eval}/{all,effective}/traces.jsonl``.

    A step has the episodes that it trained on (`effective`), and those of `all` that failed. Without `effective`, it
    has those of `all`. It is complete once the trainer has logged its metrics. What is evaluated at a step is the
    policy before its update, so it is a validation after the step before; until it is complete, so are no later steps.
    """

    trainer = "prime-rl"

    def __init__(self, path: Path) -> None:
        """Takes the folder of a run, or its folder ``rollouts``.

        Raises:
            UserError: there is no such folder.
        """
        self._folder = path.parent if path.name == "rollouts" else path
        if not (self._folder / "rollouts").is_dir():
            raise UserError(f"{path}: there is no folder rollouts: name the folder of a run of prime-rl")
        begun = [step for step in (self._folder / "rollouts").iterdir() if STEP.fullmatch(step.name)]
        written = [{entry.name for entry in step.iterdir()} for step in begun]
        if any(written) and not any(names & {"train", "eval"} for names in written):
            raise UserError(
                f"{path}: its steps have no {TRACES}, which prime-rl writes since 0.7: the files of older releases are "
                "not read"
            )
        configs = {name: self._folder / "configs" / f"{name}.json" for name in CONFIGS}
        self.config: Mapping[str, Any] = {name: parsed_file(file) for name, file in configs.items() if file.is_file()}
        model = (self.config.get("trainer") or {}).get("model")
        name = model.get("name") if isinstance(model, Mapping) else None
        self.model: str | None = name if isinstance(name, str) else None
        self._digests = Digests()

    def units(self) -> Iterator[Unit]:
        """See `Source.units`."""
        metrics = self._metrics()
        steps = sorted(
            (int(name[1]), folder)
            for folder in (self._folder / "rollouts").iterdir()
            if (name := STEP.fullmatch(folder.name))
        )
        newest = {
            kind: max((n for n, step in steps if (step / kind).is_dir()), default=-1) for kind in ("train", "eval")
        }
        trained = max((step for step, values in metrics.items() if TRAINED in values), default=-1)
        for number, step in steps:
            everything, effective = (step / "eval" / subset / TRACES for subset in ("all", "effective"))
            if everything.is_file() or effective.is_file():
                chosen = _complete(effective, everything, is_newest=number == newest["eval"])
                if chosen is None or (
                    number == newest["eval"] and _environments(everything) - _environments(effective)
                ):
                    return
                yield self._unit(number - 1, chosen, partial(_read, chosen, None, {}), is_validation=True)
            everything, effective = (step / "train" / subset / TRACES for subset in ("all", "effective"))
            chosen = _complete(effective, everything, is_newest=number == newest["train"])
            if chosen is not None and (number <= trained or not metrics):
                rest = everything if chosen is effective and everything.is_file() else None
                yield self._unit(number, chosen, partial(_read, chosen, rest, metrics.get(number, {})))

    def _unit(self, number: int, file: Path, read: Callable[[], Content], is_validation: bool = False) -> Unit:
        return Unit(number, self._digests.of(file), str(file), read, is_validation)

    def _metrics(self) -> dict[int, dict[str, Any]]:
        """Returns the metrics of each step. The trainer and the orchestrator write several lines of it."""
        metrics: dict[int, dict[str, Any]] = {}
        file = self._folder / "metrics.jsonl"
        for number, _, line in complete_lines(file) if file.is_file() else ():
            row = parsed(line, where := f"{file}, line {number}")
            step = row.pop("step", None)
            if not isinstance(step, int | float):
                raise UserError(f"{where}: there is no step, which prime-rl's metrics have")
            row.pop("time", None)
            metrics[int(step)] = metrics.get(int(step), {}) | row
        return metrics


def _complete(effective: Path, everything: Path, is_newest: bool) -> Path | None:
    """Chooses the file of a step: None if it is still being written."""
    if effective.is_file():
        return None if is_cut(effective) else effective
    return everything if everything.is_file() and not is_newest else None


def _environments(file: Path) -> set[str | None]:
    """Returns the names of the environments whose episodes a file has: those of an evaluation end one by one."""
    return {(episode.get("env") or {}).get("name") for episode, _ in _episodes(file)} if file.is_file() else set()


def _episodes(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for number, _, line in complete_lines(file):
        where = f"{file}, line {number}"
        yield episode_of(parsed(line, where), where), where


def _read(file: Path, everything: Path | None, metrics: Mapping[str, Any]) -> Content:
    """Reads a step.

    Args:
        everything: the episodes of which the failed ones are added.
    """
    episodes = [*_episodes(file)]
    known = {episode.get("id") for episode, _ in episodes}
    others = [] if everything is None else [one for one in _episodes(everything) if one[0].get("id") not in known]
    failed = [one for one in others if not one[0].get("ok", True)]
    for episode, _ in episodes:
        episode["subset"] = file.parent.name
    for episode, _ in failed:
        episode["subset"] = "all"
    content = content_of_episodes([*episodes, *failed], is_validation=file.parents[1].name == "eval")
    content.metrics = named(finite(metrics))
    if metrics:
        content.left_out += ("time of metrics",)
    if len(failed) < len(others):
        content.left_out += ("episodes of all/ that this step did not train on",)
    return content


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Gives metrics of prime-rl Ratchet's names, or names after ``prime-rl/``."""
    rewards = [name for name in metrics if REWARD.fullmatch(name)]
    agents = {name.split("/")[3] for name in rewards}
    own = {name: name.partition("/reward")[2] for name in rewards} if len(agents) == 1 else {}
    own = {name: f"reward{rest.removeprefix('s')}" for name, rest in own.items()}
    return {own.get(name) or NAMES.get(name) or f"prime-rl/{name}": value for name, value in metrics.items()}
