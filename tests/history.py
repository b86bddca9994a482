"""Reads a run's history from its files, every record from slot 0 and the files for users, to compare runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import pyarrow as pa

from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.records import Finalize, Record, RunState, ShardCommit, Skip, Snapshot, StageCommit, sha256_of
from ratchet.infra.store.run_store import parquet_bytes
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.schema import TRAJECTORY

T = TypeVar("T")


@dataclass
class History:
    folder: Path
    records: list[Record]
    state: RunState
    """The sum of all records from the first."""

    @classmethod
    def of(cls, config: RunConfig) -> History:
        return cls.at(Path(config.run.store.removeprefix("file://")) / config.run.name)

    @classmethod
    def at(cls, folder: Path) -> History:
        state, records = RunState(), []
        for path in sorted((folder / "log").glob("[0-9]*.json")):
            data = path.read_bytes()
            records.append(Record.model_validate_json(data))
            state.apply(records[-1], sha256_of(data))
        return cls(folder, records, state)

    @property
    def run(self) -> Run:
        return open_run(f"file://{self.folder}")

    def commits(self, kind: type[T]) -> list[T]:
        return [commit for record in self.records for commit in record.commits if isinstance(commit, kind)]

    @property
    def shards(self) -> Counter[tuple[str, int, int]]:
        return Counter((shard.stage, shard.iteration, shard.shard) for shard in self.commits(ShardCommit))

    @property
    def stages(self) -> Counter[tuple[str, int]]:
        """Committed stages, updates and skips among them: (stage, iteration)."""
        stages: list[StageCommit | Skip] = [*self.commits(StageCommit), *self.commits(Skip)]
        return Counter((stage.stage, stage.iteration) for stage in stages)

    @property
    def results(self) -> dict[str, Any]:
        """Everything that two runs must share to the bit: weights, checkpoints and rows."""
        store = self.run.store
        newest = max(self.state.snapshots)
        return {
            "weights": self.state.weights,
            "snapshot": newest,
            "checkpoints": {
                role: {name: file.sha256 for name, file in store.checkpoint(ref).files.items()}
                for role, ref in self.state.snapshots[newest].items()
            },
            "rows": {
                (stage.stage, stage.iteration): [
                    # without the metadata of the file, which name the run
                    sha256_of(parquet_bytes(_repeatable(store.read_shard(shard)).replace_schema_metadata()))
                    for shard in store.manifest(stage).shards
                ]
                for stage in self.commits(StageCommit)
            },
        }

    def check_sound(self, killed: bool = False) -> None:
        """Asserts that nothing is committed twice, and that the files for users hold just what is committed.

        A driver that was killed may have been about to commit a shard whose file is there: the next one deletes it.
        """
        closes = Counter(close.iteration for close in self.commits(Finalize))
        snapshots = Counter(snapshot.version for snapshot in self.commits(Snapshot))
        for counter in (self.shards, self.stages, closes, snapshots):
            twice = {what: times for what, times in counter.items() if times > 1}
            assert not twice, f"committed more than once: {twice}"
        assert self.run.state == self.state, "the state from the newest index differs from that of all records"
        committed = {shard.data.key for shard in self.commits(ShardCommit)}
        found = {path.relative_to(self.folder).as_posix() for path in self.folder.glob("trajectories/*/*/[!.]*")}
        assert found >= committed, f"gone: {committed - found}"
        assert found == committed or killed, f"not committed: {found - committed}"
        for stage in self.folder.glob("trajectories/*"):
            ids = pd.read_parquet(stage)["trajectory_id"]
            assert ids.is_unique or killed, f"{stage.name} shows {ids[ids.duplicated()].tolist()} more than once"
        if closes:
            assert pd.read_parquet(self.folder / "metrics")["iteration"].is_unique
        assert len(self.run.metrics()) == self.state.iteration


def _repeatable(rows: pa.Table) -> pa.Table:
    """Drops measured times."""
    return rows.drop_columns(
        [name for name in rows.column_names if name in TRAJECTORY and TRAJECTORY[name].is_measured]
    )
