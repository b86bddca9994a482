"""Preferences to train a reward model on: of two answers to the same problem, the one that solves it.

    ratchet evaluate MODEL --data PROMPTS --n 4 --reward countdown --output samples.parquet
    python examples/reward_model/preferences.py samples.parquet PROMPTS data/preferences

writes train.parquet and test.parquet (prompt, chosen, rejected). A rule stands here for the people who compare answers.
"""

import argparse
import random
from itertools import product
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

HELD_OUT = 0.05
MOST = 3
"""Pairs from one problem."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    prompts = pq.read_table(arguments.prompts)["prompt"].to_pylist()
    samples = pd.read_parquet(arguments.samples, columns=["prompt_id", "response", "score"])
    draw = random.Random(0)
    pairs: dict[str, list[dict[str, object]]] = {"train": [], "test": []}
    for prompt_id, group in samples.groupby("prompt_id"):
        prompt = prompts[int(str(prompt_id).rpartition("-p")[2])]
        good, bad = (sorted(set(group["response"][group["score"] == score])) for score in (1, 0))
        both = list(product(good, bad))
        split = "test" if draw.random() < HELD_OUT else "train"
        chosen = draw.sample(both, min(MOST, len(both)))
        pairs[split] += [{"prompt": prompt, "chosen": better, "rejected": worse} for better, worse in chosen]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, rows in pairs.items():
        pq.write_table(pa.Table.from_pylist(rows), arguments.out / f"{split}.parquet")
    print(f"{len(pairs['train'])} pairs to learn from and {len(pairs['test'])} held out, in {arguments.out}")


if __name__ == "__main__":
    main()
