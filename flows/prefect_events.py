"""Tells the Prefect server what a run has committed: events, by which automations start, and assets with their lineage.

| event | when | labels of its resource |
|---|---|---|
| `ratchet.iteration.closed` | an iteration is committed | |
| `ratchet.validation` | a validation is committed | `ratchet.falls` |
| `ratchet.snapshot` | a snapshot is durable | `ratchet.version` |
| `ratchet.collapsed` | an iteration is committed whose advantages are all 0 | |

The resource of all of them is the run (`prefect.resource.id` is its URL), with the labels `prefect.resource.name` (the
run's name) and `ratchet.iteration`; the payload has the metrics. A run has collapsed if the answers to each prompt
score alike, so that it learns nothing. `ratchet.falls` is the number of validations in a row that were worse than the
one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from prefect.assets import Asset, materialize
from prefect.events import emit_event
from prefect.types.names import MAX_ASSET_KEY_LENGTH

from ratchet.flows.alerts import is_collapsed
from ratchet.flows.callbacks import Callback
from ratchet.flows.prefect_pages import has_pages
from ratchet.infra.runs.run import Run
from ratchet.infra.store.object_store import StoreUnavailable
from ratchet.infra.store.records import ObjectRef
from ratchet.tasks.recording import recorded

MAX_FALLS = 10
"""Validations that are looked at for `ratchet.falls`."""


class PrefectEvents(Callback):
    """Emits the events of a run, and records its trajectories and snapshots as assets; does nothing without a server.

    What the server or the store does not answer is left out.
    """

    def __init__(self) -> None:
        self._snapshots: set[int] | None = None
        """Versions of snapshots that were told of; None: those that exist when the driver starts."""

    def on_iteration(self, run: Run, iteration: int, metrics: Mapping[str, float]) -> None:
        if not has_pages():
            return
        _emit("iteration.closed", run, iteration, metrics)
        if is_collapsed(metrics):
            _emit("collapsed", run, iteration, metrics)
        materialized(trajectories_of(run.store.url), _sources(run), {"iteration": iteration})
        self._tell_of_snapshots(run, iteration)

    def on_validation(self, run: Run, iteration: int, metrics: Mapping[str, float]) -> None:
        if has_pages():
            with suppress(StoreUnavailable):
                _emit("validation", run, iteration, metrics, {"ratchet.falls": str(_falls(run, iteration))})

    def _tell_of_snapshots(self, run: Run, iteration: int) -> None:
        durable = {version for version, roles in run.state.snapshots.items() if _is_own(roles.values())}
        told = self._snapshots if self._snapshots is not None else {v for v in durable if v <= iteration}
        for version in sorted(durable - told):
            _emit("snapshot", run, iteration, {}, {"ratchet.version": str(version)})
            materialized(snapshots_of(run.store.url), [trajectories_of(run.store.url)], {"version": version})
        self._snapshots = durable


def _is_own(refs: Iterable[ObjectRef]) -> bool:
    return all(ref.run is None for ref in refs)


def _emit(
    event: str, run: Run, iteration: int, metrics: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> None:
    resource = {
        "prefect.resource.id": run.store.url,
        "prefect.resource.name": run.config.run.name,
        "ratchet.iteration": str(iteration),
        **(labels or {}),
    }
    recorded(lambda: emit_event(f"ratchet.{event}", resource, payload={"metrics": dict(metrics)}), lambda: None)


def _falls(run: Run, iteration: int) -> int:
    """Returns the number of validations in a row up to this one that were worse than the one before each."""
    validated = [version for version in range(iteration) if run.config.validates(version)]
    later, falls = _score(run, iteration), 0
    for version in reversed(validated[-MAX_FALLS:]):
        earlier = _score(run, version)
        if later is None or earlier is None or later >= earlier:
            break
        later, falls = earlier, falls + 1
    return falls


def _score(run: Run, version: int) -> float | None:
    return run.store.validation_scores([version], run.config.validation.metric).get(version)


def trajectories_of(run: str) -> Asset:
    """Returns the asset of the trajectories of the run at a URL."""
    return _asset(f"{run}/trajectories")


def snapshots_of(run: str) -> Asset:
    """Returns the asset of the snapshots of the run at a URL."""
    return _asset(f"{run}/checkpoints")


def _sources(run: Run) -> list[Asset]:
    """Returns what trajectories come from: prompts, the model, and the run whose snapshot a fork starts with."""
    state, config = run.state, run.config
    holders = {ref.run for roles in state.snapshots.values() for ref in roles.values() if ref.run is not None}
    forked = [snapshots_of(run.store.objects.of_run(holder).url) for holder in sorted(holders)]
    return [*(_asset(_url(path)) for path in (*config.data.train, config.model.path)), *forked]


def _asset(key: str) -> Asset:
    # Prefect refuses keys with these
    return Asset(key=re.sub(r"""[\s#?&%"'<>\[\]{}|\\^`]""", "-", key)[:MAX_ASSET_KEY_LENGTH])


def _url(path: str) -> str:
    """Returns the URL of a file, a folder or a repository of the hub."""
    if "://" in path:
        return path
    return f"file://{Path(path).resolve()}" if Path(path).exists() else f"hf://{path}"


def materialized(asset: Asset, sources: Sequence[Asset], metadata: Mapping[str, int]) -> None:
    """Records that an asset was written from others."""

    @materialize(asset, asset_deps=list(sources), name="asset", task_run_name=asset.key, persist_result=False)
    def write() -> None:
        asset.add_metadata(dict(metadata))

    recorded(write, lambda: None)


def record_model(url: str, run: Run, version: int) -> None:
    """Records that the model of a snapshot was written to a folder or a repository, if there is a server."""
    if has_pages():
        materialized(_asset(url), [snapshots_of(run.store.url)], {"version": version})


def record_dataset(url: str, runs: Sequence[Run], rows: int) -> None:
    """Records that trajectories of runs were written to a file as training data, if there is a server."""
    if has_pages():
        materialized(_asset(url), [trajectories_of(run.store.url) for run in runs], {"rows": rows})
