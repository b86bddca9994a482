"""Models that take turns on a device: in which order vLLM gives its memory, gets weights, and gets its memory back.

vLLM's process is a stand-in that records its calls: on the CPU, vLLM accepts all of them and does nothing.
`tests/contract/test_rollout_engines.py` sends them to the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers import rollout_weights
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.distributed.host_buffers import release_memory
from ratchet.rlhf.rollout import vllm_engine
from ratchet.rlhf.rollout.vllm_engine import without_expandable_segments
from ratchet.rlhf.rollout.vllm_process import VLLM
from ratchet.rlhf.train import model_engine
from tests import tiny
from tests.tiers import sampled

FIRST, SECOND = Weights(version=0, digest="first"), Weights(version=1, digest="second")
TOLD: list[tuple[Any, ...]] = []


class Told:
    """Stands in for the process."""

    lost = None

    def __init__(self, *_: object) -> None:
        TOLD.append(("start",))

    def call(self, method: Callable[..., object], *arguments: object) -> None:
        if method in (VLLM.sleep, VLLM.wake):
            TOLD.append((method.__name__, *arguments))
        elif ("new weights",) not in TOLD[-1:]:  # which take several calls
            TOLD.append(("new weights",))

    def end(self) -> None:
        pass


def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Worker:
    """A worker of a run with vLLM whose models take turns, which has loaded its first weights."""
    monkeypatch.setattr(vllm_engine, "VLLMProcess", Told)
    TOLD.clear()
    tiny.workspace(tmp_path)
    config = tiny.config(
        tmp_path, rollout__engine="vllm", actor__offload_when_idle=True, critic__offload_when_idle=True, **changes
    )
    built = Worker(config, RunStore(ObjectStore(f"file://{tmp_path}")))
    built.load("actor", FIRST, None)
    assert built.copy_to_rollout(FIRST)
    built.mark_as_version("rollout", FIRST)
    return built


def told() -> list[tuple[Any, ...]]:
    """What the process was told since the last call."""
    messages = TOLD.copy()
    TOLD.clear()
    return messages


@pytest.mark.slow
def test_weights_that_are_replaced_anyway_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sleeps without its weights, gets memory for the new ones alone, and the cache's only when it generates: the
    actor has left the device by then."""
    built = worker(tmp_path, monkeypatch)
    assert told() == [("start",), ("new weights",)]
    built.engines.rollout()
    assert built.has_weights("rollout", FIRST)
    assert told() == [], "it is awake"
    built.engines.model("reference")
    built.engines.model("actor", learns=True)
    assert told() == [("sleep", 2)], "it sleeps once, whoever takes the next turn"
    assert not built.has_weights("rollout", FIRST)
    built.mark_as_version("actor", SECOND)
    assert built.copy_to_rollout(SECOND)
    assert told() == [("wake", ["weights"]), ("new weights",)]
    assert built.engines.state_of("actor").weights_buffers.in_use, "the weights are read from host memory"
    assert not built.has_weights("rollout", SECOND), "whoever transfers them checks them first"
    built.mark_as_version("rollout", SECOND)
    built.engines.rollout()
    assert told() == [("wake", ["kv_cache"])]


@sampled(2)
@pytest.mark.parametrize("changes", [{"model__lora": {"r": 2}}, {"train__updates": False}], ids=["lora", "no updates"])
def test_weights_that_are_needed_again_are_kept(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = worker(tmp_path, monkeypatch, **changes)
    built.engines.rollout()
    told()
    built.engines.model("critic")
    assert told() == [("sleep", 1)]
    assert built.has_weights("rollout", FIRST)
    built.engines.rollout()
    assert told() == [("wake", ["weights", "kv_cache"])]


@pytest.mark.slow
def test_moments_do_not_move_when_weights_are_copied_or_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = worker(tmp_path, monkeypatch)
    actor = built.engines.state_of("actor")
    placed: list[tuple[bool, bool]] = []
    place = type(actor).place

    def noted(self: Any, *, model: bool, optimizer: bool) -> None:
        placed.append((model, optimizer))
        place(self, model=model, optimizer=optimizer)

    monkeypatch.setattr(type(actor), "place", noted)
    built.engines.model("critic")
    placed.clear()
    built.begin_save("actor")
    assert built.finish_save("actor") is not None
    assert placed == []
    built.copy_to_rollout(FIRST)
    assert not any(optimizer for _, optimizer in placed)


@pytest.mark.slow
def test_memory_is_given_back_at_each_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose calls are recorded: its driver gets the memory once nothing uses it."""
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("empty_cache"))
    for module in (model_engine, rollout_weights):
        monkeypatch.setattr(module, "release_memory", lambda device: release_memory(torch.device("cuda")))
    engines = worker(tmp_path, monkeypatch).engines
    released = ["synchronize", "empty_cache"]
    engines.model("reference")
    for role in ("critic", "actor", "reference"):
        calls.clear()
        engines.model(role, learns=role in ("actor", "critic"))
        assert calls == released, f"the turn of the {role}"
    calls.clear()
    engines.rollout()
    assert calls == released, "the turn of the rollout"
    engines.rollout()
    assert calls == released, "nothing has left"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),  # noqa: E501
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "HOME": "/"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "HOME": "/"}),  # noqa: E501
    ],
)  # fmt: skip
def test_vllm_gets_no_expandable_segments(before: dict[str, str], after: dict[str, str]) -> None:
    """With which its sleep does not work; other settings of the allocator reach it."""
    assert without_expandable_segments(before) == after
