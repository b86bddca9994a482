"""What resuming costs in the length of a run: reading the log, claiming, and sweeping, at iteration 10 and at 1 000.

    python benchmarks/resume.py [--repeats 50]

A synthetic log in a folder: every iteration has nine stages with their manifests, a snapshot of two roles, the
retirement of an old one, and its index. The two runs take turns, so that a noisy machine is noisy for both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from infra.manifest import Fingerprint, Manifest
from infra.objects import LocalBackend, Objects
from infra.records import Claim, ObjectRef, Retire, Snapshot, Stage, Weights
from infra.store import ROW_STAGES, RunStore
from rlhf.config import STAGES, RunConfig, parse_config

CONFIG: RunConfig = parse_config({"model": {"path": "model"}, "data": {"train": ["prompts"]}}, "benchmark")


class Counting(LocalBackend):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("create", "put", "get", "size", "delete", "list"):
            self.requests[name] += 1
        return super().__getattribute__(name)


def claim() -> Claim:
    start = {role: Weights(version=0, digest="0" * 64) for role in ("actor", "critic", "reference")}
    config = CONFIG.model_dump(mode="json")
    return Claim(config=config, code="", packages={}, threads=1, host="", shards=4, initial=start)


def write(folder: Path, iterations: int) -> None:
    """A run of so many closed iterations, and one that is open."""
    store = RunStore(Objects(f"file://{folder}", LocalBackend(str(folder))))
    store.log.read()
    store.log.claim(claim())
    for iteration in range(iterations + 1):
        for name in STAGES:
            role = name.removeprefix("update_") if name.startswith("update_") else None
            weights = None if role is None else Weights(version=iteration + 1, digest=f"{iteration:064d}")
            manifest = Manifest(
                iteration=iteration, stage=name, epoch=1, attempt=0, fingerprint=Fingerprint(parts={}), config={}
            )
            ref = store.write_manifest(manifest)
            store.commit(
                Stage(iteration=iteration, stage=name, manifest=ref, fingerprint="0" * 64, role=role, weights=weights)
            )
            if iteration == iterations:
                return
        refs = {role: ObjectRef(key=f"checkpoints/{role}/{iteration}", sha256="0" * 64) for role in ("actor", "critic")}
        old = [Retire(version=iteration - 2)] if iteration > 2 and (iteration - 2) % 10 else []
        store.close({"loss": 0.0}, Snapshot(version=iteration + 1, roles=refs), *old)


def resume(folder: Path) -> tuple[float, Counter[str]]:
    """Milliseconds, and store requests."""
    backend = Counting(str(folder))
    store = RunStore(Objects(f"file://{folder}", backend))
    started = time.perf_counter()
    store.log.read()
    store.log.claim(claim())
    store.sweep((*ROW_STAGES, "validate"))
    return 1e3 * (time.perf_counter() - started), backend.requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as temporary:
        folders = {length: Path(temporary) / str(length) for length in (10, 1000)}
        for length, folder in folders.items():
            write(folder, length)
        found: dict[int, list[float]] = {length: [] for length in folders}
        requests: dict[int, Counter[str]] = {}
        for _ in range(repeats):
            for length, folder in folders.items():
                milliseconds, requests[length] = resume(folder)
                found[length].append(milliseconds)
    for length, times in found.items():
        print(f"iteration {length:>5}: median {statistics.median(times):.1f} ms, requests {dict(requests[length])}")
    ratio = statistics.median(found[1000]) / statistics.median(found[10])
    print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
