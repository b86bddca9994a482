r"""A digest of sharded tensors that needs no gathering and does not depend on the layout.

Each rank hashes the elements that it holds, together with their positions in the whole tensor, and adds the hashes up:

.. math:: S = \sum_i h\big(k \oplus (2^{32} i + b_i)\big) \bmod 2^{64}

where :math:`b_i` are the 32 bits of element :math:`i` of the flattened tensor, :math:`k` is a key made of the tensor's
name and shape, and :math:`h` mixes 64 bits as MurmurHash's finalizer does. A sum does not depend on who adds what, so
only the sums are exchanged. Two sums, of :math:`h` and of a second mix of it, make 128 bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import torch

from ratchet.rlhf.distributed import accelerator, ranks
from ratchet.rlhf.weights.tensor_shards import TensorShard

KIND = "sum64"
"""Prefix of the digests."""
CHUNK = {"cpu": 2**15, "gpu": 2**24}
"""Elements hashed at a time: on a CPU they stay in its cache."""
MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Odd 64-bit constants, as signed integers."""


def sums(part: TensorShard, key: int) -> tuple[int, int]:
    """Hashes the elements of a part and adds the hashes up; returns both sums modulo 2^64, signed.

    Args:
        key: the tensor's key, 64 bits, signed.
    """
    assert part.values.dtype == torch.float32, f"a state is float32, not {part.values.dtype}"
    device = part.values.device
    chunk = CHUNK[accelerator.kind(device)]
    bits = part.values.detach().contiguous().view(torch.int32)
    runs, length = bits.shape
    at_once = max(1, chunk // max(length, 1))  # runs
    steps = torch.arange(min(length, chunk), device=device, dtype=torch.int64) << 32
    starts = part.starts.to(device) << 32
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    for run in range(0, runs, at_once):
        for first in range(0, length, chunk):
            piece = bits[run : run + at_once, first : first + chunk]
            mixed = starts[run : run + at_once, None] + ((first << 32) + steps[: piece.shape[1]])
            mixed.add_(piece).bitwise_xor_(key)
            for lane, constants in enumerate((MIX[:2], MIX[2:])):
                for constant in constants:
                    mixed.mul_(constant)
                    mixed.bitwise_xor_(mixed >> 32)
                totals[lane] += mixed.sum()
    first_sum, second_sum = totals.tolist()
    return first_sum, second_sum


def of_parts(parts: Mapping[str, Iterable[TensorShard]], shapes: Mapping[str, Sequence[int]], about: str) -> str:
    """Computes the digest of tensors that are spread over the ranks; all ranks must make the same call.

    Args:
        parts: this rank's parts of each tensor. No element is on two ranks.
        shapes: shape of each whole tensor, by the same names, equal on all ranks.
        about: other facts that the digest covers, equal on all ranks.

    Returns:
        `KIND`, a colon and a SHA-256 in hexadecimal.
    """
    names = sorted(shapes)
    table = torch.zeros((len(names), 2), dtype=torch.int64)
    for row, name in enumerate(names):
        key = _key(name, shapes[name])
        for part in parts[name]:
            table[row] += torch.tensor(sums(part, key))
    table = ranks.summed(table.to(accelerator.device())).cpu()
    tensors = {name: [list(shapes[name]), *sums] for name, sums in zip(names, table.tolist(), strict=True)}
    return f"{KIND}:{hashlib.sha256(json.dumps([about, tensors], sort_keys=True).encode()).hexdigest()}"


def _key(name: str, shape: Sequence[int]) -> int:
    return int.from_bytes(hashlib.sha256(f"{name} {list(shape)}".encode()).digest()[:8], "little", signed=True)
