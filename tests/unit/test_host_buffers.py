"""Host buffers: that state comes back bit by bit, and that no buffer is allocated twice.

On the CPU the memory of the device is host memory, too; the code is the same.
"""

from __future__ import annotations

import torch

from rlhf.engines.host_buffers import HostBuffers, release_memory

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
        addresses.append({buffers.readable(tensor).untyped_storage().data_ptr() for tensor in tensors[:3]})
        buffers.give_back()
        if loaded:
            tensors = state()
    assert addresses[0] == addresses[1] == addresses[2]


def test_what_is_on_another_device_stays() -> None:
    elsewhere, buffers = torch.ones(3, device="meta"), HostBuffers(CPU)
    assert not buffers.take([elsewhere])
    assert buffers.readable(elsewhere) is elsewhere
    release_memory(CPU)
