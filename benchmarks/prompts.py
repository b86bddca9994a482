"""Measures memory and time of drawing prompts from a file of a million rows that is not held in memory.

    OMP_NUM_THREADS=1 python benchmarks/prompts.py [--rows 1000000]

Each kind of file is read by a process of its own: it indexes the file, draws 64 prompts as an iteration does, and reads
all of them once as the check before the start does. The memory is the growth of the process's largest resident set,
from after the imports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.rlhf.data.prompts import PromptDataset

KINDS = ("prompts.parquet", "prompts.jsonl")
TEXT = "x" * 500
BATCH = 10_000


def write(path: Path, rows: int) -> None:
    batches = (range(start, min(start + BATCH, rows)) for start in range(0, rows, BATCH))
    columns = ([{"prompt": f"{row:09d} {TEXT}", "answer": str(row)} for row in batch] for batch in batches)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(f"{json.dumps(row)}\n" for batch in columns for row in batch)
        return
    schema = pa.schema({"prompt": pa.string(), "answer": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for batch in columns:
            writer.write_table(pa.Table.from_pylist(batch, schema), row_group_size=1000)


def peak_mib() -> float:
    """Returns the largest resident set of this process. `getrusage` would also count its parent's."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def measure(path: Path, pipe: Connection) -> None:
    before, began = peak_mib(), time.perf_counter()
    dataset = PromptDataset([path])
    indexed = time.perf_counter()
    prompts = [dataset[row] for row in dataset.draw(0, 0, 64)]
    drawn, memory = time.perf_counter(), peak_mib()
    assert len({prompt.where for prompt in prompts}) == 64
    assert sum(1 for _ in dataset) == len(dataset)
    checked = time.perf_counter()
    pipe.send((memory - before, peak_mib() - before, indexed - began, drawn - indexed, checked - drawn))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    spawning = multiprocessing.get_context("spawn")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / kind
            write(path, rows)
            receiver, sender = spawning.Pipe(duplex=False)
            process = spawning.Process(target=measure, args=(path, sender))
            process.start()
            memory, after_check, index_s, draw_s, check_s = receiver.recv()
            process.join()
            size = path.stat().st_size / 2**20
        print(
            f"{kind}: {rows} rows, {size:.0f} MiB; index and draw {memory:.0f} MiB, check {after_check:.0f} MiB; "
            f"index {index_s:.2f} s, 64 prompts {draw_s:.2f} s, check {check_s:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
