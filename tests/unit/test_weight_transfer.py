"""Weights on their way from the trainer to the rollout: what arrives is what was sent, in the rollout's type, once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from ratchet.rlhf.distributed.rendezvous import Rendezvous
from ratchet.rlhf.weights import buckets
from ratchet.rlhf.weights.broadcast import SENDER, LinkLost, WeightLink
from ratchet.rlhf.weights.buckets import Memory, Packed, SharedMemory, mapped, send
from ratchet.rlhf.weights.weight_files import write_weights
from tests.ranks import Ranks

CPU = torch.device("cpu")
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


def in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def tensor_of(shape: tuple[int, ...], kind: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(100).to(kind)


@settings(deadline=None, max_examples=200)
@given(
    drawn=st.lists(st.tuples(shapes, kinds), max_size=12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bucket=st.integers(1, 300),
    buffers=st.integers(1, 3),
)
def test_what_arrives_is_what_was_sent(
    drawn: list[tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype, bucket: int, buffers: int
) -> None:
    weights = [(f"tensor {number}", tensor_of(*about, number)) for number, about in enumerate(drawn)]
    received: list[tuple[str, Tensor]] = []
    sizes: list[tuple[int, int]] = []

    def deliver(packed: Packed, memory: Memory) -> None:
        packed = Packed.from_json(packed.as_json())
        sizes.append((packed.nbytes, len(packed.names)))
        received.extend((name, tensor.clone()) for name, tensor in packed.tensors(memory.memory))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", dict.fromkeys(buckets.BUCKET_BYTES, bucket))
        sent = send(weights, dtype, [Memory(CPU) for _ in range(buffers)], deliver)
    assert [name for name, _ in received] == [name for name, _ in weights]
    for (_, arrived), (_, original) in zip(received, weights, strict=True):
        assert arrived.dtype == in_type(original, dtype).dtype
        assert torch.equal(arrived, in_type(original, dtype))
    assert sent == sum(in_type(tensor, dtype).nbytes for _, tensor in weights), "each byte once"
    assert all(nbytes <= bucket or count == 1 for nbytes, count in sizes)


def test_a_bucket_is_filled_while_another_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", dict.fromkeys(buckets.BUCKET_BYTES, 4))
    second_is_filled = threading.Event()
    read: list[float] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number in range(5):
            if number == 2:  # taken when the second bucket is full
                second_is_filled.set()
            yield f"tensor {number}", torch.tensor([float(number)])

    def deliver(packed: Packed, memory: Memory) -> None:
        assert second_is_filled.wait(600), "nothing is filled while the first bucket is read"
        read.extend(float(tensor) for _, tensor in packed.tensors(memory.memory))

    send(weights(), torch.float32, [Memory(CPU), Memory(CPU)], deliver)
    assert read == [0, 1, 2, 3, 4], "and no bucket is filled again before it was read"


def test_an_error_of_the_receiver_reaches_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", dict.fromkeys(buckets.BUCKET_BYTES, 4))

    def deliver(packed: Packed, memory: Memory) -> None:
        if "tensor 1" in packed.names:
            raise ConnectionError("gone")

    weights = [(f"tensor {number}", torch.ones(1)) for number in range(9)]
    with pytest.raises(ConnectionError, match="gone"):
        send(weights, torch.float32, [Memory(CPU), Memory(CPU)], deliver)


def test_another_process_reads_shared_memory_and_nothing_is_left_of_it() -> None:
    memory = SharedMemory()
    memory.reserve(1000).copy_(torch.arange(1000) % 251)
    read = f"from ratchet.rlhf.weights.buckets import mapped; print(mapped({memory.path!r}, 1000).sum().item())"
    other = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert int(other.stdout) == int((torch.arange(1000) % 251).sum())
    path = memory.path
    memory.reserve(10)
    assert memory.path == path, "what is large enough is used again"
    still_mapped = mapped(path, 1000)
    memory.close()
    assert not os.path.exists(path)  # noqa: PTH110
    assert int(still_mapped[250]) == 250, "a reader is not cut off"


# Between processes that compute in a group of their own.

WEIGHTS = [(f"layers.{number}.weight", (number % 7 + 1, 300)) for number in range(50)]


def run_transfers(adapter_config: bytes | None) -> tuple[int, list[tuple[bytes | None, list[tuple[str, Tensor]]]]]:
    """The last rank sends to the others, twice; returns what was sent and received."""
    from ratchet.rlhf.distributed import ranks

    buckets.BUCKET_BYTES = dict.fromkeys(buckets.BUCKET_BYTES, 5000)
    count = ranks.count()
    sends = ranks.rank() == count - 1
    rendezvous = Rendezvous("127.0.0.1", 600) if sends else None
    url = ranks.gathered(None if rendezvous is None else rendezvous.url)[-1]
    link = WeightLink(rendezvous or url, SENDER if sends else 1 + ranks.rank(), count, "127.0.0.1", 600)
    sent, received = 0, []
    for transfer in range(2):
        if sends:
            tensors = ((name, tensor_of(shape, torch.float32, transfer)) for name, shape in WEIGHTS)
            sent += link.send(tensors, torch.bfloat16, adapter_config)
        else:
            config, arriving = link.receive()
            received.append((config, [(name, tensor.clone()) for name, tensor in arriving]))
    assert ranks.gathered(ranks.rank()) == list(range(count)), "the group that computes is undisturbed"
    return sent, received


@pytest.mark.parametrize("adapter_config", [None, b'{"r": 4}'])
def test_all_processes_of_a_rollout_receive_what_the_trainer_broadcasts_once(
    adapter_config: bytes | None, tmp_path: Path
) -> None:
    processes = Ranks(tmp_path, 3)
    try:
        *receivers, (sent, nothing) = processes(run_transfers, adapter_config)
    finally:
        processes.close()
    assert not nothing
    assert sent == 2 * sum(2 * rows * columns for _, (rows, columns) in WEIGHTS), "for both receivers together"
    for _, transfers in receivers:
        for number, (config, tensors) in enumerate(transfers):
            assert config == adapter_config
            assert [name for name, _ in tensors] == [name for name, _ in WEIGHTS]
            for (_, tensor), (_, shape) in zip(tensors, WEIGHTS, strict=True):
                assert torch.equal(tensor, tensor_of(shape, torch.float32, number).to(torch.bfloat16))


def run_files(folder: Path) -> dict[str, Tensor]:
    """The receiver writes what arrives to files, as for a server: buckets use the same memory again."""
    from ratchet.rlhf.distributed import ranks

    buckets.BUCKET_BYTES = dict.fromkeys(buckets.BUCKET_BYTES, 5000)
    sends = ranks.rank() == 1
    rendezvous = Rendezvous("127.0.0.1", 600) if sends else None
    url = ranks.gathered(None if rendezvous is None else rendezvous.url)[-1]
    link = WeightLink(rendezvous or url, SENDER if sends else 1, 2, "127.0.0.1", 600)
    if sends:
        link.send(((name, tensor_of(shape, torch.float32, 0)) for name, shape in WEIGHTS), torch.float32)
        link.refuse()
        return {}
    write_weights(link.receive()[1], folder, "model")
    with pytest.raises(LinkLost, match="the trainer has other weights by now"):
        link.receive()
    return load_file(folder / "model.safetensors")


def test_what_arrives_may_be_kept_in_files(tmp_path: Path) -> None:
    processes = Ranks(tmp_path, 2)
    try:
        received, _ = processes(run_files, tmp_path)
    finally:
        processes.close()
    assert received.keys() == {name for name, _ in WEIGHTS}
    for name, shape in WEIGHTS:
        assert torch.equal(received[name], tensor_of(shape, torch.float32, 0))


RECEIVES_ONE_TENSOR = """
import os, sys
from ratchet.rlhf.weights.broadcast import WeightLink
_, tensors = WeightLink(sys.argv[1], 1, 2, "127.0.0.1", 600).receive()
next(tensors)
os.kill(os.getpid(), 9)
"""


def test_a_trainer_notices_that_a_rollout_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", dict.fromkeys(buckets.BUCKET_BYTES, 4))
    rendezvous = Rendezvous("127.0.0.1", 600)
    with subprocess.Popen([sys.executable, "-c", RECEIVES_ONE_TENSOR, rendezvous.url]) as receiver:
        link = WeightLink(rendezvous, SENDER, 2, "127.0.0.1", 600)
        endless = (("tensor", torch.ones(1)) for _ in iter(int, 1))
        with pytest.raises(LinkLost, match="the connection for new weights failed"):
            link.send(endless, torch.float32)
    assert receiver.returncode == -9
