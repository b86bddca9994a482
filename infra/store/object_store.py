"""Bytes under keys on any fsspec URL, with the one primitive that a commit needs: create-if-absent.

`Backend` is the raw store. An operation succeeds, answers that the key exists (`FileExistsError`) or does not
(`FileNotFoundError`), or raises another error; after such an error it *may or may not have happened*. `ObjectStore`
adds retries. Reads, overwrites and deletes are safe to repeat. A create is not, so its caller retries: only the caller
can tell its own object from another writer's.
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
from typing import Any, BinaryIO, Protocol, TypeVar

import fsspec
from tenacity import Retrying, retry_if_exception

from ratchet.rlhf.errors import RatchetError, UserError

T = TypeVar("T")
LEFTOVERS_S = 3600.0
PROBE_WRITERS = 8
PROBE_ROUNDS = 5


class StoreUnavailable(RatchetError):
    """The store did not answer within the deadline; an object that was being written may or may not exist."""


class StoreFull(StoreUnavailable):
    """The disk is full. Not retried: waiting rarely helps, and the user should know at once."""


class Backend(Protocol):
    """Raw operations on keys, which are paths relative to the store's root.

    Reads raise `FileNotFoundError` if the key is absent. Any operation may also raise an error that says nothing about
    its outcome (see the module).
    """

    def create(self, key: str, data: bytes) -> None:
        """Writes an object atomically. Raises `FileExistsError` if its key exists."""

    def put(self, key: str, data: bytes) -> None:
        """Writes an object atomically, replacing any object under its key."""

    def get(self, key: str) -> bytes:
        """Reads a whole object."""

    def size(self, key: str) -> int:
        """Returns the size of an object in bytes."""

    def open(self, key: str) -> BinaryIO:
        """Opens an object for random access."""

    def read(self, key: str, start: int, end: int) -> bytes:
        """Reads the bytes from `start` to before `end`, which is at most the object's size."""

    def delete(self, keys: list[str]) -> None:
        """Deletes objects, ignoring absent keys."""

    def list(self, prefix: str) -> list[str]:
        """Lists the keys that begin with a prefix, sorted, except hidden keys.

        Args:
            prefix: a folder with its slash, the beginning of a name in a folder, or empty for all keys.
        """

    def delete_leftovers(self, older_s: float) -> None:
        """Deletes temporary files of killed writers. Files younger than `older_s` seconds stay: their writers may be
        alive."""

    def delete_empty_folders(self) -> None:
        """Deletes empty folders, if the store has folders."""


