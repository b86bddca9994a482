"""What every store promises, whatever it is made of; and that a store which does not is refused."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.endpoint import AioEndpoint
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st
from s3fs import S3FileSystem

from ratchet.infra.runs.run import check_store
from ratchet.infra.store.object_store import FsspecBackend, LocalBackend, ObjectStore, StoreUnavailable
from ratchet.infra.store.records import Claim
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.extras import needs
from tests.faulty_store import Clock, Memory

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["file", "memory", "s3", pytest.param("on_ceph", marks=needs("ceph"))])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/runs/test"
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"{request.getfixturevalue(request.param)}/{uuid.uuid4().hex}"


def test_one_of_many_creates_wins(url: str) -> None:
    together = threading.Barrier(8)

    def create(writer: int) -> bool:
        objects = ObjectStore(url)
        together.wait()
        try:
            objects.create("log/000000000000.json", b"%d" % writer)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            won = [writer for writer, first in enumerate(pool.map(create, range(8))) if first]
            assert len(won) == 1
            assert ObjectStore(url).get("log/000000000000.json") == b"%d" % won[0]
            ObjectStore(url).delete(["log/000000000000.json"])


@pytest.mark.parametrize("first", [b"first", b""])
@pytest.mark.parametrize("second", [b"second", b""])
def test_what_exists_is_not_created(url: str, first: bytes, second: bytes) -> None:
    ObjectStore(url).create("key", first)
    with pytest.raises(FileExistsError):
        ObjectStore(url).create("key", second)
    assert ObjectStore(url).get("key") == first


def test_put_overwrites(url: str) -> None:
    objects = ObjectStore(url)
    for data in (b"first", b"second, which is longer", b""):
        objects.put("folder/key", data)
        assert ObjectStore(url).get("folder/key") == data


def test_large_objects_come_back(url: str) -> None:
    data = os.urandom(6_000_000)
    ObjectStore(url).put("large", data)
    assert ObjectStore(url).get("large") == data


def test_what_is_absent_is_told_from_what_fails(url: str) -> None:
    objects = ObjectStore(url)
    with pytest.raises(FileNotFoundError):
        objects.get("absent")
    assert objects.get_if_there("absent") is None
    objects.put("here", b"")
    assert objects.get_if_there("here") == b""


def test_deleting_does_not_mind_what_is_absent(url: str) -> None:
    objects = ObjectStore(url)
    objects.delete(["never", "was"])
    objects.delete([])
    for key in ("a/1", "a/2", "b/1"):
        objects.put(key, b"1")
    objects.delete(["a/1", "a/absent", "b/1", *(f"absent/{number}" for number in range(1500))])
    assert objects.list("") == ["a/2"]


def test_a_listing_is_fresh(url: str) -> None:
    one = ObjectStore(url)
    S3FileSystem.clear_instance_cache()
    other = ObjectStore(url)
    assert one.list("") == []
    for number in range(3):
        other.put(f"log/{number}", b"")
        other.put(f"index/{number}", b"")
        assert one.list("log") == [f"log/{place}" for place in range(number + 1)]
    assert one.list("") == sorted(f"{folder}/{number}" for folder in ("index", "log") for number in range(3))
    other.delete(["log/1"])
    assert one.list("log") == ["log/0", "log/2"]
    assert one.list("nowhere") == []


def test_create_if_absent_is_honoured(url: str) -> None:
    objects = ObjectStore(url)
    assert objects.honours_create()
    assert objects.list("") == ObjectStore(f"{url}/.writing").list("") == [], "the probe is cleaned up"


def test_a_probe_that_was_killed_is_deleted_after_an_hour(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, temporary = ObjectStore(url), ObjectStore(f"{url}/.writing")
    with monkeypatch.context() as killed:
        killed.setattr(objects, "delete", lambda keys: None)
        assert objects.honours_create()
    left = temporary.list("")
    assert left and objects.list("") == [], "it is no part of the run"
    objects.delete_leftovers()
    assert temporary.list("") == left, "somebody may be at it"
    monkeypatch.setattr("ratchet.infra.store.object_store.LEFTOVERS_S", -5.0)
    objects.delete_leftovers()
    assert temporary.list("") == []


# A store that ignores create-if-absent.


class Overwriting(Memory):
    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


def test_a_store_without_create_if_absent_is_refused(tmp_path: Path) -> None:
    from ratchet.infra.execution.claims import begin

    objects = ObjectStore("overwriting://", Overwriting())
    assert not objects.honours_create()
    assert objects.list("") == []
    with pytest.raises(UserError, match=r"ignores create-if-absent.*run.single_writer"):
        begin(RunStore(objects), tiny.config(tmp_path), take_over=False)
    assert objects.list("") == []
    begin(RunStore(objects), tiny.config(tmp_path, run__single_writer=True), take_over=False)


class Racy(Memory):
    """As a real store does (OpenStack Swift by its S3 interface): it looks first and writes then. So it refuses who
    comes later, and lets several win a race."""

    def create(self, key: str, data: bytes) -> None:
        there = key in self.objects
        time.sleep(0.001)
        if there:
            raise FileExistsError(key)
        self.put(key, data)


def test_a_store_that_lets_several_win_a_race_is_refused() -> None:
    objects = ObjectStore("racy://", Racy())
    objects.create("key", b"first")
    with pytest.raises(FileExistsError):
        objects.create("key", b"late")
    assert not objects.honours_create()
    assert objects.list("") == ["key"]


# S3 in particular.


def test_a_412_in_other_words_than_those_of_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs makes `FileExistsError` of AWS's own wording only; MinIO and others do not name the condition."""
    backend = FsspecBackend("memory://other")
    monkeypatch.setattr(backend.fs, "protocol", ("s3", "s3a"))

    def answer(status: int, code: str) -> None:
        def pipe_file(path: str, data: bytes, mode: str) -> None:
            assert mode == "create"
            response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise OSError(errno.EINVAL, code) from ClientError(response, "PutObject")

        monkeypatch.setattr(backend.fs, "pipe_file", pipe_file)

    answer(412, "PreconditionFailed")
    with pytest.raises(FileExistsError):
        backend.create("key", b"")
    for status, code in ((409, "ConditionalRequestConflict"), (503, "SlowDown"), (400, "InvalidRequest")):
        answer(status, code)
        with pytest.raises(OSError, match=code) as unknown:
            backend.create("key", b"")
        assert not isinstance(unknown.value, FileExistsError)


