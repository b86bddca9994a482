"""Keys that an older release stored under other names: a stored config is brought up to date before it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GONE = {
    "algorithm.kl.estimator": "it is two keys now: algorithm.kl.loss_estimator for the KL in the loss, and "
    "algorithm.kl.reward_estimator, always k1, for the KL in the reward",
}
"""Keys that were taken away, and what to write instead."""


def changed_since(tree: Mapping[str, Any]) -> list[str]:
    """What a stored config asked for that this release does otherwise, as a person reads it."""
    kl = _kl(tree)
    estimator = kl.get("estimator", "k1")
    if kl.get("in_reward") is None or estimator.removesuffix("+") == "k1":
        return []
    return [f"the KL in the reward {estimator} -> k1, which alone has the right gradient"]


def as_of_today(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config in today's keys; a config of today as it is."""
    kl = dict(_kl(tree))
    if "estimator" not in kl:
        return dict(tree)
    estimator = kl.pop("estimator")
    if kl.get("in_loss") is not None:
        kl["loss_estimator"] = estimator
    return {**tree, "algorithm": {**tree["algorithm"], "kl": kl}}


def _kl(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `algorithm.kl`; empty where the tree is no run's config."""
    kl = (tree.get("algorithm") or {}).get("kl")
    return kl if isinstance(kl, Mapping) else {}
