"""Tracks which version of the weights each role of a worker holds."""

from __future__ import annotations

from ratchet.infra.store.records import Weights
from ratchet.infra.workers.role_engines import Engines


class WrongPolicyVersion(Exception):
    """The worker does not hold the weights of a call. The caller should load the newest snapshot and replay."""


class HeldWeights:
    """The version of the weights that each role of a worker holds."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._held: dict[str, Weights] = {}

    def of(self, role: str) -> Weights | None:
        """Returns the version of a role's tensors. None: they have no version, because they are changing or were not
        loaded."""
        if role == "rollout":
            role = self._engines.owner(role)
            if role == "rollout" and self._engines.rollout_is_empty:
                return None
        return self._held.get(role)

    def has(self, role: str, weights: Weights | None) -> bool:
        """True if the role holds these weights."""
        return weights is not None and self.of(role) == weights

    def check(self, role: str, weights: Weights) -> None:
        """Raises `WrongPolicyVersion` if the role holds other weights."""
        if not self.has(role, weights):
            raise WrongPolicyVersion(role)

    def hold(self, role: str, weights: Weights) -> None:
        """Labels the role's tensors with a version."""
        self._held[role] = weights

    def lose(self, role: str) -> None:
        """Forgets the version of the role's tensors, which are about to change."""
        self._held.pop(role, None)
