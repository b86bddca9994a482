"""Preferences to train a reward model on: an answer to the problem, before an answer to another one.

    python examples/reward_model/preferences.py data/countdown/sft.parquet data/preferences

writes train.parquet and test.parquet (prompt, chosen, rejected). What is to be learned is to look whether an answer
uses the numbers of its problem; whether it reaches the target is not asked.
"""

import argparse
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HELD_OUT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    examples = pq.read_table(arguments.examples).to_pylist()
    draw = random.Random(0)
    draw.shuffle(examples)
    pairs = []
    for example, other in zip(examples, examples[1:] + examples[:1], strict=True):
        if numbers(example["response"]) != numbers(other["response"]):
            pairs.append({"prompt": example["prompt"], "chosen": example["response"], "rejected": other["response"]})
    arguments.out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(pairs[HELD_OUT:]), arguments.out / "train.parquet")
    pq.write_table(pa.Table.from_pylist(pairs[:HELD_OUT]), arguments.out / "test.parquet")
    print(f"{len(pairs) - HELD_OUT} pairs to learn from and {HELD_OUT} held out, in {arguments.out}")


def numbers(text: str) -> list[str]:
    return sorted(re.findall(r"\d+", text))


if __name__ == "__main__":
    main()
