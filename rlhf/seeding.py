"""All randomness of a run, as pure functions of the seed and the place of use.

There is no generator state to save: each draw is keyed by the run's seed and a path such as ``("generate",
"it000007-p00012-s03")``, so it does not depend on earlier draws, on batching or on resuming.
"""

import hashlib

import numpy as np


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """Returns a counter-based generator (Philox) for one place of use, `path`."""
    # a separator that no part contains
    text = "\x1f".join(str(part) for part in (seed, *path))
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


LARGE = 2**20
"""Rows from which an epoch's permutation is computed row by row, not held in memory."""
ROUNDS = 6


def epochs(seed: int, name: str, size: int, first: int, count: int) -> list[int]:
    """Draws rows `first` to `first + count` of an endless sequence of epochs, each a different permutation of all rows.

    Args:
        name: purpose of the draw; different names give different orders.
    """
    rows: list[int] = []
    while len(rows) < count:
        epoch, start = divmod(first + len(rows), size)
        end = min(start + count - len(rows), size)
        if size <= LARGE:
            rows += generator(seed, name, epoch).permutation(size)[start:end].tolist()
        else:
            rows += (permuted(f"{seed} {name} {epoch}", size, place) for place in range(start, end))
    return rows


def permuted(key: str, size: int, place: int) -> int:
    """Returns the element at a place of a permutation of ``range(size)``, chosen by `key`, without the others."""
    # a Feistel network is a permutation; applied until the result is in the range, it permutes the range
    half = -(-(size - 1).bit_length() // 2)
    mask, secret = (1 << half) - 1, hashlib.blake2b(key.encode(), digest_size=32).digest()
    while True:
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            text = number.to_bytes(1, "little") + right.to_bytes(8, "little")
            mixed = int.from_bytes(hashlib.blake2b(text, key=secret, digest_size=8).digest(), "little")
            left, right = right, left ^ (mixed & mask)
        place = left << half | right
        if place < size:
            return place
