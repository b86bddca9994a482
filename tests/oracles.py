"""Recorded inputs and outputs of a published implementation (float64); RATCHET_ORACLES names another folder of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

FOLDER = Path(os.environ.get("RATCHET_ORACLES", Path(__file__).parent / "data" / "oracles"))


@dataclass(frozen=True)
class Case:
    id: int
    kind: str
    name: str
    params: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def check(self, found: Mapping[str, Tensor], mask: Tensor | None = None, tolerance: float = 1e-9) -> None:
        """Every recorded output is found again, where `mask` is set."""
        assert found.keys() == self.outputs.keys()
        for name, expected in self.outputs.items():
            shown = torch.ones_like(expected) if mask is None or mask.shape != expected.shape else mask
            torch.testing.assert_close(found[name].detach() * shown, expected * shown, rtol=tolerance, atol=tolerance)

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}-{self.id}"


@cache
def _recorded() -> tuple[Case, ...]:
    arrays = np.load(FOLDER / "rl_math" / "arrays.npz")
    return tuple(
        Case(
            **{key: case[key] for key in ("id", "kind", "name", "params")},
            inputs={name: torch.from_numpy(arrays[f"{case['id']}/in/{name}"]) for name in case["in"]},
            outputs={name: torch.from_numpy(np.asarray(arrays[f"{case['id']}/out/{name}"])) for name in case["out"]},
        )
        for case in json.loads((FOLDER / "rl_math" / "cases.json").read_text())
    )


def cases(kind: str, *names: str) -> list[Any]:
    """Parameters of a test: every recorded case of the kind with one of the names."""
    found = [pytest.param(case, id=str(case)) for case in _recorded() if case.kind == kind and case.name in names]
    assert found, f"no recorded case of {kind} {names}"
    return found
