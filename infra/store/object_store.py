"""Bytes under keys, on any fsspec URL, with the one primitive a commit needs: create-if-absent.

`Backend` is the raw store: an operation either does what it says, answers that the key exists (`FileExistsError`) or
does not (`FileNotFoundError`), or raises anything else, and then *may or may not have happened*. `Objects` adds the
retries: reading, overwriting and deleting may be repeated at will; creating is left to the caller, who can tell its
own object from another's.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec
from tenacity import Retrying, retry_if_exception

from rlhf.errors import RatchetError, UserError

T = TypeVar("T")
LEAVINGS_S = 3600.0
PROBE_WRITERS = 8
PROBE_ROUNDS = 5


class StoreUnavailable(RatchetError):
    """The store did not answer within the deadline; what was being written may or may not be there."""


class StoreFull(StoreUnavailable):
    """There is no room: waiting rarely helps, and a person should know at once."""


class Backend(Protocol):
    """Raw operations on keys; `delete` does not mind absent ones."""

    def create(self, key: str, data: bytes) -> None: ...
    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def size(self, key: str) -> int: ...
    def read(self, key: str, start: int, end: int) -> bytes: ...
    def delete(self, keys: list[str]) -> None: ...
    def list(self, prefix: str) -> list[str]: ...
    def delete_leavings(self, older_s: float) -> None: ...
    def delete_empty_folders(self) -> None: ...


class Clock(Protocol):
    """What paces the retries: the module `time`, or a clock that jumps."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


TEMPORARY = ".writing"
"""Where nothing lasts: files of a local folder before they are given their names, and what tries the store out. Like
everything whose name begins with a dot, listings leave it out."""


