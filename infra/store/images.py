"""The images of a run, in the folder `images/` by the sha256 of their encoded bytes: each once, however many
trajectories show it.

Columns hold only the digests. A shard that names an image is committed after the image is written, and a fork finds the
images of the rows that it shares in the folders of its ancestors.
"""

from __future__ import annotations

import re

from ratchet.infra.store.lineage import Lineage
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import sha256_of
from ratchet.rlhf.errors import UserError

FOLDER = "images/"
DIGEST = re.compile("[0-9a-f]{64}")


class Images:
    """The images that a run's folder and those of its ancestors hold. Thread-safe.

    Methods raise `StoreUnavailable` if the store does not answer.
    """

    def __init__(self, objects: ObjectStore) -> None:
        """Opens the images of a run's folder; this reads nothing."""
        self._objects = objects
        self._lineage = Lineage(objects)

    def put(self, data: bytes) -> str:
        """Stores the encoded bytes of an image, unless this run's folder has them, and returns their digest.

        A fork stores its own copy of an ancestor's image: the ancestor's `vacuum` does not know the fork's rows.
        """
        digest = sha256_of(data)
        key = key_of(digest)
        if _size(self._objects, key) != len(data):  # absent, or cut off
            self._objects.put(key, data)
        return digest

    def get(self, digest: str) -> bytes:
        """Reads the encoded bytes of an image.

        Raises:
            UserError: `digest` is no digest, or the image is missing or damaged.
        """
        key = key_of(digest)
        damaged = None
        for run in self._lineage:
            data = run.get_if_there(key)
            if data is not None and sha256_of(data) == digest:
                return data
            if data is not None and damaged is None:
                damaged = run.url
        what = "is missing" if damaged is None else "is damaged"
        raise UserError(
            f"{damaged or self._objects.url}/{key} {what}: restore it from a backup, or copy the image whose sha256 "
            "this is to there"
        )


def key_of(digest: str) -> str:
    """Returns the key of an image. Raises `UserError` if the digest is none, such as a path in a damaged column."""
    if not is_digest(digest):
        raise UserError(f"{digest!r} is no digest of an image: name it by the 64 hex digits of the column images")
    return f"{FOLDER}{digest}"


def is_digest(text: str) -> bool:
    """True if a text has the form of a digest."""
    return DIGEST.fullmatch(text) is not None


def digest_in(key: str) -> str | None:
    """Returns the digest in the key of an image; None if the key is another file's."""
    name = key.removeprefix(FOLDER)
    return name if name != key and is_digest(name) else None


def _size(objects: ObjectStore, key: str) -> int | None:
    """Returns the size of an object; None if it is absent."""
    try:
        return objects.retry(f"read {key}", lambda: objects.backend.size(key))
    except FileNotFoundError:
        return None
