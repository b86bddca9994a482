"""Lets megatron-core compute on the CPU, with gloo: it asks CUDA for a device, a stream and a generator's state, and
takes the answers to nothing but PyTorch's own functions. No process outside the tests does this."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
"""Functions that Megatron calls with `device="cuda"`."""


@functools.cache
def install() -> None:
    """Replace what asks for a GPU. Everything else computes as before."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda device=None: None
    cuda.set_device = lambda device: None
    cuda.current_stream = lambda device=None: torch.Stream(device="cpu")
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    name_of_type = tensor.type
    # its optimizers take no tensors but "torch.cuda.FloatTensor" and the like
    tensor.type = lambda self, *args, **kwargs: (
        name_of_type(self, *args, **kwargs) if args or kwargs else name_of_type(self).replace("torch.", "torch.cuda.", 1)
    )
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def call(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        is_gpu = device is not None and torch.device(device).type == "cuda"
        return factory(*args, device=CPU if is_gpu else device, **kwargs)

    return call
