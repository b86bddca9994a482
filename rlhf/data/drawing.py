"""Draws prompts: pure functions of the seed, the sizes of the files and the position in the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ratchet.rlhf import seeding

BLOCK = 1000
"""Draws in which each file of a mixture has exactly its share, in random order."""
ATTEMPTS = 64
"""Candidates per draw of a curriculum; the last one is accepted in any case."""

Drawn = tuple[int, int]
"""Number of a file, and a row in it."""


def draw(
    seed: int,
    sizes: Sequence[int],
    weights: Sequence[float] | None,
    cursor: int,
    count: int,
    *,
    shuffle: bool = True,
) -> list[Drawn]:
    """Draws rows from an endless sequence of epochs of each file, each a different permutation of its rows.

    Args:
        shuffle: False: each epoch has the rows in the order of the file. A mixture still alternates at random.
        sizes: number of rows of each file.
        weights: weight of each file in the mixture; None: the files are read as if they were one.
        cursor: number of rows drawn before.
    """
    epochs = seeding.epochs if shuffle else _in_order
    if weights is None:
        ends = np.cumsum(sizes)
        rows = np.array(epochs(seed, "data", int(ends[-1]), cursor, count), dtype=np.int64)
        files = np.searchsorted(ends, rows, side="right")
        return list(zip(files.tolist(), (rows - (ends - sizes)[files]).tolist(), strict=True))
    counts = shares(weights)
    of_block = np.repeat(np.arange(len(sizes)), counts)
    before = np.array(counts) * (cursor // BLOCK)
    order: list[int] = []
    for block in range(cursor // BLOCK, -(-(cursor + count) // BLOCK)):
        order += seeding.generator(seed, "mixture", block).permutation(of_block).tolist()
    start = cursor % BLOCK
    before += np.bincount(order[:start], minlength=len(sizes))
    chosen = order[start : start + count]
    queues = [
        iter(epochs(seed, f"data {file}", size, int(before[file]), chosen.count(file)))
        for file, size in enumerate(sizes)
    ]
    return [(file, next(queues[file])) for file in chosen]


def _in_order(seed: int, name: str, size: int, first: int, count: int) -> list[int]:
    """Stands for `seeding.epochs`, without a permutation."""
    return [position % size for position in range(first, first + count)]


def shares(weights: Sequence[float]) -> list[int]:
    """Returns the draws of each file per block: numbers that sum to `BLOCK`, as close to the weights as possible."""
    exact = np.array(weights) / sum(weights) * BLOCK
    counts = np.floor(exact).astype(int)
    largest = np.argsort(-(exact - counts), kind="stable")[: BLOCK - counts.sum()]
    # the method of largest remainders
    counts[largest] += 1
    return [int(number) for number in counts]


def redraw(seed: int, position: int, first: Drawn, size: int, chance: Callable[[Drawn], float]) -> Drawn:
    """Replaces a drawn row, with some probability, by another one of its file.

    Args:
        chance: the probability with which a row is accepted; other rows are then tried, uniformly.
    """
    random, candidate = seeding.generator(seed, "curriculum", position), first
    for _ in range(ATTEMPTS - 1):
        if random.random() < chance(candidate):
            break
        candidate = first[0], int(random.integers(size))
    return candidate
