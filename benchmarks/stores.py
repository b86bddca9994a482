"""Measures a commit on a disk, on moto and on Ceph's S3 gateway (`make ceph`), in turns.

OMP_NUM_THREADS=1 python benchmarks/stores.py [--repeats 100]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import s3fs

from ratchet.infra.store.run_store import RunStore
from tests.bare_run import claimed, write
from tests.ceph import ceph_server, missing
from tests.s3_server import moto_server, s3_at

requests: Counter[str] = Counter()
_call_s3 = s3fs.S3FileSystem._call_s3


async def counted(self: s3fs.S3FileSystem, method: str, *arguments: object, **options: object) -> object:
    requests[method] += 1
    return await _call_s3(self, method, *arguments, **options)


def spread(times: list[float], base: list[float]) -> str:
    """Formats the ratio within a turn: its median, and its quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times, base, strict=True)], n=4)
    return f"{middle:.1f} ({low:.1f}–{high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    s3fs.S3FileSystem._call_s3 = counted
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stores: dict[str, RunStore] = {"disk": claimed(f"file://{folder}/run")}
        for name, server in (("moto", moto_server()), ("ceph", ceph_server(folder / "ceph"))):
            with s3_at(stack.enter_context(server)) as bucket:
                stores[name] = claimed(f"{bucket}/{uuid.uuid4().hex}")
        times: dict[tuple[str, str], list[float]] = {}
        asked: dict[str, Counter[str]] = {}
        for shard in range(arguments.repeats):
            for name, store in stores.items():
                started = time.perf_counter()
                written = write(store, shard)
                between, before = time.perf_counter(), Counter(requests)
                store.commit(written)
                ended = time.perf_counter()
                asked[name] = requests - before
                times.setdefault(("a shard's file", name), []).append(1e3 * (between - started))
                times.setdefault(("its commit", name), []).append(1e3 * (ended - between))
        print("| median of ms | disk | moto | Ceph | Ceph / disk | Ceph / moto |\n|---|---|---|---|---|---|")
        for what in ("a shard's file", "its commit"):
            disk, moto, ceph = (times[what, name] for name in stores)
            medians = " | ".join(f"{statistics.median(values):.1f}" for values in (disk, moto, ceph))
            print(f"| {what} | {medians} | {spread(ceph, disk)} | {spread(ceph, moto)} |")
        for name in ("moto", "ceph"):
            print(f"requests of a commit on {name}: {dict(asked[name])}")


if __name__ == "__main__":
    main()
