"""Sandboxes: what goes in comes out, and what runs inside reaches nothing else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ratchet.rlhf.sandboxes.processes import Bubblewrap, Limited
from ratchet.rlhf.sandboxes.sandbox import Limits, Sandbox, SandboxFailed
from tests.extras import needs

LIMITS = Limits(memory_mb=512, file_bytes=1 << 20)
KINDS = [Limited, pytest.param(Bubblewrap, marks=needs("bubblewrap"))]


@pytest.fixture(params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    made: Sandbox = request.param(["/app", "/logs"], LIMITS, {"COLOR": "red"})
    made.start({"/app/given.txt": b"given"})
    yield made
    made.stop()


@pytest.fixture
def wrapped() -> Iterator[Bubblewrap]:
    made = Bubblewrap(["/app", "/tmp"], LIMITS)
    made.start({})
    yield made
    made.stop()


def sh(sandbox: Sandbox, command: str, seconds: float = 60.0, **env: str) -> str:
    done = sandbox.exec(["sh", "-c", command], seconds=seconds, env=env)
    return f"{done.output.decode()}{'' if done.code == 0 else f'[{done.code}]'}"


def test_commands_read_what_they_are_given(sandbox: Sandbox) -> None:
    assert sh(sandbox, "cat given.txt; echo $COLOR $SIZE; exit 3", SIZE="large") == "givenred large\n[3]"
    done = sandbox.exec(["sh", "-c", "cat; echo no >&2"], b"\0in", seconds=60)
    assert (done.code, done.output, done.errors) == (0, b"\0in", b"no\n")


def test_files_go_in_and_out(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "run.sh").write_text("echo ran")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "inner" / "b").write_text("b")
    sandbox.upload(tmp_path, "/app/here")
    sandbox.upload(tmp_path / "inner" / "b", "/logs/c")
    assert sh(sandbox, "here/run.sh; cat here/inner/b ../logs/c") == "ran\nbb"
    assert sandbox.download("/logs/c") == b"b"
    assert sandbox.download("/logs/d") is None
    with pytest.raises(SandboxFailed, match=r"mkdir .* failed in the sandbox: .*exists"):
        sandbox.upload(tmp_path, "/app/given.txt")


def test_a_snapshot_has_all_files_and_a_restored_sandbox_nothing_else(sandbox: Sandbox) -> None:
    sh(sandbox, "mkdir d; echo 1 > d/f; chmod 000 d/f d; ln -s /etc/hostname link; mkfifo pipe; echo log > ../logs/l")
    state = sandbox.snapshot()
    sh(sandbox, "rm -rf given.txt link pipe; echo 2 > more; echo more >> ../logs/l")
    sandbox.restore(state)
    assert sh(sandbox, "ls; cat d/f ../logs/l; readlink link; test -p pipe && echo pipe").split() == (
        ["d", "given.txt", "link", "pipe", "1", "log", "/etc/hostname", "pipe"]
    )
    sandbox.stop()
    with pytest.raises(SandboxFailed, match="is not started"):
        sh(sandbox, "true")


def test_time_memory_and_files_have_limits(sandbox: Sandbox) -> None:
    assert sandbox.exec(["sleep", "3600"], seconds=0.1).code is None
    spinning = sandbox.exec(["sh", "-c", "while :; do :; done"], seconds=1)
    assert spinning.code is None or spinning.code < 0 or spinning.code > 128, "one of the two limits"
    assert sandbox.exec(["dd", "if=/dev/zero", "of=/dev/null", "bs=1G", "count=1"], seconds=60).code != 0
    assert sandbox.exec(["sh", "-c", "head -c 2000000 /dev/zero > large"], seconds=60).code != 0
    assert len(sandbox.download("/app/large") or b"") <= 1 << 20


@needs("bubblewrap")
def test_nothing_runs_between_commands(wrapped: Bubblewrap) -> None:
    assert sh(wrapped, "sleep 86397 & echo started") == "started\n"
    assert sh(wrapped, "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; done; true").count("86397;") <= 1
    assert not [p for p in psutil.process_iter() if _command(p) == ["sleep", "86397"]]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@needs("bubblewrap")
def test_only_its_folders_can_be_changed(wrapped: Bubblewrap, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("42")
    server = socket.create_server(("127.0.0.1", 0))
    for attempt in (
        f"cat {tmp_path / 'secret'}",
        "touch /x",
        "touch /usr/x",
        "touch /etc/passwd",
        f"kill -0 {os.getpid()}",
        f"bash -c 'echo > /dev/tcp/127.0.0.1/{server.getsockname()[1]}'",
    ):
        assert sh(wrapped, f"({attempt}) 2> /dev/null || echo nothing") == "nothing\n", attempt
    server.close()
    assert sh(wrapped, "id -u; whoami; echo x > /app/x; echo y > /tmp/y") == "0\nroot\n"


@needs("bubblewrap")
def test_a_link_inside_leads_to_no_file_outside(wrapped: Bubblewrap, tmp_path: Path) -> None:
    outside, source = tmp_path / "outside", tmp_path / "source"
    outside.mkdir()
    source.write_text("new")
    (outside / "kept").write_text("old")
    sh(wrapped, f"ln -s {outside} folder; ln -s {outside}/kept file")
    with pytest.raises(SandboxFailed):
        wrapped.upload(source, "/app/folder/kept")
    wrapped.upload(source, "/app/file")
    assert wrapped.download("/app/folder/kept") is None
    wrapped.restore(wrapped.snapshot())
    assert (outside / "kept").read_text() == "old"
    assert [path.name for path in outside.iterdir()] == ["kept"]


def test_nothing_remains(sandbox: Sandbox) -> None:
    assert isinstance(sandbox, Limited)
    root = sandbox.root
    sh(sandbox, "mkdir -p a/b; touch a/b/c; chmod 000 a")
    sandbox.stop()
    assert not root.exists()
    sandbox.stop()
