"""Bytes under keys on any fsspec URL, with the one primitive that a commit needs: create-if-absent.

`Backend` is the raw store. An operation succeeds, answers that the key exists (`FileExistsError`) or does not
(`FileNotFoundError`), or raises another error; after such an error it *may or may not have happened*. `ObjectStore`
adds retries. Reads, overwrites and deletes can be repeated safely. A create cannot, so its caller retries: only the
caller can tell its own object from another writer's.
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

    Beside the errors below, any operation may raise an error that says nothing about its outcome (see the module).
    """

    def create(self, key: str, data: bytes) -> None:
        """Write an object atomically if its key is absent.

        Args:
            key: the object's key.
            data: its bytes.

        Raises:
            FileExistsError: the key exists.
        """

    def put(self, key: str, data: bytes) -> None:
        """Write an object atomically, replacing any object under its key.

        Args:
            key: the object's key.
            data: its bytes.
        """

    def get(self, key: str) -> bytes:
        """Read a whole object.

        Args:
            key: the object's key.

        Returns:
            Its bytes.

        Raises:
            FileNotFoundError: the key is absent.
        """

    def size(self, key: str) -> int:
        """Tell the size of an object.

        Args:
            key: the object's key.

        Returns:
            Its size in bytes.

        Raises:
            FileNotFoundError: the key is absent.
        """

    def open(self, key: str) -> BinaryIO:
        """Open an object to read parts of it.

        Args:
            key: the object's key.

        Returns:
            A file that can be read at any place.

        Raises:
            FileNotFoundError: the key is absent.
        """

    def read(self, key: str, start: int, end: int) -> bytes:
        """Read a part of an object.

        Args:
            key: the object's key.
            start: offset of the first byte.
            end: offset after the last byte, at most the object's size.

        Returns:
            The bytes.

        Raises:
            FileNotFoundError: the key is absent.
        """

    def delete(self, keys: list[str]) -> None:
        """Delete objects, ignoring absent keys.

        Args:
            keys: the objects' keys.
        """

    def list(self, prefix: str) -> list[str]:
        """List the keys that begin with a prefix, except hidden keys.

        Args:
            prefix: a folder with its slash, the beginning of a name in a folder, or empty for all keys.

        Returns:
            The keys, sorted.
        """

    def delete_leftovers(self, older_s: float) -> None:
        """Delete temporary files, which killed writers left behind.

        Args:
            older_s: age in seconds; younger files stay, because their writers may be alive.
        """

    def delete_empty_folders(self) -> None:
        """Delete empty folders, if the store has folders."""


