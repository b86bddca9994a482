"""No process holds a whole model that is sharded: neither at the start, nor when it exports, nor when it resumes.

Each rank reads the peak of its own memory from Linux, which can be reset.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.rlhf.algorithms.objectives import SupervisedObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.models.loading import actor_skeleton
from ratchet.rlhf.models.skeleton import Skeleton
from ratchet.rlhf.train.deepspeed_engine import DeepSpeedEngine
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.fsdp_engine import FSDPEngine
from ratchet.rlhf.train.torch_engine import TorchEngine
from ratchet.rlhf.weights.stored_state import StoredState, StoredTensor
from ratchet.rlhf.weights.tensor_shards import AT_ONCE
from tests.ranks import Ranks

pytestmark = pytest.mark.slow

MIB = 2**20
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""105 M parameters, 420 MB; the rows of every matrix can be divided by 8."""
MATRIX = 4 * 1024 * 4096
"""Bytes of the largest one."""
BLOCK = 2 * 4 * AT_ONCE
"""A block is read as bytes, and copied to a tensor."""
M_MMAP_THRESHOLD = -3
"""From glibc's malloc.h."""
AROUND = 40 * MIB
"""What Python, its allocator and gloo's buffers take besides."""

BATCH = TrajectoryBatch.of(
    {
        "trajectory_id": [f"it000000-p{row:05d}-s00" for row in range(8)],
        "prompt_ids": [[3, 4]] * 8,
        "response_ids": [[5, 6]] * 8,
        "loss_mask": [[1, 1]] * 8,
    }
)
PLAN = OptimizerPlan(
    lr=1e-3, optimizer=AdamW(), grad_clip=1.0, micro_batch_tokens=8, mini_batches=(tuple(range(8)),), temperature=1.0
)


@dataclass
class Seen:
    """What one rank saw."""

    peaks: dict[str, int]
    """Bytes that it used at most, beyond those before."""
    read: dict[str, int]
    """Bytes that it read of tensors."""
    digests: list[str]
    """Of the initial weights; with moments, after the update; after the resume."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model_bytes(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    found = sum(4 * torch.Size(shape).numel() for shape in shapes)
    assert found > 400 * 10**6
    return found


@pytest.fixture(scope="module")
def digest(folder: Path) -> str:
    """Of the initial weights, by one process that has them all."""
    return TorchEngine(actor_skeleton(ModelConfig(path=str(folder))), "policy").digest()


def test_each_rank_holds_and_reads_its_share(folder: Path, model_bytes: int, digest: str, tmp_path: Path) -> None:
    share = model_bytes // 8
    for seen in by_ranks(8, tmp_path, start_export_resume, folder, tmp_path):
        assert seen.read == {"start": share, "resume": 3 * share}
        assert seen.peaks["start"] < share + BLOCK + AROUND
        assert seen.peaks["resume"] < 2 * share + BLOCK + AROUND  # the moments
        # the files; a rank's tensors are some more or less than its share; a tensor is gathered from its parts
        assert seen.peaks["export"] < 3 * share + 4 * MATRIX + AROUND
        assert seen.digests[0] == digest
        assert seen.digests[1] == seen.digests[2] != digest


def test_each_rank_of_zero_3_starts_with_its_share(folder: Path, model_bytes: int, digest: str, tmp_path: Path) -> None:
    share = model_bytes // 4
    for seen in by_ranks(4, tmp_path, start_zero_3, folder):
        assert seen.read == {"start": share}
        # the parameters, the optimizer's copy, and the gradients, which DeepSpeed allocates at once
        assert seen.peaks["start"] < 3 * share + BLOCK + AROUND
        assert seen.digests == [digest]


def by_ranks(count: int, folder: Path, function: Callable[..., Seen], *arguments: Path) -> list[Seen]:
    ranks = Ranks(folder, count)
    try:
        return ranks(function, *arguments)
    finally:
        ranks.close()


# What the ranks run.


def start_export_resume(folder: Path, checkpoint: Path) -> Seen:
    from ratchet.rlhf.distributed import ranks

    read = {"start": 0, "resume": 0}
    tiny = FSDPEngine(tiny_model(), "policy")
    tiny.update(BATCH, SupervisedObjective(), PLAN)
    tiny.state()
    engine, start = with_peak(lambda: FSDPEngine(counting(folder, read), "policy"))
    digests = [engine.digest()]
    engine.update(BATCH, SupervisedObjective(), PLAN)
    digests.append(engine.digest())
    files, export = with_peak(engine.state)
    for name, content in files.items():
        (checkpoint / name).write_bytes(content)
    del files, content, engine
    ranks.gathered("all files are written")
    fresh = FSDPEngine(actor_skeleton(ModelConfig(path=str(folder))), "policy")

    def reads(name: str, first: int, last: int) -> bytes:
        read["resume"] += last - first if first > 8 else 0  # before, there is the header
        with (checkpoint / name).open("rb") as file:
            file.seek(first)
            return file.read(last - first)

    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.*")}
    _, resume = with_peak(lambda: fresh.load_state(StoredState(sizes, reads)))
    digests.append(fresh.digest())
    return Seen({"start": start, "export": export, "resume": resume}, read, digests)


def start_zero_3(folder: Path) -> Seen:
    read = {"start": 0}
    DeepSpeedEngine(tiny_model(), "policy", stage=3).update(BATCH, SupervisedObjective(), PLAN)
    engine, start = with_peak(lambda: DeepSpeedEngine(counting(folder, read), "policy", stage=3))
    return Seen({"start": start}, read, [engine.digest()])


def tiny_model() -> LlamaForCausalLM:
    """A model to compute with first, so that code and buffers that stay do not count.

    Tensors are allocated apart, so that their memory is given back when they are freed: glibc would keep up to 64 MiB
    for each thread.
    """
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, MIB)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | {"hidden_size": 64, "intermediate_size": 64}))


def counting(folder: Path, read: dict[str, int]) -> Skeleton:
    """A skeleton that counts the bytes that are read of it."""

    def counted(source: StoredTensor) -> StoredTensor:
        def reads(name: str, first: int, last: int) -> bytes:
            read["start"] += last - first
            return source.read(name, first, last)

        return replace(source, read=reads)

    skeleton = actor_skeleton(ModelConfig(path=str(folder)))
    return Skeleton(skeleton.model, {name: counted(source) for name, source in skeleton.sources.items()})


def with_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and the bytes of memory that it took at most."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = of_this_process("VmRSS")
    found = call()
    return found, of_this_process("VmHWM") - before


def of_this_process(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