class Clock(Protocol):
    """The clock for retries: the module `time`, or a simulated clock."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


TEMPORARY = ".writing"
"""The folder for temporary files: local files before they are renamed, and the objects of `honours_create`. Listings
skip all names that begin with a dot."""


class LocalBackend:
    """A local folder. Objects appear atomically, after their bytes are synced to disk.

    Links below the folder are not objects: they are not listed, and an operation on a key that a link or ``..`` leads
    elsewhere raises `OSError` (ELOOP). The folder itself may be reached through links.
    """

    def __init__(self, root: str) -> None:
        """Uses a folder; the first write creates it."""
        self.root = Path(root)

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._beside(path, data) as temporary:
            # unlike a rename, a link fails if the name exists
            os.link(temporary, path)

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._beside(path, data) as temporary:
            temporary.replace(path)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def size(self, key: str) -> int:
        return self._path(key).stat().st_size

    def open(self, key: str) -> BinaryIO:
        return self._path(key).open("rb")

    def read(self, key: str, start: int, end: int) -> bytes:
        with self.open(key) as file:
            file.seek(start)
            return file.read(end - start)

    def delete(self, keys: list[str]) -> None:
        """Deletes the files one by one; their folders stay."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def list(self, prefix: str) -> list[str]:
        folder, slash, _ = prefix.rpartition("/")
        if _is_hidden(folder):
            return []
        return sorted(key for key in _files(self._path(folder), folder + slash) if key.startswith(prefix))

    def delete_leftovers(self, older_s: float) -> None:
        oldest = time.time() - older_s
        for path in self._path(TEMPORARY).glob("*"):
            with suppress(FileNotFoundError):  # its writer has renamed it
                if path.lstat().st_mtime < oldest:
                    path.unlink()

    def delete_empty_folders(self) -> None:
        """Deletes empty folders, including the root."""
        for folder, _, _ in os.walk(self.root, topdown=False):  # does not follow links
            with suppress(OSError):  # it is not empty
                Path(folder).rmdir()

    def _path(self, key: str) -> Path:
        """Returns the path of an object. Raises `OSError` (ELOOP) if it is not in the folder."""
        path, real = self.root / key, os.path.realpath(self.root / key)
        if real != f"{os.path.realpath(self.root)}/{key}".rstrip("/"):
            reason = f"a link or .. leads to {real}, and below the store's folder neither is followed"
            raise OSError(errno.ELOOP, reason, str(path))
        return path

    @contextmanager
    def _beside(self, path: Path, data: bytes) -> Iterator[Path]:
        """Writes the bytes to a synced temporary file, which the caller links or renames to `path`."""
        self._make_folder(path.parent)
        self._make_folder(self._path(TEMPORARY))
        temporary = self.root / TEMPORARY / uuid.uuid4().hex
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        except FileNotFoundError as error:  # a vanished folder, which a retry creates again; not a missing key
            raise OSError(errno.ESTALE, "its folder was deleted during the write", str(path)) from error
        finally:
            temporary.unlink(missing_ok=True)
        # the new name survives a crash only if its folder is synced, too
        self._sync_folder(path.parent)

    def _make_folder(self, folder: Path) -> None:
        """Creates a folder and its parents, and syncs each: a file survives a crash only if its folders do."""
        if not folder.is_dir():
            self._make_folder(folder.parent)
            try:
                folder.mkdir(exist_ok=True)
            except FileExistsError:  # a file or a dangling link; not an existing key
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder)) from None
            self._sync_folder(folder.parent)

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _files(folder: Path, prefix: str) -> Iterator[str]:
    """Yields the keys of the files in a folder and its subfolders: `prefix` and the path from the folder."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files(folder / entry.name, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield prefix + entry.name


class FsspecBackend:
    """Any other fsspec file system. Object stores implement create-if-absent with conditional writes."""

    _memory_lock = threading.Lock()

    def __init__(self, url: str) -> None:
        """Opens the file system."""
        # a cached listing would hide the objects of other processes
        self.fs, self.root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self.root = self.root.rstrip("/")

    def create(self, key: str, data: bytes) -> None:
        """Writes conditionally on the key's absence, or under a lock in memory."""
        if self.fs.protocol == "memory":  # shared by threads of one process only, so a lock makes the create atomic
            with self._memory_lock:
                if self.fs.exists(self._path(key)):
                    raise FileExistsError(key)
                self.fs.pipe_file(self._path(key), data)
        else:
            try:
                self.fs.pipe_file(self._path(key), data, mode="create")
            except OSError as error:
                if _http_status(error) == 412:  # s3fs recognizes only AWS's wording of this error
                    raise FileExistsError(key) from error
                raise

    def put(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(self._path(key), data)

    def get(self, key: str) -> bytes:
        # otherwise s3fs first asks for the size, to read large objects in parts
        in_one_request = {"max_concurrency": 1} if "s3" in self.fs.protocol else {}
        return bytes(self.fs.cat_file(self._path(key), **in_one_request))

    def delete_leftovers(self, older_s: float) -> None:
        """Deletes old probe objects. There are no other temporary files, because an object store's writes are
        atomic."""
        oldest = datetime.now(UTC) - timedelta(seconds=older_s)
        for path in self.fs.find(self._path(TEMPORARY)):
            with suppress(FileNotFoundError):  # its writer is alive and has deleted it
                if self.fs.modified(path) < oldest:
                    self.fs.rm_file(path)

    def delete_empty_folders(self) -> None:
        """Does nothing: an object store has no folders."""

    def size(self, key: str) -> int:
        return int(self.fs.size(self._path(key)))

    def open(self, key: str) -> BinaryIO:
        return self.fs.open(self._path(key), "rb")  # type: ignore[no-any-return]

    def read(self, key: str, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self._path(key), start=start, end=end))

    def delete(self, keys: list[str]) -> None:
        if "s3" in self.fs.protocol:  # one request deletes up to 1000 keys, and ignores absent keys
            self.fs.rm([self._path(key) for key in keys])
            return
        for key in keys:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self._path(key))

    def list(self, prefix: str) -> list[str]:
        folder, _, name_prefix = prefix.rpartition("/")
        paths = self.fs.find(self._path(folder).rstrip("/"), prefix=name_prefix)
        keys = (path.removeprefix(self.root).lstrip("/") for path in paths)
        # fsspec's generic `find` ignores `prefix`
        return sorted(key for key in keys if key.startswith(prefix) and not _is_hidden(key))

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"


