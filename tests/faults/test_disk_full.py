"""The disk under the store fills up in the middle of a run: it says so, loses nothing, and goes on once it can."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.history import History
from tests.processes import Processes

MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB, mounted in a namespace of its own and reached through the process that lives there."""
    inside = tmp_path / "disk"
    inside.mkdir()
    mount = f"mount -t tmpfs -o size=16m tmpfs {inside} && echo mounted && exec sleep infinity"
    with subprocess.Popen(["unshare", "-rm", "sh", "-c", mount], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "mounted\n":
            pytest.skip("this machine lets nobody mount a small disk (user namespaces are off)")
        yield Path(f"/proc/{process.pid}/root{inside}")
        process.kill()


def test_a_full_disk_loses_nothing(small_disk: Path, workspace: Path, processes: Processes, tmp_path: Path) -> None:
    config = tiny.config(
        workspace,
        run__name="fills",
        run__store=f"file://{small_disk}/runs",
        reward__function="tests.rewards:letters",
        checkpoint={"keep": {"last": 1, "every": None}},
    )
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * (15 * MIB - MIB // 4))
    stopped = processes.train(config)
    assert stopped.wait() == 1, stopped.text
    assert f"the disk that holds file://{small_disk}/runs/fills is full; free some space, and resume" in stopped.text
    then = History.of(config)
    then.check_sound()
    assert len(then.stages) > 0
    assert then.state.iteration < 3
    assert not [path for path in small_disk.rglob(".*") if path.is_file()], "no half-written file takes up room"

    ballast.unlink()
    resumed = processes.train(config)
    assert resumed.wait() == 0, resumed.text
    elsewhere = config.with_values({"run.store": f"file://{tmp_path}/runs"})
    assert processes.train(elsewhere).wait() == 0
    now, expected = History.of(config), History.of(elsewhere)
    now.check_sound()
    assert now.results == expected.results
    assert now.stages == expected.stages
