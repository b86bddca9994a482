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
