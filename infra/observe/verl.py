"""Writes what verl computes, while it trains: metrics of its tracking, and the generations that it dumps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratchet.infra.observe.rows import GENERATE
from ratchet.infra.observe.run import ObservedRun, start
from ratchet.infra.observe.sources.lines import is_cut
from ratchet.infra.observe.sources.source import Content, finite, of_validation
from ratchet.infra.observe.sources.verl import generations
from ratchet.infra.progress import note

STORE = "RATCHET_STORE"
"""The environment variable of the folder of runs."""


class VerlLogger:
    """A backend of verl's tracking. A step is written once verl logs a later one, when its generations are dumped."""

    def __init__(self, experiment: str, config: Mapping[str, Any] | None) -> None:
        """Opens the run ``experiment`` in the store of RATCHET_STORE, or in ./runs. See `observe.start`.

        Args:
            experiment: `trainer.experiment_name`.
            config: verl's config.
        """
        trainer = (config or {}).get("trainer") or {}
        folders = (trainer.get("rollout_data_dir"), trainer.get("validation_data_dir"))
        self._rollouts, self._validations = (None if folder is None else Path(folder) for folder in folders)
        if self._rollouts is None:
            note(f"{experiment} gets metrics alone: set trainer.rollout_data_dir for its generations")
        model = ((config or {}).get("actor_rollout_ref") or {}).get("model") or {}
        self._run: ObservedRun = start(
            experiment,
            os.environ.get(STORE, "file://./runs"),
            trainer="verl",
            config=config,
            model=model.get("path"),
        )
        self._waiting: dict[int, dict[str, Any]] = {}

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Takes the metrics of a step, and writes the steps before it."""
        self._waiting[step] = {**self._waiting.get(step, {}), **data}
        self._run.attempt(lambda: self._write(step))

    def finish(self) -> None:
        """Writes what waits."""
        self._run.attempt(lambda: self._write(None))
        self._run.close(finished=True)

    def _write(self, before: int | None) -> None:
        """Writes the steps that wait and come before one; None: all."""
        for number in sorted(self._waiting):
            if before is not None and number >= before:
                break
            metrics = self._waiting.pop(number)
            rollouts = self._dumped(self._rollouts, number)
            if rollouts or any(not name.startswith("val") for name in metrics):
                step = self._run.step(number)
                for stage, rows in rollouts.items():
                    step.write(stage, rows)
                step.metrics(finite(metrics)).close()
            if validations := self._dumped(self._validations, number):
                self._run.validation(of_validation(Content(validations)).stages[GENERATE])

    def _dumped(self, folder: Path | None, number: int) -> dict[str, list[dict[str, Any]]]:
        """Reads the generations of a step; none if verl did not dump them."""
        file = (folder or Path()) / f"{number}.jsonl"
        return generations(file).stages if folder is not None and file.is_file() and not is_cut(file) else {}
