"""No process ever holds a whole model that is sharded: at the start, when it resumes and when it exports.

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

from rlhf.algorithms.objectives import SupervisedObjective
from rlhf.batch import TrajectoryBatch
from rlhf.config import ModelConfig
from rlhf.engines.base import OptimizerPlan, TrainEngine
from rlhf.engines.deepspeed_engine import DeepSpeedEngine
from rlhf.engines.fsdp_engine import FSDPEngine
from rlhf.engines.optimizers import AdamW
from rlhf.engines.parts import AT_ONCE
from rlhf.engines.stored_state import StoredState, StoredTensor
from rlhf.engines.torch_engine import TorchEngine
from rlhf.models import actor_skeleton
from rlhf.models.skeleton import Skeleton
from tests.ranks import Ranks

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
AROUND = 48 * MIB
"""What Python, its allocator and gloo's buffers take besides; it was at most 20 MiB."""

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
    """Of the initial weights, after the update, and after the resume."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(path)
    return path


def test_each_rank_holds_and_reads_its_share(folder: Path, tmp_path: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        model = sum(4 * torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
    assert model > 400 * 10**6
    whole = TorchEngine(actor_skeleton(ModelConfig(path=str(folder))), "policy").digest()
    updated = set()
    for engine, count in (("fsdp", 4), ("fsdp", 8), ("zero3", 4)):
        ranks = Ranks(tmp_path, count)
        checkpoint = tmp_path / f"{engine}-{count}"
        checkpoint.mkdir()
        try:
            seen: list[Seen] = ranks(start_export_resume, engine, folder, checkpoint)
        finally:
            ranks.close()
        share = model // count
        # ZeRO-3 has a copy of its own for the optimizer, and its own gradients
        shares = 1 if engine == "fsdp" else 3
        for rank in seen:
            assert rank.read["start"] == share
            assert rank.read["resume"] == 3 * share
            assert rank.peaks["start"] < shares * share + BLOCK + AROUND
            assert rank.peaks["resume"] < 2 * share + BLOCK + AROUND  # the moments
            # files of weights and moments; the tensors of a rank differ from a share by one; a gathered one is copied
            assert rank.peaks["export"] < 3 * share + 3 * MATRIX + AROUND
            assert rank.digests[0] == whole
            assert rank.digests[1] == rank.digests[2]
        updated |= {tuple(rank.digests) for rank in seen}
    assert len(updated) <= 3


# What the ranks run.


def start_export_resume(engine_name: str, folder: Path, checkpoint: Path) -> Seen:
    from rlhf.engines import ranks

    peaks: dict[str, int] = {}
    read = {"start": 0, "resume": 0}

    def counted(source: StoredTensor) -> StoredTensor:
        def reads(name: str, first: int, last: int) -> bytes:
            read["start"] += last - first
            return source.read(name, first, last)

        return replace(source, read=reads)

    def build() -> TrainEngine:
        skeleton = actor_skeleton(ModelConfig(path=str(folder)))
        read["start"] = 0  # the headers are read
        counting = Skeleton(skeleton.model, {name: counted(source) for name, source in skeleton.sources.items()})
        return FSDPEngine(counting, "policy") if engine_name == "fsdp" else DeepSpeedEngine(counting, "policy", stage=3)

    imports_everything(engine_name)
    engine, peaks["start"] = with_peak(build)
    digests = [engine.digest()]
    engine.update(BATCH, SupervisedObjective(), PLAN)
    digests.append(engine.digest())
    files, peaks["export"] = with_peak(engine.state)
    for name, content in files.items():
        (checkpoint / name).write_bytes(content)
    del files, content
    ranks.gathered("all files are written")
    del engine
    engine = build()

    def resume() -> None:
        def reads(name: str, first: int, last: int) -> bytes:
            read["resume"] += last - first if first > 8 else 0  # before, there is the header
            with (checkpoint / name).open("rb") as file:
                file.seek(first)
                return file.read(last - first)

        engine.load_state(StoredState({path.name: path.stat().st_size for path in checkpoint.iterdir()}, reads))

    _, peaks["resume"] = with_peak(resume)
    digests.append(engine.digest())
    return Seen(peaks, read, digests)


def imports_everything(engine_name: str) -> None:
    """Compute with a tiny model, so that code and buffers that stay do not count.

    Tensors are allocated apart, so that their memory is given back when they are freed: glibc would keep up to 64 MiB
    for each thread.
    """
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, MIB)
    tiny = LlamaForCausalLM(LlamaConfig(**SHAPE | {"hidden_size": 64, "intermediate_size": 64}))
    engine = FSDPEngine(tiny, "policy") if engine_name == "fsdp" else DeepSpeedEngine(tiny, "policy", stage=3)
    engine.update(BATCH, SupervisedObjective(), PLAN)
    engine.state()


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
