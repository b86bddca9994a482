"""Decodes responses: the only way from a policy's tokens to the text that rewards, environments and agents read.

Special tokens are kept, such as an `<answer>` or the mark of a tool call that the tokenizer declares special. Only the
tokens around turns are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ratchet.rlhf.data.chat_turns import CONTENT, around_content, state_of
from ratchet.rlhf.data.formats import Messages
from ratchet.rlhf.data.prompts import end_of_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def response_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decodes tokens of a response, or of a part such as a turn, without the tokens `around_turns`."""
    left_out = around_turns(tokenizer)
    return str(tokenizer.decode([token for token in ids if token not in left_out], skip_special_tokens=False))


def around_turns(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the tokens around turns, which are not part of their text.

    They are the beginning and the ends of a sequence, padding, and the special tokens that the chat template writes
    between a message's end and the content of the next one. Tags (`<think>` and `</think>`) are text, whoever writes
    them.
    """
    state, template = state_of(tokenizer), str(tokenizer.chat_template)
    if template not in state.around_turns:
        state.around_turns[template] = _tokens_around(tokenizer)
    return state.around_turns[template] | state.ends


def set_response_ends(tokenizer: PreTrainedTokenizerBase, ids: Collection[int]) -> None:
    """Makes further tokens, those of the model's generation config, end a response."""
    state_of(tokenizer).ends = frozenset(ids)


def _tokens_around(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    always = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    if tokenizer.chat_template:
        always |= added.keys() & set(end_of_turn(tokenizer))
    names = {token.content for token in added.values()}
    tags = {name for name in names if {f"<{name.strip('</>')}>", f"</{name.strip('</>')}>"} <= names}
    written = {token for token in _between_turns(tokenizer) if token in added and added[token].special}
    return frozenset({token for token in written if added[token].content not in tags} | {*always} - {None})


def _between_turns(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens that the chat template writes around messages, except before the first one."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return []
    messages: Messages = [{"role": role, "content": CONTENT} for role in ("user", "assistant", "user")]
    try:
        text = " ".join(around_content(messages, tokenizer)[1:])
    except TemplateError:  # the template has other roles
        return []
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
