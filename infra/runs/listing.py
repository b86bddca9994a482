"""Lists the runs of a store, from their heartbeats. The log is read only where the newest beat does not tell."""

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
from ratchet.infra.execution.heartbeat import Beat
from ratchet.infra.execution.standing import LogState, Standing, Standings, log_state, parent_of
from ratchet.infra.runs.run import Run, run_names
from ratchet.infra.store.log import Corrupt, RunLog, slot_key
from ratchet.infra.store.object_store import ObjectStore
from ratchet.rlhf.errors import UserError

READERS = 16
"""Threads that read, to hide the latency of a remote store."""
FRESH_S = 60.0
"""A driver on another host counts as alive while its heartbeat is younger."""

State = Literal["not started", "running", "stopped", "failed", "finished", "ended early", "fit", "damaged"]
"""`not started`: a fork that no driver has claimed; `failed`: an error ended the newest driver; `stopped`: it was asked
to stop, or killed; `ended early`: by `validation.patience`; `fit`: a fine-tuning run (SFT or a reward model), running
or not; `damaged`: the log, an index or a validation cannot be read. Damage after a driver's last beat shows only where
the run is opened, and in `ratchet verify`."""


@dataclass(frozen=True)
class RunSummary:
    """One run in a list of runs."""

    name: str
    url: str
    state: State
    iteration: int
    """The open iteration, which is the number of closed ones; 0 if it cannot be read. While a driver is at work, this
    and what follows are as of its newest beat, a few seconds ago."""
    iterations: int | None
    """The number of iterations of the config; None for a fine-tuning run, and if it cannot be read."""
    best_validation: tuple[str, float] | None
    """The metric that `validation.metric` names, and its best value."""
    age_s: float
    """Seconds since the last commit."""
    recipe: str = ""
    """See `recipe_of`; empty for a fine-tuning run, and if it cannot be read."""
    parent: str = ""
    """The name of the run from which it was forked; empty if it was not, and if that cannot be read."""
    problem: str = ""
    """The reason in one line, if the run is damaged, has failed or has not started."""


def runs_of(store_url: str) -> list[RunSummary]:
    """Lists the runs of a store, the newest commit first. Empty if the store does not exist.

    A run costs one read, of its heartbeat. If its driver was killed, a process that lists looks once for a later
    commit. Where there is one, or the newest beat does not say how the run stands, it reads the log, and the index of
    each iteration once. Raises `UserError` and `StoreUnavailable` as `ObjectStore`.
    """
    names, now = run_names(store_url), datetime.now(UTC)
    with ThreadPoolExecutor(READERS) as readers:
        summaries = readers.map(lambda name: _summary(store_url, name, now), names)
        listed = [summary for summary in summaries if summary is not None]
    return sorted(listed, key=lambda summary: (summary.age_s, summary.name))


def _summary(store_url: str, name: str, now: datetime) -> RunSummary | None:
    """Returns the summary of a run; None if the folder holds no run."""
    url = run_url(store_url, name)
    objects = ObjectStore(url)
    try:
        beat = heartbeat.read(objects)
        driven = _is_driven(objects, beat)
        if beat is None:
            standing = _from_log(url)
        elif beat.standing is not None and (driven or beat.stopped):
            standing = beat.standing
        else:
            standing = _after(url, beat)
    except (Corrupt, UserError) as error:
        return RunSummary(name, url, "damaged", 0, None, None, float("inf"), problem=str(error).splitlines()[0])
    if standing is None:
        return None
    state = _state(standing.state, beat, driven)
    problem = ""
    if state == "not started":
        problem = "a fork; `ratchet resume` starts it"
    elif state == "failed" and beat is not None:
        problem = beat.failure or ""
    return RunSummary(
        name=name,
        url=url,
        state=state,
        iteration=standing.iteration,
        iterations=standing.iterations,
        best_validation=standing.best_validation,
        age_s=max((now - standing.at).total_seconds(), 0.0),
        recipe=standing.recipe,
        parent=standing.parent,
        problem=problem,
    )


# a driver beats after its claim, and every few seconds: what follows its last beat is read once
@lru_cache(maxsize=4096)
def _after(url: str, beat: Beat) -> Standing | None:
    """Returns how a run stands after a beat that does not say so, or after the last one of a driver that was killed."""
    if beat.standing is not None and ObjectStore(url).get_if_there(slot_key(beat.standing.slot + 1)) is None:
        return beat.standing
    return _from_log(url)


def _from_log(url: str) -> Standing | None:
    """Reads how a run stands from its log; None if there is none."""
    log = RunLog(ObjectStore(url))
    if log.read().slot < 0:
        return None
    return _standings(url).of(log, parent_of(log), *log.last_read())


_standings = lru_cache(maxsize=4096)(lambda url: Standings())


def state_of(run: Run, metrics: Mapping[int, Mapping[str, float]]) -> State:
    """Returns the state of a readable run. `metrics` are by iteration, in order, at least those of its validations."""
    beat = heartbeat.read(run.store.objects)
    told: LogState = "fit" if run.is_fit else log_state(run.state, run.config, metrics)
    return _state(told, beat, _is_driven(run.store.objects, beat))


def _state(told: LogState, beat: Beat | None, driven: bool) -> State:
    """Returns the state of a run whose log says `told`."""
    if told in ("fit", "finished", "ended early"):
        return told
    if driven:
        return "running"
    if beat is None and told == "not started":
        return told
    return "failed" if beat is not None and beat.failure is not None else "stopped"


def is_driven(objects: ObjectStore) -> bool:
    """True if the driver's process is alive, or, on another host, its heartbeat is younger than `FRESH_S`."""
    return _is_driven(objects, heartbeat.read(objects))


def _is_driven(objects: ObjectStore, beat: Beat | None) -> bool:
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
