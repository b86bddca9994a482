"""Checks a run: its log, and the digest of every object that the log references, with repairs for harmless damage."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ratchet.infra.execution.claims import run_json, run_json_is_readable
from ratchet.infra.progress import StepProgress, report
from ratchet.infra.runs.run import no_run
from ratchet.infra.runs.vacuum import KEPT, Reached, images_of
from ratchet.infra.store import judge_answers
from ratchet.infra.store.chain import AT_ONCE, Broken, Chain, last_slot
from ratchet.infra.store.images import FOLDER, Images, digest_in
from ratchet.infra.store.log import TAIL, Corrupt
from ratchet.infra.store.records import ObjectRef
from ratchet.infra.store.run_store import RunStore, is_served, is_written, served_digest
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import IMAGES

RANGE = 2**24
"""Bytes per read."""


@dataclass(frozen=True)
class Finding:
    """A damaged or missing object, or one that nothing references."""

    key: str
    what: str
    """The problem."""
    means: str
    """The consequences and the fix."""
    harmless: bool = False
    repair: Callable[[], None] | None = None
    """Fixes the problem; None if that is not safe."""


def verify(store: RunStore) -> Iterator[Finding]:
    """Yields the problems of the whole run, those of the log first. Neither claims the run nor writes to it.

    The run may be driven meanwhile; objects written after the check has started are ignored. Raises `UserError` if
    there is no run, or this release does not read it.
    """
    keys = store.objects.list("")
    last = last_slot(keys)
    if last < 0:
        raise no_run(store.url)
    with suppress(Corrupt):  # damage is reported below; this call only rejects unknown schema versions
        store.log.read()
    reached, is_whole = Reached(store), True
    for record in Chain(store).read(last):
        if isinstance(record, Broken):
            is_whole = False
            yield Finding(
                record.key,
                record.what,
                "resume and vacuum are refused if they need this record; restore it from a backup, or fork from an "
                "iteration before it (`ratchet fork RUN --at K`)",
            )
        elif reached.add(record):
            is_whole = False  # the damaged manifest is reported below
    digests = dict(reached.digests)
    for ref in reached.checkpoints():
        digests[ref.key] = ref.sha256
        with suppress(Corrupt):
            digests |= {file.key: file.sha256 for file in store.checkpoint(ref).files.values()}
    digests |= {key: served_digest(key) for key in keys if is_served(key)}
    yield from _objects(store, digests)
    images, are_all = _named_images(reached)
    yield from _images(store, sorted(images), keys)
    if not are_all or reached.is_at_work(keys):  # `ratchet vacuum` leaves all images alone
        images |= {digest for key in keys if (digest := digest_in(key)) is not None}
    yield from _beside_the_log(store)
    yield from _answers(store, [key for key in keys if key.startswith(judge_answers.FOLDER)])
    for key in keys:
        # with a damaged log it is unknown which objects are referenced
        if is_whole and key not in digests and not key.startswith(KEPT) and digest_in(key) not in images:
            means = (
                "`ratchet vacuum` deletes it" if is_written(key) else "Ratchet did not write it, and leaves it alone"
            )
            yield Finding(key, "is not referenced by any record", means, harmless=True)


def _objects(store: RunStore, digests: dict[str, str]) -> Iterator[Finding]:
    """Compares the objects with their digests, several at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        actual = pool.map(lambda key: _digest(store, key), digests)
        for done, (key, digest) in enumerate(zip(digests, actual, strict=True), 1):
            if done % 64 == 0 or done == len(digests):
                report(StepProgress(what="objects", done=done, total=len(digests)))
            if digest != digests[key]:
                yield Finding(key, "is gone" if digest is None else "is damaged", _means(key))


def _named_images(reached: Reached) -> tuple[set[str], bool]:
    """Returns the digests that rows name, and False if rows are missing or damaged."""
    images: set[str] = set()
    are_all = True
    for rows in reached.rows_with_images([IMAGES]):
        if isinstance(rows, Corrupt):
            are_all = False
        else:
            images |= images_of(rows)
    return images, are_all


def _images(store: RunStore, images: Sequence[str], keys: Sequence[str]) -> Iterator[Finding]:
    """Checks the images that rows name, several at a time; an ancestor of a fork may have them."""
    there, stored = set(keys), Images(store.objects)

    def what_is_wrong(digest: str) -> str | None:
        key = f"{FOLDER}{digest}"
        if key in there:
            return None if _digest(store, key) == digest else "is damaged"
        try:
            stored.get(digest)
        except UserError:
            return "is gone"
        return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for digest, what in zip(images, pool.map(what_is_wrong, images), strict=True):
            if what is not None:
                yield Finding(f"{FOLDER}{digest}", what, _means(FOLDER))


def _digest(store: RunStore, key: str) -> str | None:
    """Returns the sha256 of an object; None if it is missing."""
    digest = hashlib.sha256()
    try:
        for part in store.objects.parts(key, RANGE):
            digest.update(part)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def _means(key: str) -> str:
    if key.startswith("checkpoints/rollout/"):
        return "rollout workers cannot load these weights, and wait for the next iteration; the run resumes"
    kind = key.partition("/")[0]
    return {
        "trajectories": "pandas, query and replays cannot read these rows; the run resumes if the iteration is closed",
        "manifests": "this stage cannot be read, forked at or replayed; the run resumes if the iteration is closed",
        "index": "the iterations of its page cannot be read; resuming needs the newest index",
        "metrics": "the metrics of this iteration are lost; the run resumes",
        "images": "trajectories with this image cannot be shown whole, exported or trained on again",
        "canaries": "this check of the rollout's weights cannot be looked at; the run resumes",
        "served": "answers of `ratchet serve` are lost; the run resumes",
        "checkpoints": "this snapshot cannot be loaded: resuming from it is refused",
    }.get(kind, "it is lost") + "; restore it from a backup"


def _beside_the_log(store: RunStore) -> Iterator[Finding]:
    """Checks the copies of the log's data, which can be written again."""
    if not run_json_is_readable(store):
        yield Finding(
            "run.json",
            "is gone or damaged",
            "it is a copy of data in the log; --repair writes it again, as does resuming",
            harmless=True,
            repair=lambda: store.objects.put("run.json", run_json(store)),
        )
    hint = store.objects.get_if_there(TAIL)
    try:
        if hint is not None:
            store.log.load_index(ObjectRef.model_validate_json(hint))
    except (ValueError, Corrupt):
        yield Finding(
            TAIL,
            "is damaged, or names no index",
            "it is only a hint that saves a few reads; --repair deletes it, and the next close writes it again",
            harmless=True,
            repair=lambda: store.objects.delete([TAIL]),
        )


def _answers(store: RunStore, keys: list[str]) -> Iterator[Finding]:
    """Checks the judge's answers, several at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for key, data in zip(keys, pool.map(store.objects.get_if_there, keys), strict=True):
            if data is not None and not judge_answers.is_sound(data):
                yield Finding(
                    key,
                    "is damaged",
                    "it is an answer of the judge; --repair deletes it, and the judge is asked again",
                    harmless=True,
                    repair=partial(store.objects.delete, [key]),
                )