class LocalBackend:
    """A folder. An object appears whole or not at all, and is on the disk before it appears."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def create(self, key: str, data: bytes) -> None:
        path = self.root / key
        with self._beside(path, data) as temporary:
            os.link(temporary, path)

    def put(self, key: str, data: bytes) -> None:
        path = self.root / key
        with self._beside(path, data) as temporary:
            temporary.replace(path)

    def get(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def size(self, key: str) -> int:
        return (self.root / key).stat().st_size

    def read(self, key: str, start: int, end: int) -> bytes:
        with (self.root / key).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            (self.root / key).unlink(missing_ok=True)

    def list(self, prefix: str) -> list[str]:
        folder, _, beginning = prefix.rpartition("/")
        files = (
            file.relative_to(self.root)
            for path in (self.root / folder).glob(f"{beginning}*")
            for file in (path.rglob("*") if path.is_dir() else [path])
            if file.is_file()
        )
        return sorted(path.as_posix() for path in files if not any(part.startswith(".") for part in path.parts))

    def delete_leavings(self, older_s: float) -> None:
        """Temporary files that writers left who were killed, if nobody can still be writing them."""
        oldest = time.time() - older_s
        for path in (self.root / TEMPORARY).glob("*"):
            with suppress(FileNotFoundError):  # it was given its name
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def delete_empty_folders(self) -> None:
        for folder, _, _ in os.walk(self.root, topdown=False):
            with suppress(OSError):  # it is not empty
                Path(folder).rmdir()

    @contextmanager
    def _beside(self, path: Path, data: bytes) -> Iterator[Path]:
        """The bytes in a temporary file on the disk, to be given the name of `path`; nothing else stays."""
        self._make_folder(path.parent)
        self._make_folder(self.root / TEMPORARY)
        temporary = self.root / TEMPORARY / uuid.uuid4().hex
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        except FileNotFoundError as error:  # not the answer to a read: another try makes it again
            raise OSError(errno.ESTALE, "somebody deletes what is being written", str(path)) from error
        finally:
            temporary.unlink(missing_ok=True)
        self._sync_folder(path.parent)

    def _make_folder(self, folder: Path) -> None:
        """A file is no safer than the folders that lead to it: each new one is on the disk, too."""
        if not folder.is_dir():
            self._make_folder(folder.parent)
            try:
                folder.mkdir(exist_ok=True)
            except FileExistsError:  # a file, or a link to nothing; not the answer to a create
                raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(folder)) from None
            self._sync_folder(folder.parent)

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class FsspecBackend:
    """Any other fsspec file system; object stores honour create-if-absent by conditional writes."""

    _memory_lock = threading.Lock()

    def __init__(self, url: str) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self.root = self.root.rstrip("/")

    def create(self, key: str, data: bytes) -> None:
        if self.fs.protocol == "memory":  # threads of one process: a lock is its create-if-absent
            with self._memory_lock:
                if self.fs.exists(self._path(key)):
                    raise FileExistsError(key)
                self.fs.pipe_file(self._path(key), data)
        else:
            try:
                self.fs.pipe_file(self._path(key), data, mode="create")
            except OSError as error:
                if _http_status(error) == 412:  # s3fs knows AWS's wording of it only
                    raise FileExistsError(key) from error
                raise

    def put(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(self._path(key), data)

    def get(self, key: str) -> bytes:
        return bytes(self.fs.cat_file(self._path(key)))

    def delete_leavings(self, older_s: float) -> None:
        """An object store shows nothing before it is whole: there is only what tried it out."""
        oldest = datetime.now(UTC) - timedelta(seconds=older_s)
        for path in self.fs.find(self._path(TEMPORARY)):
            with suppress(FileNotFoundError):  # its writer lives, and has deleted it
                if self.fs.modified(path) < oldest:
                    self.fs.rm_file(path)

    def delete_empty_folders(self) -> None:
        """An object store has no folders."""

    def size(self, key: str) -> int:
        return int(self.fs.size(self._path(key)))

    def read(self, key: str, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self._path(key), start=start, end=end))

    def delete(self, keys: list[str]) -> None:
        if "s3" in self.fs.protocol:  # one request for a thousand keys, absent ones included
            self.fs.rm([self._path(key) for key in keys])
            return
        for key in keys:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self._path(key))

    def list(self, prefix: str) -> list[str]:
        folder, _, beginning = prefix.rpartition("/")
        paths = self.fs.find(self._path(folder).rstrip("/"), prefix=beginning)
        keys = (path.removeprefix(self.root).lstrip("/") for path in paths)
        is_hidden = re.compile(r"(^|/)\.").search
        return sorted(key for key in keys if key.startswith(prefix) and not is_hidden(key))

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"


def backend_for(url: str) -> Backend:
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot use the store {url}: {error}") from None
    return LocalBackend(root) if "file" in fs.protocol else FsspecBackend(url)


class ObjectStore:
    """A folder of objects, with bounded retries."""

    def __init__(
        self, url: str, backend: Backend | None = None, *, deadline_s: float = 60.0, clock: Clock = time
    ) -> None:
        self.url = url.rstrip("/")
        self.backend = backend_for(url) if backend is None else backend
        self.deadline_s = deadline_s
        self.clock = clock
        self._others: dict[str, ObjectStore] = {}

    def of_run(self, run: str | None) -> ObjectStore:
        """The folder of another run: its URL, or ``../name`` for one beside this; this one for None."""
        if run is None:
            return self
        if run not in self._others:
            parent, _, _ = self.url.rpartition("/")
            url = f"{parent}/{run.removeprefix('../')}" if run.startswith("../") else run
            self._others[run] = ObjectStore(url, deadline_s=self.deadline_s, clock=self.clock)
        return self._others[run]

    def create(self, key: str, data: bytes) -> None:
        """Write `key` if it is absent, once. `FileExistsError` if it is there; any other error: unknown."""
        self.backend.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        try:
            self.retry(f"write {key}", lambda: self.backend.put(key, data))
        except FileNotFoundError as error:
            raise self.no_bucket(error) from error

    def get(self, key: str) -> bytes:
        """The object's bytes; `FileNotFoundError` if it is absent."""
        return self.retry(f"read {key}", lambda: self.backend.get(key))

    def parts(self, key: str, size: int) -> Iterator[bytes]:
        """The object's bytes, so many at a time; `FileNotFoundError` if it is absent."""
        end = self.retry(f"read {key}", lambda: self.backend.size(key))
        for start in range(0, end, size):
            part = partial(self.backend.read, key, start, min(start + size, end))
            yield self.retry(f"read {key}", part)

    def get_if_there(self, key: str) -> bytes | None:
        try:
            return self.get(key)
        except FileNotFoundError:
            return None

    def delete(self, keys: Iterable[str]) -> None:
        """Delete what is there of `keys`."""
        doomed = list(keys)
        if doomed:
            self.retry(f"delete {doomed[0]}", lambda: self.backend.delete(doomed))

    def list(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, sorted; but for those of which a part begins with a dot."""
        return self.retry(f"list {prefix}", lambda: self.backend.list(prefix))

    def delete_leavings(self) -> None:
        """What writers who were killed left half-written, more than an hour ago."""
        self.retry("delete temporary files", lambda: self.backend.delete_leavings(LEAVINGS_S))

    def delete_empty_folders(self) -> None:
        """Those of a local store, itself included; files stay, and the folders that hold them."""
        self.retry("delete empty folders", self.backend.delete_empty_folders)

    def pause(self, attempt: int) -> float:
        """Seconds to wait after a failed attempt: growing, bounded, and random so that writers do not meet again."""
        return random.uniform(0, min(0.05 * 2**attempt, 5.0, self.deadline_s / 2))

    def honours_create(self) -> bool:
        """Try create-if-absent on throw-away objects: does only one of several writers win a race, and does one that
        comes later learn that it is late? Some stores refuse the late one, and let several win."""
        keys = [f"{TEMPORARY}/probe-{uuid.uuid4().hex}" for _ in range(PROBE_ROUNDS)]
        try:
            with ThreadPoolExecutor(PROBE_WRITERS) as writers:
                for key in keys:
                    writes = partial(self._wins, key, at=threading.Barrier(PROBE_WRITERS))
                    if sum(writers.map(writes, range(PROBE_WRITERS))) > 1 or self._wins(key, PROBE_WRITERS):
                        return False
            return True
        finally:
            with suppress(FileNotFoundError):  # of the bucket
                self.delete(keys)

    def _wins(self, key: str, number: int, at: threading.Barrier | None = None) -> bool:
        """Whether a writer is told that it wrote the object. One whose answer is lost is not: it would read it back."""
        if at is not None:
            at.wait()
        try:
            self.retry("probe", lambda: self.backend.create(key, b"%d" % number))
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise self.no_bucket(error) from error
        return True

    def no_bucket(self, error: FileNotFoundError) -> UserError:
        return UserError(f"the store {self.url} is not there: create its bucket first ({error})")

    def full(self, what: str) -> StoreFull:
        return StoreFull(f"could not {what}: the disk that holds {self.url} is full; free some space, and resume")

    def retry(self, what: str, operation: Callable[[], T]) -> T:
        """Run an operation that may be repeated until it answers; `StoreUnavailable` after the deadline."""
        deadline = self.clock.monotonic() + self.deadline_s
        attempts: Any = Retrying(
            retry=retry_if_exception(lambda error: is_transient(error) and not is_full(error)),
            wait=lambda state: self.pause(state.attempt_number),
            stop=lambda state: self.clock.monotonic() >= deadline,
            sleep=self.clock.sleep,
            reraise=True,
        )
        try:
            return attempts(operation)  # type: ignore[no-any-return]
        except Exception as error:
            if is_refusal(error):
                raise UserError(f"the store {self.url} refuses to {what}: {error}") from error
            if is_full(error):
                raise self.full(what) from error
            if not is_transient(error):
                raise
            raise StoreUnavailable(f"could not {what} in {self.url} within {self.deadline_s:.0f} s: {error}") from error


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_refusal(error: BaseException) -> bool:
    """Whether the store will not have us, as we are, or as it is."""
    closed = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ELOOP)
    known = isinstance(error, PermissionError | NotADirectoryError) or type(error).__name__ == "NoCredentialsError"
    return closed or known


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: anything but a plain answer, and never a programming error."""
    answers = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    mistakes = (TypeError, AttributeError, NameError, AssertionError)
    return isinstance(error, Exception) and not isinstance(error, (*answers, *mistakes)) and not is_refusal(error)


def _http_status(error: OSError) -> int | None:
    """Of the answer that s3fs made this error from, if there was one."""
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # type: ignore[no-any-return]
