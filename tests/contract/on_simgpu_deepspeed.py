"""How often DeepSpeed's engine waits for the simulated GPU; test_simulated_gpu.py runs this elsewhere."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.on_simgpu import waits
from tests.contract.test_train_engines import kind_of

FLOAT32, BFLOAT16 = {"dtype": "float32"}, {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("engine", "options", "numbers"),
    [
        ("zero0", FLOAT32, 1),
        ("zero1", FLOAT32, 3),
        ("zero1", BFLOAT16, 4),
        ("zero2", FLOAT32, 3),
        ("zero2", BFLOAT16, 4),
        ("zero3", FLOAT32, 2),
        ("zero3", BFLOAT16, 2),
    ],
)
def test_an_update_waits_for_its_micro_batches_in_stage_3_only(
    engine: str, options: dict[str, Any], numbers: int, policy_folder: Path
) -> None:
    """It reads the norm and what else a step depends on, and all metrics."""
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    built: Any = kind.build(**options)
    assert {parameter.device.type for parameter in built.parameters.values()} == {"simgpu"}
    waits(built, kind.objective, 2)  # the first step makes the optimizer's state
    for micro_batches in (2, 7):
        expected = {("synchronize", "item"): numbers, ("to device", "copy"): 1, ("to host", "copy"): 1}
        if engine == "zero0":
            del expected["to device", "copy"]
        if engine == "zero3":  # DeepSpeed waits for the stream that sums the gradients
            expected["synchronize", "stream"] = micro_batches + 1
        assert waits(built, kind.objective, micro_batches) == expected


def test_making_room_frees_the_device(policy_folder: Path) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    kind = kind_of("zero1", "policy", policy_folder, policy_folder)
    built: Any = kind.build()
    waits(built, kind.objective, 2)
    held, digest = torch.accelerator.memory_allocated() - before, built.digest()
    built.place(model=False, optimizer=False)
    left = torch.accelerator.memory_allocated() - before
    assert left < 0.02 * held, "rotary frequencies and the like"
    assert built.digest() == digest
    built.place(model=True, optimizer=True)
    assert built.digest() == digest
