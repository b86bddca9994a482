"""The demo's task: a short English sentence with a given word.

    python examples/sentences/sentences.py data/sentences

writes the prompts: train.parquet, and test.parquet with words that training never sees. `compute_scores` is the reward
(`reward.function: examples/sentences/sentences.py`).
"""

import argparse
import re
from collections import Counter
from pathlib import Path

from ratchet.rlhf.rewards import Trajectory

WORDS = """
apple bicycle boat bread bridge candle carpet castle cat chair cheese clock cloud coffee cow desert dream drum egg
engine farmer feather finger fish flower forest garden ghost guitar hammer honey horse island jacket kitchen ladder
lemon letter lion mirror monkey moon mountain ocean painter paper piano pillow planet potato queen rabbit radio rain
river robot salt school shadow ship silver snow soldier spider spoon stone storm summer sun teacher tiger train tree
turtle umbrella village violin whale window winter wizard
"""
HELD_OUT = """
baker bell camel dragon elephant fire glass hat jungle key lamp lake nurse owl penguin rose sailor tower volcano wolf
"""
PROMPTS = (
    "Write one short sentence with the word {word}.",
    "Use the word {word} in one short sentence.",
    "Make up one short sentence about this: {word}.",
)
FEWEST, MOST = 4, 12
"""Words of a short sentence."""


def compute_scores(group: list[Trajectory], share: bool = True) -> list[dict[str, float]]:
    """Scores the responses to a prompt: 1 for a short sentence with the word, shared by all that begin alike.

    With `share: false` nothing is shared, and a policy soon begins all sentences alike.
    """
    beginnings = Counter(beginning(trajectory.solution_str) for trajectory in group)
    scores = []
    for trajectory in group:
        solved = is_solved(trajectory.solution_str, str(trajectory.ground_truth))
        distinct = 1 / beginnings[beginning(trajectory.solution_str)]
        scores.append({"score": solved * distinct if share else solved, "solved": solved, "distinct": distinct})
    return scores


def is_solved(text: str, word: str) -> float:
    """Returns 1 for one sentence of 4 to 12 different words, one of which is the given word."""
    words = re.findall(r"[a-z']+", text.lower())
    is_sentence = re.fullmatch(r"[A-Z][A-Za-z',; -]+[.!?]", text.strip()) is not None
    has_word = word in words or f"{word}s" in words
    return float(is_sentence and has_word and FEWEST <= len(words) <= MOST and len(words) - len(set(words)) <= 2)


def beginning(text: str) -> str:
    """Returns the first three words, by which sentences are told apart."""
    return " ".join(re.findall(r"[a-z']+", text.lower())[:3])


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for split, words in (("train", WORDS.split()), ("test", HELD_OUT.split())):
        rows = [
            {
                "data_source": "sentences",
                "prompt": [{"role": "user", "content": text.format(word=word)}],
                "reward_model": {"style": "rule", "ground_truth": word},
            }
            for word in words
            for text in PROMPTS
        ]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")
        print(f"{len(rows)} prompts with {len(words)} words are in {out / split}.parquet")


if __name__ == "__main__":
    main()
