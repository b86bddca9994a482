"""Deterministic computing (`run.deterministic`): the same bits each time, on the same machines with the same packages.

On the CPU all engines are deterministic anyway. On a GPU this needs slower kernels, and an operation without a
deterministic kernel fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",  # the package flash-attn; transformers reads it
    "NCCL_NVLS_ENABLE": "0",  # sums within a switch
    "NCCL_COLLNET_ENABLE": "0",
}
"""Variables that libraries read when they start; existing values are kept."""
VLLM_ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1"}
"""Further variables for vLLM on a GPU: a response then does not depend on the rest of its batch."""


def enforce() -> None:
    """Makes this process compute deterministically; called before CUDA starts.

    With this setting PyTorch itself chooses the deterministic kernels of `sdpa`.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch

    torch.use_deterministic_algorithms(True)
    # new memory is always written before it is read
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


@contextmanager
def relaxed() -> Iterator[None]:
    """Allows operations for which PyTorch has no deterministic kernel."""
    import torch

    enforced = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enforced)
