"""Lists the runs of a store, from their logs and indexes. No data file is read."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

import fsspec

from ratchet.infra.execution import heartbeat
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import Run, run_names
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Fork, ObjectRef, StageCommit
from ratchet.infra.store.run_store import VALIDATE, RunStore
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.metrics import VALIDATION, validation_scores

READERS = 16
"""Threads that read, to hide the latency of a remote store."""
FRESH_S = 60.0
"""A driver on another host counts as alive while its heartbeat is younger."""

State = Literal["not started", "running", "stopped", "failed", "finished", "ended early", "fit", "damaged"]
"""`not started`: a fork that no driver has claimed; `failed`: an error ended the newest driver; `stopped`: it was asked
to stop, or killed; `ended early`: by `validation.patience`; `fit`: a fine-tuning run (SFT or a reward model), running
or not; `damaged`: the log, an index or a validation cannot be read."""


@dataclass(frozen=True)
class RunSummary:
    """One run in a list of runs."""

    name: str
    url: str
    state: State
    iteration: int
    """The open iteration, which is the number of closed ones."""
    iterations: int | None
    """The number of iterations of the config; None for a fine-tuning run, and if it cannot be read."""
    best_validation: tuple[str, float] | None
    """The metric that `validation.metric` names, and its best value."""
    age_s: float
    """Seconds since the last commit."""
    bytes: int
    """Size of all files in the run's folder. A fork's folder lacks the files that it shares with its parent."""
    problem: str = ""
    """The reason in one line, if the run is damaged, has failed or has not started."""


def runs_of(store_url: str) -> list[RunSummary]:
    """Lists the runs of a store, the newest commit first. Empty if the store does not exist.

    A run costs a listing of its folder, its newest log records, and the index of each closed iteration, which is read
    once per process. Raises `UserError` and `StoreUnavailable` as `ObjectStore`.
    """
    names = run_names(store_url)
    with ThreadPoolExecutor(READERS) as readers:
        summaries = readers.map(lambda name: _summary(store_url, name), names)
        return sorted((summary for summary in summaries if summary is not None), key=lambda summary: summary.age_s)


def _summary(store_url: str, name: str) -> RunSummary | None:
    """Returns the summary of a run; None if the folder holds no run."""
    url = run_url(store_url, name)
    objects = ObjectStore(url)
    size = _size(objects)
    closed, iterations, age_s = 0, None, float("inf")
    try:
        store = RunStore(objects)
        if store.log.read().slot < 0:
            return None
        run = Run(store)
        closed, iterations = run.state.iteration, None if run.is_fit else run.config.iterations
        age_s = max((datetime.now(UTC) - run.store.log.record(run.state.slot).at).total_seconds(), 0.0)
        validated = {} if run.is_fit else validations(run)
        metric = None if run.is_fit else run.config.validation.metric
        best = max(validation_scores(validated, metric).values(), key=lambda score: score[1], default=None)
        state = state_of(run, validated)
    except (Corrupt, UserError) as error:
        return RunSummary(name, url, "damaged", closed, iterations, None, age_s, size, str(error).splitlines()[0])
    return RunSummary(name, url, state, closed, iterations, best, age_s, size, _problem(run, state))


def _problem(run: Run, state: State) -> str:
    """Explains why a run of this state is not running."""
    if state == "not started":
        return "a fork; `ratchet resume` starts it"
    beat = heartbeat.read(run.store.objects)
    return beat.failure or "" if state == "failed" and beat is not None else ""


def state_of(run: Run, metrics: Mapping[int, Mapping[str, float]]) -> State:
    """Returns the state of a readable run. `metrics` are by iteration, in order, at least those of its validations."""
    if run.is_fit:
        return "fit"
    config, closed = run.config, run.state.iteration
    if closed >= config.iterations:
        return "finished"
    scores = validation_scores(metrics, config.validation.metric)
    if config.ends_early({iteration: value for iteration, (_, value) in scores.items() if iteration < closed}):
        return "ended early"
    objects = run.store.objects
    if is_driven(objects):
        return "running"
    beat = heartbeat.read(objects)
    if beat is None and run.state.slot == 0 and isinstance(run.store.log.record(0).commits[0], Fork):
        return "not started"
    return "failed" if beat is not None and beat.failure is not None else "stopped"


def is_driven(objects: ObjectStore) -> bool:
    """True if the driver's process is alive, or, on another host, its heartbeat is younger than `FRESH_S`."""
    beat = heartbeat.read(objects)
    if beat is None or beat.stopped:
        return False
    lives = heartbeat.lives_here(beat)
    if lives is not None:
        return lives
    fs, path = fsspec.core.url_to_fs(f"{objects.url}/{heartbeat.KEY}", use_listings_cache=False)
    try:
        written: datetime = objects.retry("look at the heartbeat", lambda: fs.modified(path))
    except FileNotFoundError:
        return False
    return (datetime.now(UTC) - written).total_seconds() < FRESH_S


def validations(run: Run) -> dict[int, dict[str, float]]:
    """Returns the validation metrics of a run by iteration, in order, including the open iteration's."""
    state, url = run.state, run.store.url
    refs = [ref for page in state.pages for ref in (*_page(url, page), page)] + state.recent
    metrics = {iteration: dict(_validation(url, ref)) for iteration, ref in enumerate(refs)}
    committed = state.stages.get(VALIDATE)
    if isinstance(committed, StageCommit):
        metrics[state.iteration] = _of_validation(run.store.manifest(committed).metrics)
    return {iteration: row for iteration, row in metrics.items() if row}


@lru_cache(maxsize=4096)
def _page(url: str, page: ObjectRef) -> tuple[ObjectRef, ...]:
    """Returns the other indexes in a page of closed iterations."""
    return tuple(RunStore.at(url).log.load_index(page).recent)


# indexes are immutable, so they are read once
@lru_cache(maxsize=262_144)
def _validation(url: str, index: ObjectRef) -> tuple[tuple[str, float], ...]:
    """Returns the validation metrics in an index."""
    return tuple(_of_validation(Run(RunStore.at(url)).metrics_of(index)).items())


def _of_validation(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(VALIDATION)}


def _size(objects: ObjectStore) -> int:
    fs, path = fsspec.core.url_to_fs(objects.url, use_listings_cache=False)
    return int(objects.retry("list its files", lambda: fs.du(path)))
