"""The digest of a state is that of its logical tensors, however they are cut up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ratchet.rlhf.weights.state_digest import CHUNK, KIND, of_parts, sums
from ratchet.rlhf.weights.tensor_shards import TensorShard
from tests.padded import properties

KEY = -1234567890123456789


def total(parts: Sequence[TensorShard]) -> tuple[int, int]:
    """The sums of all parts, as an all-reduce adds them up."""
    table = torch.zeros(2, dtype=torch.int64)
    for part in parts:
        table += torch.tensor(sums(part, KEY))
    first, second = table.tolist()
    return first, second


def whole(tensor: Tensor) -> tuple[int, int]:
    return total([TensorShard.flat(tensor)])


@st.composite
def cut(draw: st.DrawFn) -> tuple[Tensor, list[list[int]]]:
    """A tensor, and the bounds of the blocks into which each of its dimensions is cut."""
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    bounds = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    return tensor, bounds


@properties
@given(cut())
def test_blocks_of_any_cut_add_up_to_the_whole(drawn: tuple[Tensor, list[list[int]]]) -> None:
    tensor, bounds = drawn
    blocks = []
    for corners in itertools.product(*(itertools.pairwise(edges) for edges in bounds)):
        block = tensor[tuple(slice(first, last) for first, last in corners)].contiguous()  # as a rank holds it
        blocks.append(TensorShard.block(block, tensor.shape, [first for first, _ in corners]))
    assert total(blocks) == whole(tensor)


@properties
@given(st.integers(1, 3 * CHUNK["cpu"]), st.data())
def test_runs_of_any_length_add_up_to_the_whole(length: int, data: st.DataObject) -> None:
    tensor = torch.arange(length, dtype=torch.float32)
    edges = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    parts = [TensorShard.flat(tensor[first:last], first) for first, last in itertools.pairwise(edges)]
    assert total(parts) == whole(tensor)


def test_runs_longer_and_shorter_than_what_is_hashed_at_once() -> None:
    for shape in ((3, 2 * CHUNK["cpu"] + 5), (2 * CHUNK["cpu"] + 5, 3)):
        tensor = torch.randn(shape)
        columns = [TensorShard.block(tensor[:, :1], shape, (0, 0)), TensorShard.block(tensor[:, 1:], shape, (0, 1))]
        assert total(columns) == whole(tensor)


@properties
@given(st.integers(0, 99), st.integers(0, 31))
def test_every_bit_counts(place: int, bit: int) -> None:
    tensor = torch.randn(100)
    flipped = tensor.clone()
    flipped.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert all(before != after for before, after in zip(whole(tensor), whole(flipped), strict=True))


@properties
@given(st.integers(0, 99), st.integers(0, 99))
def test_places_count(place: int, other: int) -> None:
    tensor = torch.arange(100, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[place, other]] = tensor[[other, place]]
    assert (whole(tensor) == whole(swapped)) == (place == other)


def test_no_flip_of_one_bit_gives_the_digest_of_another() -> None:
    tensor = torch.zeros(400)
    digests = {whole(tensor)}
    for place, bit in itertools.product(range(len(tensor)), range(32)):
        flipped = tensor.clone()
        flipped.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
        digests.add(whole(flipped))
    assert len(digests) == 1 + len(tensor) * 32


def test_names_shapes_and_what_is_said_count() -> None:
    tensor = torch.randn(6)

    def digest(name: str = "a", shape: Sequence[int] = (6,), about: str = "") -> str:
        return of_parts({name: [TensorShard.flat(tensor)]}, {name: shape}, about)

    digests = {digest(), digest(name="b"), digest(shape=(2, 3)), digest(shape=(3, 2)), digest(about="1 step")}
    assert len(digests) == 5
    assert all(digest.startswith(f"{KIND}:") for digest in digests)
    assert digest() == digest()
