"""Caches a judge's answers in the run's folder by the digest of the question: no question is asked twice.

An answer is written as soon as it arrives, and no record names it: it is not part of the run's history, and losing it
costs a question. A fork finds the answers of its ancestors.
"""

from __future__ import annotations

from pydantic import BaseModel

from ratchet.infra.store.lineage import Lineage
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import sha256_of

FOLDER = "answers/"


class StoredAnswer(BaseModel):
    sha256: str
    answer: str


class JudgeAnswers:
    """The answers of a run, by the sha256 of their question in hex. Thread-safe.

    Methods raise `Corrupt` if an answer is damaged, and `StoreUnavailable` if the store does not answer.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._lineage = Lineage(objects)

    def get(self, digest: str) -> str | None:
        """Returns the answer to a question; None if neither this run nor an ancestor has one."""
        found = (_read(run, digest) for run in self._lineage)
        return next((answer for answer in found if answer is not None), None)

    def keep(self, digest: str, answer: str) -> str:
        """Stores the answer to a question, unless this run has one, and returns the stored answer."""
        data = StoredAnswer(sha256=sha256_of(answer.encode()), answer=answer).model_dump_json().encode()
        key = key_of(digest)
        try:  # a repeated create that meets its own object reads it back below
            self._objects.retry(f"write {key}", lambda: self._objects.create(key, data))
        except FileExistsError:
            return _read(self._objects, digest) or answer
        except FileNotFoundError as error:
            raise self._objects.nowhere(error) from error
        return answer


def key_of(digest: str) -> str:
    """Returns the key of the answer to a question."""
    return f"{FOLDER}{digest}.json"


def is_sound(data: bytes) -> bool:
    """True if the bytes are a whole answer."""
    try:
        _parse(data)
    except ValueError:
        return False
    return True


def _read(run: ObjectStore, digest: str) -> str | None:
    data = run.get_if_there(key_of(digest))
    try:
        return None if data is None else _parse(data)
    except ValueError:
        raise Corrupt(
            f"{run.url}/{key_of(digest)} is damaged: delete it (`ratchet verify RUN --repair` does), and the judge is "
            "asked again"
        ) from None


def _parse(data: bytes) -> str:
    """Returns the answer. Raises `ValueError` if the bytes are not a whole answer."""
    stored = StoredAnswer.model_validate_json(data)
    if stored.sha256 != sha256_of(stored.answer.encode()):
        raise ValueError("the answer is not the one that was written")
    return stored.answer
