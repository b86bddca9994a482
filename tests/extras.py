"""The extras of some tests that machines may lack: how to get them, and which of them take gigabytes when they start.

This is the only place that decides whether such a test runs: it looks at what is installed. `RATCHET_REQUIRE=vllm,ceph`
fails the tests that lack one of those, instead of skipping them, so that CI notices a broken installation. (tests/gpu
looks for itself: it also runs where the packages of other tests are missing.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import pytest

from tests import ceph, image, kubernetes, openenv_server, sglang_server, slurm

VERL = Path(__file__).parents[1] / "build" / "verl" / "bin" / "python"
HARNESSES = Path(__file__).parents[1] / "build" / "harness"
MKDOCS = Path(__file__).parents[1] / "build" / "site-environment" / "bin" / "mkdocs"


@dataclass(frozen=True)
class Extra:
    """A dependency of tests in addition to the package itself."""

    is_here: Callable[[], bool]
    get: str
    """Instructions to get it."""
    is_large: bool = False
    """True if it takes gigabytes when it starts: no two such tests run at the same time on one machine."""
    is_extra: bool = True
    """True if `make test` does not install it."""


def _package(name: str) -> Callable[[], bool]:
    return lambda: find_spec(name) is not None


def chromium() -> str | None:
    """Returns the path of a Chromium."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


EXTRAS = {
    "ray": Extra(_package("ray"), "pip install ratchet-rlhf[ray]", is_large=True, is_extra=False),
    "megatron": Extra(_package("megatron"), "pip install ratchet-rlhf[megatron]", is_large=True, is_extra=False),
    "verl": Extra(VERL.exists, "make verl"),
    "vllm": Extra(_package("vllm"), "make vllm", is_large=True),
    "sglang": Extra(sglang_server.PYTHON.exists, "make sglang", is_large=True),
    "ceph": Extra(lambda: ceph.missing() is None, "make ceph"),
    "kubernetes": Extra(kubernetes.is_here, "make kubernetes"),
    "buildah": Extra(image.is_here, "make buildah"),
    "slurm": Extra(slurm.is_here, "make slurm"),
    "site": Extra(MKDOCS.exists, "make site-environment"),
    "harness": Extra((HARNESSES / "installed").exists, "make harness"),
    "chromium": Extra(lambda: chromium() is not None, "make browser"),
    "bubblewrap": Extra(lambda: shutil.which("bwrap") is not None, "make bubblewrap"),
    "openenv": Extra(openenv_server.PYTHON.exists, "make openenv"),
    "verifiers": Extra(_package("verifiers"), "pip install ratchet-rlhf[verifiers]", is_extra=False),
    "gymnasium": Extra(_package("gymnasium"), "pip install ratchet-rlhf[gymnasium]", is_extra=False),
    "reasoning-gym": Extra(_package("reasoning_gym"), "pip install ratchet-rlhf[reasoning-gym]", is_extra=False),
    "trl": Extra(_package("trl"), "pip install trl"),
    "trackio": Extra(_package("trackio"), "pip install ratchet-rlhf[trackio]"),
    "gpu": Extra(_has_gpu, "run it on a machine with a GPU", is_large=True),
}


def needs(*names: str) -> pytest.MarkDecorator:
    """Returns the mark of a test that needs some of `EXTRAS`."""
    assert set(names) <= EXTRAS.keys(), names
    return pytest.mark.needs(*names)


def _needed(item: pytest.Item) -> list[str]:
    return [name for mark in item.iter_markers("needs") for name in mark.args]


def is_extra(item: pytest.Item) -> bool:
    """True if a test needs an extra that `make test` does not install."""
    return any(EXTRAS[name].is_extra for name in _needed(item))


def check(item: pytest.Item) -> None:
    """Skips a test that lacks an extra, or fails it if that is required."""
    if missing := _missing(item):
        reason = ", ".join(f"{name} is not here: `{EXTRAS[name].get}`" for name in missing)
        required = set(filter(None, os.environ.get("RATCHET_REQUIRE", "").split(",")))
        assert required <= EXTRAS.keys(), required
        pytest.fail(reason, pytrace=False) if required & set(missing) else pytest.skip(reason)


def _missing(item: pytest.Item) -> list[str]:
    return [name for name in _needed(item) if not EXTRAS[name].is_here()]


def is_large(item: pytest.Item | None) -> bool:
    """True if a test runs and takes gigabytes: it starts Ray, vLLM, Megatron or the like."""
    return item is not None and any(EXTRAS[name].is_large for name in _needed(item)) and not _missing(item)


class LargeTests:
    """Lets one process at a time run large tests, across checkouts and workers of pytest-xdist."""

    def __init__(self) -> None:
        self._lock: IO[str] | None = None

    def begin(self, item: pytest.Item) -> None:
        """Waits for the turn of this process, before a large test."""
        if is_large(item) and self._lock is None:
            self._lock = (Path(tempfile.gettempdir()) / f"ratchet-large-tests-{os.getuid()}").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def end(self, next_item: pytest.Item | None) -> None:
        """Ends the turn unless the next test is large, too: until then fixtures may keep what they have started."""
        if self._lock is not None and not is_large(next_item):
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may hold the file open
            self._lock.close()
            self._lock = None
