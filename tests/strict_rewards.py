"""Rewards that are stricter than those of `tests/rewards.py`, whose code stored runs depend on."""

from __future__ import annotations

from typing import Any


def distinct_letters(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Rewards the share of the letters a to m, counting each once: a stricter `letters`."""
    return len({letter for letter in solution_str if "a" <= letter <= "m"}) / max(len(solution_str), 1)
