"""Drivers in processes of their own that take a run from each other as fast as they can.

python -m tests.racing --ceph --rounds 20       # many races, on Ceph's gateway instead of moto
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import uuid
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier

from ratchet.infra.store.log import Fenced
from ratchet.infra.store.run_store import RunStore
from tests import ceph
from tests.bare_run import claim, write
from tests.processes import PRELOAD
from tests.s3_server import moto_server, s3_at


@dataclass
class Outcome:
    terms: list[int] = field(default_factory=list)
    """Terms of the claims that they won."""
    committed: list[int] = field(default_factory=list)
    """Numbers of the shards whose commit was acknowledged."""
    fenced: int = 0


def race(url: str, drivers: int, claims: int) -> Outcome:
    """Lets drivers claim the run at the same moment, so many times each, and commit a shard after each claim.

    Asserts that the log agrees with the answers that they got.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    told = Outcome()
    with context.Manager() as manager, ProcessPoolExecutor(drivers, context) as pool:
        together = manager.Barrier(drivers)
        driven = [pool.submit(_drive, url, number, claims, environment, together) for number in range(drivers)]
        try:
            for future in as_completed(driven):
                outcome = future.result()
                told.terms += outcome.terms
                told.committed += outcome.committed
                told.fenced += outcome.fenced
        except Exception:
            together.abort()  # the others would wait for the one that failed
            raise
    _check(url, told, drivers * claims)
    return told


def _drive(url: str, number: int, claims: int, environment: dict[str, str], together: Barrier) -> Outcome:
    os.environ.update(environment)
    store, outcome = RunStore.at(url), Outcome()
    store.log.read()
    for attempt in range(claims):
        together.wait(timeout=600)
        claim(store)
        outcome.terms.append(store.log.term)
        shard = number * claims + attempt
        try:
            store.commit(write(store, shard))
        except Fenced:
            outcome.fenced += 1
        else:
            outcome.committed.append(shard)
    return outcome


def _check(url: str, told: Outcome, claims: int) -> None:
    assert sorted(told.terms) == list(range(1, claims + 1)), "each term has one winner"
    store = RunStore.at(url)
    state = store.log.read()
    assert (state.term, state.slot + 1) == (claims, claims + len(told.committed)), "and so has each slot of the log"
    committed = store.committed_shards("generate")
    assert sorted(committed) == sorted(told.committed) != []
    files = sorted(commit.data.key for commit in committed.values())
    assert store.objects.list("trajectories/") == files, "who was fenced left nothing"


def main() -> None:
    parser = argparse.ArgumentParser(prog="racing", description=__doc__.partition("\n")[0])
    parser.add_argument("--ceph", action="store_true", help="on Ceph's gateway, not on moto (make ceph)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--drivers", type=int, default=16)
    parser.add_argument("--claims", type=int, default=2, help="of each driver in a round")
    arguments = parser.parse_args()
    if arguments.ceph and (reason := ceph.missing()):
        parser.error(reason)
    total = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        server = ceph.ceph_server(Path(folder) / "ceph") if arguments.ceph else moto_server()
        with server as endpoint, s3_at(endpoint) as bucket:
            for _ in range(arguments.rounds):
                told = race(f"{bucket}/{uuid.uuid4().hex}", arguments.drivers, arguments.claims)
                total.update(claims=len(told.terms), committed=len(told.committed), fenced=told.fenced)
    counts = ", ".join(f"{count} {name}" for name, count in total.items())
    print(f"{arguments.rounds} races of {arguments.drivers} drivers: {counts}; one winner at every slot")


if __name__ == "__main__":
    main()
