"""Which prompts are drawn: permutations, mixtures and curricula; and that reading them does not need all of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.infra.execution.epochs import with_iterations
from ratchet.rlhf import seeding
from ratchet.rlhf.config import RunConfig, load_config, parse_config
from ratchet.rlhf.data import drawing, files
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.errors import UserError
from tests.padded import properties


def prompt_file(path: Path, rows: int) -> str:
    path.write_text("".join(f'{{"prompt": "{path.stem} {row}"}}\n' for row in range(rows)))
    return str(path)


@properties
@given(st.integers(1, 300), st.text(max_size=3))
def test_a_permutation_that_is_not_held_has_every_element_once(size: int, key: str) -> None:
    assert sorted(seeding.permuted(key, size, place) for place in range(size)) == list(range(size))


def test_large_epochs_are_windows_of_one_sequence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "LARGE", 9)
    whole = seeding.epochs(0, "data", 10, 0, 50)
    epochs = [tuple(whole[start : start + 10]) for start in range(0, 50, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 5
    assert seeding.epochs(0, "data", 10, 7, 20) == whole[7:27]
    assert seeding.epochs(1, "data", 10, 0, 50) != whole


@properties
@given(st.integers(0, 3), st.integers(0, 2500), st.lists(st.integers(0, 40), max_size=4))
def test_a_mixture_is_windows_of_one_sequence(seed: int, cursor: int, counts: list[int]) -> None:
    sizes, weights, start = [7, 40], [3.0, 1.0], cursor
    whole = drawing.draw(seed, sizes, weights, cursor, 160)
    for count in counts:
        assert drawing.draw(seed, sizes, weights, start, count) == whole[start - cursor : start - cursor + count]
        start += count


@pytest.mark.parametrize("weights", [None, (2.0, 1.0)])
def test_without_shuffling_each_file_is_read_in_its_order(weights: tuple[float, ...] | None) -> None:
    drawn = drawing.draw(0, (5, 3), weights, 0, 40, shuffle=False)
    for file, size in enumerate((5, 3)):
        rows = [row for number, row in drawn if number == file]
        assert rows == [position % size for position in range(len(rows))]
    assert drawing.draw(0, (5, 3), weights, 7, 20, shuffle=False) == drawn[7:27], "windows of one sequence"
    if weights is None:
        assert drawn[:8] == [*((0, row) for row in range(5)), *((1, row) for row in range(3))]


def test_a_mixture_has_its_shares_and_reads_each_file_in_epochs() -> None:
    drawn = drawing.draw(0, [7, 400, 10], [6.0, 3.0, 1.0], 0, 3000)
    for block in range(0, 3000, drawing.BLOCK):
        assert Counter(file for file, _ in drawn[block : block + drawing.BLOCK]) == {0: 600, 1: 300, 2: 100}
    for file, size in enumerate([7, 400, 10]):
        rows = [row for chosen, row in drawn if chosen == file]
        for epoch in range(0, len(rows) - size + 1, size):
            assert sorted(rows[epoch : epoch + size]) == list(range(size))


@properties
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_are_those_of_the_weights(weights: list[float]) -> None:
    shares = drawing.shares(weights)
    assert sum(shares) == drawing.BLOCK
    assert all(
        abs(share - weight / sum(weights) * drawing.BLOCK) < 1 for share, weight in zip(shares, weights, strict=True)
    )


def test_a_curriculum_draws_some_prompts_less_often(tmp_path: Path) -> None:
    """And stays within a mixture's files. The same place draws the same."""
    paths = [prompt_file(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", 20), ("b", 60))]
    dataset = PromptDataset(paths)

    def chance(row: int) -> float:
        return 0.25 if row < 10 else 1.0

    weights = [1.0, 3.0]
    drawn = dataset.draw(0, 0, 4000, weights, chance)
    of_a = [row for row in drawn if row < 20]
    assert len(of_a) == 1000
    easy = sum(row < 10 for row in of_a)
    # 10 rows of weight 0.25 and 10 of weight 1: a fifth; of 1000 draws, five standard deviations are 6 %
    assert 0.14 < easy / len(of_a) < 0.26
    assert dataset.draw(0, 130, 40, weights, chance) == drawn[130:170]
    assert dataset.draw(0, 0, 100, weights, lambda row: 1.0) == dataset.draw(0, 0, 100, weights)
    assert len(dataset.draw(0, 0, 10, weights, lambda row: 0.0)) == 10, "all may have been solved"


TREE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": ["a", "b"]}, "actor": {}}


def config(**changes: Any) -> RunConfig:
    return parse_config(TREE, "here").with_values({key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "says", "remedy"),
    [
        ({"data__weights": [1]}, "data: weights has 1 numbers, but train has 2 files", {"data__weights": [1, 2]}),
        ({"data__weights": [1, 0]}, "greater than 0", {"data__weights": [1, 0.1]}),
        ({"data__weights": [5000, 1]}, "less than a thousandth of their sum", {"data__weights": [5000, 6]}),
        (
            {"train": {"epochs": 2, "iterations": 5}},
            "train: iterations and epochs are both set: remove one, or set it to null",
            {"train": {"epochs": 2, "iterations": None}},
        ),
        ({"train": {"iterations": None}}, "both null: set one", {"train": {"epochs": 1}}),
        (
            {"train": {"epochs": 2}, "algorithm__dynamic_sampling": {"max_prompts": 128}},
            "set train.iterations instead",
            {"train": {"iterations": 2}, "algorithm__dynamic_sampling": {"max_prompts": 128}},
        ),
        (
            {"data__curriculum": {}, "rollout__mode": "one_step_off"},
            "data.curriculum.lag to 2 or more",
            {"data__curriculum": {"lag": 2}, "rollout__mode": "one_step_off"},
        ),
        ({"data__curriculum": {}, "rollout__n": 1}, "raise rollout.n", {"data__curriculum": {}, "rollout__n": 2}),
        (
            {"data__curriculum": {}, "reward__function": "mine.py"},
            "set data.curriculum.solved_score",
            {"data__curriculum": {"solved_score": 0.5}, "reward__function": "mine.py"},
        ),
        (
            {"data__curriculum": {}, "data__generations": "file:///runs/other"},
            "data.generations draws no prompts: remove one of them",
            {"data__generations": "file:///runs/other"},
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(changes: dict[str, Any], says: str, remedy: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        config(**changes)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    config(**remedy)


def test_epochs_become_iterations(tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "a.jsonl", 130)
    (tmp_path / "run.yaml").write_text(f"model: m\ndata: {{train: {path}}}\ntrain: {{epochs: 1.5}}\n")
    written = load_config(tmp_path / "run.yaml")
    resolved = with_iterations(written.with_values({"run.name": "other"}))
    assert (resolved.iterations, resolved.train.epochs) == (4, None), "1.5 x 130 prompts, 64 at a time"
    assert with_iterations(resolved) == resolved
    longer = load_config(tmp_path / "run.yaml", ["train.epochs=null", "train.iterations=9"])
    assert with_iterations(longer).iterations == 9
    assert config().iterations == 30


@pytest.mark.parametrize("kind", ["lines", "row groups"])
def test_a_large_file_is_read_where_it_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Parquet file some row groups are held, of JSON lines nothing but the offsets."""
    rows = [{"prompt": f"{number:06d} {'x' * 200}"} for number in range(20_000)]
    monkeypatch.setattr(files, "HELD_BYTES", 100_000)
    if kind == "lines":
        path = tmp_path / "large.jsonl"
        path.write_text("\n" + "".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        path = tmp_path / "large.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    before = pa.total_allocated_bytes()
    dataset = PromptDataset([path])
    drawn = dataset.draw(0, 0, 64)
    assert [dataset[row].original for row in drawn] == [rows[row]["prompt"] for row in drawn]
    assert dataset[0].where == (f"{path}, line 2" if kind == "lines" else f"{path}, row 1")
    assert pa.total_allocated_bytes() - before < 500_000, "of more than 4 MB"
    assert [prompt.original for prompt in dataset] == [row["prompt"] for row in rows]
    if kind == "lines":
        path.write_text(path.read_text() + "\n")
        with pytest.raises(UserError, match="has changed since the run opened it: restore it"):
            dataset[0]
