"""The base class of config sections, and validators that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

T = TypeVar("T")


def _names(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


OneOrMore = Annotated[tuple[T, ...], BeforeValidator(_names)]
"""A list of names; a single name may be written without brackets, and null for none."""
NULL_IS_OFF = BeforeValidator(lambda value: {} if value is None else value)
"""For a section that switches something on: null means its defaults, which leave it off."""


def type_may_be_left_out(default: str) -> BeforeValidator:
    """Accepts `grpo` for {type: grpo}, and options without a type for the default type."""

    def complete(value: Any) -> Any:
        if isinstance(value, str):
            return {"type": value}
        return {"type": default, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(complete)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    operational: ClassVar[frozenset[str]] = frozenset()
    """Keys that may change without changing the result: speed, memory, time limits, addresses."""
    alone: ClassVar[str | None] = None
    """The key that a plain text sets when it is given in place of the section."""

    @model_validator(mode="before")
    @classmethod
    def _value_alone(cls, value: Any) -> Any:
        return {cls.alone: value} if cls.alone is not None and isinstance(value, str) else value
