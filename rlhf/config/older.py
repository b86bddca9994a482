"""Keys that an older release stored under other names: a stored config is brought up to date before it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GONE = {
    "algorithm.kl.estimator": "it is two keys now: algorithm.kl.loss_estimator for the KL in the loss, and "
    "algorithm.kl.reward_estimator, always k1, for the KL in the reward",
}
"""Keys that were taken away, and what to write instead."""


def as_of_today(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config in today's keys; a config of today as it is."""
    algorithm = tree.get("algorithm")
    kl = algorithm.get("kl") if isinstance(algorithm, Mapping) else None
    if not isinstance(algorithm, Mapping) or not isinstance(kl, Mapping) or "estimator" not in kl:
        return dict(tree)
    now = {key: value for key, value in kl.items() if key != "estimator"}
    if now.get("in_loss") is not None:
        now["loss_estimator"] = kl["estimator"]
    return {**tree, "algorithm": {**algorithm, "kl": now}}
