"""What needs a GPU: that engines compute there what they compute on the CPU, and that taking turns frees its memory.

Run with ``pytest tests/gpu`` where there is one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.store.object_store import ObjectStore
from infra.store.run_store import RunStore
from infra.workers.worker import Worker
from rlhf.batch import TrajectoryBatch
from rlhf.config import ModelConfig
from rlhf.engines.prefix_sharing import Segments
from rlhf.engines.torch_engine import TorchEngine
from rlhf.models import load_actor
from tests import tiny
from tests.contract.conftest import batch, critic_folder, policy_folder
from tests.contract.test_train_engines import (
    ALL,
    ENGINES,
    PLAN,
    assert_close,
    assert_same_update,
    infer,
    kind_of,
    tensors,
)

__all__ = ["batch", "critic_folder", "policy_folder"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("head", ["policy", "value"])
def test_a_gpu_computes_what_a_cpu_computes(
    engine: str,
    head: str,
    policy_folder: Path,
    critic_folder: Path,
    batch: TrajectoryBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = kind_of(engine, head, policy_folder, critic_folder)  # type: ignore[arg-type]
    on_gpu = kind.build()
    assert next(iter(on_gpu.parameters.values())).device.type == "cuda"  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr("rlhf.engines.ranks.device", lambda: torch.device("cpu"))
        on_cpu = ENGINES["torch"](kind.folder, kind.head)
    assert on_gpu.digest() == on_cpu.digest()
    assert_close(infer(on_gpu, kind, batch), infer(on_cpu, kind, batch))
    for one in (on_gpu, on_cpu):
        one.update(batch, kind.objective, PLAN)
    assert_same_update(on_gpu, on_cpu)


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_packing_with_attention_that_skips_what_lies_between(
    attention: str,
    policy_folder: Path,
    batch: TrajectoryBatch,
) -> None:
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    kind = kind_of("torch", "policy", policy_folder, policy_folder)
    plain = kind.build(dtype="bfloat16")
    model = load_actor(ModelConfig(path=str(policy_folder), attention=attention))
    packed = TorchEngine(model, "policy", dtype="bfloat16", packing=True)
    assert_close(infer(packed, kind, batch), infer(plain, kind, batch), atol=0.3)  # as bfloat16 is to float32
    packed.update(batch, kind.objective, replace(PLAN, mini_batches=(ALL,)))


def test_the_kernel_for_pieces_of_any_length() -> None:
    """Against the loop that takes its place on a CPU, in float32: the kernel's bfloat16 has 8 bits."""
    prompts, responses, prompt_of = np.array([5, 70]), np.array([3, 0, 90, 1]), np.array([0, 0, 1, 1])
    whole = Segments.of_sequences(np.array([5, 1, 163]))
    for segments in (Segments.of(prompts, responses, prompt_of), whole):
        torch.manual_seed(0)
        shape = [(4, 64), (2, 64), (2, 64)]
        inputs = [torch.randn(169, *heads, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in shape]
        exact = [heads.detach().cpu().float().requires_grad_() for heads in inputs]
        (q, k, v), (exact_q, exact_k, exact_v) = inputs, exact
        found = segments.to(torch.device("cuda")).attend(q, k, v, None)
        expected = segments.attend(exact_q, exact_k, exact_v, None)
        weights = torch.randn(expected.shape)
        torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=0.03)
        gradients = torch.autograd.grad((found.float() * weights.cuda()).sum(), inputs)
        for gradient, right in zip(gradients, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
            error = (gradient.cpu().float() - right).norm() / right.norm()
            assert error < 0.02


@pytest.mark.parametrize("options", [{}, {"share_prompts": False}])
def test_packing_by_default_computes_what_padding_does(
    options: dict[str, bool], policy_folder: Path, batch: TrajectoryBatch
) -> None:
    kind = kind_of("torch", "policy", policy_folder, policy_folder)
    padded = kind.build(dtype="bfloat16", packing=False, share_prompts=False)
    packed = kind.build(dtype="bfloat16", **options)
    assert packed.packing  # type: ignore[attr-defined]
    assert_close(infer(packed, kind, batch), infer(padded, kind, batch), atol=0.3)  # as bfloat16 is to float32
    for one in (padded, packed):
        one.update(batch, kind.objective, replace(PLAN, mini_batches=(ALL,)))
    moments, expected = (tensors(one)[1] for one in (packed, padded))
    for name in (name for name in moments if name.startswith("exp_avg.")):
        assert torch.cosine_similarity(moments[name].flatten(), expected[name].flatten(), dim=0) > 0.97, name


@pytest.mark.parametrize("engine", ["torch", "fsdp", "zero1", "zero2"])
def test_what_gives_way_frees_its_memory(
    engine: str,
    policy_folder: Path,
    batch: TrajectoryBatch,
    tmp_path: Path,
) -> None:
    large = tiny.model_folder(tmp_path, hidden=512, layers=4, intermediate=2048)
    kind = kind_of(engine, "policy", large, large)
    before = torch.cuda.memory_allocated()
    built, other = kind.build(), kind.build()
    for one in (built, other):
        one.update(batch, kind.objective, PLAN)
    taken = (torch.cuda.memory_allocated() - before) // 2
    built.place(model=True, optimizer=False)
    learning = torch.cuda.memory_allocated() - before - taken
    built.place(model=False, optimizer=False)
    left = torch.cuda.memory_allocated() - before - taken
    assert learning < 0.6 * taken, "weights stay, two moments go"
    assert left < 0.1 * taken
    built.place(model=True, optimizer=True)
    for one in (built, other):
        one.update(batch, kind.objective, PLAN)
    assert built.digest() == other.digest()


def test_the_peak_of_colocated_models_is_lower_where_idle_ones_are_offloaded(tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    tiny.model_folder(tmp_path / "model", hidden=512, layers=4, intermediate=2048)
    peaks = {}
    for offload in (False, True):
        config = tiny.config(tmp_path, actor__offload_when_idle=offload, critic__offload_when_idle=offload)
        worker = Worker(config, RunStore(ObjectStore(f"file://{tmp_path}/{offload}")))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        worker.engines.rollout()
        for role in ("reference", "critic", "actor"):
            worker.engines.model(role, learns=role in ("actor", "critic"))
        peaks[offload] = torch.cuda.max_memory_allocated() - before
        del worker
    assert peaks[True] < 0.5 * peaks[False], "three models, one at a time"
