"""Config keys of older releases: stored configs are converted to today's keys before they are validated."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ratchet.rlhf.config.rollouts import generates_stale, generates_with_other_rounding

RENAMED = {
    "actor.by_turns": "actor.offload_when_idle",
    "critic.by_turns": "critic.offload_when_idle",
    "actor.betas": "actor.optimizer.betas",
    "actor.weight_decay": "actor.optimizer.weight_decay",
    "critic.betas": "critic.optimizer.betas",
    "critic.weight_decay": "critic.optimizer.weight_decay",
    "algorithm.advantage.drop_flat_groups": "algorithm.advantage.drop_zero_std_groups",
}
"""Renamed keys, old to new. The old names still work in files and overrides."""


NEEDLESS = {
    "rollout.partial_tokens": "new weights interrupt a generation when they arrive",
}
"""Keys that have no effect any more, and why. They are still accepted."""


class RenamedKey(FutureWarning):
    """A config uses the old name of a key, or a key that has no effect any more."""


GONE = {
    "algorithm.kl.estimator": "it is two keys now: algorithm.kl.loss_estimator for the KL in the loss, and "
    "algorithm.kl.reward_estimator, always k1, for the KL in the reward",
}
"""Removed keys, and what to write instead."""


def changed_since(tree: Mapping[str, Any]) -> list[str]:
    """Describe settings of a stored config that this release treats differently, one line each."""
    kl = _kl(tree)
    estimator = kl.get("estimator", "k1")
    if kl.get("in_reward") is None or estimator.removesuffix("+") == "k1":
        return []
    return [f"the KL in the reward {estimator} -> k1, the only estimator with the right gradient"]


def as_of_today(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a stored config to today's keys; a config of this release is returned unchanged."""
    tree, _ = _renamed(tree)
    environment = (tree.get("rollout") or {}).get("environment")
    if isinstance(environment, dict) and "name" in environment:
        environment.setdefault("on_error", "fail")  # what a failure did before there was a choice
    if isinstance(reward := tree.get("reward"), dict):
        reward.setdefault("max_error_share", 1.0)  # any number could fail
    algorithm = tree.get("algorithm")
    is_left_out = isinstance(algorithm, dict) and algorithm.get("rollout_correction") is None
    if is_left_out and not generates_stale(tree) and generates_with_other_rounding(tree):
        tree["algorithm"]["rollout_correction"] = {}  # it was off by default
    kl = dict(_kl(tree))
    if "estimator" not in kl:
        return tree
    estimator = kl.pop("estimator")
    if kl.get("in_loss") is not None:
        kl["loss_estimator"] = estimator
    return {**tree, "algorithm": {**tree["algorithm"], "kl": kl}}


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config to today's keys, with a `RenamedKey` warning that gives the new name of each old key.

    Raises:
        ValueError: a key has both its old and its new name.
    """
    tree, old_names = _renamed(tree)
    for old in old_names:
        if old in NEEDLESS:
            warnings.warn(f"{old} has no effect any more: {NEEDLESS[old]}", RenamedKey, stacklevel=2)
        else:
            warnings.warn(f"{old} is called {RENAMED[old]} now: the old name still works", RenamedKey, stacklevel=2)
    return tree


def _renamed(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The tree with today's names, and the old names that it had."""
    today = deepcopy(dict(tree))
    old_names: list[str] = []
    for gone in NEEDLESS:
        holder, _, name = gone.partition(".")
        holding = today.get(holder)
        if isinstance(holding, dict) and holding.pop(name, None) is not None:
            old_names.append(gone)
    for old, new in RENAMED.items():
        section: Any = today
        *parents, old_name = old.split(".")
        for part in parents:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and old_name in section:
            value = section.pop(old_name)
            *new_parents, new_name = new.removeprefix(".".join(parents) + ".").split(".")
            for part in new_parents:
                inner = section.get(part)
                section[part] = inner if isinstance(inner, dict) else {} if inner is None else {"type": inner}
                section = section[part]
            if new_name in section:
                raise ValueError(f"{old} and {new} are both set: {old} is the old name, remove it")
            section[new_name] = value
            old_names.append(old)
    return today, old_names


def _kl(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `algorithm.kl`; empty if the tree is not the config of a run."""
    kl = (tree.get("algorithm") or {}).get("kl")
    return kl if isinstance(kl, Mapping) else {}
