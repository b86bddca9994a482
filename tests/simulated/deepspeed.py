"""Gives the simulated GPU to DeepSpeed, too, which knows devices by their names: `-p tests.simulated.deepspeed`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.simulated import plugin  # noqa: F401  (it enables the device)
from tests.simulated.device import NAME


class Accelerator(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed has no type hints
    """As CUDA's answers, where the CPU's differ."""

    def __init__(self) -> None:
        super().__init__()
        self._name = NAME
        self._communication_backend_name = "simccl"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[None]:
        return torch.get_device_module().device(device_index)  # type: ignore[no-any-return]

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{NAME}:0"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        torch.accelerator.synchronize()

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return torch.get_device_module().stream(stream)  # type: ignore[no-any-return]

    @property
    def Stream(self) -> type[torch.Stream]:
        return torch.Stream

    @property
    def Event(self) -> type[torch.Event]:
        return torch.Event

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    default_stream = current_stream

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.memory_allocated()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.max_memory_allocated()

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME


set_accelerator(Accelerator())
