"""Recomputing what an iteration has committed, and naming the first stage, column and row that come out otherwise.

Nothing is claimed and nothing is written: the run may be driven meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from infra.execution.driver import Driver
from infra.execution.executors import StageHandle
from infra.forks import state_before
from infra.progress import StageProgress, report
from infra.runs import Run
from infra.store.manifest import Manifest
from infra.store.records import Skip
from infra.workers.calls import RowsCall, UpdateCall
from infra.workers.worker import Worker
from rlhf.errors import UserError
from tasks.pipeline import STAGES
from tasks.runner import call_of, on_worker
from tasks.stage import Stage, UpdateStage


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
    for stage in STAGES:
        commit = committed.get(stage.name)
        if commit is None or isinstance(commit, Skip):
            continue
        manifest = manifests[stage.name]
        read = {name for name in stage.reads if f"input.{name}" in manifest.fingerprint.parts}
        inputs = stage.inputs_of({name: StageHandle.of(manifests[name]) for name in read})
        config = stage.config.of(run.config.as_committed({**manifest.config, "rollout.partial": False}))
        difference = ""
        if isinstance(stage, UpdateStage):
            call = call_of(driver, stage, iteration, inputs, config=config, began=began)
            update = UpdateCall(call, stage.compute)
            updated = on_worker(driver, call, lambda group, asked=update: group.call(Worker.update, asked))  # type: ignore[misc]
            assert manifest.weights is not None
            was, now = manifest.weights.digest, updated.weights.digest
            difference = "" if was == now else f"weights of the {stage.role}: {was[:12]} was committed, now {now[:12]}"
            yield Replayed(stage.name, was == now, difference + _of_older_code(difference, stage, manifest))
            continue
        for number, shard in enumerate(manifest.shards):
            report(StageProgress(iteration=iteration, stage=stage.name, done=number, total=len(manifest.shards)))
            call = call_of(driver, stage, iteration, inputs, shard=number, config=config, began=began)
            rows = RowsCall(call, stage.compute, stage.writes)
            output, _ = on_worker(driver, call, lambda group, asked=rows: group.call(Worker.computed, asked))  # type: ignore[misc]
            difference = first_difference(store.read_shard(shard), output.batch.table)
            if difference:
                break
        yield Replayed(stage.name, not difference, difference + _of_older_code(difference, stage, manifest))


def _of_older_code(difference: str, stage: Stage, manifest: Manifest) -> str:
    then = manifest.fingerprint.parts.get("version")
    return (
        f" (of an older release: version {then}, now {stage.version})" if difference and then != stage.version else ""
    )


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
