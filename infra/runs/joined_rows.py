"""Joins the stages of an iteration as one Arrow table, for files that others read."""

from __future__ import annotations

import json
from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.infra.runs.run import Run, row_stages
from ratchet.infra.store.records import SCHEMA_VERSION, RunState, StageCommit
from ratchet.infra.store.run_store import ORIGIN, VALIDATE
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import TRAJECTORY

KEYS = ("iteration", "trajectory_id")
SPLITS = ("train", "validation")
"""The kinds of rows: trajectories for training, and validations."""


class JoinedRows:
    """The rows of a run, one table for each iteration and split, all with the same columns.

    Only closed iterations count, and the validation after the last of them. A column is null where a stage has no row
    of a trajectory, as for those that were not selected, and where a validation has no such column.
    """

    def __init__(self, run: Run, without: Collection[str] = ()) -> None:
        """Reads the manifests of the run.

        Args:
            without: columns to leave out.

        Raises:
            UserError: no iteration is closed, or `without` has a column that the run does not have, or that joins rows.
            Corrupt: an object is missing or damaged.
        """
        self._run = run
        self._states = [run.store.iteration_state(iteration) for iteration in range(run.state.iteration + 1)]
        if not run.state.iteration:
            raise UserError(f"{run.store.url}: no iteration is closed yet, so there are no trajectories")
        types: dict[str, pa.DataType] = {}
        for state in self._states:
            for stage in self._stages(state):
                for name in run.store.columns_of(state, stage):
                    if name not in types:
                        types[name] = TRAJECTORY.type_of(name) or self._read(state, stage)[name].type
        if unknown := [name for name in without if name not in types]:
            problem = f"{unknown[0]} tells rows apart" if unknown[0] in KEYS else f"there is no column {unknown[0]}"
            raise UserError(f"{problem}: columns that can be left out are {', '.join(types)}")
        keys = {"iteration": pa.int32(), "trajectory_id": pa.string()}
        self.schema = pa.schema(keys | {name: kind for name, kind in types.items() if name not in without})

    @property
    def iterations(self) -> range:
        return range(len(self._states))

    def table(self, iteration: int, split: str) -> pa.Table | None:
        """Reads the rows of a split of `SPLITS` in an iteration; None if there are none."""
        state = self._states[iteration]
        stages = [stage for stage in self._stages(state) if (stage == VALIDATE) == (split == SPLITS[1])]
        if not stages:
            return None
        columns: dict[str, pa.ChunkedArray] = {}
        for stage in stages:
            rows = self._read(state, stage)
            ids = columns.setdefault("trajectory_id", rows["trajectory_id"])
            joined = rows.take(pc.index_in(ids, value_set=rows["trajectory_id"].combine_chunks()))
            columns = {**dict(zip(rows.column_names, joined.columns, strict=True)), **columns}
        columns["iteration"] = pa.array([iteration] * len(ids), pa.int32())
        empty = {field.name: pa.nulls(len(ids), field.type) for field in self.schema if field.name not in columns}
        origin = {"run": self._name, "split": split, "iteration": iteration, "schema_version": SCHEMA_VERSION}
        schema = self.schema.with_metadata({ORIGIN: json.dumps(origin)})
        return pa.table([{**columns, **empty}[name] for name in schema.names], schema=schema)

    @property
    def _name(self) -> str:
        return self._run.store.url.rpartition("/")[2]

    def _stages(self, state: RunState) -> list[str]:
        """Returns the stages that have rows; of the open iteration only a complete validation."""
        if state.iteration == self._run.state.iteration:
            return [VALIDATE] if isinstance(state.stages.get(VALIDATE), StageCommit) else []
        return [stage for stage in row_stages(state) if self._run.store.shards_of(state, stage)]

    def _read(self, state: RunState, stage: str) -> pa.Table:
        store = self._run.store
        columns = ("trajectory_id", *store.columns_of(state, stage))
        return pa.concat_tables([store.read_shard(ref, columns) for ref in store.shards_of(state, stage)])
