"""Calls the user's callbacks after iterations and validations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ratchet.infra.execution.preflight.mistakes import check_all
from ratchet.infra.progress import note
from ratchet.infra.runs.run import Run
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.metrics import VALIDATION
from ratchet.rlhf.named import load_named, raised
from ratchet.tasks.pipeline import all_stages

KEY = "run.callbacks"


class Callback:
    """Base class of callbacks. `run.callbacks` names subclasses, of which each driver makes one object.

    What a callback is called for is committed. A driver that dies in a callback does not call it again.
    """

    def on_iteration(self, run: Run, iteration: int, metrics: Mapping[str, float]) -> None:
        """Called when an iteration is closed.

        Args:
            run: the run, to read.
            iteration: the number of the iteration, from 0.
            metrics: the iteration's metrics, by name.
        """

    def on_validation(self, run: Run, iteration: int, metrics: Mapping[str, float]) -> None:
        """Called when a validation is committed, just before `on_iteration` of the same iteration.

        Args:
            run: the run, to read.
            iteration: the iteration before which the weights were validated.
            metrics: the validation's metrics, by name.
        """


class Callbacks:
    """The callbacks of a run."""

    def __init__(self, config: RunConfig, *others: Callback) -> None:
        """Makes the callbacks that a config names, which follow `others`. Raises UserError if one cannot be made."""
        self._callbacks = {type(other).__name__: other for other in others}
        self._callbacks |= {name: _made(name) for name in config.run.callbacks}
        self._fails = config.run.on_callback_error == "fail"

    def on_iteration(self, run: Run, iteration: int, metrics: Mapping[str, float]) -> None:
        """Calls `on_validation` of all callbacks if the iteration validated, then `on_iteration` of all."""
        if validation := {name: value for name, value in metrics.items() if name.startswith(VALIDATION)}:
            self.on_validation(run, iteration, validation)
        for name, callback in self._callbacks.items():
            self._call(name, callback.on_iteration, run, iteration, metrics)

    def on_validation(self, run: Run, iteration: int, metrics: Mapping[str, float]) -> None:
        """Calls `on_validation` of all callbacks."""
        for name, callback in self._callbacks.items():
            self._call(name, callback.on_validation, run, iteration, metrics)

    def _call(
        self,
        name: str,
        call: Callable[[Run, int, Mapping[str, float]], None],
        run: Run,
        iteration: int,
        metrics: Mapping[str, float],
    ) -> None:
        try:
            call(run, iteration, dict(metrics))
        except Exception as error:  # a user's code may raise anything
            message = f"{KEY} {name} {raised(error, call)}, after iteration {iteration}"
            if self._fails:
                raise UserError(message) from error
            note(message)


def check_named(config: RunConfig) -> None:
    """Imports the stages and callbacks that a config names. Raises one UserError for all mistakes."""
    check_all(partial(all_stages, config), partial(Callbacks, config))


def _made(name: str) -> Callback:
    kind = load_named(name, KEY, "", ("Callback",), ())
    if not (isinstance(kind, type) and issubclass(kind, Callback)):
        raise UserError(f"{KEY} {name} is no subclass of ratchet.Callback: derive it")
    if unknown := [event for event in dir(kind) if event.startswith("on_") and not hasattr(Callback, event)]:
        raise UserError(f"{KEY} {name} has {unknown[0]}, which is never called: define on_iteration or on_validation")
    try:
        return kind()
    except Exception as error:
        raise UserError(f"{KEY} {name} cannot be made without arguments: {type(error).__name__}: {error}") from None
