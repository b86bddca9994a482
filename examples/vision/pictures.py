"""The task of the vision demo: pictures of coloured shapes, and questions about them.

    python examples/vision/pictures.py data/vision [--shuffled] [--seed 0]

writes train.parquet, test.parquet with pictures that training never sees, and sft.parquet, whose rows have answers.
With `--shuffled`, the pictures of train.parquet and sft.parquet are exchanged between the rows, and the answers stay: a
control, from which nothing can be learned about pictures. `compute_score` is the reward (`reward.function:
examples/vision/pictures.py`).
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa
    from PIL.Image import Image

COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (240, 210, 40),
    "purple": (148, 60, 189),
    "orange": (255, 127, 14),
}
"""The palette: each picture has all of its colours but one."""
CELL, CELLS = 28, 4
"""A picture has 4 × 4 cells of 28 × 28 pixels. Each has at most one shape, and is one token of Qwen2.5-VL."""
MOST_SQUARES = len(COLOURS)
"""So that a guess is right in one case of six, whatever the question."""
QUESTIONS = ("How many squares are there?", f"Which colour is missing: {', '.join(COLOURS)}?")


class Picture(NamedTuple):
    """A picture, encoded as PNG, and the answers to the questions about it."""

    png: bytes
    answers: tuple[str, str]


def pictures(seed: int) -> Iterator[Picture]:
    """Draws pictures without end, each different from all before.

    A picture depends on the seed and the version of Pillow: all draws use `random.random()`, which Python keeps.
    """
    rng = random.Random(f"pictures:{seed}")
    seen = set[bytes]()
    while True:
        drawn = _picture(rng)
        if drawn.png not in seen:
            seen.add(drawn.png)
            yield drawn


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Returns 1.0 if the response is the answer and nothing else, else 0.0."""
    return float(solution_str.strip() == ground_truth)


def rows(drawn: Sequence[Picture], pictured: Sequence[Picture], split: str) -> pa.Table:
    """Makes a row of each picture, with one of the questions, in verl's layout.

    Args:
        drawn: the pictures that the questions are about.
        pictured: the pictures that the rows show: the same ones, or others.
        split: name of the split; rows of `sft` have a `response`.
    """
    import pyarrow as pa

    message = pa.struct({"role": pa.string(), "content": pa.string()})
    types: dict[str, pa.DataType] = {
        "data_source": pa.string(),
        "prompt": pa.list_(message),
        "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
    }
    found: list[dict[str, Any]] = []
    for number, (about, shown) in enumerate(zip(drawn, pictured, strict=True)):
        kind = number % len(QUESTIONS)
        row: dict[str, Any] = {
            "data_source": ("squares", "missing_colour")[kind],
            "prompt": [{"role": "user", "content": f"<image>{QUESTIONS[kind]}"}],
            "images": [{"bytes": shown.png, "path": f"{split}-{number:05}.png"}],
        }
        answer = about.answers[kind]
        if split == "sft":
            row["response"] = answer
        else:
            row["reward_model"] = {"style": "rule", "ground_truth": answer}
        found.append(row)
    if split == "sft":
        types["response"] = pa.string()
    else:
        types["reward_model"] = pa.struct({"style": pa.string(), "ground_truth": pa.string()})
    return pa.Table.from_pylist(found, pa.schema(types))


def exchanged(drawn: Sequence[Picture], seed: int) -> list[Picture]:
    """Returns the pictures in random order."""
    rng = random.Random(f"exchanged:{seed}")
    return [picture for _, _, picture in sorted((rng.random(), at, picture) for at, picture in enumerate(drawn))]


def _picture(rng: random.Random) -> Picture:
    squares, missing = 1 + _below(MOST_SQUARES, rng), _below(len(COLOURS), rng)
    names = list(COLOURS)
    answer = names.pop(missing)
    shapes = MOST_SQUARES + _below(4, rng)
    colours = names + [names[_below(len(names), rng)] for _ in range(shapes - len(names))]
    kinds = ["square"] * squares + [("circle", "triangle")[_below(2, rng)] for _ in range(shapes - squares)]
    places = _shuffled(list(range(CELLS * CELLS)), rng)
    image = _drawn(list(zip(kinds, _shuffled(colours, rng), places, strict=False)), rng)
    written = io.BytesIO()
    image.save(written, "PNG")
    return Picture(written.getvalue(), (str(squares), answer))


def _drawn(shapes: Sequence[tuple[str, str, int]], rng: random.Random) -> Image:
    """Draws shapes: each has a kind, a colour and a cell, and a random size and place within that."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), "white")
    draw = ImageDraw.Draw(image)
    for kind, colour, cell in shapes:
        size = 20 + 2 * _below(3, rng)
        left, top = (at * CELL + _below(CELL - size, rng) for at in (cell % CELLS, cell // CELLS))
        right, bottom = left + size - 1, top + size - 1
        if kind == "square":
            draw.rectangle((left, top, right, bottom), fill=COLOURS[colour])
        elif kind == "circle":
            draw.ellipse((left, top, right, bottom), fill=COLOURS[colour])
        else:
            draw.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill=COLOURS[colour])
    return image


def _below(n: int, rng: random.Random) -> int:
    return int(rng.random() * n)


def _shuffled(values: list[Any], rng: random.Random) -> list[Any]:
    return [value for _, _, value in sorted((rng.random(), at, value) for at, value in enumerate(values))]


def main() -> None:
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=2048, help="rows of train.parquet")
    parser.add_argument("--test", type=int, default=256, help="rows of test.parquet")
    parser.add_argument("--sft", type=int, default=4096, help="rows of sft.parquet")
    parser.add_argument("--shuffled", action="store_true", help="exchange the pictures that are learned from")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    drawn = pictures(arguments.seed)
    # the held-out pictures come first: they are the same whatever the other sizes
    for split, count in (("test", arguments.test), ("train", arguments.train), ("sft", arguments.sft)):
        those = [next(drawn) for _ in range(count)]
        shown = exchanged(those, arguments.seed) if arguments.shuffled and split != "test" else those
        pq.write_table(rows(those, shown, split), arguments.out / f"{split}.parquet")
        print(f"{count} pictures with questions are in {arguments.out / split}.parquet")


if __name__ == "__main__":
    main()
