"""Python runs this in every process that finds its folder on `PYTHONPATH`: see `tests.megatron_on_cpu`."""

from __future__ import annotations

import sys
from typing import Any


class _BeforeMegatron:
    """Lets Megatron compute on the CPU in a process that is about to import its engine."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "ratchet.rlhf.train.megatron_engine":
            sys.meta_path.remove(self)
            from tests import megatron_on_cpu

            megatron_on_cpu.install()


sys.meta_path.insert(0, _BeforeMegatron())
