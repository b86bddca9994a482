"""Lets megatron-core compute on the CPU, with gloo.

It asks CUDA for a device, a stream and a generator's state, and passes the answers to PyTorch's own functions only. No
process outside the tests does this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
"""Functions that Megatron calls with `device="cuda"`."""


class _Stream:
    """A stream and its events: on the CPU everything is done when a call returns."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...

    def wait_stream(self, other: _Stream) -> None: ...


STREAM = _Stream()


def install() -> None:
    """Replaces all queries of a GPU, for good; everything else computes as before."""
    if torch.cuda.current_device.__module__ != __name__:
        _replace(torch.cuda, _of_cuda())
        _replace(torch, _factories())
        _replace(torch.Tensor, _of_tensors())
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import token_dispatcher

        token_dispatcher.maybe_move_tensor_to_cpu = _on_the_host
        random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron makes arrays only of tensors on a GPU, but passes them to functions that take nothing else."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextmanager
def installed() -> Iterator[None]:
    """Installs the replacements for the duration of the block."""
    before = [
        (owner, {name: getattr(owner, name) for name in names})
        for owner, names in ((torch.cuda, _of_cuda()), (torch, _factories()), (torch.Tensor, _of_tensors()))
    ]
    install()
    try:
        yield
    finally:
        for owner, functions in before:
            _replace(owner, functions)


def _replace(owner: Any, functions: dict[str, Callable[..., Any]]) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)


def _of_cuda() -> dict[str, Callable[..., Any]]:
    # each name has a function of its own, because dynamo's tables are by function
    return {
        "current_device": lambda: CPU,
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
        "current_stream": lambda device=None: STREAM,
        "stream": lambda stream: nullcontext(),
        "Stream": lambda: STREAM,
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }


def _factories() -> dict[str, Callable[..., Any]]:
    _device_constructors()  # it remembers PyTorch's own functions, not these
    return {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}


def _of_tensors() -> dict[str, Callable[..., Any]]:
    name_of_type: Any = torch.Tensor.type
    return {
        "cuda": lambda self, *args, **kwargs: self,
        # Megatron's optimizers take no tensors but "torch.cuda.FloatTensor" and the like
        "type": lambda self, *args, **kwargs: (
            name_of_type(self, *args, **kwargs)
            if args or kwargs
            else name_of_type(self).replace("torch.", "torch.cuda.", 1)
        ),
    }


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def call(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        is_gpu = device is not None and torch.device(device).type == "cuda"
        return factory(*args, device=CPU if is_gpu else device, **kwargs)

    return call
