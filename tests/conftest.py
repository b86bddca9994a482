"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.prefect_server import locked, shared_server

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of this session, the same for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "common"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def prefect_server(common: Path) -> Iterator[str]:
    """The API's URL of a real Prefect server; child processes are pointed at it."""
    with shared_server(common / "prefect") as url:
        os.environ["PREFECT_API_URL"] = url
        os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = "false"
        os.environ["PREFECT_LOGGING_LEVEL"] = "CRITICAL"
        yield url
        del os.environ["PREFECT_API_URL"]


@pytest.fixture(scope="session")
def workspace(common: Path) -> Path:
    """A tiny model and its prompts, as `tiny.config` wants them."""
    folder = common / "workspace"
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if not (folder / "done").exists():
            tiny.workspace(folder)
            tiny.prompt_file(folder / "held_out.parquet", prompts=3)
            (folder / "done").touch()
    return folder
