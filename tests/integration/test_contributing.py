"""The worked examples of CONTRIBUTING.md run as they stand there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from rlhf.rewards import load_reward, score

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def example(heading: str) -> str:
    """The first block of Python under a heading."""
    found = re.search(rf"### {heading}\n.*?```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found[1]


def test_a_reward_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(example("A reward"))
    monkeypatch.syspath_prepend(tmp_path)
    reward = load_reward("my_rewards:compute_score")
    assert score(reward, "any", "x" * 25, "null", "null").score == 0.75
    sys.modules.pop("my_rewards")


def test_an_advantage_estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = (
        "from typing import Literal\n"
        "from rlhf.algorithms.advantages import AdvantageEstimator\n"
        "from rlhf.algorithms.masked import sequence_sum\n\n"
    )
    (tmp_path / "my_advantages.py").write_text(header + example("An advantage estimator"))
    monkeypatch.syspath_prepend(tmp_path)
    import my_advantages  # type: ignore[import-not-found]

    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    advantages, _ = my_advantages.BatchMean()(rewards, torch.ones(2, 2))
    assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    sys.modules.pop("my_advantages")
