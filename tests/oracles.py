"""Recorded inputs and outputs of a published implementation (float64); RATCHET_ORACLES names another folder of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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

    def check(self, found: Mapping[str, Tensor]) -> None:
        """Asserts that the outputs equal the recorded ones, except for masked tokens."""
        mask = self.inputs.get("response_mask")
        for name, expected in self.outputs.items():
            actual = found[name].detach()
            if mask is not None and mask.shape == expected.shape and name != "response_mask":
                actual, expected = actual[mask > 0], expected[mask > 0]
            tolerance = 1e-5 if self.name == "gdpo" else 1e-9  # the published gdpo computes in float32
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}-{self.id}"


def _recorded() -> tuple[Case, ...]:
    """Returns the cases of every `cases.json` in the folder, with the arrays next to it."""
    found = []
    for listing in sorted(FOLDER.rglob("cases.json")):
        arrays = np.load(listing.parent / "arrays.npz")
        for case in json.loads(listing.read_text()):
            inputs, outputs = (
                {name: torch.from_numpy(np.asarray(arrays[f"{case['id']}/{side}/{name}"])) for name in case[side]}
                for side in ("in", "out")
            )
            found.append(Case(case["id"], case["kind"], case["name"], case["params"], inputs, outputs))
    assert found, f"no recorded cases in {FOLDER}"
    return tuple(found)


RECORDED = _recorded()
