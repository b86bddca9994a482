"""The pictures of the vision demo: the answers are what the pixels show, and no picture is in two splits."""

from __future__ import annotations

import io
import runpy
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "examples" / "vision" / "pictures.py"
SPLITS = {"test": 12, "train": 30, "sft": 24}


@pytest.fixture(scope="module")
def pictures() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, list[dict[str, Any]]]:
    sizes = [word for split, count in SPLITS.items() for word in (f"--{split}", str(count))]
    monkeypatch.setattr("sys.argv", [str(SCRIPT), str(folder), *sizes, *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in SPLITS}


def shown(png: bytes, palette: dict[str, tuple[int, int, int]]) -> tuple[str, str]:
    """Answers both questions from the pixels: a square fills the box around it."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    squares = 0
    for top in range(0, 112, 28):
        for left in range(0, 112, 28):
            covered = (pixels[top : top + 28, left : left + 28] != 255).any(axis=-1)
            rows, columns = covered.any(axis=1).sum(), covered.any(axis=0).sum()
            squares += bool(covered.any()) and covered.sum() == rows * columns
    there = {tuple(colour) for colour in pixels.reshape(-1, 3).tolist()}
    [missing] = [name for name, colour in palette.items() if colour not in there]
    return str(squares), missing


@pytest.mark.slow
def test_answers_are_what_the_pixels_show(pictures: dict[str, Any]) -> None:
    drawn = list(islice(pictures["pictures"](0), 200))
    assert [picture.answers for picture in drawn] == [shown(picture.png, pictures["COLOURS"]) for picture in drawn]
    for answers in zip(*(picture.answers for picture in drawn), strict=True):
        assert len(set(answers)) == 6, "a guess is right in one case of six"


def test_the_splits_share_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = written(tmp_path / "a", monkeypatch)
    of = {split: [row["images"][0]["bytes"] for row in rows] for split, rows in splits.items()}
    assert {split: len(images) for split, images in of.items()} == SPLITS
    assert len({image for images in of.values() for image in images}) == sum(SPLITS.values())
    assert written(tmp_path / "b", monkeypatch) == splits, "the same seed gives the same bytes"
    assert written(tmp_path / "c", monkeypatch, "--seed", "1")["test"] != splits["test"]


def test_a_control_has_other_pictures_beside_the_same_answers(
    pictures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, control = written(tmp_path / "a", monkeypatch), written(tmp_path / "b", monkeypatch, "--shuffled")
    assert control["test"] == splits["test"], "it is judged by what it ought to see"
    for split in ("train", "sft"):
        rows, others = splits[split], control[split]
        assert [row | {"images": None} for row in rows] == [row | {"images": None} for row in others]
        images, exchanged = ([row["images"][0]["bytes"] for row in table] for table in (rows, others))
        assert sorted(images) == sorted(exchanged)
        assert sum(a == b for a, b in zip(images, exchanged, strict=True)) < len(images) / 4


def test_only_the_answer_alone_is_right(pictures: dict[str, Any]) -> None:
    score = pictures["compute_score"]
    assert [score("squares", text, "3") for text in ("3", " 3\n", "33", "", "3 squares", "4")] == [1, 1, 0, 0, 0, 0]
