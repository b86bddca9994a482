"""Lists the roles of a run: its models and the rollout, and what each does. Everything that asks about a role reads its
row of `ROLES`; only what is special to the rollout is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ratchet.rlhf.config.run import RunConfig
    from ratchet.rlhf.config.sections import ModelConfig, OneTeacher, TrainerConfig

PlacedRole = Literal["actor", "critic", "reference", "teacher", "reward", "rollout"]
"""Roles for which `placement` may name a pool."""


def _always(config: RunConfig) -> bool:
    return True


def _never(config: RunConfig) -> bool:
    return False


def _teachers(config: RunConfig) -> dict[str, OneTeacher]:
    return {} if config.teacher is None else config.teacher.by_key


@dataclass(frozen=True, kw_only=True)
class Role:
    """A role of a run."""

    exists: Callable[[RunConfig], bool] = _always
    """True if runs with this config have the role."""
    model_key: str = "model"
    """Key of the config that gives the role a model of its own."""
    own_model: Callable[[RunConfig], ModelConfig | None]
    """The value at `model_key`, whether or not the role exists. None: the role begins as `default_model`."""
    default_model: Callable[[RunConfig], ModelConfig] = lambda config: config.model
    several: Callable[[RunConfig], Mapping[str, ModelConfig]] | None = None
    """The role's models by key of the config, if it may have several, or one that servers compute; `own_model` is then
    the first of them."""
    head: Literal["policy", "value", "reward"] | None = "policy"
    """Output of the model; None: the role has no model, but generates with the actor's weights."""
    section: str = "actor"
    """Section of the config with the engine that computes the role, and with the optimizer if it learns."""
    learns: bool = False
    """True if an optimizer updates it."""
    follow_key: str | None = None
    """Key of the config that makes the role's weights move toward the actor's; null leaves them as they are."""
    computes: bool = True
    """False if its weights are only kept."""
    shares_actor: Callable[[RunConfig], bool] = _never
    """True if the role computes with the actor's tensors where it is in the same process."""
    placed_with: str | None = None
    """The role whose processes hold it; None: `placement` says where it is."""
    card: str = ""
    """What a model card calls the role."""
    exported: bool = False
    """True if `ratchet export` offers it."""

    @property
    def has_versions(self) -> bool:
        """True if the log records the weights of the role."""
        return self.head in ("policy", "value")

    def trainer(self, config: RunConfig) -> TrainerConfig | None:
        """The section `section`; None if the config leaves it out."""
        trainer: TrainerConfig | None = getattr(config, self.section)
        return trainer

    def follows(self, config: RunConfig) -> bool:
        """True if the role's weights move toward the actor's."""
        return self.follow_key is not None and reduce(getattr, self.follow_key.split("."), config) is not None


ROLES: dict[str, Role] = {
    "actor": Role(own_model=lambda config: config.model, learns=True, card="policy", exported=True),
    "critic": Role(
        exists=lambda config: config.needs_critic,
        model_key="critic.model",
        own_model=lambda config: None if config.critic is None else config.critic.model,
        head="value",
        section="critic",
        learns=True,
        card="value model",
        exported=True,
    ),
    "reference": Role(
        exists=lambda config: config.needs_reference,
        model_key="reference.model",
        own_model=lambda config: config.reference.model,
        # new adapters change nothing, so a reference without them is the same policy
        default_model=lambda config: config.model.model_copy(update={"lora": None}),
        follow_key="reference.sync_every",
        shares_actor=lambda config: config.model.lora is not None and config.reference.model is None,
        card="reference",
    ),
    "teacher": Role(
        exists=lambda config: config.teacher is not None and config.algorithm.distillation is not None,
        model_key="teacher",
        own_model=lambda config: next(iter(_teachers(config).values()), None),
        several=lambda config: _teachers(config),
    ),
    "ema": Role(
        exists=lambda config: config.train.updates and config.actor.ema_decay is not None,
        own_model=lambda config: config.model,
        follow_key="actor.ema_decay",
        computes=False,
        placed_with="actor",
        card="moving average of the policy",
        exported=True,
    ),
    "reward": Role(
        exists=lambda config: config.reward.model is not None,
        model_key="reward.model",
        own_model=lambda config: config.reward.model,
        head="reward",
    ),
    "rollout": Role(
        own_model=lambda config: config.model,
        head=None,
        shares_actor=lambda config: not config.rollout.engine.own_process and config.actor.engine.whole_model,
    ),
}
"""The rows, in the order in which people read them."""
EXPORTED = tuple(name for name, role in ROLES.items() if role.exported)


def is_critic(role: str) -> bool:
    """True if the role's model has a value head."""
    return ROLES[role].head == "value"


def weights_of(role: str) -> str:
    """The role whose weights a role has: the rollout generates with the actor's, in the same tensors or in a copy."""
    return "actor" if ROLES[role].head is None else role
