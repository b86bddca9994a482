"""Host buffers: that state comes back bit by bit, that no buffer is allocated twice, and that little is wasted.

On the CPU the memory of the device is host memory, too; the code is the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.distributed import host_buffers
from ratchet.rlhf.distributed.host_buffers import HostBuffers, host_memory, local_of, release_memory
from ratchet.rlhf.models.loading import actor_skeleton
from ratchet.rlhf.models.skeleton import without_memory
from ratchet.rlhf.train.fsdp_engine import FSDPEngine
from tests import tiny
from tests.unit.test_big_layouts import CONFIGS, LAYERS

CPU = torch.device("cpu")


def state() -> list[torch.Tensor]:
    """Tensors of several types, two of which share memory, and one without elements."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(1000, generator=generator)
    return [flat[:600].view(20, 30), flat[600:], torch.randint(0, 9, (7,), generator=generator), torch.zeros(0, 3)]


def test_state_comes_back_bit_by_bit_and_its_views_are_those_of_before() -> None:
    tensors, expected = state(), state()
    view, buffers = tensors[0].t(), HostBuffers(CPU)
    for _ in range(2):
        assert buffers.take(tensors)
        assert buffers.in_use
        assert buffers.size == 1000 * 4 + 7 * 8
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 4
        for tensor, values in zip([*tensors, view], [*expected, expected[0].t()], strict=True):
            assert torch.equal(buffers.readable(tensor), values)
        assert not buffers.take(tensors), "they are away already"
        buffers.give_back()
        assert not buffers.in_use
        for tensor, values in zip([*tensors, view], [*expected, expected[0].t()], strict=True):
            assert torch.equal(tensor, values)
            assert buffers.readable(tensor) is tensor
        tensors[0] += 1
        expected[0] += 1
        assert torch.equal(view, expected[0].t())


def test_no_buffer_is_allocated_twice() -> None:
    """Not even for an optimizer state that was loaded again, which is other tensors of the same sizes."""
    tensors, buffers = state(), HostBuffers(CPU)
    addresses = []
    for loaded in range(3):
        buffers.take(tensors)
        addresses.append({buffers.readable(tensor).data_ptr() for tensor in tensors[:3]})
        buffers.give_back()
        if loaded:
            tensors = state()
    assert addresses[0] == addresses[1] == addresses[2]


def test_what_is_on_another_device_stays() -> None:
    elsewhere, buffers = torch.ones(3, device="meta"), HostBuffers(CPU)
    assert not buffers.take([elsewhere])
    assert buffers.readable(elsewhere) is elsewhere
    release_memory(CPU)


def test_buffers_are_cut_from_one_slab() -> None:
    tensors, buffers = [torch.full((size,), size) for size in range(1, 300)], HostBuffers(CPU)
    buffers.take(tensors)
    held = [buffers.readable(tensor) for tensor in tensors]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == 1
    assert all(bool((tensor == size).all()) for size, tensor in enumerate(held, 1)), "none has another's place"


def test_memory_may_lie_in_several_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the flat buffers of ZeRO and Megatron. Views lie within one slab, or across their bounds."""
    monkeypatch.setattr(host_buffers, "SLAB", 1024)
    monkeypatch.setattr(host_buffers, "SMALL_SLAB", 64)
    flat = torch.arange(1000, dtype=torch.float32)
    views = [flat[:256], flat[256:512], flat[200:800].view(20, 30).t(), flat[700:700], flat[1], flat[3::7], flat]
    expected, buffers = [view.clone() for view in views], HostBuffers(CPU)
    for _ in range(2):
        buffers.take(views)
        assert buffers.size == 4000
        assert buffers.readable(views[0]).data_ptr() != buffers.readable(views[1]).data_ptr()
        for view, values in zip(views, expected, strict=True):
            assert torch.equal(buffers.readable(view), values)
        buffers.give_back()
        assert torch.equal(flat, expected[-1])


QWEN = Qwen2Config(  # 2.5 of 7.6 billion parameters
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=LAYERS,
    num_attention_heads=28,
    num_key_value_heads=4,
)


def shares(config: PreTrainedConfig, layers: int, ranks: int) -> list[torch.Tensor]:
    """The float32 weights, moments and counts of steps that a rank holds of a model, without memory."""
    sizes: list[int] = []
    with without_memory():
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        size = parameter.numel() // ranks
        sizes += [size, size, size, 1] * (layers // LAYERS if ".layers." in name else 1)
    return [torch.empty(size, device="meta") for size in sizes]


@pytest.mark.parametrize(
    ("config", "layers", "ranks"),
    [(QWEN, 28, 8), (QWEN, 28, 1), (CONFIGS["7 B"], 32, 1), (CONFIGS["32 B"], 64, 32), (CONFIGS["70 B"], 80, 64)],
)
def test_slabs_take_hardly_more_than_what_leaves(
    config: PreTrainedConfig, layers: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's allocator of pinned memory takes the next power of two of each size that it is asked for."""
    slabs: list[int] = []

    def allocate(size: int, device: torch.device) -> torch.Tensor:
        slabs.append(1 << (size - 1).bit_length())
        return torch.empty(size, dtype=torch.uint8, device=device)

    monkeypatch.setattr(host_buffers, "host_memory", allocate)
    buffers = HostBuffers(torch.device("meta"))
    tensors = shares(config, layers, ranks)
    needed = sum(tensor.nbytes for tensor in tensors)
    for _ in range(2):
        buffers.take(tensors)
        assert buffers.size == needed
        buffers.give_back()
    assert sum(slabs) <= 1.05 * needed
    assert len(slabs) <= 1.05 * needed / host_buffers.SLAB + 10


def test_shards_that_stay_on_the_host_are_cut_from_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP would pin each of them by itself."""
    slabs: list[torch.Tensor] = []

    def allocate(size: int, device: torch.device) -> torch.Tensor:
        slabs.append(host_memory(size, device))
        return slabs[-1]

    monkeypatch.setattr(host_buffers, "host_memory", allocate)
    engine = FSDPEngine(actor_skeleton(ModelConfig(path=str(tiny.model_folder(tmp_path)))), "policy", offload=True)
    places = {slab.untyped_storage().data_ptr() for slab in slabs}
    shards = [local_of(parameter) for parameter in engine.parameters.values()]
    assert len(slabs) < len(shards)
    assert {shard.untyped_storage().data_ptr() for shard in shards} <= places
