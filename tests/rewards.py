"""Rewards for tests: deterministic, and different from response to response, so that gradients are not zero."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any


def letters(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Rewards the share of the letters a to m, or the environment's number."""
    if "REWARD_OF_LETTERS" in os.environ:
        return float(os.environ["REWARD_OF_LETTERS"])
    return sum("a" <= letter <= "m" for letter in solution_str) / max(len(solution_str), 1)


def slow_letters(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Rewards like `letters`, slowly."""
    time.sleep(0.3)
    return letters(data_source, solution_str, ground_truth)


def falling(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Rewards the same for all answers of a moment, and less from moment to moment."""
    return -(time.time() // 1e-3)


def same(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Rewards all answers alike."""
    return 0.5


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Rewards the share of digits."""
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)


def not_a_number(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Returns NaN, except for the ground truth itself, on which rewards are tried."""
    return 0.0 if solution_str == ground_truth else float("nan")


def mostly_flat(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 for the quarter of the responses that begin with one of these characters: many groups do not differ."""
    return float(solution_str[:1] in set("abcdefghijklmnopqrs"))


def hostile(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Does what its response says."""
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "sleep":
        time.sleep(3600)
    if solution_str == "nap":
        time.sleep(0.1)
    if solution_str == "die":
        os._exit(7)
    if solution_str == "fork":
        if os.fork() == 0:
            time.sleep(3600)
        return 1.0
    if solution_str == "fork and return":
        return 1.0 if os.fork() else 0.5
    if solution_str == "daemon":
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    if solution_str == "fork and sleep":
        os.fork()
        time.sleep(3600)
    if solution_str == "print":
        print("the pipe is not the standard output")
    return {"nan": float("nan"), "text": "high"}.get(solution_str, 1.0)  # type: ignore[return-value]


def fails_on_some(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Raises for responses that begin with a small letter up to m, and never ends for digits."""
    if "a" <= solution_str[:1] <= "m":
        raise ValueError("not this one")
    if solution_str[:1] in set("01"):
        time.sleep(3600)
    return letters(data_source, solution_str, ground_truth)


def fails_on_a_third(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Raises by prompt and response together, but never on the ground truth itself."""
    if solution_str != ground_truth and sum(map(ord, solution_str + ground_truth)) % 3 == 0:
        raise ValueError("not this one")
    return letters(data_source, solution_str, ground_truth)
