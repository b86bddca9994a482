"""A game of two turns: the policy may ask for a hidden digit, and then has to say it.

    python examples/ask/ask.py data/ask

writes prompts (train.parquet, test.parquet), and games of a player who asks in half of them, and listens to the answer
in one of five (sft.jsonl). `Ask` is the environment: `rollout.environment: examples/ask/ask.py:Ask`.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from ratchet.rlhf.environments import Observation

PROMPT = "digit?"
ASKS, LISTENS = 0.5, 0.2


class Ask:
    """Answers `ask` with the digit, and rewards 1 for saying it: one of ten guesses is right, and every listener."""

    stop = ()

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        self.digit = ground_truth

    def step(self, turn: str) -> Observation:
        if turn.strip() == "ask":
            return Observation([{"role": "user", "content": self.digit}])
        return Observation(None, reward=float(turn.strip() == self.digit))


def games(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns conversations, one that ends with each turn of the player: `ratchet sft` learns the last message only."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        digit, messages = draw.randint(0, 9), [{"role": "user", "content": PROMPT}]
        is_told = draw.random() < ASKS
        if is_told:
            messages.append({"role": "assistant", "content": "ask"})
            rows.append({"messages": list(messages)})
            messages.append({"role": "user", "content": str(digit)})
        said = digit if is_told and draw.random() < LISTENS else draw.randint(0, 9)
        messages.append({"role": "assistant", "content": str(said)})
        rows.append({"messages": messages})
    return rows


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    prompts = [
        {
            "data_source": "ask",
            "prompt": [{"role": "user", "content": PROMPT}],
            "reward_model": {"style": "rule", "ground_truth": str(digit)},
        }
        for digit in range(10)
    ]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(prompts), out / f"{split}.parquet")
    rows = games(4096, seed=0)
    (out / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(prompts)} digits to ask for, and {len(rows)} conversations, are in {out}")


if __name__ == "__main__":
    main()
