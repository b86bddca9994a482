"""The state of a Gymnasium environment as JSON, without pickle: what its attributes and its wrappers' hold.

An environment is brought into a state by a reset with the same seed, after which the attributes that have changed since
then are set. This is only right if the attributes are all of the state, and if each belongs to one place: what JSON
cannot hold, what two attributes share, and what is an object of another class is refused. State outside the attributes
(of a module, of a class, of a program) is not seen.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from random import Random
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
NUMBERS = "biufcSU"
"""The kinds of numpy's types that have values and no objects."""
GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
"""The names of numpy's bit generators."""


class NotStorable(Exception):
    """The environment has a state that JSON cannot hold, or that could not be brought back."""


class _Encoded(NamedTuple):
    """An attribute's value."""

    text: str
    """As JSON."""
    constants: tuple[object, ...]
    """The parts that cannot be stored, and do not change."""

    def is_same(self, other: _Encoded) -> bool:
        pairs = zip(self.constants, other.constants, strict=False)
        return self.text == other.text and all(one is another for one, another in pairs)


class Attributes:
    """The attributes of an environment and its wrappers, and what they were after its reset."""

    def __init__(self, environment: Any) -> None:
        """Takes an environment that has just been reset. Raises NotStorable."""
        self._layers = _layers(environment)
        self._first = self._now()

    @property
    def digest(self) -> str:
        """A digest of the state after the reset."""
        texts = [[name, value.text] for layer in self._first for name, value in sorted(layer.items())]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]

    def changed(self) -> list[dict[str, JSON]]:
        """Returns the attributes that have changed since the reset, of the wrappers from the outermost, and of the
        environment. Raises NotStorable."""
        return [
            self._changed_of(type(layer).__name__, first, now)
            for layer, first, now in zip(self._layers, self._first, self._now(), strict=True)
        ]

    def set(self, changed: Sequence[Mapping[str, JSON]]) -> None:
        """Brings the environment, which has just been reset, into a state that `changed` has returned."""
        for layer, values in zip(self._layers, changed, strict=True):
            vars(layer).update({name: _decoded(value) for name, value in values.items()})

    def _now(self) -> list[dict[str, _Encoded]]:
        encoder = _Encoder(self._layers)
        return [{name: encoder.encoded(value) for name, value in vars(layer).items()} for layer in self._layers]

    def _changed_of(self, layer: str, first: Mapping[str, _Encoded], now: Mapping[str, _Encoded]) -> dict[str, JSON]:
        changed = [name for name, value in now.items() if name not in first or not value.is_same(first[name])]
        lost = [*(first.keys() - now.keys()), *(name for name in changed if now[name].constants)]
        if lost:
            raise NotStorable(f"{layer}.{lost[0]} has changed, and cannot be stored")
        return {name: json.loads(now[name].text) for name in changed}


def _layers(environment: Any) -> list[Any]:
    """Returns the wrappers of an environment, from the outermost, and the environment itself."""
    layers = [environment]
    while layers[-1] is not environment.unwrapped:
        layers.append(layers[-1].env)
    for layer in layers:
        if any(getattr(kind, "__slots__", ()) for kind in type(layer).__mro__) or not hasattr(layer, "__dict__"):
            raise NotStorable(f"{type(layer).__name__} has __slots__")
    return layers


class _Encoder:
    """Writes values as JSON, each object that can change once."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._seen: dict[int, object] = {}
        """The objects that can change, by `id`."""
        self._arrays: list[Any] = []
        self._constants: list[object] = []

    def encoded(self, value: Any) -> _Encoded:
        """Raises NotStorable."""
        self._constants = []
        try:
            text = json.dumps(self._json(value))
        except RecursionError:
            raise NotStorable("a value holds itself") from None
        return _Encoded(text, tuple(self._constants))

    def _json(self, value: Any) -> JSON:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value  # type: ignore[no-any-return]
        if kind is bytes:
            return {"bytes": _base64(value)}
        if kind is tuple:
            return {"tuple": [self._json(item) for item in value]}
        if isinstance(value, np.generic) and value.dtype.kind in NUMBERS:
            return {"number": value.dtype.str, "bytes": _base64(value.tobytes())}
        if self._is_constant(value):
            return self._constant(value)
        if id(value) in self._seen:
            raise NotStorable(f"two attributes share a {kind.__name__}")
        self._seen[id(value)] = value
        if kind is list:
            return [self._json(item) for item in value]
        if kind is dict:
            return {"dict": [[self._json(name), self._json(item)] for name, item in value.items()]}
        if kind is np.ndarray:
            return self._array(value)
        if kind is np.random.Generator and (name := type(value.bit_generator).__name__) in GENERATORS:
            return {"generator": name, "state": self._json(value.bit_generator.state)}
        if kind is Random:
            return {"random": self._json(value.getstate())}
        raise NotStorable(f"a {kind.__module__}.{kind.__qualname__} cannot be stored")

    def _array(self, value: Any) -> JSON:
        if value.dtype.kind not in NUMBERS or not value.flags.c_contiguous:
            raise NotStorable(f"an array of {value.dtype} cannot be stored")
        if any(np.may_share_memory(value, other) for other in self._arrays):
            raise NotStorable("two attributes share an array")
        self._arrays.append(value)
        return {"array": value.dtype.str, "shape": list(value.shape), "bytes": _base64(value.tobytes())}

    def _is_constant(self, value: Any) -> bool:
        """True for what no step changes, and for the environment and its wrappers, which are stored by themselves."""
        from gymnasium import Space
        from gymnasium.envs.registration import EnvSpec

        if isinstance(value, MethodType):
            return any(value.__self__ is layer for layer in self._layers)
        fixed = (type, ModuleType, FunctionType, BuiltinFunctionType, Enum, np.dtype, frozenset, EnvSpec, Space)
        return isinstance(value, fixed) or any(value is layer for layer in self._layers)

    def _constant(self, value: Any) -> JSON:
        from gymnasium import Space

        self._constants.append(value)
        kind: JSON = type(value).__qualname__
        if isinstance(value, FunctionType):  # what it has taken along could change
            return {"constant": kind, "holds": [self._json(cell.cell_contents) for cell in value.__closure__ or ()]}
        if isinstance(value, Space):  # it draws, and holds other spaces
            inner = value.spaces if hasattr(value, "spaces") else ()
            spaces = inner.values() if isinstance(inner, Mapping) else inner
            drawn = value._np_random
            return {
                "constant": kind,
                "draws": None if drawn is None else self._json(drawn.bit_generator.state),
                "holds": [self._json(space) for space in spaces],
            }
        return {"constant": kind}


def _decoded(value: JSON) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    # a value without pickle: each has one of these forms
    found: dict[str, Any] = value
    if "dict" in found:
        return {_decoded(name): _decoded(item) for name, item in found["dict"]}
    if "tuple" in found:
        return tuple(_decoded(item) for item in found["tuple"])
    if "number" in found:
        return np.frombuffer(_bytes(found), np.dtype(found["number"]))[0]
    if "array" in found:
        return np.frombuffer(_bytes(found), np.dtype(found["array"])).reshape(found["shape"]).copy()
    if "generator" in found and found["generator"] in GENERATORS:
        bits = getattr(np.random, found["generator"])()
        bits.state = _decoded(found["state"])
        return np.random.Generator(bits)
    if "random" in found:
        drawing = Random()
        drawing.setstate(_decoded(found["random"]))
        return drawing
    return _bytes(found)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(found: Mapping[str, Any]) -> bytes:
    return base64.b64decode(found["bytes"])
