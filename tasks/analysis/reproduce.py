"""Recomputes the committed stages of an iteration, and names the first stage, column and row that differ.

It claims and writes nothing, so a driver may work on the run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.progress import StageProgress, report
from ratchet.infra.runs.forks import state_before
from ratchet.infra.runs.run import Run
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.records import Skip
from ratchet.infra.workers.calls import RowsCall, UpdateCall
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf import consent
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import TRAJECTORY
from ratchet.tasks.pipeline import all_stages
from ratchet.tasks.stage import Stage, UpdateStage
from ratchet.tasks.stages.generate import GENERATE
from ratchet.tasks.worker_calls import call_of, on_worker


@dataclass(frozen=True)
class Reproduced:
    """A committed stage, recomputed."""

    stage: str
    same: bool
    difference: str = ""
    """The first difference, such as a column and a trajectory; empty if there is none."""


def reproduce(run: Run, iteration: int) -> Iterator[Reproduced]:
    """Recomputes every committed stage of an iteration from its committed inputs, in order.

    The shards after the first difference of a stage are not recomputed. Raises `UserError` if the iteration has
    committed nothing, or there is no consent to the run's code.
    """
    run.config.require_own("cannot compute its iterations again")
    store = run.store
    committed = store.iteration_state(iteration).stages
    if not committed or iteration > store.state.iteration:
        raise UserError(
            f"iteration {iteration} has committed nothing; the run has iterations 0 to {run.state.iteration}"
        )
    consent.require(run.config)
    manifests, began = store.manifests(iteration), state_before(store, iteration, ())
    # in this process, without a claim
    driver = Driver(run.config.as_committed({"pools": {}, "placement": "colocated"}), store)
    for stage in all_stages(run.config):
        commit = committed.get(stage.name)
        if commit is None or isinstance(commit, Skip) or (run.config.only_scores and stage is GENERATE):
            continue
        manifest = manifests[stage.name]
        input_names = {name for name in stage.reads if f"input.{name}" in manifest.fingerprint.parts}
        inputs = stage.inputs_of({name: StageHandle.of(manifests[name]) for name in input_names})
        then = run.config.as_committed({**manifest.config, "rollout.partial": False})
        consent.require(then)  # it may name other code than the newest config
        config = stage.config.of(then)
        difference = ""
        if isinstance(stage, UpdateStage):
            call = call_of(driver, stage, iteration, inputs, config=config, began=began)
            update = UpdateCall(call, stage.compute)
            group = driver.groups.of(stage.role)
            updated = on_worker(driver, call.needs, partial(group.call, Worker.update, update))
            assert manifest.weights is not None
            before, after = manifest.weights.digest, updated.weights.digest
            if before != after:
                difference = f"weights of the {stage.role}: {before[:18]} was committed, now {after[:18]}"
            yield Reproduced(stage.name, before == after, difference + _of_older_code(difference, stage, manifest))
            continue
        for number, shard in enumerate(manifest.shards):
            report(StageProgress(iteration=iteration, stage=stage.name, done=number, total=len(manifest.shards)))
            call = call_of(driver, stage, iteration, inputs, shard=number, config=config, began=began)
            rows = RowsCall(call, stage.compute, stage.writes, stage.begin)
            group = driver.groups.of(stage.role)
            [output], _ = on_worker(driver, call.needs, partial(group.call, Worker.computed, [rows]))
            difference = first_difference(store.read_shard(shard), output.batch.table)
            if difference:
                break
        yield Reproduced(stage.name, not difference, difference + _of_older_code(difference, stage, manifest))


def _of_older_code(difference: str, stage: Stage, manifest: Manifest) -> str:
    """Returns a remark for a stage that differs and was committed by another version of its code."""
    then = manifest.fingerprint.parts["version"]
    return (
        f" (of an older release: version {then}, now {stage.version})" if difference and then != stage.version else ""
    )


def first_difference(committed: pa.Table, now: pa.Table) -> str:
    """Describes the first difference of two tables, column by column; empty if there is none.

    Columns of `now` that `committed` does not have are ignored, and so are measured times.
    """
    if not set(committed.column_names) <= set(now.column_names):
        return f"columns {', '.join(committed.column_names)} were committed, now {', '.join(now.column_names)}"
    ids = committed["trajectory_id"].to_pylist()
    for name in committed.column_names:
        if name in TRAJECTORY and TRAJECTORY[name].is_measured:
            continue
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
        index = next(index for index, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        return f"value {index} was {before[index]!r}, now {after[index]!r}"
    return f"was {before!r}, now {after!r}"
