"""The GPUs that Ratchet knows by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from ratchet.rlhf.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """A kind of GPU; rates are those of its data sheet."""

    memory: float
    """Bytes that PyTorch reports, of which a new process finds about 1.2 GiB taken by CUDA."""
    bf16_flops: float
    """Floating-point operations per second of dense matrix products in bfloat16."""
    bandwidth: float
    """Bytes per second of its memory."""
    to_gpus: float
    """Bytes per second to the other GPUs of its machine, in one direction."""
    to_host: float
    """Bytes per second to the host's memory, in one direction."""


KNOWN = {
    "a10": GPU(22.0 * GIB, 125e12, 0.60e12, 32e9, 32e9),
    "a100-40gb": GPU(39.4 * GIB, 312e12, 1.56e12, 300e9, 32e9),
    "a100-80gb": GPU(79.1 * GIB, 312e12, 2.04e12, 300e9, 32e9),
    "h20": GPU(95.0 * GIB, 148e12, 4.0e12, 450e9, 64e9),
    "h100": GPU(79.1 * GIB, 989e12, 3.35e12, 450e9, 64e9),
    "h100-pcie": GPU(79.1 * GIB, 756e12, 2.0e12, 64e9, 64e9),
    "h200": GPU(139.8 * GIB, 989e12, 4.8e12, 450e9, 64e9),
    "gh200": GPU(94.5 * GIB, 989e12, 4.0e12, 450e9, 450e9),
    "b200": GPU(178.3 * GIB, 2250e12, 8.0e12, 900e9, 64e9),
    "l4": GPU(22.0 * GIB, 121e12, 0.30e12, 32e9, 32e9),
    "l40s": GPU(44.4 * GIB, 362e12, 0.86e12, 32e9, 32e9),
    "rtx4090": GPU(23.5 * GIB, 165e12, 1.01e12, 32e9, 32e9),
    "rtx5090": GPU(31.3 * GIB, 210e12, 1.79e12, 64e9, 64e9),
}
"""GPUs by name; of those with several forms the fastest, SXM."""


@dataclass(frozen=True)
class GPUs:
    """A number of GPUs of one kind."""

    name: str
    count: int

    @classmethod
    def named(cls, text: str) -> GPUs:
        """Reads a name such as `h100` or `h100x8`; raises UserError if it is unknown."""
        name, _, count = text.rpartition("x")
        if text in KNOWN:
            name, count = text, "1"
        if name not in KNOWN or not count.isdecimal() or count.startswith("0"):
            raise UserError(
                f"--gpu {text} is unknown: name one of {', '.join(KNOWN)}, with a number of them if there are several, "
                "such as h100x8"
            )
        return cls(name, int(count))

    @property
    def memory(self) -> float:
        """Bytes of one of them."""
        return KNOWN[self.name].memory

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.name}x{self.count}"


def of_device(name: str) -> GPU | None:
    """Returns the kind of a device by the name that PyTorch gives it, up to its memory; None if it is unknown."""
    words = re.split("[ -]", name.lower())
    for part in (*map("".join, pairwise(words)), *words):  # "RTX 4090", "H100 PCIe", "H100"
        for known, gpu in KNOWN.items():
            if part in (known.replace("-", ""), known.partition("-")[0]):
                return gpu
    return None
