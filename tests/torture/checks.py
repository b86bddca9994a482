"""Checks the invariants of a run after faults."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Finalize, ShardCommit, StageCommit
from tests.environments import check_books
from tests.history import History
from tests.torture.kinds import Kind

TEMPORARY_FILES = 16
"""Largest number that a killed process leaves: its trial of the store, and the files that its threads were writing."""


@dataclass
class Result:
    """The contents that two runs of a kind share."""

    bits: dict[str, Any]
    rows: list[int]


def history_of(url: str, folder: Path) -> History:
    """Returns the history of a run anywhere; one on S3 is copied first."""
    if url.startswith("file://"):
        return History.at(Path(url.removeprefix("file://")))
    objects, copy = ObjectStore(url), folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    for key in objects.list(""):
        path = copy / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(objects.get(key))
    return History.at(copy)


def result_of(kind: Kind, url: str, folder: Path) -> Result:
    history = history_of(url, folder)
    history.check_sound(killed=True)
    rows = [] if kind.is_fit else [len(history.run.trajectories([k])) for k in range(history.state.iteration)]
    return Result(history.results, rows)


def check(kind: Kind, url: str, folder: Path, expected: Result, *, drivers: int, is_damaged: bool) -> None:
    """Asserts that weights, rows, chain and files are those of a run that was left alone.

    Args:
        drivers: number of processes that may have driven the run.
        is_damaged: an object was lost or changed.
    """
    result = result_of(kind, url, folder)
    check_books(folder / "books", drivers=drivers, is_damaged=is_damaged)
    assert len(result.rows) == len(expected.rows), f"{len(result.rows)} iterations, not {len(expected.rows)}"
    if kind.is_exact:
        assert result.rows == expected.rows, "other rows"
        for what, value in expected.bits.items():
            if what == "rows" and not kind.has_exact_rows:
                continue
            assert result.bits[what] == value, f"other {what} than the run that was left alone"


def named(history: History) -> set[str]:
    """Returns the keys of all objects that the records name, and of those that these name in turn."""
    keys: set[str] = set()
    for commit in history.commits(StageCommit):
        manifest = json.loads((history.folder / commit.manifest.key).read_text())
        keys |= {commit.manifest.key, *(shard["key"] for shard in manifest["shards"])}
    keys |= {shard.data.key for shard in history.commits(ShardCommit)}
    for close in history.commits(Finalize):
        keys |= {close.index.key, close.metrics.key}
    for roles in history.state.snapshots.values():
        for ref in roles.values():
            checkpoint = json.loads((history.folder / ref.key).read_text())
            keys |= {ref.key, *(file["key"] for file in checkpoint["files"].values())}
    return keys


def check_files(url: str, folder: Path, killed: int) -> None:
    """Asserts that after a vacuum the run has exactly the files that the log names, and few of `killed` processes."""
    history = history_of(url, folder)
    history.check_sound(killed=False)
    beside = ("log/", "forks/", ".writing/")
    files = {path.relative_to(history.folder).as_posix() for path in history.folder.rglob("*") if path.is_file()}
    there = {key for key in files if not key.startswith(beside)} - {"run.json", "report.html"}
    assert there == named(history), f"left over or gone: {sorted(there ^ named(history))[:5]}"
    hidden = [key for key in files if key.startswith(".writing/")]
    assert len(hidden) <= killed * TEMPORARY_FILES, f"temporary files pile up: {hidden[:5]}"


def leftovers(folder: Path) -> list[psutil.Process]:
    """Returns processes that were started there and still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
