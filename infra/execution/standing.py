"""How a run stands, as a list of runs shows it. Drivers store it with their heartbeat: then a list reads only that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from ratchet.infra.store.log import RunLog, read_model
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.records import Fork, Frozen, ObjectRef, RunState, StageCommit
from ratchet.infra.store.run_store import VALIDATE
from ratchet.rlhf.config import RunConfig, stored_config
from ratchet.rlhf.metrics import VALIDATION, validation_scores

LogState = Literal["not started", "open", "finished", "ended early", "fit"]
"""`not started`: a fork that no driver has claimed; `open`: it has iterations to close, whether it is driven or not."""


class Standing(Frozen):
    """What a list says about a run, as of one slot of its log."""

    slot: int
    at: datetime
    """The time of the record in that slot."""
    state: LogState
    iteration: int
    """The open iteration, which is the number of closed ones."""
    iterations: int | None
    """The number of iterations of the config; None for a fine-tuning run, and if it is unknown."""
    best_validation: tuple[str, float] | None
    """The metric that `validation.metric` names, and its best value."""
    recipe: str
    """See `recipe_of`; empty for a fine-tuning run."""
    parent: str
    """The name of the run from which it was forked; empty if it was not."""


class Standings:
    """Finds out how a run stands, again and again: each index is read once, because it is immutable."""

    def __init__(self) -> None:
        self._pages: dict[ObjectRef, tuple[ObjectRef, ...]] = {}
        self._validations: dict[ObjectRef, dict[str, float]] = {}

    def of(
        self, log: RunLog, parent: str, state: RunState, at: datetime, limit_s: float = float("inf")
    ) -> Standing | None:
        """Returns how a run stands; None if its indexes cannot be read in `limit_s` seconds: later calls continue.

        Args:
            parent: see `parent_of`.
            state: the state of its log, and `at` the time of the last record; see `RunLog.last_read`.

        Raises:
            Corrupt: an object is missing or damaged.
            UserError: this release does not read the run's config, or the schema of its objects.
            StoreUnavailable: the store does not answer.
        """
        assert state.claim is not None, "a run that can be read was claimed"
        config = None
        validations: dict[int, dict[str, float]] | None = {}
        if not is_fit(state.claim.config):
            config = stored_config(state.claim.config, f"{log.objects.url}, newest claim")
            validations = self._of_iterations(log, state, time.monotonic() + limit_s)
        if validations is None:
            return None
        scores = validation_scores(validations, None if config is None else config.validation.metric)
        return Standing(
            slot=state.slot,
            at=at,
            state="fit" if config is None else log_state(state, config, validations),
            iteration=state.iteration,
            iterations=None if config is None else config.known_iterations,
            best_validation=max(scores.values(), key=lambda score: score[1], default=None),
            recipe="" if config is None else recipe_of(config),
            parent=parent,
        )

    def _of_iterations(self, log: RunLog, state: RunState, deadline: float) -> dict[int, dict[str, float]] | None:
        """Returns the metrics of validations by iteration, in order, with the open iteration's; None if time is up."""
        closed: list[ObjectRef] = []
        for page in state.pages:
            if page not in self._pages:
                if time.monotonic() > deadline:
                    return None
                self._pages[page] = tuple(log.load_index(page).recent)
            closed += (*self._pages[page], page)
        closed += state.recent
        for ref in closed:
            if ref not in self._validations:
                if time.monotonic() > deadline:
                    return None
                self._validations[ref] = _validation_in(log.load_index(ref).metric_values)
        validations = {iteration: self._validations[ref] for iteration, ref in enumerate(closed)}
        committed = state.stages.get(VALIDATE)
        if isinstance(committed, StageCommit):
            ref = committed.manifest
            if ref not in self._validations:
                self._validations[ref] = _validation_in(read_model(log.objects, ref, Manifest).metrics)
            validations[state.iteration] = self._validations[ref]
        return {iteration: metrics for iteration, metrics in validations.items() if metrics}


def parent_of(log: RunLog) -> str:
    """Reads the name of the run from which a run was forked; empty if it was not. Raises `Corrupt`."""
    [first, *_] = log.record(0).commits
    return first.parent.rpartition("/")[2] if isinstance(first, Fork) else ""


def recipe_of(config: RunConfig) -> str:
    """Returns `algorithm.advantage.type`, or the name of the trainer that computes the run; empty if a run only scores
    that trainer's answers."""
    if config.observed is not None:
        return config.observed.trainer
    return "" if config.only_scores else config.algorithm.advantage.type


def is_fit(config: Mapping[str, Any]) -> bool:
    """True if a claim's config is that of a fine-tuning run: only those have an output folder."""
    return "output" in config


def log_state(state: RunState, config: RunConfig, metrics: Mapping[int, Mapping[str, float]]) -> LogState:
    """Returns what the log of a run of iterations says about its state. `metrics` are by iteration, in order, at least
    those of its validations."""
    total = config.known_iterations
    if total is not None and state.iteration >= total:
        return "finished"
    scores = validation_scores(metrics, config.validation.metric)
    if config.ends_early({k: value for k, (_, value) in scores.items() if k < state.iteration}):
        return "ended early"
    return "open" if state.term else "not started"


def _validation_in(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(VALIDATION)}
