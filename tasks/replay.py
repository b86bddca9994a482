"""Recomputing what an iteration has committed, and naming the first stage, column and row that come out otherwise.

Nothing is claimed and nothing is written: the run may be driven meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from infra.driver import Driver
from infra.forks import state_before
from infra.lanes import Output
from infra.manifest import Manifest
from infra.progress import report
from infra.records import Skip
from infra.runs import Run
from infra.workers.worker import Updated
from rlhf.errors import UserError
from tasks.plan import ORDER
from tasks.spec import UPDATES, StageSpec
from tasks.stage import ROWS, call_of, on_worker


@dataclass(frozen=True)
class Replayed:
    """A committed stage, recomputed."""

    stage: str
    same: bool
    difference: str = ""
    """The first that differs: column and trajectory, or what else."""


def replay(run: Run, iteration: int) -> Iterator[Replayed]:
    """Every stage that an iteration has committed, in order, from the inputs that it read then."""
    store = run.store
    committed = store.iteration_state(iteration).stages
    if not committed or iteration > store.state.iteration:
        raise UserError(
            f"iteration {iteration} has committed nothing; the run has iterations 0 to {run.state.iteration}"
        )
    manifests, began = store.manifests(iteration), state_before(store, iteration, ())
    driver = Driver(run.config.as_committed({"pools": {}, "placement": "colocated"}), store)  # it only looks
    for spec in ORDER:
        stage = committed.get(spec.name)
        if stage is None or isinstance(stage, Skip):
            continue
        manifest = manifests[spec.name]
        inputs = tuple(
            Output.of(manifests[name]) for name in spec.reads if f"input.{name}" in manifest.fingerprint.parts
        )
        view = spec.view(run.config.as_committed({**manifest.config, "rollout.partial": False}))
        if spec.role in UPDATES and not manifest.shards:
            call = call_of(driver, spec, view, iteration, inputs, 0, 0, began)
            updated: Updated = on_worker(driver, "update", call, UPDATES[spec.role][1])
            assert manifest.weights is not None
            was, now = manifest.weights.digest, updated.weights.digest
            difference = "" if was == now else f"weights of the {spec.role}: {was[:12]} was committed, now {now[:12]}"
            yield Replayed(spec.name, was == now, difference + _of_older_code(difference, spec, manifest))
            continue
        difference = ""
        for number, shard in enumerate(manifest.shards):
            report("stage", iteration=iteration, stage=spec.name, done=number, total=len(manifest.shards), metrics=None)
            call = call_of(driver, spec, view, iteration, inputs, 0, number, began)
            batch, _, _ = on_worker(driver, "computed", call, ROWS[spec.name].compute)
            difference = first_difference(store.read_shard(shard), batch.table)
            if difference:
                break
        yield Replayed(spec.name, not difference, difference + _of_older_code(difference, spec, manifest))


def _of_older_code(difference: str, spec: StageSpec, manifest: Manifest) -> str:
    then = manifest.fingerprint.parts.get("version")
    return f" (of an older release: version {then}, now {spec.version})" if difference and then != spec.version else ""


def first_difference(committed: pa.Table, now: pa.Table) -> str:
    """Where two tables first differ, column by column; empty if they do not. A column that is younger than what is
    committed counts as nothing."""
    if not set(committed.column_names) <= set(now.column_names):
        return f"columns {', '.join(committed.column_names)} were committed, now {', '.join(now.column_names)}"
    ids = committed["trajectory_id"].to_pylist()
    for name in committed.column_names:
        before, after = committed[name].to_pylist(), now[name].to_pylist()
        if before == after:
            continue
        if len(before) != len(after):
            return f"{len(before)} rows were committed, now {len(after)}"
        row = next(row for row, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        return f"column {name} of {ids[row]}: {_short(before[row], after[row])}"
    return ""


def _short(before: object, after: object) -> str:
    if isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{len(before)} values were committed, now {len(after)}"
        at = next(at for at, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        return f"value {at} was {before[at]!r}, now {after[at]!r}"
    return f"was {before!r}, now {after!r}"
