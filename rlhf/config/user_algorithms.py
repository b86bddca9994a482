"""Losses and advantage estimators of the user's own package, named in the config like the built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, overload

from pydantic import Discriminator, Field, JsonValue, Tag, ValidationError, ValidationInfo, model_validator

from ratchet.rlhf.algorithms import Advantage, PolicyLoss
from ratchet.rlhf.algorithms.advantages import AdvantageEstimator
from ratchet.rlhf.algorithms.base import Algorithm, Options
from ratchet.rlhf.algorithms.policy_losses import PolicyLossBase
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.named import blamed, load_named, raised, source_of

NAMES = "package.module:Class or file.py:Class"


AlgorithmClass = type[Algorithm]


class UserAlgorithm(Options):
    """An algorithm in the user's code. What the config's checks need to know of the class is recorded beside its name,
    so that a stored config can be read without importing it."""

    key: ClassVar[str]
    base: ClassVar[AlgorithmClass]

    type: str = Field(description=NAMES)
    options: dict[str, JsonValue] = Field({}, description="values of the class's fields")
    needs: tuple[str, ...] = Field(description="filled in: the class's `needs`")

    @model_validator(mode="before")
    @classmethod
    def _record_facts(cls, tree: Any, info: ValidationInfo) -> Any:
        if not isinstance(tree, Mapping) or "needs" in tree:
            return tree
        if extra := sorted(tree.keys() - cls.model_fields.keys()):
            raise ValueError(f"{', '.join(extra)}: values of the class's fields belong in {cls.key}.options")
        if info.context is not None:
            raise ValueError("needs is missing from a stored config, which must not import code")
        name = str(tree["type"])
        try:
            algorithm = _load(cls, name, tree.get("options") or {})
            return {**tree, **cls.facts(algorithm)}
        except UserError as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # the user's class may raise anything, also when its fields are read
            raise ValueError(f"{cls.key} {name} {raised(error, _named(cls, name))}") from None

    @classmethod
    def facts(cls, algorithm: Any) -> dict[str, object]:
        """Returns what is recorded of the class."""
        return {"needs": tuple(algorithm.needs)}

    @property
    def source(self) -> str:
        """The source of the module that defines the class."""
        return source_of(_named(type(self), self.type), self.key, self.type)

    def _checked(self, check: Callable[..., None]) -> None:
        algorithm = _load(type(self), self.type, self.options)
        facts = self.facts(algorithm)
        changed = [name for name, value in facts.items() if getattr(self, name) != value]
        if changed:
            raise UserError(
                f"{self.key} {self.type}: {changed[0]} of the class is {facts[changed[0]]}, but the config says "
                f"{getattr(self, changed[0])}: set {self.key} to {self.type} again, in a fork if the run has begun"
            )
        _ = self.source  # an error if there is none
        try:
            check(algorithm, examples=12)
        except UserError as error:
            text = str(error)
            raise UserError(text if text.startswith(self.key) else f"{self.key} {self.type}: {text}") from None
        except Exception as error:  # also if its functions take or return something else than they should
            owner = _named(type(self), self.type)
            raise UserError(f"{self.key} {self.type} {raised(error, owner)}") from error


class UserLoss(UserAlgorithm):
    """A policy loss in the user's code: a subclass of `TokenLoss`, `SequenceLoss` or `SelectingLoss`."""

    key = "algorithm.loss"
    base = PolicyLossBase

    def check(self) -> None:
        """Tries the loss on small random mini-batches; see `check_loss`. Raises UserError."""
        from ratchet.rlhf.algorithms.checks import check_loss  # imports torch

        self._checked(check_loss)


class UserAdvantage(UserAlgorithm):
    """An advantage estimator in the user's code: a subclass of `AdvantageEstimator`."""

    key = "algorithm.advantage"
    base = AdvantageEstimator

    learns_from_reward: bool = Field(True, description="filled in: False if the reward has no effect")
    drop_zero_std_groups: bool = Field(False, description="filled in from the options")

    @classmethod
    def facts(cls, algorithm: Any) -> dict[str, object]:
        names = ("learns_from_reward", "drop_zero_std_groups")
        return super().facts(algorithm) | {name: getattr(algorithm, name) for name in names}

    def check(self) -> None:
        """Tries the estimator on small random batches; see `check_advantage`. Raises UserError."""
        from ratchet.rlhf.algorithms.checks import check_advantage  # imports torch

        self._checked(check_advantage)


def _kind(value: Any) -> str:
    name = str(value.get("type") if isinstance(value, Mapping) else getattr(value, "type", ""))
    return "user" if ":" in name or name.endswith(".py") else "built-in"


AnyPolicyLoss = Annotated[
    Annotated[PolicyLoss, Tag("built-in")] | Annotated[UserLoss, Tag("user")], Discriminator(_kind)
]
AnyAdvantage = Annotated[
    Annotated[Advantage, Tag("built-in")] | Annotated[UserAdvantage, Tag("user")], Discriminator(_kind)
]


@overload
def loaded(algorithm: PolicyLossBase | UserLoss) -> PolicyLossBase: ...
@overload
def loaded(algorithm: AdvantageEstimator | UserAdvantage) -> AdvantageEstimator: ...
def loaded(algorithm: Algorithm | UserAlgorithm) -> Algorithm:
    """Returns the algorithm that a config names. Raises UserError if the user's code does not define it."""
    if not isinstance(algorithm, UserAlgorithm):
        return algorithm
    made: Algorithm = _load(type(algorithm), algorithm.type, algorithm.options)
    return made


def _named(kind: type[UserAlgorithm], name: str) -> AlgorithmClass:
    attributes = ("PolicyLoss", "Loss") if kind is UserLoss else ("AdvantageEstimator", "Advantage")
    found: AlgorithmClass = load_named(name, kind.key, "", attributes, ())
    if not (isinstance(found, type) and issubclass(found, kind.base)):
        raise UserError(f"{kind.key} {name} is no subclass of {kind.base.__module__}.{kind.base.__name__}: derive it")
    return found


def _load(kind: type[UserAlgorithm], name: str, options: Mapping[str, JsonValue]) -> Any:
    """Makes the algorithm; its calls name the line of the user's code that fails."""
    found = _named(kind, name)

    class Guarded(found):  # type: ignore[valid-type,misc]
        def __call__(self, *args: Any, **inputs: Any) -> Any:
            with blamed(kind.key, name, found):
                return super().__call__(*args, **inputs)

    Guarded.__name__ = Guarded.__qualname__ = found.__name__
    try:
        return Guarded.model_validate(options)
    except ValidationError as error:
        problems = [f"{'.'.join((kind.key, 'options', *map(str, p['loc'])))}: {p['msg']}" for p in error.errors()]
        fields = f"; {name} has {', '.join(found.model_fields)}"
        raise UserError("\n".join(problems) + fields) from None
