"""A reward that answers when a test lets it. It is not in tests/rewards.py, whose digest tests/data/stored holds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.rewards import letters


def held_letters(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Answers once the file `HOLD` is gone; rewards are tried on the ground truth."""
    while solution_str != ground_truth and Path(os.environ["HOLD"]).exists():
        time.sleep(0.05)
    return letters(data_source, solution_str, ground_truth)
