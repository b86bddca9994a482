"""All randomness of a run, as pure functions of (seed, where it is used).

There is no generator state to save: every draw is keyed by the run's seed and a path such as
``("generate", "it000007-p00012-s03")``, so it does not depend on what ran before, on batching or on resuming.
"""

import hashlib

import numpy as np


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """A counter-based generator (Philox) for one place of a run."""
    text = "\x1f".join(str(part) for part in (seed, *path))
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def epochs(seed: int, name: str, size: int, first: int, count: int) -> list[int]:
    """Rows `first` to `first + count` of an endless sequence of epochs over `size` rows, each shuffled in its own way.

    Args:
        seed: the run's seed.
        name: what is drawn; different names give different orders.
        size: rows of an epoch, each of which it has once.
        first: rows of the sequence that come before.
        count: rows to draw.
    """
    rows: list[int] = []
    while len(rows) < count:
        epoch, start = divmod(first + len(rows), size)
        order = generator(seed, name, epoch).permutation(size)
        rows += order[start : start + count - len(rows)].tolist()
    return rows
