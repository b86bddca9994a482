"""Trajectory batches, and how they are cut into micro-batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.rlhf.batch import TrajectoryBatch, ragged, unpadded
from ratchet.rlhf.schema import TRAJECTORY
from ratchet.rlhf.train.micro_batches import Layout, MicroBatch, by_prompt, by_token_budget, prompt_numbers
from tests.padded import properties

PROMPTS = [[10], [20, 21, 22], [30, 31]]
RESPONSES = [[11, 12], [23], [32, 33, 34]]


@pytest.fixture
def batch() -> TrajectoryBatch:
    return TrajectoryBatch.of(
        {
            "trajectory_id": ["a", "b", "c"],
            "prompt_ids": PROMPTS,
            "response_ids": RESPONSES,
            "values": [[0.5, 1], [2], [3, 4, 5]],
            "loss_mask": [[1, 0], [1], [1, 1, 1]],
        }
    )


def test_columns_have_the_types_of_the_schema(batch: TrajectoryBatch) -> None:
    for name in batch.columns:
        assert batch.array(name).type == TRAJECTORY[name].type
    assert batch.padded("values").dtype == torch.float32
    assert batch.padded("loss_mask").dtype == torch.int8
    assert batch.padded("response_ids").dtype == torch.int32
    with pytest.raises(KeyError, match="column score is not in this batch, which has: trajectory_id"):
        batch.array("score")


def test_padding_and_back(batch: TrajectoryBatch) -> None:
    expected = torch.tensor([[0.5, 1, 0], [2, 0, 0], [3, 4, 5]])
    assert torch.equal(batch.padded("values"), expected)
    assert torch.equal(batch.padded("values", width=4), torch.nn.functional.pad(expected, (0, 1)))
    assert unpadded(expected + 0.0, batch.lengths("values")).equals(batch.array("values"))
    assert ragged(batch.flat("values"), batch.lengths("values")).equals(batch.array("values"))
    assert ragged(batch.flat("loss_mask"), batch.lengths("loss_mask")).equals(batch.array("loss_mask"))
    assert ragged(batch.flat("prompt_ids").astype(np.int64), batch.lengths("prompt_ids")).type == pa.list_(pa.int32())


@pytest.mark.parametrize("rows", [[2, 0], [1], [0, 0], []])
def test_taken_rows_are_as_good_as_any(batch: TrajectoryBatch, rows: list[int]) -> None:
    """Arrow slices share buffers: lengths, values and padding are still those of the rows."""
    slices = [batch.table.slice(row, 1) for row in rows] or [batch.table.slice(0, 0)]
    for part in (batch.take(rows), TrajectoryBatch(pa.concat_tables(slices))):
        assert len(part) == len(rows)
        assert part.list("response_ids") == [RESPONSES[row] for row in rows]
        assert part.lengths("response_ids").tolist() == [len(RESPONSES[row]) for row in rows]
        assert part.flat("response_ids").tolist() == [token for row in rows for token in RESPONSES[row]]
        assert part.padded("response_ids").shape == (len(rows), max([len(RESPONSES[row]) for row in rows], default=0))


def test_concat_and_join(batch: TrajectoryBatch) -> None:
    twice = TrajectoryBatch.concat([batch, batch.take([1])])
    assert twice.list("trajectory_id") == ["a", "b", "c", "b"]
    scores = TrajectoryBatch.of({"trajectory_id": ["a", "b", "c"], "score": [1, 2, 3], "values": [[], [], []]})
    joined = TrajectoryBatch.join([batch, scores])
    assert joined.list("score") == [1, 2, 3]
    assert joined.list("values") == batch.list("values"), "the first stage to give a column keeps it"
    with pytest.raises(AssertionError, match="other trajectories"):
        TrajectoryBatch.join([batch, scores.take([1, 0, 2])])


@pytest.mark.parametrize(
    ("layout", "input_ids", "positions", "at"),
    [
        ("padded", [[30, 31, 32, 33], [10, 11, 0, 0], [20, 21, 22, 0]], None, [1, 2, 3, 4, 5, 10]),
        ("packed", [[30, 31, 32, 33, 10, 11, 20, 21, 22]], [0, 1, 2, 3, 0, 1, 0, 1, 2], [1, 2, 3, 4, 5, 8]),
        ("shared", [[30, 31, 10, 20, 21, 22, 32, 33, 11]], [0, 1, 0, 0, 1, 2, 2, 3, 1], [1, 6, 7, 2, 8, 5]),
    ],
)
def test_micro_batch_knows_what_predicts_each_response_token(
    batch: TrajectoryBatch,
    layout: Layout,
    input_ids: list[list[int]],
    positions: list[int] | None,
    at: list[int],
) -> None:
    """The last token of a response predicts nothing, so it is not read."""
    micro = MicroBatch.of(batch, [2, 0, 1], layout)
    assert micro.input_ids.tolist() == input_ids
    assert (None if micro.position_ids is None else micro.position_ids[0].tolist()) == positions
    assert micro.at.tolist() == at
    assert micro.targets.tolist() == [32, 33, 34, 11, 12, 23]
    assert micro.padded(micro.targets).tolist() == [[32, 33, 34], [11, 12, 0], [23, 0, 0]]


def test_equal_prompts_have_the_same_number() -> None:
    prompts = [[5, 6], [7], [6, 5], [5, 6], [5], [7]]
    assert prompt_numbers(TrajectoryBatch.of({"prompt_ids": prompts})).tolist() == [0, 1, 2, 0, 3, 1]


def test_a_shared_prompt_is_in_the_micro_batch_once() -> None:
    batch = TrajectoryBatch.of({"prompt_ids": [[5, 6], [7], [5, 6]], "response_ids": [[1, 2, 3], [4], [8, 9]]})
    micro = MicroBatch.of(batch, [0, 1, 2], "shared")
    assert micro.input_ids.tolist() == [[5, 6, 7, 1, 2, 8]]
    assert micro.position_ids is not None
    assert micro.position_ids.tolist() == [[0, 1, 0, 2, 3, 2]]
    assert micro.at.tolist() == [1, 3, 4, 2, 1, 5]


@properties
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=30), st.integers(1, 100))
def test_every_row_is_in_one_group_of_its_prompt_that_fits(rows: list[tuple[int, int]], limit: int) -> None:
    prompt_of, responses = np.array([prompt for prompt, _ in rows]), np.array([response for _, response in rows])
    prompts = 3 * prompt_of + 1
    groups, sizes = by_prompt(prompt_of, prompts, responses, limit)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(rows)))
    for group, size in zip(groups, sizes, strict=True):
        assert len(set(prompt_of[group])) == 1
        assert size == prompts[group[0]] + responses[group].sum()
        assert size <= limit or len(group) == 1
    for (group, size), after in pairwise(zip(groups, sizes, strict=True)):
        new = after[0][0]
        assert prompt_of[new] != prompt_of[group[0]] or size + responses[new] > limit, "groups are full"


@properties
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 100), st.booleans())
def test_every_row_is_in_one_piece_that_fits(lengths: list[int], budget: int, packed: bool) -> None:
    def tokens(piece: list[int]) -> int:
        return sum(piece) if packed else len(piece) * max(piece)

    pieces = by_token_budget(np.array(lengths), budget, packed=packed)
    assert sorted(np.concatenate(pieces).tolist()) == list(range(len(lengths)))
    sizes = [[lengths[row] for row in piece] for piece in pieces]
    assert all(tokens(size) <= budget or len(size) == 1 for size in sizes)
    assert [max(size) for size in sizes] == sorted((max(size) for size in sizes), reverse=True), "longest first"
    assert all(tokens([*size, after[0]]) > budget for size, after in pairwise(sizes)), "full, but for the last"
