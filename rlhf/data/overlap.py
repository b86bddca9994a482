"""Decontamination: near-duplicates by MinHash, and n-grams of held-out prompts.

An instruction or a chat template that many prompts share says nothing about a prompt's question. N-grams of many
different prompts therefore do not count.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

HELD_OUT_WORDS = 13
"""Words of an n-gram of a held-out prompt, as in GPT-3's paper (arXiv 2005.14165)."""
HELD_OUT_SHARE = 0.5
"""Share of a held-out prompt's own n-grams that a text must not reach."""
COMMON = 10
"""An n-gram of more different prompts than this belongs to none of them, as in GPT-3's paper."""
SHINGLE_TOKENS = 5
"""Length of the n-grams that identify near-duplicates, in words and signs."""
PERMUTATIONS = 128
"""Hash functions of a MinHash."""
RECALL = 0.999
"""Minimum probability that two near-duplicates are compared."""

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = rf"[{_CJK}]|[^\W{_CJK}]+"
"""A word; scripts without spaces between words count by character."""
WORDS = re.compile(_WORD)
TOKENS = re.compile(rf"{_WORD}|[^\w\s]")
"""Words and signs: ``1 + 2`` is not ``1 * 2``."""


def ngrams(text: str, n: int, unit: re.Pattern[str], side: int = 0) -> set[int]:
    """Returns the n-grams of a text, in lower case, as 64-bit hashes.

    Args:
        n: length of an n-gram. A shorter text is one n-gram as a whole.
        unit: `WORDS` or `TOKENS`.
        side: separates texts of different meaning: equal n-grams of different sides have different hashes.
    """
    units = unit.findall(text.lower())
    last = max(len(units) - n, 0)
    return {_hash(" ".join(units[start : start + n]), side) for start in range(last + 1)}


def _hash(text: str, side: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=bytes([side])).digest(), "little")


class HeldOut:
    """Held-out prompts, which training data must not contain.

    A text contains a prompt if it has the same words, or at least half of the 13-word n-grams that only this prompt
    has. A shorter prompt has one n-gram, the whole prompt. N-grams of several held-out prompts, or of more than ten
    prompts of the training data, do not count: they are an instruction.
    """

    def __init__(self, prompts: Iterable[str], training_prompts: Iterable[str]) -> None:
        """Indexes the held-out prompts; the training data's prompts show which n-grams are instructions."""
        by_words = {_whole(prompt): prompt for prompt in prompts}
        self._wholes = frozenset(by_words)
        grams = [ngrams(prompt, HELD_OUT_WORDS, WORDS) for prompt in by_words.values()]
        held = Counter(gram for of_prompt in grams for gram in of_prompt)
        training = Counter(
            gram
            for prompt in dict.fromkeys(training_prompts)
            for gram in ngrams(prompt, HELD_OUT_WORDS, WORDS)
            if gram in held
        )
        self._prompt_of = {
            gram: number
            for number, of_prompt in enumerate(grams)
            for gram in of_prompt
            if held[gram] == 1 and training[gram] <= COMMON
        }
        self._own = Counter(self._prompt_of.values())

    def is_in(self, texts: Iterable[str]) -> bool:
        """Returns True if the texts of a training example, its prompt and answers, contain one of the prompts."""
        texts = list(texts)
        if any(_whole(text) in self._wholes for text in texts):
            return True
        grams = set().union(*(ngrams(text, HELD_OUT_WORDS, WORDS) for text in texts))
        shared = Counter(self._prompt_of[gram] for gram in grams if gram in self._prompt_of)
        return any(count >= HELD_OUT_SHARE * self._own[prompt] for prompt, count in shared.items())


def _whole(text: str) -> int:
    return _hash(" ".join(WORDS.findall(text.lower())), 0)


def near_duplicates(examples: Sequence[tuple[str, ...]], similarity: float) -> list[bool]:
    """Finds examples that are near-duplicates of an earlier one that is not a near-duplicate itself.

    Both the prompts and the answers of near-duplicates are similar, each by the Jaccard index of its n-grams of five
    words and signs: similar answers to different questions do not count, nor do different answers to one long question.
    MinHash and locality-sensitive hashing find the candidates, which are then compared exactly; they miss one in a
    thousand at the threshold, and fewer above it.

    Args:
        examples: the prompt and the answers of each example; the same number of answers in each.
        similarity: minimum Jaccard index of similar texts, above 0 and below 1.
    """
    from datasketch import MinHash, MinHashLSH

    different_prompts = dict.fromkeys(prompt for prompt, *_ in examples)
    common = _common(different_prompts)
    index = MinHashLSH(num_perm=PERMUTATIONS, params=_bands(similarity))
    kept: dict[int, list[np.ndarray]] = {}
    duplicates = []
    for number, texts in enumerate(examples):
        shingles = [ngrams(text, SHINGLE_TOKENS, TOKENS, side) for side, text in enumerate(texts)]
        # a prompt of common n-grams only counts as a whole
        shingles[0] = shingles[0] - common or {_hash(texts[0], 0)}
        arrays = [np.array(sorted(of_text), dtype=np.uint64) for of_text in shingles]
        sketch = MinHash(num_perm=PERMUTATIONS, hashfunc=_low_bits)
        sketch.update_batch([shingle for of_text in shingles for shingle in of_text])
        is_duplicate = any(
            all(_jaccard(one, other) >= similarity for one, other in zip(arrays, kept[candidate], strict=True))
            for candidate in index.query(sketch)
        )
        duplicates.append(is_duplicate)
        if not is_duplicate:
            index.insert(number, sketch)
            kept[number] = arrays
    return duplicates


def _common(prompts: Collection[str]) -> set[int]:
    """Returns the n-grams of many prompts; among few prompts, of more than half of them, and of more than two."""
    limit = max(2, min(COMMON, len(prompts) // 2))
    counts = Counter(shingle for prompt in prompts for shingle in ngrams(prompt, SHINGLE_TOKENS, TOKENS))
    return {shingle for shingle, count in counts.items() if count > limit}


def _bands(similarity: float) -> tuple[int, int]:
    """Returns the number of bands, and of rows in each, that compare the fewest other texts.

    With r rows, texts of a Jaccard index s agree in a band with probability s^r.
    """
    choices = ((PERMUTATIONS // rows, rows) for rows in range(PERMUTATIONS // 2, 0, -1))
    certain = ((bands, rows) for bands, rows in choices if 1 - (1 - similarity**rows) ** bands >= RECALL)
    return next(certain, (PERMUTATIONS, 1))


def _low_bits(shingle: int) -> int:
    # datasketch expects hashes of 32 bits
    return shingle & 0xFFFFFFFF


def _jaccard(one: np.ndarray, other: np.ndarray) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)
