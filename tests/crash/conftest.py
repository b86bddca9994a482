from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.prefect_server import locked
from tests.processes import Processes

EVERY = (1, 3)
ITERATIONS = 3


def crash_config(workspace: Path, store: Path, every: int = 1) -> RunConfig:
    return tiny.config(
        workspace,
        run__store=f"file://{store}",
        reward__function="tests.rewards:letters",
        train__iterations=ITERATIONS,
        checkpoint={"every": every, "keep": {"last": 1, "every": None}},
    )


@pytest.fixture
def config(workspace: Path, tmp_path: Path) -> RunConfig:
    return crash_config(workspace, tmp_path / "runs")


@pytest.fixture
def config_file(config: RunConfig, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


class Uninterrupted(dict[int, History]):
    """The histories of runs with a snapshot after `every` iterations, each of which is made when a test asks for it."""

    def __init__(self, folder: Path, workspace: Path) -> None:
        self.folder, self.workspace = folder, workspace

    def __missing__(self, every: int) -> History:
        config = crash_config(self.workspace, self.folder / str(every), every)
        with locked(self.folder):
            if not (self.folder / f"{every}.done").exists():
                (self.folder / str(every)).mkdir()
                child = Processes(self.folder / str(every)).train(config)
                assert child.wait() == 0, child.text
                (self.folder / f"{every}.done").touch()
        self[every] = history = History.of(config)
        history.check_sound()
        for role in ("actor", "critic"):
            assert history.state.weights[role].version == ITERATIONS
            assert history.state.weights[role].digest != history.state.initial[role].digest
        return history


@pytest.fixture(scope="session")
def uninterrupted(common: Path, workspace: Path, prefect_server: str) -> dict[int, History]:
    """The histories of the runs that tests kill, left alone."""
    folder = common / "uninterrupted"
    folder.mkdir(exist_ok=True)
    return Uninterrupted(folder, workspace)
