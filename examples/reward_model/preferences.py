"""Writes preferences for a reward model: of two solutions to a problem, the one that starts with its largest number.

    python examples/reward_model/preferences.py data/countdown/sft.parquet data/preferences

writes train.parquet and test.parquet (prompt, chosen, rejected). Here a rule replaces the people who compare answers.
"""

import argparse
import re
from collections import defaultdict
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HELD_OUT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    solutions: dict[str, set[str]] = defaultdict(set)
    for example in pq.read_table(arguments.examples).to_pylist():
        solutions[example["prompt"][-1]["content"]].add(example["response"])
    pairs = []
    for prompt, responses in solutions.items():
        good, bad = (sorted(text for text in responses if preferred(text) is wanted) for wanted in (True, False))
        pairs += [{"prompt": prompt, "chosen": better, "rejected": worse} for better, worse in product(good, bad)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(pairs[HELD_OUT:]), arguments.out / "train.parquet")
    pq.write_table(pa.Table.from_pylist(pairs[:HELD_OUT]), arguments.out / "test.parquet")
    print(f"{len(pairs) - HELD_OUT} training pairs and {HELD_OUT} held-out pairs are in {arguments.out}")


def preferred(response: str) -> bool:
    numbers = [int(number) for number in re.findall(r"\d+", response)]
    return numbers[0] == max(numbers)


if __name__ == "__main__":
    main()
