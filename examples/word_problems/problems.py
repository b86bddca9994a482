"""Word problems of one and two steps, in the style of GSM8K.

    python examples/word_problems/problems.py data/word_problems

writes prompts with their results (train.parquet, test.parquet), and worked answers for supervised training (sft.jsonl).
No problem is in two of the files. The reward is `gsm8k`: the number after `####`.
"""

import argparse
import json
import random
from pathlib import Path

NAMES = "Anna Ben Carla David Emma Finn Grace Henry Ida Jack Lena Max Nora Oscar Paula Tom"
THINGS = "apples books cards coins eggs flowers marbles pencils shells stamps stickers stones"
TRAIN, TEST, SFT = 1000, 200, 1000
HIGHEST = 20


def problem(draw: random.Random) -> tuple[str, str, int]:
    """Returns a question, a worked answer, and the result."""
    name, other = draw.sample(NAMES.split(), 2)
    thing, a, b = draw.choice(THINGS.split()), draw.randint(2, HIGHEST), draw.randint(2, HIGHEST)
    start = f"{name} has {a} {thing}. "
    if draw.random() < 0.5:
        more, total = f"{other} gives {name} {b} more. ", a + b
        step = f"{a} + {b} = {total}"
    else:
        b = draw.randint(1, a)
        more, total = f"{name} gives {b} of them to {other}. ", a - b
        step = f"{a} - {b} = {total}"
    question = f"{start}{more}"
    if draw.random() < 0.5:
        c = draw.randint(2, HIGHEST)
        question += f"Then {name} finds {c} {thing}. "
        step += f"\n{total} + {c} = {total + c}"
        total += c
    return f"{question}How many {thing} does {name} have now?", f"{step}\n#### {total}", total


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    problems: dict[str, tuple[str, int]] = {}
    while len(problems) < TRAIN + TEST + SFT:
        question, answer, result = problem(draw)
        problems.setdefault(question, (answer, result))
    rows = [(question, *rest) for question, rest in problems.items()]
    for split, part in (("train", rows[:TRAIN]), ("test", rows[TRAIN : TRAIN + TEST])):
        prompts = [
            {
                "data_source": "word_problems",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": str(result)},
            }
            for question, _, result in part
        ]
        pq.write_table(pa.Table.from_pylist(prompts), out / f"{split}.parquet")
    examples = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer, _ in rows[TRAIN + TEST :]
    ]
    (out / "sft.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    print(f"{TRAIN} problems to train on, {TEST} to test and {SFT} worked answers are in {out}")


if __name__ == "__main__":
    main()
