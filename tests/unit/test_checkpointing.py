"""Gradient checkpointing: what is computed again. That it changes no result is a promise of the engines' contract."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.models import activation_checkpointing
from ratchet.rlhf.models.activation_checkpointing import Checkpointing
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests import tiny
from tests.ranks import in_another_process

LAYERS, PRODUCTS = 2, 7
"""Of the model, and the matrix products of a layer: q, k, v, o, gate, up, down."""


class Operations(TorchDispatchMode):
    """Counts matrix products and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if func in activation_checkpointing.PRODUCTS:
            self.counts["products"] += 1
        elif "attention" in name and "backward" not in name:
            self.counts["attention"] += 1
        return func(*args, **(kwargs or {}))


def operations(folder: Path, setting: Checkpointing | None) -> Counter[str]:
    """The operations of a forward and a backward pass.

    In another process: an engine with ZeRO-3 replaces `torch.nn.functional.linear` for as long as its process lives.
    """
    return in_another_process(operations_here, folder, setting)


def operations_here(folder: Path, setting: Checkpointing | None) -> Counter[str]:
    engine = TorchEngine(load_actor(ModelConfig(path=str(folder))), "policy", gradient_checkpointing=setting)
    ids = torch.arange(3, 19, device=engine.device)[None]
    with Operations() as operations:
        engine.model.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    return operations.counts


def test_full_checkpointing_computes_layers_again_and_selective_only_every_second_product(tmp_path: Path) -> None:
    """The last product of a layer is not needed by any gradient, so even full checkpointing leaves it out."""
    folder = tiny.model_folder(tmp_path, layers=LAYERS)
    none, full, selective = (operations(folder, setting) for setting in (False, True, "selective"))
    assert none == {"products": LAYERS * 3 * PRODUCTS, "attention": LAYERS}  # a product has two in the backward pass
    assert full - none == {"products": LAYERS * (PRODUCTS - 1), "attention": LAYERS}
    assert selective - none == {"products": LAYERS * (PRODUCTS // 2)}


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", False), ("cuda", "selective")], ids=["none on a CPU", "selective on a GPU"]
)
def test_the_default_depends_on_the_device(device: str, kind: Checkpointing) -> None:
    assert activation_checkpointing.chosen(None, torch.device(device)) == kind
    for setting in (True, False, "selective"):
        assert activation_checkpointing.chosen(setting, torch.device(device)) == setting  # type: ignore[arg-type]


def test_the_default_on_this_machine_computes_what_it_says(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path)
    there = activation_checkpointing.chosen(None, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert operations(folder, None) == operations(folder, there)
