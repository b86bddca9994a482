"""Spans of equal text: parts of a text that two tokenizers begin and end at the same characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ratchet.rlhf.data.chat_turns import Rendered, Span, tokens
from ratchet.rlhf.data.prompts import end_of_turn
from ratchet.rlhf.data.responses import around_turns, response_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Numbers = npt.NDArray[np.int64]


class Translated(NamedTuple):
    """The tokens of another tokenizer for a response."""

    ids: list[int]
    own_spans: Numbers
    """Number of the span of each token of the response, from 0."""
    spans: Numbers
    """Number of the span of each token in `ids`. Each span has tokens of both."""


def translated(
    ids: Sequence[int], own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, *, ends: bool
) -> Translated:
    """Tokenizes a response again.

    Args:
        ids: the response's tokens, at least one.
        own: its tokenizer, a fast one.
        other: another fast tokenizer.
        ends: True if the last token ends the response; the other tokenizer's end of a turn stands for it.
    """
    text = response_text(ids, own)
    again = tokens(Rendered(text, ()), other)
    their_ids, parts = list(again.ids), list(again.spans)
    own_ends = text_lengths(ids, own).tolist()
    if ends or not their_ids:  # an answer without any text is compared as an end
        end = end_of_turn(other)
        their_ids += end
        parts += [(len(text), len(text) + 1)] * len(end)
    if ends:
        own_ends[-1] = len(text) + 1
    own_spans, spans = numbered(own_ends, parts)
    return Translated(their_ids, own_spans, spans)


def numbered(own: Sequence[int], parts: Sequence[Span]) -> tuple[Numbers, Numbers]:
    """Numbers the spans of a text that two sequences of tokens have in common.

    Args:
        own: number of characters up to and including each token of the first sequence; a token that adds none is a part
            of what follows.
        parts: the part of the text that each token of the second sequence encodes.

    Returns:
        The number of each token's span, for both sequences.
    """
    own_ends = np.asarray(own)
    own_cuts = {int(end): at for at, end in enumerate(own_ends) if end > (own_ends[at - 1] if at else 0)}
    # several tokens of one character have the same part: the last of them counts
    cuts = {end: at for at, (_, end) in enumerate(parts[:-1])}
    shared = sorted(own_cuts.keys() & cuts.keys())
    of_own = np.searchsorted([own_cuts[end] for end in shared], np.arange(len(own)))
    of_other = np.searchsorted([cuts[end] for end in shared], np.arange(len(parts)))
    last = min(of_own[-1], of_other[-1])  # what is left at the end of one alone belongs to the last span
    return np.minimum(of_own, last), np.minimum(of_other, last)


def text_lengths(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Numbers:
    """Returns the number of characters up to and including each token, with a fast tokenizer."""
    from tokenizers.decoders import DecodeStream

    stream, left_out = DecodeStream(skip_special_tokens=False), around_turns(tokenizer)
    backend = tokenizer.backend_tokenizer
    return np.cumsum([0 if token in left_out else len(stream.step(backend, token) or "") for token in ids])
