"""Registers the simulated device, `simgpu`, with PyTorch; see simgpu.cpp for what it does.

It takes PyTorch's place for an accelerator in the whole process, and so in `torch.accelerator`. A process cannot undo
it: tests that use it run in processes of their own (`python -m pytest -p tests.simulated.plugin`).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration

from ratchet.rlhf.distributed import ranks

NAME = "simgpu"
VARIABLE = "RATCHET_TEST_SIMGPU"
"""Set for processes that start others, which are to have the device, too."""
SOURCE = Path(__file__).with_name("simgpu.cpp")
GIB = 2**30


def library() -> Path:
    """Returns the compiled library; compiles it (20 s) where it is missing or out of date."""
    digest = hashlib.sha256(f"{torch.__version__} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    built = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ratchet-tests" / f"{NAME}-{digest}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            compiled = Path(folder) / built.name
            home = Path(torch.__path__[0])
            subprocess.run(
                [
                    *("g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", str(SOURCE), "-o", str(compiled)),
                    *(f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"),
                    *(f"-I{sysconfig.get_paths()['include']}", f"-L{home / 'lib'}"),
                    *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
                ],
                check=True,
            )
            compiled.replace(built)  # whole, or not at all: another process may compile it, too
    return built


class OnlyEvent:
    """An event of the only stream."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.accelerator.synchronize()


class OnlyStream:
    """The device's only stream."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.device = torch.device(NAME, 0)

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: OnlyEvent | None = None) -> OnlyEvent:
        return event or OnlyEvent()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.accelerator.synchronize()


class Module(ModuleType):
    """`torch.simgpu`: what libraries ask of a device's module."""

    Stream: type[OnlyStream] = OnlyStream
    Event: type[OnlyEvent] = OnlyEvent

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def current_stream(self, device: Any = None) -> OnlyStream:
        return OnlyStream()

    default_stream = current_stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize()

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()  # kernels draw from the CPU's generator

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def is_bf16_supported(self, *arguments: Any) -> bool:
        return True

    def get_device_name(self, device: Any = None) -> str:
        return "simulated GPU"


_library: Any = None
_is_hollow = False


def enable(size: int = 80 * GIB) -> None:
    """Gives this process the device.

    Args:
        size: its memory in bytes.
    """
    global _library
    if _library is None:
        backend_registration.rename_privateuse1_backend(NAME)
        backend_registration.generate_methods_for_privateuse1_backend()
        torch._register_device_module(NAME, Module(f"torch.{NAME}"))
        loader = importlib.machinery.ExtensionFileLoader(NAME, str(library()))
        spec = importlib.util.spec_from_loader(NAME, loader)
        assert spec is not None
        _library = importlib.util.module_from_spec(spec)
        loader.exec_module(_library)
        torch.distributed.Backend.register_backend("simccl", _group, devices=[NAME])
        torch.distributed.Backend.register_backend("hollow", _group, devices=["cpu"])
        torch.distributed.ProcessGroupNCCL = _NCCL  # type: ignore[attr-defined]
        _fsdp_init._move_states_to_device = _move_states_to_device
    _library.set_size(size)


def _move_states_to_device(parameters: list[Tensor], buffers: list[Tensor], device: torch.device) -> None:
    """As FSDP's own, which gives tensors other `data`: PyTorch allows that only between devices that it knows."""
    for tensor in (*parameters, *buffers):
        if tensor.device != device and not tensor.is_meta:
            moved = tensor.detach().to(device)
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


class _NCCL:
    """Stands for `ProcessGroupNCCL`."""

    class Options:
        _timeout: timedelta

    def __new__(cls, store: Any, rank: int, count: int, options: Options) -> Any:
        return _group(store, rank, count, options._timeout)


def _group(store: Any, rank: int, count: int, timeout: timedelta) -> Any:
    if _is_hollow:
        return _library.hollow_group(rank, count)
    return _library.group(torch.distributed.ProcessGroupGloo(store, rank, count, timeout))


def others_hold(size: int) -> None:
    """Makes other processes hold this many bytes of the device's memory."""
    _library.set_others(size)


def pinned() -> int:
    """Returns the bytes of pinned host memory in use."""
    return int(_library.pinned())


@contextlib.contextmanager
def reported() -> Iterator[list[tuple[str, str, int]]]:
    """Yields a list that gets the kind, operation and bytes of each wait for the device and each copy to or from it."""
    reports: list[tuple[str, str, int]] = []
    _library.set_callback(lambda kind, operation, size: reports.append((kind, operation, size)))
    try:
        yield reports
    finally:
        _library.set_callback(None)


@contextlib.contextmanager
def hollow(rank: int = 0, count: int = 1) -> Iterator[None]:
    """Makes the device hollow, and this process one rank of a group whose other ranks do not exist."""
    global _is_hollow
    importlib.import_module("torch._meta_registrations")  # the shapes that Python computes
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it remembers the mesh as the rank before saw it
    ranks._group.cache_clear()
    _is_hollow = True
    _library.set_hollow(True)
    torch.distributed.init_process_group(f"cpu:hollow,{NAME}:simccl", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        gc.collect()
        _library.set_hollow(False)
        _is_hollow = False
