from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Processes


@pytest.fixture
def processes(prefect_server: str, tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()
