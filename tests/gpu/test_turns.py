"""Taking turns and deterministic updates on a GPU. Run with ``pytest tests/gpu`` where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.distributed.host_buffers import HostBuffers, release_memory

pytestmark = pytest.mark.skipif(not accelerator.is_available(), reason="there is no GPU here")
GIB = 2**30 if accelerator.has_cuda() else 2**24
"""A simulated GPU is slow, and needs no slack."""


def free() -> int:
    """Bytes that any process can have, by the driver."""
    return accelerator.free_and_total()[0]


def test_memory_that_was_left_belongs_to_other_processes_and_comes_back_with_its_bits() -> None:
    device = accelerator.device()
    before = free()
    state = [torch.randn(GIB // 4, device=device) for _ in range(2)]
    expected, buffers = [tensor[:1000].cpu() for tensor in state], HostBuffers(device)
    for _ in range(2):
        assert free() < before - 2 * GIB + GIB // 8
        buffers.take(state)
        release_memory(device)
        assert free() > before - GIB // 8  # PyTorch and the driver keep a few MiB
        assert all(buffers.readable(tensor).is_pinned() for tensor in state)
        buffers.give_back()
        for tensor, values in zip(state, expected, strict=True):
            assert torch.equal(tensor[:1000].cpu(), values)


DIGEST = """
import sys
from pathlib import Path
from ratchet.rlhf.distributed import determinism
determinism.enforce()
from tests.contract.conftest import batch
from tests.contract.test_train_engines import PLAN, kind_of
folder = Path(sys.argv[1])
kind = kind_of("torch", "policy", folder, folder)
engine = kind.build(dtype="bfloat16", gradient_checkpointing="selective")
engine.update(batch.__wrapped__(), kind.objective, PLAN)
print("digest", engine.digest())
"""


def test_a_deterministic_update_gives_the_same_bits_in_another_process(tmp_path: Path) -> None:
    from tests import tiny

    folder = tiny.model_folder(tmp_path, hidden=512, layers=4, intermediate=2048)
    digests = []
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", DIGEST, str(folder)], capture_output=True, text=True, check=True)
        digests.append(ran.stdout.split("digest ")[1].strip())
    assert digests[0] == digests[1]
