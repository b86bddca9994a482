"""A checkpoint is read by range: each rank reads what it holds, and damage in it is found."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.manifest import BLOCK, Checkpoint
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Claim, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.checkpoints import stored_state
from ratchet.rlhf.weights.stored_state import StoredState, StoredTensor
from ratchet.rlhf.weights.tensor_shards import AT_ONCE, TensorShard
from tests.padded import properties

WEIGHTS = Weights(version=1, digest="of a test")


@properties
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_any_block_of_a_tensor_is_filled(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored = StoredState.of({"model.safetensors": save({"other": torch.zeros(3), "weight": tensor})})
    bounds = [sorted({0, size, data.draw(st.integers(0, size))}) for size in shape]
    for corners in itertools.product(*(itertools.pairwise(edges) for edges in bounds)):
        block = tensor[tuple(slice(first, last) for first, last in corners)]
        own = torch.full_like(block, float("nan")).contiguous()
        TensorShard.block(own, shape, [first for first, _ in corners]).fill(stored.weights["weight"])
        assert torch.equal(own, block)


@properties
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.data())
def test_several_tensors_are_read_as_one(sizes: list[int], data: st.DataObject) -> None:
    parts = {str(number): torch.rand(size, dtype=torch.float64) for number, size in enumerate(sizes)}
    stored = StoredState.of({"model-1.safetensors": save(parts), "model-2.safetensors": save({"x": torch.ones(3)})})
    whole = torch.cat(list(parts.values()))
    joined = StoredTensor.joined([stored.weights[name] for name in parts], (1, len(whole)))
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    assert torch.equal(joined.flat(first, last), whole[first:last])
    assert torch.equal(joined.whole(), whole[None])


@pytest.mark.parametrize("shape", [(3, AT_ONCE + 5), (AT_ONCE + 5, 3), (2 * AT_ONCE + 5,)])
def test_tensors_larger_than_what_is_read_at_once(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    stored = StoredState.of({"model.safetensors": save({"weight": tensor})})
    for first, last in itertools.pairwise((0, shape[-1] // 3, shape[-1])):
        own = torch.zeros_like(tensor[..., first:last]).contiguous()
        TensorShard.block(own, shape, (*[0] * (len(shape) - 1), first)).fill(stored.weights["weight"])
        assert torch.equal(own, tensor[..., first:last])


def test_all_types_and_files(tmp_path: Path) -> None:
    weights = {"a": torch.randn(2, 3), "b": torch.arange(4), "c": torch.tensor(1.5, dtype=torch.bfloat16)}
    parts = {"model-00001-of-00002.safetensors": save({"a": weights["a"]}), "config.json": b"{}"}
    parts |= {"model-00002-of-00002.safetensors": save({"b": weights["b"], "c": weights["c"]}, {"format": "pt"})}
    parts |= {"optimizer-00001-of-00001.safetensors": save({"exp_avg.a": weights["a"] + 1})}
    stored = StoredState.of(parts)
    read = dict(stored.tensors())
    assert read.keys() == weights.keys()
    for name, tensor in weights.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert torch.equal(stored.moments["exp_avg.a"].whole(), weights["a"] + 1)
    assert (stored.file("config.json"), stored.file("state.json")) == (b"{}", None)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    store = RunStore(ObjectStore(f"file://{tmp_path}/run"))
    store.log.claim(Claim(config={}, code="", packages={}, threads=1, host="here", initial={"actor": WEIGHTS}))
    return store


def checkpoint_of(store: RunStore, files: dict[str, bytes]) -> Checkpoint:
    folder = store.checkpoint_folder("actor", WEIGHTS)
    written = store.write_checkpoint_files(folder, files)
    return store.checkpoint(
        store.write_checkpoint_manifest(folder, Checkpoint(role="actor", weights=WEIGHTS, files=written))
    )


def counting(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The bytes that are read from now on, by how."""
    read: Counter[str] = Counter()
    backend = store.objects.backend

    def counted(name: str, original: Callable[..., bytes]) -> None:
        def method(*arguments: object) -> bytes:
            data = original(*arguments)
            read[name] += len(data)
            return data

        monkeypatch.setattr(backend, name, method)

    counted("get", backend.get)
    counted("read", backend.read)
    return read


def test_only_what_is_needed_is_read(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(16 * BLOCK // 4)
    checkpoint = checkpoint_of(store, {"model.safetensors": save({"weight": tensor}), "state.json": b"{}"})
    read = counting(store, monkeypatch)
    stored = stored_state(store, checkpoint)
    assert read == {"read": BLOCK}, "the header"
    own = torch.zeros(len(tensor) // 4)
    TensorShard.flat(own, len(own)).fill(stored.weights["weight"])
    assert torch.equal(own, tensor[len(own) : 2 * len(own)])
    assert read["read"] <= 4 * BLOCK + 2 * BLOCK, "a quarter, and the blocks at its ends"
    assert stored.file("state.json") == b"{}"
    assert read["get"] == 2, "a small file is read whole"


@pytest.mark.parametrize("harm", ["flipped", "cut short", "gone"])
def test_damage_is_found_in_the_blocks_that_are_read(store: RunStore, harm: str) -> None:
    data = os.urandom(3 * BLOCK)
    checkpoint = checkpoint_of(store, {"model.bin": data})
    path = Path(store.url.removeprefix("file://")) / checkpoint.files["model.bin"].key
    if harm == "flipped":
        path.write_bytes(data[: BLOCK + 9] + bytes([data[BLOCK + 9] ^ 1]) + data[BLOCK + 10 :])
    elif harm == "cut short":
        path.write_bytes(data[: 2 * BLOCK - 1])
    else:
        path.unlink()
    read = store.ranges(checkpoint)
    if harm != "gone":
        assert read("model.bin", 5, BLOCK) == data[5:BLOCK], "other blocks are fine"
    with pytest.raises(Corrupt, match=r"model.bin is (damaged|gone)"):
        read("model.bin", BLOCK - 1, BLOCK + 1)
