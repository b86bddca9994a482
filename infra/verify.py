"""Whether a run is what was written: its log, and every object that the log reaches; and what can be done where not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from infra.execution.claims import run_json, run_json_is_readable
from infra.progress import StepProgress, report
from infra.store.chain import AT_ONCE, Broken, Chain, last_slot
from infra.store.log import TAIL, Corrupt
from infra.store.records import ObjectRef
from infra.store.run_store import RunStore
from infra.vacuum import KEPT, Reached
from rlhf.errors import UserError

RANGE = 2**24
"""Bytes that are read at once."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it was written, or that nothing needs."""

    key: str
    what: str
    means: str
    """What follows from it, and what can be done."""
    harmless: bool = False
    repair: Callable[[], None] | None = None
    """Where that is safe."""


def verify(store: RunStore) -> Iterator[Finding]:
    """Read the whole run, and say what is wrong, the log first.

    Nothing is claimed and nothing is written: the run may be driven meanwhile, and what is written after the beginning
    is not looked at. Raises `UserError` if there is no run, or one that this release does not read.
    """
    there = store.objects.list("")
    last = last_slot(there)
    if last < 0:
        raise UserError(f"there is no run at {store.url}: check --store (or RATCHET_STORE) and the name")
    with suppress(Corrupt):  # which is told below, with all the rest; an older release's run is refused
        store.log.read()
    reached, is_whole = Reached(store), True
    for found in Chain(store).read(last):
        if isinstance(found, Broken):
            is_whole = False
            yield Finding(
                found.key,
                found.what,
                "resuming and vacuum refuse where it matters; restore the record from a backup, or fork from an "
                "iteration before it (`ratchet fork RUN --at K`)",
            )
        elif reached.add(found):
            is_whole = False  # the object is named below
    digests = dict(reached.digests)
    for ref in reached.checkpoints():
        digests[ref.key] = ref.sha256
        with suppress(Corrupt):
            digests |= {file.key: file.sha256 for file in store.checkpoint(ref).files.values()}
    yield from _objects(store, digests)
    yield from _beside_the_log(store)
    for key in there:
        if is_whole and key not in digests and not key.startswith(KEPT):
            yield Finding(key, "is named by no record", "`ratchet vacuum` deletes it", harmless=True)


def _objects(store: RunStore, digests: dict[str, str]) -> Iterator[Finding]:
    """Every object's bytes against its digest, several at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda key: _digest(store, key), digests)
        for done, (key, digest) in enumerate(zip(digests, found, strict=True), 1):
            if done % 64 == 0 or done == len(digests):
                report(StepProgress(what="objects", done=done, total=len(digests)))
            if digest != digests[key]:
                yield Finding(key, "is gone" if digest is None else "is damaged", _means(key))


def _digest(store: RunStore, key: str) -> str | None:
    digest = hashlib.sha256()
    try:
        for part in store.objects.parts(key, RANGE):
            digest.update(part)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def _means(key: str) -> str:
    kind = key.partition("/")[0]
    return {
        "trajectories": "these rows are lost to pandas, query and replays; a run whose iteration is closed resumes",
        "manifests": "this stage cannot be read, forked at or replayed; a run whose iteration is closed resumes",
        "index": "the iterations of its page cannot be looked up; resuming needs the newest index",
        "metrics": "the metrics of this iteration are lost; the run resumes",
        "checkpoints": "this snapshot cannot be loaded: resuming from it is refused",
    }.get(kind, "it is lost") + "; restore it from a backup"


def _beside_the_log(store: RunStore) -> Iterator[Finding]:
    """What is only a copy of what the log says, and can be written anew."""
    if not run_json_is_readable(store):
        yield Finding(
            "run.json",
            "is gone or damaged",
            "it is a copy of what the log has; --repair writes it anew, as resuming does",
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
            "it is a hint, and costs a few reads; --repair deletes it, and the next close writes it anew",
            harmless=True,
            repair=lambda: store.objects.delete([TAIL]),
        )