def _is_hidden(key: str) -> bool:
    return re.search(r"(^|/)\.", key) is not None


def backend_for(url: str) -> Backend:
    """Returns the backend for a URL: `LocalBackend` for a local folder, otherwise `FsspecBackend`.

    Raises:
        UserError: fsspec does not support the protocol, or its package is not installed.
    """
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot use the store {url}: {error}") from None
    return LocalBackend(root) if "file" in fs.protocol else FsspecBackend(url)


class ObjectStore:
    """A folder of objects, with bounded retries.

    The methods that access the store, except `create`, raise `StoreUnavailable` if the store does not answer within the
    deadline, `StoreFull` if the disk is full, and `UserError` if the store refuses the operation.
    """

    def __init__(
        self, url: str, backend: Backend | None = None, *, deadline_s: float = 60.0, clock: Clock = time
    ) -> None:
        """Opens the folder; this writes nothing. Raises `UserError` as `backend_for`.

        Args:
            url: any fsspec URL or a local path.
            backend: None: chosen by the URL.
            deadline_s: seconds after which an operation is no longer retried.
        """
        self.url = url.rstrip("/")
        self.backend = backend_for(url) if backend is None else backend
        self.deadline_s = deadline_s
        self.clock = clock
        self._others: dict[str, ObjectStore] = {}

    def of_run(self, run: str | None) -> ObjectStore:
        """Returns the store of another run, the same object in every call. Raises `UserError` as `backend_for`.

        Args:
            run: the run's URL, ``../name`` for a run in the same folder, or None for this run.
        """
        if run is None:
            return self
        if run not in self._others:
            parent, _, _ = self.url.rpartition("/")
            url = f"{parent}/{run.removeprefix('../')}" if run.startswith("../") else run
            self._others[run] = ObjectStore(url, deadline_s=self.deadline_s, clock=self.clock)
        return self._others[run]

    def create(self, key: str, data: bytes) -> None:
        """Writes an object if its key is absent. Not retried.

        Raises:
            FileExistsError: the key exists.
            Exception: any other error; the object may or may not have been written.
        """
        self.backend.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        """Writes an object, replacing any object under its key. Raises `UserError` if the bucket does not exist."""
        try:
            self.retry(f"write {key}", lambda: self.backend.put(key, data))
        except FileNotFoundError as error:
            raise self.nowhere(error) from error

    def get(self, key: str) -> bytes:
        """Reads a whole object; see `Backend.get`."""
        return self.retry(f"read {key}", lambda: self.backend.get(key))

    def read(self, key: str, start: int, end: int) -> bytes:
        """Reads a part of an object; see `Backend.read`."""
        return self.retry(f"read {key}", lambda: self.backend.read(key, start, end))

    def parts(self, key: str, size: int) -> Iterator[bytes]:
        """Reads an object in parts of `size` bytes; the last may be shorter. Raises `FileNotFoundError` if the key is
        absent."""
        end = self.retry(f"read {key}", lambda: self.backend.size(key))
        for start in range(0, end, size):
            part = partial(self.backend.read, key, start, min(start + size, end))
            yield self.retry(f"read {key}", part)

    def get_if_there(self, key: str) -> bytes | None:
        """Reads a whole object; None if its key is absent."""
        try:
            return self.get(key)
        except FileNotFoundError:
            return None

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects, ignoring absent keys."""
        doomed = list(keys)
        if doomed:
            self.retry(f"delete {doomed[0]}", lambda: self.backend.delete(doomed))

    def list(self, prefix: str) -> list[str]:
        """Lists the keys that begin with a prefix; see `Backend.list`."""
        return self.retry(f"list {prefix}", lambda: self.backend.list(prefix))

    def delete_leftovers(self) -> None:
        """Deletes temporary files of killed writers that are older than an hour."""
        self.retry("delete temporary files", lambda: self.backend.delete_leftovers(LEFTOVERS_S))

    def delete_empty_folders(self) -> None:
        """Deletes the empty folders of a local store, including the store's own folder."""
        self.retry("delete empty folders", self.backend.delete_empty_folders)

    def pause(self, attempt: int) -> float:
        """Returns the seconds to wait after a failed attempt (from 1): bounded exponential backoff with full jitter."""
        return random.uniform(0, min(0.05 * 2**attempt, 5.0, self.deadline_s / 2))

    def honours_create(self) -> bool:
        """Returns True if at most one of several racing writers creates an object, and every later writer is refused.

        Raises:
            UserError: the bucket does not exist, the folder cannot be made, or the store refuses to write.
        """
        keys = [f"{TEMPORARY}/probe-{uuid.uuid4().hex}" for _ in range(PROBE_ROUNDS)]
        try:
            with ThreadPoolExecutor(PROBE_WRITERS) as writers:
                for key in keys:
                    writes = partial(self._wins, key, at=threading.Barrier(PROBE_WRITERS))
                    # some stores refuse a later writer, but let several racing writers succeed
                    if sum(writers.map(writes, range(PROBE_WRITERS))) > 1 or self._wins(key, PROBE_WRITERS):
                        return False
            return True
        finally:
            with suppress(FileNotFoundError):  # the bucket does not exist
                self.delete(keys)

    def _wins(self, key: str, number: int, at: threading.Barrier | None = None) -> bool:
        """True if the store confirms that this writer created the object."""
        if at is not None:
            at.wait()
        try:
            # A retried create whose answer was lost meets its own object and counts as refused. That is fine for a
            # probe; a real commit reads the object back.
            self.retry("probe", lambda: self.backend.create(key, b"%d" % number))
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise self.nowhere(error) from error
        return True

    def nowhere(self, error: FileNotFoundError) -> UserError:
        """Makes the error for a write to a bucket that does not exist, or to a folder that cannot be made."""
        if isinstance(self.backend, LocalBackend):
            return UserError(f"the folder {self.url} cannot be made ({error}): choose another folder in run.store")
        return UserError(f"the store {self.url} does not exist: create its bucket first ({error})")

    def full(self, action: str) -> StoreFull:
        """Makes the error for a full disk. `action` says what failed, such as ``write KEY``."""
        return StoreFull(f"could not {action}: the disk that holds {self.url} is full; free some space, and resume")

    def retry(self, action: str, operation: Callable[[], T]) -> T:
        """Runs an operation that is safe to repeat, retrying it after transient errors until the deadline.

        Args:
            action: describes the operation in error messages, such as ``write KEY``.

        Raises:
            StoreUnavailable: no attempt succeeded before the deadline.
            StoreFull: the disk is full.
            UserError: the store refuses the operation.
            Exception: an answer of the store, such as `FileNotFoundError`, or a programming error; raised as it is.
        """
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
                raise UserError(f"the store {self.url} refuses to {action}: {error}") from error
            if is_full(error):
                raise self.full(action) from error
            if not is_transient(error):
                raise
            raise StoreUnavailable(
                f"could not {action} in {self.url} within {self.deadline_s:.0f} s: {error}"
            ) from error


def is_full(error: BaseException) -> bool:
    """True if an error says that the disk or the quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_refusal(error: BaseException) -> bool:
    """True if the store refuses an operation for good: no permission, no credentials, or not a writable folder."""
    is_unwritable = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ELOOP)
    # `NoCredentialsError` is botocore's, which is imported only for S3
    is_denied = isinstance(error, PermissionError | NotADirectoryError) or type(error).__name__ == "NoCredentialsError"
    return is_unwritable or is_denied


def is_transient(error: BaseException) -> bool:
    """True if a retry may help: the error is not an answer of the store, a refusal or a programming error."""
    answers = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    mistakes = (TypeError, AttributeError, NameError, AssertionError)
    return isinstance(error, Exception) and not isinstance(error, (*answers, *mistakes)) and not is_refusal(error)


def _http_status(error: OSError) -> int | None:
    """Returns the HTTP status of the response behind an s3fs error, or None."""
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # type: ignore[no-any-return]
