"""A game of several turns: the policy guesses a number, and the environment answers `up` or `down`.

    python examples/guess/guess.py data/guess

writes prompts (train.parquet, test.parquet), and games of a player who follows the rules but guesses at random
(sft.jsonl). `Guess` is the environment: `rollout.environment: examples/guess/guess.py:Guess`.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from ratchet.rlhf.environments import Observation

HIGHEST = 15
PROMPT = f"1 to {HIGHEST}?"


class Guess:
    """Rewards 1 for the right number, in any turn; `rollout.environment.max_turns` limits the turns."""

    stop = ()
    replayable = True  # the same guesses get the same hints

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        self.secret = int(ground_truth)

    def step(self, turn: str) -> Observation:
        if not (turn.isascii() and turn.isdigit()) or len(turn) > 3:
            return Observation(None)  # not a guess
        if int(turn) == self.secret:
            return Observation(None, reward=1.0)
        return Observation([{"role": "user", "content": hint(int(turn), self.secret)}])


def hint(guess: int, secret: int) -> str:
    return "up" if guess < secret else "down"


def games(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns conversations that end with a random guess, whatever the hints before it."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        secret, messages = draw.randint(1, HIGHEST), [{"role": "user", "content": PROMPT}]
        for _ in range(draw.randint(0, 3)):
            guess = draw.choice([number for number in range(1, HIGHEST + 1) if number != secret])
            messages.append({"role": "assistant", "content": str(guess)})
            messages.append({"role": "user", "content": hint(guess, secret)})
        messages.append({"role": "assistant", "content": str(draw.randint(1, HIGHEST))})
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
            "data_source": "guess",
            "prompt": [{"role": "user", "content": PROMPT}],
            "reward_model": {"style": "rule", "ground_truth": str(secret)},
        }
        for secret in range(1, HIGHEST + 1)
    ]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(prompts), out / f"{split}.parquet")
    (out / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in games(4096, seed=0)))
    print(f"{len(prompts)} numbers to guess and 4096 games are in {out}")


if __name__ == "__main__":
    main()
