"""Drivers that tests start in processes of their own; see `tests.processes`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Without the Prefect server of other tests."""
    started = Processes(tmp_path)
    yield started
    started.close()


def say_server() -> None:
    from prefect.settings import get_current_settings

    print("server", get_current_settings().api.url)


def test_a_driver_has_the_prefect_server_that_was_set_after_the_fork_server_began(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary server for each driver would take longer than its run."""
    for number in range(2):
        url = f"http://127.0.0.1:9/api/{number}"
        monkeypatch.setenv("PREFECT_API_URL", url)
        child = processes.cli("--help", setup=say_server)
        assert child.wait() == 0
        assert f"server {url}\n" in child.text
