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
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from infra.store.log import Fenced
from infra.store.run_store import RunStore
from tests import ceph
from tests.bare_run import claim, write
from tests.processes import PRELOAD
from tests.s3_server import moto_server, s3_at


@dataclass
class Outcome:
    """What the drivers were told."""

    terms: list[int] = field(default_factory=list)
    """Of the claims that they won."""
    committed: list[int] = field(default_factory=list)
    """Numbers of the shards whose commit was acknowledged."""
    fenced: int = 0


def race(url: str, drivers: int, claims: int) -> Outcome:
    """Let so many drivers claim the run at the same moment, so many times each; after each claim they commit a shard
    of their own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    together: Barrier = context.Barrier(drivers)
    outcomes: Queue[Outcome] = context.Queue()
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    processes = [
        context.Process(target=_drive, args=(url, number, claims, environment, together, outcomes))
        for number in range(drivers)
    ]
    for process in processes:
        process.start()
    told = Outcome()
    for _ in processes:
        outcome = outcomes.get(timeout=600)
        told.terms += outcome.terms
        told.committed += outcome.committed
        told.fenced += outcome.fenced
    for process in processes:
        process.join()
    return told


def _drive(
    url: str, number: int, claims: int, environment: dict[str, str], together: Barrier, outcomes: Queue[Outcome]
) -> None:
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
    outcomes.put(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(prog="racing", description=__doc__.partition("\n")[0])
    parser.add_argument("--ceph", action="store_true", help="on Ceph's gateway, not on moto (make ceph)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--drivers", type=int, default=16)
    parser.add_argument("--claims", type=int, default=2, help="of each driver in a round")
    arguments = parser.parse_args()
    total = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        server = ceph.ceph_server(Path(folder) / "ceph") if arguments.ceph else moto_server()
        with server as endpoint, s3_at(endpoint) as bucket:
            for _ in range(arguments.rounds):
                url = f"{bucket}/{uuid.uuid4().hex}"
                outcome = race(url, arguments.drivers, arguments.claims)
                store = RunStore.at(url)
                store.log.read()
                assert sorted(outcome.terms) == list(range(1, arguments.drivers * arguments.claims + 1))
                assert sorted(store.committed_shards("generate")) == sorted(outcome.committed)
                total.update(claims=len(outcome.terms), committed=len(outcome.committed), fenced=outcome.fenced)
    counts = ", ".join(f"{count} {name}" for name, count in total.items())
    print(f"{arguments.rounds} races of {arguments.drivers} drivers: {counts}; one winner at every slot")


if __name__ == "__main__":
    main()
