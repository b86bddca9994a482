"""Spans of text that two tokenizers begin and end at the same characters."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ratchet.rlhf.data.chat_turns import text_ids
from ratchet.rlhf.data.equal_text import numbered, translated

TEXTS = [
    "the cat sat on the mat",
    "3 + 4 = 7, so 7 - 4 = 3",
    "naïve café",
    "the 猫 sat 🐈‍⬛ there",
    "",
    "  two  spaces ",
]


def byte_level(words: list[str], size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<pad>", "<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


OWN = byte_level(["the cat sat on the mat", "the cats"] * 9, 280)
OTHER = byte_level(["3 + 4 = 7", "that mat, the hat", "naïve café 猫 🐈"] * 9, 300)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
)
def test_spans_end_where_both_tokens_end(own_sizes: list[int], sizes: list[int]) -> None:
    """Every token has a span, spans are in order, each has tokens of both, and no cut in common is left out."""
    length = sum(sizes)
    own = [min(end, length) for end in accumulate(own_sizes)]
    own[-1] = length
    ends = list(accumulate(sizes))
    of_own, of_other = numbered(own, list(zip([0, *ends], ends, strict=False)))
    assert set(of_own) == set(of_other) == set(range(of_own[-1] + 1))
    assert list(of_own) == sorted(of_own) and list(of_other) == sorted(of_other)
    shared = {end for end in own if 0 < end < length} & set(ends)
    assert of_own[-1] == len(shared)
    for span in range(of_own[-1]):
        end = own[max(at for at, number in enumerate(of_own) if number == span)]
        assert end == ends[max(at for at, number in enumerate(of_other) if number == span)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ends", [False, True], ids=["cut", "ends"])
def test_spans_decode_to_equal_texts(text: str, ends: bool) -> None:
    ids = [*text_ids(text, OWN), *([OWN.eos_token_id] if ends or not text else [])]
    found = translated(ids, OWN, OTHER, ends=ends)
    theirs = [token for token in found.ids if token != OTHER.eos_token_id]
    assert OTHER.decode(theirs) == text and (len(theirs) < len(found.ids)) == (ends or not text)
    for span in range(found.own_spans[-1] + 1):
        own = [token for token, number in zip(ids, found.own_spans, strict=True) if number == span]
        other = [token for token, number in zip(found.ids, found.spans, strict=True) if number == span]
        assert OWN.decode(own, skip_special_tokens=True) == OTHER.decode(other, skip_special_tokens=True)
    if ends:
        assert found.ids[-1] == OTHER.eos_token_id
        assert list(found.own_spans).count(found.own_spans[-1]) == 1, "the end is a span by itself"


def test_the_same_tokenizer_has_spans_of_one_token(tmp_path: Path) -> None:
    ids = [*text_ids("the cat sat", OWN), OWN.eos_token_id]
    found = translated(ids, OWN, OWN, ends=True)
    assert found.ids == ids
    assert list(found.own_spans) == list(found.spans) == list(range(len(ids)))


def test_special_tokens_in_a_text_are_text() -> None:
    ids = text_ids("a <eos> b", OWN)
    assert OWN.eos_token_id not in ids
    found = translated(ids, OWN, OTHER, ends=False)
    assert OTHER.eos_token_id not in found.ids and OTHER.decode(found.ids) == "a <eos> b"
