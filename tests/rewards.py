"""Rewards for tests: deterministic, and different from response to response, so that gradients are not zero."""

from __future__ import annotations

import time
from typing import Any


def letters(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of the letters a to m."""
    return sum("a" <= letter <= "m" for letter in solution_str) / max(len(solution_str), 1)


def slow_letters(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward that takes its time."""
    time.sleep(0.3)
    return letters(data_source, solution_str, ground_truth)


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of digits: another reward."""
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)


def not_a_number(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float("nan")


def mostly_flat(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 for the quarter of the responses that begin with one of these characters: many groups do not differ."""
    return float(solution_str[:1] in set("abcdefghijklmnopqrs"))