def test_an_operation_on_s3_is_one_request(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster in virtual time counts on it."""
    sent: list[str] = []
    send = AioEndpoint._send

    async def noted(endpoint: AioEndpoint, request: Any) -> Any:
        sent.append(request.method)
        return await send(endpoint, request)

    monkeypatch.setattr(AioEndpoint, "_send", noted)
    objects = ObjectStore(f"{s3}/{uuid.uuid4().hex}")
    for operation, requests in [
        (lambda: objects.create("log/0", b"1"), ["PUT"]),
        (lambda: objects.put("part/0", b"0123"), ["PUT"]),
        (lambda: objects.get("part/0"), ["GET"]),
        (lambda: objects.get_if_there("part/1"), ["GET"]),
        (lambda: objects.read("part/0", 1, 3), ["GET"]),
        (lambda: objects.list("part/"), ["GET"]),
        (lambda: objects.delete(["part/0", "part/1", "log/0"]), ["POST"]),
    ]:
        operation()
        assert sent == requests
        sent.clear()


def test_a_missing_bucket_is_named(each_s3: str) -> None:
    objects = ObjectStore("s3://no-such-bucket/run")
    assert objects.get_if_there("key") is None
    with pytest.raises(UserError, match=r"s3://no-such-bucket/run does not exist: create its bucket"):
        objects.honours_create()


def test_a_store_that_is_not_there_is_named(each_s3: str, tmp_path: Path) -> None:
    """An empty one is there, and of a folder of a bucket, an object store knows no more."""
    (tmp_path / "empty").mkdir()
    for url in (f"file://{tmp_path}/empty", str(tmp_path / "empty"), f"{each_s3}/nowhere"):
        check_store(url)
    for url, kind in ((str(tmp_path / "nothere"), "folder"), ("s3://no-such-bucket/runs", "bucket")):
        with pytest.raises(UserError, match=f"^--store {url}: there is no such {kind}: name the {kind} of your runs$"):
            check_store(url)


# A folder in particular.


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no folder in which none can be made")
def test_a_folder_that_cannot_be_made_is_named() -> None:
    objects = ObjectStore("file:///proc/no/run")
    for write in (lambda: objects.put("key", b""), objects.honours_create):
        with pytest.raises(
            UserError, match=r"^the folder file:///proc/no/run cannot be made .*: choose another folder"
        ):
            write()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("broken", "write"),
    [("os.fsync", "create"), ("os.fsync", "put"), ("os.link", "create"), ("pathlib.Path.replace", "put")],
)
def test_a_failing_disk_leaves_nothing_behind(
    broken: str, write: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(str(folder))
    backend.put("log/there", b"before")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(broken, fail)
    for key in ("log/new", "log/there"):
        with pytest.raises(OSError, match="no space left"):
            getattr(backend, write)(key, b"after")
    assert _files(folder) == ["log/there"]
    assert backend.get("log/there") == b"before"


def test_a_writer_killed_halfway_leaves_no_half_object(folder: Path) -> None:
    kill = (
        "import os, sys; from ratchet.infra.store.object_store import LocalBackend\n"
        "os.fsync = lambda handle: os._exit(9)\n"
        "getattr(LocalBackend(sys.argv[1]), sys.argv[2])('key', b'x' * 100_000)"
    )
    folder.mkdir()
    for write in ("create", "put"):
        command = [sys.executable, "-c", kill, str(folder), write]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == 9
    assert LocalBackend(str(folder)).list("") == []
    LocalBackend(str(folder)).create("key", b"whole")


def test_files_are_as_readable_as_others(folder: Path, tmp_path: Path) -> None:
    LocalBackend(str(folder)).put("key", b"")
    (tmp_path / "other").touch()
    assert (folder / "key").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_a_link_leads_to_is_no_object(folder: Path, tmp_path: Path) -> None:
    """Whatever the operation, nothing outside the folder is read, written, listed or deleted."""
    victim = tmp_path / "victim"
    (victim / "sub" / "empty").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt"):
        (victim / name).write_text("precious")
    os.utime(victim / "a.txt", (0, 0))
    backend = LocalBackend(str(folder))
    backend.put("here/key", b"1")
    (folder / "x").symlink_to("../victim")
    (folder / "here" / "deep").symlink_to(victim / "sub")
    (folder / "file").symlink_to(victim / "a.txt")
    (folder / "inner").symlink_to(folder / "here" / "key")
    assert backend.list("") == backend.list("here") == backend.list("here/") == ["here/key"]
    assert backend.list("f") == []
    for key in ("x/a.txt", "here/deep/b.txt", "x/new", "file", "inner", "../victim/a.txt", str(victim / "a.txt")):
        for operation in (
            partial(backend.get, key),
            partial(backend.size, key),
            partial(backend.open, key),
            partial(backend.read, key, 0, 1),
            partial(backend.put, key, b"2"),
            partial(backend.create, key, b"2"),
            partial(backend.delete, [key]),
        ):
            with pytest.raises(OSError, match="below the store's folder neither is followed"):
                operation()
    with pytest.raises(UserError, match=rf"refuses to read x/a.txt: .*a link or \.\. leads to {victim}/a\.txt"):
        ObjectStore(str(folder)).get("x/a.txt")
    with pytest.raises(OSError, match="neither is followed"):
        backend.list("x/")
    (folder / ".writing").rmdir()
    (folder / ".writing").symlink_to("../victim")
    for write in (partial(backend.delete_leftovers, -5.0), partial(backend.put, "key", b"2")):
        with pytest.raises(OSError, match="neither is followed"):
            write()
    backend.delete_empty_folders()
    assert (victim / "sub" / "empty").is_dir()
    assert _files(victim) == ["a.txt", "sub/b.txt"]


def test_a_folder_behind_links_is_a_store(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "disk")
    for _ in range(2):  # a link to a folder of runs, then one to a run, too
        backend = LocalBackend(str(tmp_path / "linked" / "run"))
        backend.put("log/1", b"1")
        backend.create("log/2", b"2")
        assert backend.list("log/") == ["log/1", "log/2"]
        assert backend.get("log/1") + backend.read("log/2", 0, 1) == b"12"
        backend.delete(["log/1", "log/2"])
        backend.delete_leftovers(-5.0)
        backend.delete_empty_folders()
        if not folder.exists():
            folder.mkdir()
            (tmp_path / "disk" / "run").symlink_to(folder)


NAMES = st.sampled_from(["a", "ab", "[a]*", "b.c", ".d"])
KEYS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


@settings(deadline=None, max_examples=50)
@given(st.sets(KEYS, max_size=6), st.sets(KEYS, max_size=3))
def test_a_listing_is_of_the_keys_that_begin_so(keys: set[str], links: set[str]) -> None:
    """As of a set of keys, but for hidden names, and whatever links are beside them."""
    with tempfile.TemporaryDirectory() as place:
        outside, store = Path(place, "outside"), Path(place, "store")
        outside.mkdir()
        (outside / "a").touch()
        written = set()
        for key in sorted(keys, key=len):
            with suppress(OSError):  # a file is in the place of a folder
                (store / key).parent.mkdir(parents=True, exist_ok=True)
                (store / key).touch()
                written.add(key)
        for key in links:
            with suppress(OSError):  # there is no such folder, or something else there
                (store / key).symlink_to(outside)
        backend = LocalBackend(str(store))
        every_key = sorted(key for key in written if not re.search(r"(^|/)\.", key))
        assert backend.list("") == every_key
        for key in written:
            for prefix in (key[:size] for size in range(len(key))):
                assert backend.list(prefix) == [key for key in every_key if key.startswith(prefix)]


# Retries.


class Failing(Memory):
    def __init__(self, *errors: Exception) -> None:
        super().__init__({"key": b"data"})
        self.errors = list(errors)

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.objects[key]


def test_what_may_pass_is_tried_again_until_the_deadline() -> None:
    passing = Failing(TimeoutError(), OSError(errno.EBUSY, "503"), ConnectionResetError())
    assert ObjectStore("", passing, clock=Clock()).get("key") == b"data"

    clock, lasting = Clock(), Failing(*[TimeoutError("no answer")] * 10_000)
    with pytest.raises(StoreUnavailable, match=r"could not read key in sim://run within 60 s: no answer"):
        ObjectStore("sim://run", lasting, clock=clock).get("key")
    assert 60 <= clock.now < 65
    assert 10 < lasting.requests["get"] < 60


class NoCredentialsError(Exception):
    """As botocore calls it."""


@pytest.mark.parametrize("error", [PermissionError("403"), NoCredentialsError("unable to locate credentials")])
def test_a_refusal_is_told_at_once(error: Exception) -> None:
    backend = Failing(error)
    with pytest.raises(UserError, match="refuses to read key"):
        ObjectStore("", backend, clock=Clock()).get("key")
    assert backend.requests["get"] == 1


def test_a_mistake_is_not_blamed_on_the_store() -> None:
    with pytest.raises(TypeError):
        ObjectStore("", Failing(TypeError("a mistake")), clock=Clock()).get("key")


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# A folder that cannot be written.


@pytest.mark.parametrize("number", [errno.EROFS, errno.ELOOP, errno.EACCES])
def test_a_store_that_became_read_only_is_not_asked_again(number: int) -> None:
    class Closed(Memory):
        def put(self, key: str, data: bytes) -> None:
            self.requests["put"] += 1
            raise OSError(number, os.strerror(number))

        def create(self, key: str, data: bytes) -> None:
            self.put(key, data)

    memory = Closed()
    objects = ObjectStore("closed://", memory)
    with pytest.raises(UserError, match="the store closed: refuses to write key"):
        objects.put("key", b"")
    with pytest.raises(UserError, match=r"refuses to write log/0+\.json"):
        claim(RunStore(objects))
    assert memory.requests["put"] == 2, "once each"


def claim(store: RunStore) -> None:
    store.log.claim(Claim(config={}, code="", packages={}, threads=1, host="", initial={}))


def test_a_store_that_is_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    objects = ObjectStore(f"file://{tmp_path}/runs/run")
    for write in (lambda: objects.put("key", b""), objects.honours_create, lambda: claim(RunStore(objects))):
        with pytest.raises(UserError, match="refuses to"):
            write()


def test_a_store_is_read_in_parts(url: str) -> None:
    objects = ObjectStore(url)
    for size in (0, 1, 9, 10, 11, 25):
        data = bytes(range(size))
        objects.put("key", data)
        parts = list(objects.parts("key", 10))
        assert b"".join(parts) == data
        assert [len(part) for part in parts[:-1]] == [10] * max(-(-size // 10) - 1, 0)
    with pytest.raises(FileNotFoundError):
        list(objects.parts("other", 10))
