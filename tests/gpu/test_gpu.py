"""What needs a GPU: that engines compute there what they compute on the CPU, and that taking turns frees its memory.

`make gpu` runs them, and ``pytest tests/gpu --confcutdir=tests/gpu`` does where packages of other tests are missing.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.models.segments import Segments
from ratchet.rlhf.train.torch_engine import TorchEngine
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

pytestmark = pytest.mark.skipif(not accelerator.is_available(), reason="there is no GPU here")
kernels = pytest.mark.skipif(not accelerator.has_cuda(), reason="there are no kernels of CUDA here")
PACKAGES = {"zero": "deepspeed", "mega": "megatron.core"}
"""What an engine needs, by the start of its name."""
LARGE = {"hidden": 1024, "layers": 8, "intermediate": 4096}
"""A model beside whose memory that of kernels and of the driver is little."""
if not accelerator.has_cuda():  # a simulated GPU is slow, and has no such memory
    LARGE = {"hidden": 128, "layers": 2, "intermediate": 256}


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def needs(engine: str) -> None:
    """Skips a test if the engine's package is missing or does not support this GPU."""
    if package := PACKAGES.get(engine[:4]):
        pytest.importorskip(package)
        if not accelerator.has_cuda():
            pytest.skip(f"{package} does not support this GPU")


def in_use() -> int:
    """Bytes of the GPU that no other process can have: also those that PyTorch keeps without using them."""
    torch.accelerator.synchronize()
    free, total = accelerator.free_and_total()
    return total - free


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
    needs(engine)
    kind = kind_of(engine, head, policy_folder, critic_folder)  # type: ignore[arg-type]
    on_gpu = kind.build()
    assert next(iter(on_gpu.parameters.values())).device.type != "cpu"  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr("ratchet.rlhf.distributed.accelerator.device", lambda: torch.device("cpu"))
        on_cpu = ENGINES["torch"](kind.folder, kind.head)
    assert on_gpu.digest() == on_cpu.digest()
    assert_close(infer(on_gpu, kind, batch), infer(on_cpu, kind, batch))
    for built in (on_gpu, on_cpu):
        built.update(batch, kind.objective, PLAN)
    assert_same_update(on_gpu, on_cpu)


@kernels
@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_packing_with_attention_that_skips_what_lies_between(
    attention: str,
    batch: TrajectoryBatch,
    tmp_path: Path,
) -> None:
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    folder = tiny.model_folder(tmp_path, heads=2, key_value_heads=1)  # flex attention wants heads of 16 and more
    kind = kind_of("torch", "policy", folder, folder)
    plain = kind.build(dtype="bfloat16")
    model = load_actor(ModelConfig(path=str(folder), attention=attention))
    packed = TorchEngine(model, "policy", dtype="bfloat16", packing=True)
    assert_close(infer(packed, kind, batch), infer(plain, kind, batch), atol=0.3)  # as bfloat16 is to float32
    packed.update(batch, kind.objective, replace(PLAN, mini_batches=(ALL,)))


@kernels
def test_the_kernel_for_pieces_of_any_length() -> None:
    """Against the loop that takes its place on a CPU, in float32: the kernel's bfloat16 has 8 bits."""
    prompts, responses, prompt_of = np.array([5, 70]), np.array([3, 0, 90, 1]), np.array([0, 0, 1, 1])
    whole, device = Segments.of_sequences(np.array([5, 1, 163])), accelerator.device()
    for segments in (Segments.of(prompts, responses, prompt_of), whole):
        torch.manual_seed(0)
        shape = [(4, 64), (2, 64), (2, 64)]
        inputs = [torch.randn(169, *heads, device=device, dtype=torch.bfloat16, requires_grad=True) for heads in shape]
        exact = [heads.detach().cpu().float().requires_grad_() for heads in inputs]
        (q, k, v), (exact_q, exact_k, exact_v) = inputs, exact
        found = segments.to(device).attend(q, k, v, None)
        expected = segments.attend(exact_q, exact_k, exact_v, None)
        weights = torch.randn(expected.shape)
        torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=0.03)
        gradients = torch.autograd.grad((found.float() * weights.to(device)).sum(), inputs)
        for gradient, right in zip(gradients, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
            error = (gradient.cpu().float() - right).norm() / right.norm()
            assert error < 0.02


@kernels
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
    batch: TrajectoryBatch,
    tmp_path: Path,
) -> None:
    """For another process; and it has the same bits when it is back."""
    needs(engine)
    large = tiny.model_folder(tmp_path, **LARGE)
    kind = kind_of(engine, "policy", large, large)
    loads_kernels = kind.build()
    loads_kernels.update(batch, kind.objective, PLAN)
    loads_kernels.digest()
    del loads_kernels
    gc.collect()
    torch.accelerator.empty_cache()
    before = in_use()

    built = kind.build()
    built.update(batch, kind.objective, PLAN)
    digest = built.digest()
    torch.accelerator.empty_cache()
    taken = in_use() - before
    built.place(model=True, optimizer=False)
    assert in_use() - before < 0.6 * taken, "weights stay, two moments go"
    built.place(model=False, optimizer=False)
    assert in_use() - before < 0.1 * taken
    built.place(model=True, optimizer=True)
    assert built.digest() == digest
    built.update(batch, kind.objective, PLAN)
    assert built.digest() != digest


def test_colocated_models_take_less_where_idle_ones_are_offloaded(tmp_path: Path) -> None:
    pytest.importorskip("tenacity")  # the store needs it
    from ratchet.infra.store.object_store import ObjectStore
    from ratchet.infra.store.run_store import RunStore
    from ratchet.infra.workers.worker import Worker

    tiny.workspace(tmp_path)
    tiny.model_folder(tmp_path / "model", **LARGE)
    gc.collect()  # memory that earlier tests left to this process would hide what is taken
    torch.accelerator.empty_cache()
    most = {}
    for offload in (False, True):
        config = tiny.config(tmp_path, actor__offload_when_idle=offload, critic__offload_when_idle=offload)
        worker = Worker(config, RunStore(ObjectStore(f"file://{tmp_path}/{offload}")))
        before = in_use()
        worker.engines.rollout()
        resident = [in_use() - before]
        for role in ("reference", "critic", "actor"):
            worker.engines.model(role, learns=role in ("actor", "critic"))
            resident.append(in_use() - before)
        most[offload] = max(resident)
        worker.close()
        del worker
        gc.collect()
        torch.accelerator.empty_cache()
    assert most[True] < 0.5 * most[False], "three models, one at a time"
