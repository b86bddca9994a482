"""`trainer.logger=[console,ratchet]`: writes what verl computes, while it trains.

verl loads this module by itself (the entry point ``verl.plugins``, verl 0.9 or later), or by
``VERL_USE_EXTERNAL_MODULES=ratchet.infra.observe.verl``. Metrics come from verl's tracking. Generations are those that
verl dumps: set `trainer.rollout_data_dir`, and `trainer.validation_data_dir`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from verl.utils.tracking import Tracking

from ratchet.infra.observe.rows import GENERATE
from ratchet.infra.observe.run import ObservedRun, start
from ratchet.infra.observe.sources.lines import is_cut
from ratchet.infra.observe.sources.source import Content, finite, of_validation
from ratchet.infra.observe.sources.verl import generations
from ratchet.infra.progress import note

NAME = "ratchet"
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


def _register() -> None:
    if NAME in Tracking.supported_backend:
        return
    Tracking.supported_backend.append(NAME)
    original, finish = Tracking.__init__, Tracking.finish

    @wraps(original)
    def init(
        self: Any,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        original(self, project_name, experiment_name, default_backend, config)
        if NAME in ([default_backend] if isinstance(default_backend, str) else default_backend):
            self.logger[NAME] = VerlLogger(experiment_name, config)

    @wraps(finish)
    def finished(self: Any, *args: Any, **kwargs: Any) -> None:
        if (logger := self.logger.pop(NAME, None)) is not None:
            logger.finish()
        finish(self, *args, **kwargs)

    Tracking.__init__, Tracking.finish = init, finished


_register()
