"""All randomness of a run, as pure functions of the seed and the place of use.

There is no generator state to save: each draw is keyed by the run's seed and a path such as
``("generate", "it000007-p00012-s03")``, so it does not depend on earlier draws, on batching or on resuming.
"""

import hashlib

import numpy as np


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """A counter-based generator (Philox) for one place of use.

    Args:
        seed: seed of the run.
        path: the place of use.
    """
    text = "\x1f".join(str(part) for part in (seed, *path))
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def epochs(seed: int, name: str, size: int, first: int, count: int) -> list[int]:
    """Draw rows `first` to `first + count` of an endless sequence of epochs, each a different permutation of all rows.

    Args:
        seed: seed of the run.
        name: purpose of the draw; different names give different orders.
        size: number of rows in an epoch.
        first: number of rows of the sequence to skip.
        count: number of rows to draw.
    """
    rows: list[int] = []
    while len(rows) < count:
        epoch, start = divmod(first + len(rows), size)
        order = generator(seed, name, epoch).permutation(size)
        rows += order[start : start + count - len(rows)].tolist()
    return rows