class Clock(Protocol):
    """The clock for retries: the module `time`, or a simulated clock."""

    def monotonic(self) -> float:
        """Tell the time; it never goes backwards.

        Returns:
            Seconds from an arbitrary start.
        """
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait.

        Args:
            seconds: how long.
        """
        ...


TEMPORARY = ".writing"
"""The folder for temporary files: local files before they are renamed, and the objects of `honours_create`. Listings
skip every name that begins with a dot."""


class LocalBackend:
    """A local folder. Objects appear atomically, after their bytes are synced to disk.

    Only what lies in the folder is an object. A link below it, to a folder or to a file, is not: it is not listed, and
    an operation on a key that a link or ``..`` leads elsewhere is refused with an `OSError` (ELOOP). The folder itself
    may be reached through links.
    """

    def __init__(self, root: str) -> None:
        """Use a folder; the first write creates it.

        Args:
            root: path of the folder.
        """
        self.root = Path(root)

    def create(self, key: str, data: bytes) -> None:
        """Link a synced temporary file to the key; see `Backend.create`."""
        path = self._path(key)
        with self._beside(path, data) as temporary:
            os.link(temporary, path)

    def put(self, key: str, data: bytes) -> None:
        """Rename a synced temporary file to the key; see `Backend.put`."""
        path = self._path(key)
        with self._beside(path, data) as temporary:
            temporary.replace(path)

    def get(self, key: str) -> bytes:
        """Read the file; see `Backend.get`."""
        return self._path(key).read_bytes()

    def size(self, key: str) -> int:
        """Look up the file's size; see `Backend.size`."""
        return self._path(key).stat().st_size

    def open(self, key: str) -> BinaryIO:
        """Open the file; see `Backend.open`."""
        return self._path(key).open("rb")

    def read(self, key: str, start: int, end: int) -> bytes:
        """Read a part of the file; see `Backend.read`."""
        with self.open(key) as file:
            file.seek(start)
            return file.read(end - start)

    def delete(self, keys: list[str]) -> None:
        """Delete the files one by one; their folders stay; see `Backend.delete`."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def list(self, prefix: str) -> list[str]:
        """List the files of the folder and its subfolders; see `Backend.list`."""
        folder, slash, _ = prefix.rpartition("/")
        if _is_hidden(folder):
            return []
        return sorted(key for key in _files(self._path(folder), folder + slash) if key.startswith(prefix))

    def delete_leftovers(self, older_s: float) -> None:
        """Delete old files of the folder `TEMPORARY`; see `Backend.delete_leftovers`."""
        oldest = time.time() - older_s
        for path in self._path(TEMPORARY).glob("*"):
            with suppress(FileNotFoundError):  # its writer has renamed it
                if path.lstat().st_mtime < oldest:
                    path.unlink()

    def delete_empty_folders(self) -> None:
        """Delete empty folders, including the root; see `Backend.delete_empty_folders`."""
        for folder, _, _ in os.walk(self.root, topdown=False):  # which follows no links
            with suppress(OSError):  # it is not empty
                Path(folder).rmdir()

    def _path(self, key: str) -> Path:
        """Where an object lies. Raises `OSError` (ELOOP) if that is not in the folder."""
        path, real = self.root / key, os.path.realpath(self.root / key)
        if real != f"{os.path.realpath(self.root)}/{key}".rstrip("/"):
            reason = f"a link or .. leads to {real}, and below the store's folder neither is followed"
            raise OSError(errno.ELOOP, reason, str(path))
        return path

    @contextmanager
    def _beside(self, path: Path, data: bytes) -> Iterator[Path]:
        """Write the bytes to a synced temporary file, which the caller links or renames to `path`. Always removes the
        temporary file."""
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
        self._sync_folder(path.parent)

    def _make_folder(self, folder: Path) -> None:
        """Create a folder and its parents, and sync each: a file survives a crash only if its folders do."""
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
    """The keys of the files in a folder and in its subfolders: the paths from the folder, after a prefix."""
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
        """Open the file system, without a cache of its listings.

        Args:
            url: URL of the root; fsspec knows its protocol.
        """
        self.fs, self.root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self.root = self.root.rstrip("/")

    def create(self, key: str, data: bytes) -> None:
        """Write with the condition that the key is absent, or under a lock in memory; see `Backend.create`."""
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
        """Write the object; see `Backend.put`."""
        self.fs.pipe_file(self._path(key), data)

    def get(self, key: str) -> bytes:
        """Read the object; see `Backend.get`."""
        return bytes(self.fs.cat_file(self._path(key)))

    def delete_leftovers(self, older_s: float) -> None:
        """Delete old probe objects; see `Backend.delete_leftovers`.

        Object stores have no other temporary files, because their writes are atomic.
        """
        oldest = datetime.now(UTC) - timedelta(seconds=older_s)
        for path in self.fs.find(self._path(TEMPORARY)):
            with suppress(FileNotFoundError):  # its writer is alive and has deleted it
                if self.fs.modified(path) < oldest:
                    self.fs.rm_file(path)

    def delete_empty_folders(self) -> None:
        """Do nothing: an object store has no folders."""

    def size(self, key: str) -> int:
        """Ask for the object's size; see `Backend.size`."""
        return int(self.fs.size(self._path(key)))

    def open(self, key: str) -> BinaryIO:
        """Open the object; see `Backend.open`."""
        return self.fs.open(self._path(key), "rb")  # type: ignore[no-any-return]

    def read(self, key: str, start: int, end: int) -> bytes:
        """Read a range of the object; see `Backend.read`."""
        return bytes(self.fs.cat_file(self._path(key), start=start, end=end))

    def delete(self, keys: list[str]) -> None:
        """Delete the objects, on S3 many per request; see `Backend.delete`."""
        if "s3" in self.fs.protocol:  # one request deletes up to 1000 keys, and ignores absent keys
            self.fs.rm([self._path(key) for key in keys])
            return
        for key in keys:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self._path(key))

    def list(self, prefix: str) -> list[str]:
        """List the objects; see `Backend.list`."""
        folder, _, name_prefix = prefix.rpartition("/")
        paths = self.fs.find(self._path(folder).rstrip("/"), prefix=name_prefix)
        keys = (path.removeprefix(self.root).lstrip("/") for path in paths)
        return sorted(key for key in keys if key.startswith(prefix) and not _is_hidden(key))

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"


