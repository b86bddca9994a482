"""Nearly all fields of each format are kept, and the import names the rest."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ratchet.infra.observe.importing import import_run
from ratchet.infra.observe.sources.atif import ATIF
from ratchet.infra.observe.sources.jsonl import JSONLines
from ratchet.infra.observe.sources.nemo_rl import NeMoRL
from ratchet.infra.observe.sources.openrlhf import OpenRLHF
from ratchet.infra.observe.sources.prime_rl import PrimeRL
from ratchet.infra.observe.sources.source import Source
from ratchet.infra.observe.sources.trl import TRL
from ratchet.infra.observe.sources.verifiers import Verifiers
from ratchet.infra.observe.sources.verl import Verl
from ratchet.infra.runs.run import Run, open_run
from tests.unit import (
    test_import_agents,
    test_import_jsonl,
    test_import_nemo_rl,
    test_import_openrlhf,
    test_import_prime_rl,
    test_import_trl,
    test_import_verifiers,
    test_import_verl,
)

KEPT = {"atif": 0.86}
"""Smallest share of fields that is kept, 0.95 for the other formats."""


def verl(folder: Path) -> Source:
    file = folder / "1.jsonl"
    test_import_verl.write(
        file,
        *(
            test_import_verl.generation(f"{n} it is", n / 8, 1, f"g{n // 2}_{n % 2}_0", acc=n / 4, pred=f"p{n}")
            for n in range(4)
        ),
    )
    return Verl(folder)


def trl(folder: Path) -> Source:
    test_import_trl.write(folder, 1, test_import_trl.group(1, topic="sums", level=3))
    test_import_trl.checkpoint(folder, test_import_trl.entry(1, entropy=0.625))
    return TRL(folder)


def prime_rl(folder: Path) -> Source:
    ids = ("a1", "a2")
    test_import_prime_rl.trained(
        folder, 1, *(test_import_prime_rl.episode(id, advantage=0.375, note=f"n{id}") for id in ids)
    )
    return PrimeRL(folder)


def verifiers(folder: Path) -> Source:
    of = test_import_verifiers
    asked = {"message": {"role": "user", "content": "7*8?"}, "token_ids": [1, 2, 3], "mask": [False] * 3}
    file = folder / "traces.jsonl"
    of.write(
        file, *(of.episode(f"e{n}", of.trace(asked, of.said(f"it is {n}"), info={"cost": n / 16})) for n in range(3))
    )
    return Verifiers(file)


def nemo_rl(folder: Path) -> Source:
    test_import_nemo_rl.write(
        folder / "train_data_step1.jsonl", *(test_import_nemo_rl.sample(n, task="sums") for n in range(3))
    )
    return NeMoRL(folder)


def openrlhf(folder: Path) -> Source:
    test_import_openrlhf.play(test_import_openrlhf.recording(folder), "1", "0", "1", "1")
    return OpenRLHF(folder)


def atif(folder: Path) -> Source:
    of = test_import_agents
    for n in range(2):
        of.trial(folder, f"task{n}__x", {"reward": n / 2}, of.trajectory())
    of.end(folder)
    return ATIF(folder)


def jsonl(folder: Path) -> Source:
    (file := folder / "mine.jsonl").parent.mkdir()
    test_import_jsonl.write(
        file,
        *(
            test_import_jsonl.line(0, output=f"it is {n}", seconds=n / 32, kind=f"k{n}", more={"a": [n, 7]})
            for n in range(3)
        ),
    )
    return JSONLines(file, test_import_jsonl.MAP)


FORMATS: dict[str, Callable[[Path], Source]] = {
    made.__name__: made for made in (verl, trl, prime_rl, verifiers, nemo_rl, openrlhf, atif, jsonl)
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str | float]]:
    """Yields the texts and numbers within a value, with the names of the fields around them."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}")
    elif isinstance(value, list | tuple | np.ndarray):
        for inner in value:
            yield from leaves(inner, path)
    elif isinstance(value, str):
        if value.startswith(("{", "[")):
            try:
                yield from leaves(json.loads(value), path)
                return
            except ValueError:
                pass
        yield path, value
    elif isinstance(value, int | float | np.number) and not isinstance(value, bool):
        yield path, float(f"{float(value):.6g}")


def in_files(folder: Path) -> list[tuple[str, str | float]]:
    found: list[tuple[str, str | float]] = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if file.suffix == ".parquet":
            found += leaves(pq.read_table(file).to_pylist())
        elif file.suffix == ".jsonl":
            found += (leaf for line in file.read_text().split("\n") if line for leaf in leaves(json.loads(line)))
        elif file.suffix == ".json":
            found += leaves(json.loads(file.read_text()))
    return found


def in_run(run: Run) -> tuple[str, set[float]]:
    """Returns all texts of a run, and all its numbers, those within texts among them."""
    frames = [run.trajectories(0), run.metrics()]
    values = [leaf for frame in frames for row in frame.to_dict("records") for _, leaf in leaves(row)]
    values += [leaf for _, leaf in leaves(run.config.model_dump(mode="json"))]
    text = "\n".join(value for value in values if isinstance(value, str))
    numbers = {value for value in values if isinstance(value, float)}
    return text, numbers | {float(f"{float(number):.6g}") for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)}


@pytest.mark.parametrize("name", FORMATS)
def test_fields_are_kept(name: str, tmp_path: Path) -> None:
    source = FORMATS[name](tmp_path / "source")
    imported = import_run(source, "run", f"file://{tmp_path}/runs")
    assert imported.steps == 1
    text, numbers = in_run(open_run(imported.url))
    found = in_files(tmp_path / "source")
    kept: defaultdict[str, list[bool]] = defaultdict(list)
    for path, value in found:
        kept[path].append(value in text if isinstance(value, str) else value in numbers)
    lost = [path for path, values in kept.items() if np.mean(values) <= 0.5]  # some are there by chance
    assert len(lost) <= (1 - KEPT.get(name, 0.95)) * len(kept), (len(kept), lost)
    for path in lost:
        assert any(text.startswith(path.rpartition(".")[2]) for text in imported.left_out), (path, imported.left_out)
