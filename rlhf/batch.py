"""Trajectories in memory: typed columns, with conversion to padded tensors and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ratchet.rlhf.schema import TRAJECTORY, trajectory_of

if TYPE_CHECKING:
    from jaxtyping import Float, Num
    from torch import Tensor


class TrajectoryBatch:
    """Named, typed columns with one row per trajectory (the counterpart of verl's DataProto, with a schema).

    Reading a column that the batch lacks raises KeyError, so a stage cannot read undeclared columns.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> TrajectoryBatch:
        """Makes a batch from Python lists, numpy arrays or Arrow arrays, with the types of the schema."""
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(column, type=TRAJECTORY.type_of(name))
            for name, column in columns.items()
        ]
        return cls(pa.table(dict(zip(columns, arrays, strict=True)))).cast({})

    def cast(self, types: Mapping[str, pa.DataType]) -> TrajectoryBatch:
        """Casts the columns to the given types, or else to those of the schema."""
        fields = [
            pa.field(field.name, types.get(field.name, TRAJECTORY.type_of(field.name) or field.type))
            for field in self.table.schema
        ]
        return TrajectoryBatch(self.table.cast(pa.schema(fields)))

    @classmethod
    def concat(cls, batches: Sequence[TrajectoryBatch]) -> TrajectoryBatch:
        return cls(pa.concat_tables([batch.table for batch in batches]))

    @classmethod
    def join(cls, batches: Sequence[TrajectoryBatch]) -> TrajectoryBatch:
        """Puts columns side by side. All batches must hold the same trajectories in the same order."""
        table = batches[0].table
        for batch in batches[1:]:
            assert batch.table["trajectory_id"].equals(table["trajectory_id"]), "the batches hold other trajectories"
            for name in batch.columns:
                if name not in table.column_names:
                    table = table.append_column(batch.table.field(name), batch.table[name])
        return cls(table)

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __contains__(self, name: str) -> bool:
        return name in self.table.column_names

    def renamed(self, names: Mapping[str, str]) -> TrajectoryBatch:
        return TrajectoryBatch(self.table.rename_columns([names.get(name, name) for name in self.columns]))

    def array(self, name: str) -> pa.Array:
        if name not in self:
            raise KeyError(f"column {name} is not in this batch, which has: {', '.join(self.columns)}")
        return self.table[name].combine_chunks()

    def list(self, name: str) -> list[Any]:
        return list(self.array(name).to_pylist())

    def numpy(self, name: str) -> np.ndarray:
        return np.asarray(self.array(name).to_numpy(zero_copy_only=False))

    def flat(self, name: str) -> np.ndarray:
        """Returns the values of a per-token column without padding, trajectory after trajectory; shape (tokens,)."""
        return np.asarray(self.array(name).flatten().to_numpy(zero_copy_only=False))

    def lengths(self, name: str) -> np.ndarray:
        """Returns the length of each trajectory in a per-token column, in tokens; shape (batch,)."""
        offsets = self.array(name).offsets.to_numpy()
        return np.diff(offsets)

    def trajectory_index(self) -> np.ndarray:
        """Returns for each row the number of its trajectory, in order of first appearance, shape (batch,).

        A trajectory is one row, unless an agent edited its conversation, which starts another branch. All branches have
        the trajectory's score. Code that compares or counts trajectories looks at the last branch of each; code that
        trains on them gives every branch the advantage of its trajectory.
        """
        numbers: dict[str, int] = {}
        names = map(trajectory_of, self.list("trajectory_id"))
        return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)

    def last_branches(self) -> np.ndarray:
        """Returns the row of each trajectory's last branch, in order, shape (trajectories,)."""
        index = self.trajectory_index()
        last = np.zeros(index.max(initial=-1) + 1, dtype=np.int64)
        last[index] = np.arange(len(index))  # of equal indices, the last assignment counts
        return last

    def only(self, trajectory_ids: pa.Array) -> TrajectoryBatch:
        """Returns the trajectories with the given ids, in the order of this batch."""
        return TrajectoryBatch(self.table.filter(pc.is_in(self.array("trajectory_id"), trajectory_ids)))

    def with_column(self, name: str, column: pa.Array) -> TrajectoryBatch:
        return TrajectoryBatch(self.table.append_column(name, column))

    def has_values(self, name: str) -> bool:
        """True if there is such a column, and any row has a value there."""
        return name in self and bool(self.table[name].null_count < len(self))

    def without(self, *names: str) -> TrajectoryBatch:
        """Returns the batch without some columns."""
        return TrajectoryBatch(self.table.drop_columns(list(names)))

    def take(self, rows: Iterable[int]) -> TrajectoryBatch:
        return TrajectoryBatch(self.table.take(pa.array(np.fromiter(rows, dtype=np.int64))))

    def padded(self, name: str, width: int | None = None) -> Num[Tensor, "batch time"]:
        """Returns a per-token column as a tensor, padded with zeros on the right to `width` or the longest
        trajectory."""
        import torch

        lengths = self.lengths(name)
        values = self.flat(name)
        out = np.zeros((len(self), int(lengths.max(initial=0)) if width is None else width), dtype=values.dtype)
        out[np.arange(out.shape[1])[None, :] < lengths[:, None]] = values
        return torch.from_numpy(out)


def ragged(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Makes a per-token column from flat values, given the lengths: the inverse of `TrajectoryBatch.flat`."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kind = pa.int8() if values.dtype == np.int8 else pa.int32() if values.dtype.kind == "i" else pa.float32()
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, type=kind))


def unpadded(padded: Float[Tensor, "batch time"], lengths: np.ndarray) -> pa.Array:
    """Makes a per-token float32 column from a padded tensor, given the lengths."""
    array = padded.detach().float().cpu().numpy()
    return ragged(array[np.arange(array.shape[1])[None, :] < lengths[:, None]], lengths)