def _is_hidden(key: str) -> bool:
    return re.search(r"(^|/)\.", key) is not None


def backend_for(url: str) -> Backend:
    """Choose the backend for a store.

    Args:
        url: the store's URL, or a local path.

    Returns:
        A `LocalBackend` for a local folder, else an `FsspecBackend`.

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
        """Open the folder; this writes nothing.

        Args:
            url: the folder, as any fsspec URL or a local path.
            backend: raw operations; None: chosen by the URL.
            deadline_s: seconds after which an operation is no longer retried.
            clock: measures the deadline and sleeps between attempts.

        Raises:
            UserError: fsspec does not support the protocol, or its package is not installed.
        """
        self.url = url.rstrip("/")
        self.backend = backend_for(url) if backend is None else backend
        self.deadline_s = deadline_s
        self.clock = clock
        self._others: dict[str, ObjectStore] = {}

    def of_run(self, run: str | None) -> ObjectStore:
        """Find the store of another run.

        Args:
            run: the run's URL, ``../name`` for a run beside this one, or None for this run.

        Returns:
            The run's store, the same one in every call.

        Raises:
            UserError: fsspec does not support the protocol, or its package is not installed.
        """
        if run is None:
            return self
        if run not in self._others:
            parent, _, _ = self.url.rpartition("/")
            url = f"{parent}/{run.removeprefix('../')}" if run.startswith("../") else run
            self._others[run] = ObjectStore(url, deadline_s=self.deadline_s, clock=self.clock)
        return self._others[run]

    def create(self, key: str, data: bytes) -> None:
        """Write an object if its key is absent. Not retried.

        Args:
            key: the object's key.
            data: its bytes.

        Raises:
            FileExistsError: the key exists.
            Exception: any other error; the object may or may not have been written.
        """
        self.backend.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing any object under its key.

        Args:
            key: the object's key.
            data: its bytes.

        Raises:
            UserError: the bucket does not exist, or the store refuses the write.
        """
        try:
            self.retry(f"write {key}", lambda: self.backend.put(key, data))
        except FileNotFoundError as error:
            raise self.nowhere(error) from error

    def get(self, key: str) -> bytes:
        """Read a whole object; see `Backend.get`."""
        return self.retry(f"read {key}", lambda: self.backend.get(key))

    def read(self, key: str, start: int, end: int) -> bytes:
        """Read a part of an object; see `Backend.read`."""
        return self.retry(f"read {key}", lambda: self.backend.read(key, start, end))

    def parts(self, key: str, size: int) -> Iterator[bytes]:
        """Read an object in parts.

        Args:
            key: the object's key.
            size: bytes in a part; the last part may be shorter.

        Yields:
            The parts, in order.

        Raises:
            FileNotFoundError: the key is absent.
        """
        end = self.retry(f"read {key}", lambda: self.backend.size(key))
        for start in range(0, end, size):
            part = partial(self.backend.read, key, start, min(start + size, end))
            yield self.retry(f"read {key}", part)

    def get_if_there(self, key: str) -> bytes | None:
        """Read a whole object that may be absent.

        Args:
            key: the object's key.

        Returns:
            Its bytes, or None if the key is absent.
        """
        try:
            return self.get(key)
        except FileNotFoundError:
            return None

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, ignoring absent keys; see `Backend.delete`."""
        doomed = list(keys)
        if doomed:
            self.retry(f"delete {doomed[0]}", lambda: self.backend.delete(doomed))

    def list(self, prefix: str) -> list[str]:
        """List the keys that begin with a prefix; see `Backend.list`."""
        return self.retry(f"list {prefix}", lambda: self.backend.list(prefix))

    def delete_leftovers(self) -> None:
        """Delete temporary files older than an hour, which killed writers left behind."""
        self.retry("delete temporary files", lambda: self.backend.delete_leftovers(LEFTOVERS_S))

    def delete_empty_folders(self) -> None:
        """Delete the empty folders of a local store, including the store's own folder."""
        self.retry("delete empty folders", self.backend.delete_empty_folders)

    def pause(self, attempt: int) -> float:
        """Choose the wait after a failed attempt: exponential and bounded, with random jitter so that writers do not
        collide again.

        Args:
            attempt: number of the attempt, from 1.

        Returns:
            Seconds to wait.
        """
        return random.uniform(0, min(0.05 * 2**attempt, 5.0, self.deadline_s / 2))

    def honours_create(self) -> bool:
        """Test create-if-absent on temporary objects.

        Several writers race for each object, and a later writer follows. Some stores refuse the later writer but let
        several racing writers succeed.

        Returns:
            Whether at most one writer won each race, and every later writer was refused.

        Raises:
            UserError: the bucket does not exist, the folder cannot be made, or the store refuses to write.
        """
        keys = [f"{TEMPORARY}/probe-{uuid.uuid4().hex}" for _ in range(PROBE_ROUNDS)]
        try:
            with ThreadPoolExecutor(PROBE_WRITERS) as writers:
                for key in keys:
                    writes = partial(self._wins, key, at=threading.Barrier(PROBE_WRITERS))
                    if sum(writers.map(writes, range(PROBE_WRITERS))) > 1 or self._wins(key, PROBE_WRITERS):
                        return False
            return True
        finally:
            with suppress(FileNotFoundError):  # the bucket does not exist
                self.delete(keys)

    def _wins(self, key: str, number: int, at: threading.Barrier | None = None) -> bool:
        """Whether the store confirms that this writer created the object. A writer whose answer is lost does not count:
        in a real commit it reads the object back."""
        if at is not None:
            at.wait()
        try:
            self.retry("probe", lambda: self.backend.create(key, b"%d" % number))
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise self.nowhere(error) from error
        return True

    def nowhere(self, error: FileNotFoundError) -> UserError:
        """Make the error for a write to a bucket that does not exist, or to a folder that cannot be made.

        Args:
            error: what the write raised.

        Returns:
            The error to raise.
        """
        if isinstance(self.backend, LocalBackend):
            return UserError(f"the folder {self.url} cannot be made ({error}): choose another folder in run.store")
        return UserError(f"the store {self.url} does not exist: create its bucket first ({error})")

    def full(self, action: str) -> StoreFull:
        """Make the error for a full disk.

        Args:
            action: what failed, such as ``write KEY``.

        Returns:
            The error to raise.
        """
        return StoreFull(f"could not {action}: the disk that holds {self.url} is full; free some space, and resume")

    def retry(self, action: str, operation: Callable[[], T]) -> T:
        """Run an operation, repeating it after transient errors until the deadline.

        Args:
            action: what the operation does, for error messages, such as ``write KEY``.
            operation: must be safe to repeat.

        Returns:
            The operation's result.

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
    """Tell whether an error says that the disk or the quota is full.

    Args:
        error: what an operation raised.

    Returns:
        Whether it says so.
    """
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_refusal(error: BaseException) -> bool:
    """Tell whether the store refuses an operation for good: no permission, no credentials, or not a writable folder.

    Args:
        error: what the operation raised.

    Returns:
        Whether it is a refusal.
    """
    is_unwritable = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ELOOP)
    is_denied = isinstance(error, PermissionError | NotADirectoryError) or type(error).__name__ == "NoCredentialsError"
    return is_unwritable or is_denied


def is_transient(error: BaseException) -> bool:
    """Tell whether a retry may help: the error is not an answer from the store, a refusal or a programming error.

    Args:
        error: what the operation raised.

    Returns:
        Whether a retry may help.
    """
    answers = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    mistakes = (TypeError, AttributeError, NameError, AssertionError)
    return isinstance(error, Exception) and not isinstance(error, (*answers, *mistakes)) and not is_refusal(error)


def _http_status(error: OSError) -> int | None:
    """The HTTP status of the response behind an s3fs error, or None."""
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # type: ignore[no-any-return]
