"""How a batch is dealt to many ranks: to 64 as to 2, nothing is lost, computed twice or waited for."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ratchet.rlhf.distributed import ranks
from ratchet.rlhf.models.sequence_parallel import Team
from ratchet.rlhf.train.micro_batches import deal, in_rounds
from tests.padded import properties
from tests.ranks import in_another_process, only_rank

LENGTHS = st.lists(st.integers(0, 8192), max_size=300).map(lambda lengths: np.array(lengths, dtype=np.int64))


@properties
@given(LENGTHS, st.integers(1, 64), st.integers(1, 20_000), st.booleans())
def test_teams_get_each_row_once_and_equally_many_pieces(
    lengths: np.ndarray, teams: int, budget: int, packed: bool
) -> None:
    by_team = deal(lengths, budget, teams, packed=packed)
    assert len(by_team) == teams
    assert len({len(pieces) for pieces in by_team}) == 1
    rows = [row for pieces in by_team for piece in pieces for row in piece.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    for piece in (piece for pieces in by_team for piece in pieces):
        size = lengths[piece].sum() if packed else len(piece) * lengths[piece].max(initial=0)
        assert size <= budget or len(piece) == 1, "only a row that is longer than the budget exceeds it"


@properties
@given(LENGTHS, st.integers(1, 64))
def test_teams_get_about_the_same_number_of_tokens(lengths: np.ndarray, teams: int) -> None:
    """Team a's i-th longest row is at most as long as team b's (i-1)-th, so any two teams differ by at most the
    longest row (less the shortest, if all have as many rows)."""
    by_team = deal(lengths, 16384, teams)
    tokens = [sum(int(lengths[piece].sum()) for piece in pieces) for pieces in by_team]
    even = len(lengths) and len(lengths) % teams == 0
    assert max(tokens) - min(tokens) <= lengths.max(initial=0) - (lengths.min() if even else 0)


@properties
@given(st.lists(LENGTHS, min_size=1, max_size=6), st.integers(1, 64), st.integers(1, 20_000), st.booleans())
def test_pieces_of_several_shards_keep_all_teams_busy(
    shards: list[np.ndarray], teams: int, budget: int, packed: bool
) -> None:
    """As many rounds as the pieces need, and of pieces of one size: they take the mean of the teams at most, and in
    addition the largest piece."""
    dealt = [deal(lengths, budget, teams, packed=packed) for lengths in shards]
    alone = sum(len(by_team[0]) for by_team in dealt)
    pieces = [
        lengths[piece].sum() if packed else len(piece) * lengths[piece].max()
        for lengths, by_team in zip(shards, dealt, strict=True)
        for piece in chain.from_iterable(by_team)
        if len(piece)
    ]
    sizes = np.array(pieces, dtype=np.int64)
    by_team = in_rounds(sizes, teams)
    assert sorted(number for own in by_team for number in own.tolist()) == list(range(len(sizes)))
    rounds = [max(sizes[own[number]] for own in by_team if number < len(own)) for number in range(len(by_team[0]))]
    assert len(rounds) == -(-len(sizes) // teams) <= alone
    assert sum(rounds) <= sizes.sum() / teams + sizes.max(initial=0)


def dealt_to(rank: int, size: int, lengths: np.ndarray) -> tuple[list[list[int]], int, list[int]]:
    """The rows of a rank's pieces, its place in its team, and the team's ranks."""
    with only_rank(rank, 64):
        team = Team.of(size)
        share = ranks.Share.of(size)
        own = [piece.tolist() for piece in deal(lengths, 16384, share.shares, packed=True)[share.number]]
        return own, team.index, dist.get_process_group_ranks(team.group)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 8])
def test_64_ranks_form_teams_of_neighbours_that_compute_the_same_rows(size: int) -> None:
    lengths = np.random.default_rng(0).integers(100, 8192, 1024)
    seen: dict[int, list[list[int]]] = {}
    for rank in range(64):
        own, index, members = in_another_process(dealt_to, rank, size, lengths)
        assert index == rank % size
        assert members == list(range(rank - index, rank - index + size))
        assert seen.setdefault(rank // size, own) == own
    assert len(seen) == 64 // size
    assert sorted(row for pieces in seen.values() for piece in pieces for row in piece) == list(range(1024))
