"""`trainer.logger=[console,ratchet]`: writes what verl computes, while it trains.

verl loads this module by itself (the entry point ``verl.plugins``, verl 0.9 or later), or by
``VERL_USE_EXTERNAL_MODULES=ratchet.infra.observe.verl_plugin``. Metrics come from verl's tracking. Generations are
those that verl dumps: set `trainer.rollout_data_dir`, and `trainer.validation_data_dir`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from verl.utils.tracking import Tracking

NAME = "ratchet"


def _register() -> None:
    if NAME in Tracking.supported_backend:
        return
    Tracking.supported_backend.append(NAME)
    original, finish = Tracking.__init__, Tracking.finish

    @wraps(original)
    def init(
        self: Any,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        original(self, project_name, experiment_name, default_backend, config)
        if NAME in ([default_backend] if isinstance(default_backend, str) else default_backend):
            from ratchet.infra.observe.verl import VerlLogger  # on use: every process of verl loads this module

            self.logger[NAME] = VerlLogger(experiment_name, config)

    @wraps(finish)
    def finished(self: Any, *args: Any, **kwargs: Any) -> None:
        if (logger := self.logger.pop(NAME, None)) is not None:
            logger.finish()
        finish(self, *args, **kwargs)

    Tracking.__init__, Tracking.finish = init, finished


_register()
