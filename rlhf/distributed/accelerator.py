"""This process's GPU, if it has one.

This is the only module that names `torch.cuda`, for what `torch.accelerator` lacks. All else works on any accelerator
of PyTorch that has a backend for collectives. Functions import torch when called, so that this module is cheap to
import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def _type() -> str:
    """Returns the type of the GPUs, or `cpu` if there are none; takes no memory of a GPU."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    # Apple's GPUs have neither collectives nor float64
    return "cpu" if found is None or found.type == "mps" else found.type


def is_available() -> bool:
    """Returns True if there is a GPU; a driver, which computes nothing, asks this, and takes no memory of it."""
    return _type() != "cpu"


def has_cuda() -> bool:
    """Returns True if there is a GPU of CUDA, or of ROCm, which takes its place: vLLM generates on those."""
    return _type() == "cuda"


def device() -> torch.device:
    """Returns the current GPU, or the CPU if there is none. This process then uses the GPU, and must not fork."""
    import torch

    kind = _type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def count() -> int:
    """Returns the number of GPUs that this process sees."""
    import torch

    return torch.accelerator.device_count() if is_available() else 0


def kind(device: torch.device) -> Literal["cpu", "gpu"]:
    """Returns the kind of a device."""
    return "cpu" if device.type == "cpu" else "gpu"


def is_gpu(device: torch.device) -> bool:
    """Returns True for a GPU, whose memory is not the host's."""
    return device.type not in ("cpu", "meta")


def name() -> str | None:
    """Returns the GPU's name; None if there is none."""
    import torch

    return str(torch.get_device_module().get_device_name()) if is_available() else None


def backend() -> str:
    """Returns the backends of collectives, in the form that `init_process_group` takes."""
    from torch.distributed import get_default_backend_for_device

    here = _type()
    return "gloo" if here == "cpu" else f"cpu:gloo,{here}:{get_default_backend_for_device(here)}"


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor of the host to a device, without waiting for what a GPU still computes."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has finished; does nothing on the CPU."""
    import torch

    if is_gpu(device):
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Returns a GPU's memory that torch caches to the driver, once the GPU has finished; does nothing on the CPU."""
    import torch

    if is_gpu(device):
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()


def free_and_total() -> tuple[int, int]:
    """Returns the GPU's free and total memory in bytes."""
    import torch

    return torch.accelerator.get_memory_info()


def allocated() -> int:
    """Returns the bytes of tensors in the GPU's memory."""
    import torch

    return torch.accelerator.memory_allocated()


def reserved() -> int:
    """Returns the bytes of the GPU's memory that torch holds, for tensors or for later ones."""
    import torch

    return torch.accelerator.memory_reserved()


def peaks() -> tuple[int, int]:
    """Returns the peaks of tensors' memory, and of what torch reserved for them, since the process began or
    `reset_peaks`; in bytes."""
    import torch

    return torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()


def reset_peaks() -> None:
    """Makes `peaks` start from what is allocated now."""
    import torch

    torch.accelerator.reset_peak_memory_stats()


def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA GPU, such as (9, 0); None for another device."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def cuda_uuid(device: torch.device) -> str:
    """Returns the UUID of an NVIDIA GPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def release_exports() -> None:
    """Frees memory that this process has exported to others, once none of them maps it (CUDA)."""
    import torch

    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    torch.cuda.empty_cache()


def check_cuda() -> None:
    """Raises RuntimeError or AssertionError if PyTorch cannot use an NVIDIA GPU."""
    import torch

    torch.cuda.current_device()
