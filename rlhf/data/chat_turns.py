"""Tokenizes conversations so that only the chat template can start or end turns.

A content with a control token, such as a web page with `<|im_end|>`, would end its turn and start another one if the
rendered conversation were tokenized as it is. So the special tokens that the template writes are distinguished from
those in contents, which are tokenized as plain text.

Special tokens are split. Added tokens that are not special (`<tool_call>` in Qwen's tokenizers) are words of the
vocabulary, and stay so in any text. A template's plain text (Zephyr's `<|user|>`) has no token that could distinguish
it from a content.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

from ratchet.rlhf.data.formats import Chat, Message, Messages
from ratchet.rlhf.data.images import MARK
from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Int
    from transformers import PreTrainedTokenizerBase

    from ratchet.rlhf.config.sections import SpecialTokens

T = TypeVar("T")
CONTENT = token_hex(16)
"""Placeholder for a content, to find what a chat template writes around it; no text contains it."""
Span = tuple[int, int]
"""First character of a part of a text, and the one after its last."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    special: tuple[Span, ...] | None
    """The special tokens that the template wrote, in order; None: all in the text."""


class Tokens(NamedTuple):
    """The tokens of a text."""

    ids: list[int]
    spans: list[Span]
    """The part of the text that each token encodes."""


def render_contents(template: Callable[[T], str], contents: T, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Renders contents, and finds the special tokens that the template writes itself.

    Contents without special tokens are rendered once. Others are rendered again with random marks at their special
    tokens: beside them, or, if the template inspects them and then writes something else, in their place.

    Args:
        contents: texts written by others, or lists and dictionaries of texts at any depth.
    """
    text, state = template(contents), state_of(tokenizer)
    found = sorted(state.within(contents))
    if state.kept or not found:
        return Rendered(text, None)
    mark = token_hex(16)
    ways = (
        {token: mark + token for token in found},
        {token: token + mark for token in found},
        {token: f"{mark}{number:04}" for number, token in enumerate(found)},
    )
    written = [_unmarked(template(state.marked(contents, way)), way, mark, state.pattern) for way in ways]
    return next((one for one in written if one.text == text), written[-1])


def token_ids(written: Rendered, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes a rendered conversation, without adding anything."""
    if written.special is None:
        return list(tokenizer(written.text, add_special_tokens=False)["input_ids"])
    if tokenizer.is_fast:
        return tokens(written, tokenizer).ids
    ids: list[int] = []
    for piece, token in _pieces(written):
        ids += tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"] if piece else []
        ids += [tokenizer.convert_tokens_to_ids(token)] if token else []
    return ids


def tokens(written: Rendered, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenizes a rendered conversation as `token_ids` does, with a fast tokenizer, and locates the tokens."""
    if written.special is None:
        encoding = tokenizer(written.text, add_special_tokens=False, return_offsets_mapping=True)
        return Tokens(list(encoding["input_ids"]), list(encoding["offset_mapping"]))
    return state_of(tokenizer).splitting.tokens(written)


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes a content that no template writes, without adding anything."""
    return token_ids(render_contents(str, text, tokenizer), tokenizer)


def around_content(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, is_prompt: bool = False) -> list[str]:
    """Returns what the chat template writes before, between and after the places where it writes `CONTENT`.

    With `is_prompt` the start of the assistant's next message follows. Raises TemplateError if the template refuses.
    """
    return by_template(messages, tokenizer, add_generation_prompt=is_prompt).split(CONTENT)


def by_template(messages: Messages, tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Renders messages by the chat template. Raises TemplateError if the template refuses them."""
    return str(tokenizer.apply_chat_template(in_parts(messages, tokenizer), tokenize=False, **options))


def in_parts(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> Messages:
    """Returns messages as the chat template expects them: a model that sees images has contents of several parts."""
    if state_of(tokenizer).images is None:
        return messages
    return cast(Messages, [_in_parts(message) for message in messages])


def _in_parts(message: Message) -> dict[str, Any]:
    content, others = message["content"], {name: value for name, value in message.items() if name != "images"}
    if not isinstance(content, str):  # it has been split
        return others
    texts = content.split(MARK) if message.get("images") else [content]
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return others | {"content": parts}


def check_sees(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raises UserError if messages have images, and the model has no way to read them; `where` is their place."""
    reads_text = state_of(tokenizer).images is None
    if chat.images and (reads_text or not tokenizer.chat_template):
        lacks = "the model reads text only" if reads_text else "the model has no chat template"
        raise UserError(
            f"{where} has images, and {lacks}: choose a vision-language model (docs/models.md), or leave them out"
        )


def with_image_tokens(ids: list[int], chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """Replaces the placeholders in tokenized messages by the tokens of their images."""
    processor = state_of(tokenizer).images
    return ids if processor is None else processor.expanded(ids, chat.images, where)


def special_in(contents: object, tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Returns the special tokens in contents: texts, or lists and dictionaries of texts at any depth."""
    return state_of(tokenizer).within(contents)


def treat_special_tokens(tokenizer: PreTrainedTokenizerBase, treatment: SpecialTokens) -> None:
    """Sets the treatment of special tokens in a tokenizer's contents from now on: by default they are split.

    To `keep` them is to treat them like those of the template.
    """
    state_of(tokenizer).kept = treatment == "keep"


def _unmarked(marked: str, way: Mapping[str, str], mark: str, special: re.Pattern[str]) -> Rendered:
    """Restores what a template wrote of marked contents; `way` maps each token to its mark."""
    tokens_of = {shown: token for token, shown in way.items()} | {mark: ""}
    text, found = "", list[Span]()
    for number, piece in enumerate(re.split(f"({_any_of(tokens_of)})", marked)):
        if number % 2:
            text += tokens_of[piece]
        else:
            found += [(len(text) + match.start(), len(text) + match.end()) for match in special.finditer(piece)]
            text += piece
    return Rendered(text, tuple(found))


def _pieces(written: Rendered) -> Iterator[tuple[str, str]]:
    """Yields the texts before the template's special tokens, with these, and the rest with an empty one."""
    assert written.special is not None
    done = 0
    for start, end in (*written.special, (len(written.text), len(written.text))):
        yield written.text[done:start], written.text[start:end]
        done = end


def _any_of(texts: Collection[str]) -> str:
    """Returns a pattern of texts, the longest of which wins, as in tokenizers."""
    # without texts, a pattern that matches nothing
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"


class ImageTokens(Protocol):
    """The tokens of images."""

    def expanded(self, ids: Sequence[int], images: Sequence[bytes], where: str) -> list[int]:
        """Replaces the placeholders in a tokenized prompt by the tokens of its images, in order."""
        ...

    def readable(self, ids: Int[np.ndarray, " tokens"], drawn: Bool[np.ndarray, " tokens"]) -> np.ndarray:
        """Replaces the placeholders that a policy drew."""
        ...

    def left_out(self, ids: Sequence[int]) -> list[int]:
        """Removes the placeholders: a text that is not sent with its images must have none."""
        ...


class TokenizerState:
    """State kept per tokenizer: its special tokens, their treatment, and the tokens around turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.names = {*added, *tokenizer.all_special_tokens} - {""}
        self.pattern = re.compile(_any_of(self.names))
        self.kept = False
        """True if special tokens in contents are treated like the template's."""
        self.ends = frozenset[int]()
        """Further ends of a response; see `ratchet.rlhf.data.responses`."""
        self.images: ImageTokens | None = None
        """What takes the place of images in a tokenized prompt; None: the model reads text only."""
        self.around_turns: dict[str, frozenset[int]] = {}
        """The tokens around turns, by chat template."""
        self.rendered: defaultdict[str, set[str]] = defaultdict(set)
        """The roles that were seen to be rendered, by chat template; see `ratchet.rlhf.data.prompts`."""
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None

    def within(self, contents: object) -> set[str]:
        """Returns the special tokens in contents."""
        if isinstance(contents, str):
            return set(self.pattern.findall(contents))
        if isinstance(contents, Mapping):
            contents = [*contents.keys(), *contents.values()]
        return set().union(*map(self.within, contents)) if isinstance(contents, list | tuple) else set()

    def marked(self, contents: T, way: Mapping[str, str]) -> T:
        """Returns the contents with each of these tokens replaced."""
        found: object = contents
        if isinstance(contents, str):
            found = self.pattern.sub(lambda match: way[match[0]], contents)
        elif isinstance(contents, Mapping):
            found = {self.marked(key, way): self.marked(value, way) for key, value in contents.items()}
        elif isinstance(contents, Chat):
            messages, tools, images = contents  # images have no text
            found = Chat(self.marked(messages, way), tuple(self.marked(tool, way) for tool in tools), images)
        elif isinstance(contents, list | tuple):
            found = [self.marked(one, way) for one in contents]
        return cast(T, found)

    @cached_property
    def splitting(self) -> _Splitting:
        """The tokenizer that splits special tokens, built on first use: a large vocabulary takes seconds."""
        assert self._backend is not None, "only of a fast tokenizer"
        return _Splitting(self._backend.to_str(), self.names)


class _Splitting:
    """A copy of a fast tokenizer in which special tokens have other, random names.

    So it never takes text that spells a special token for one, neither as an added token nor as a piece of its model,
    and the text around the template's own special tokens is tokenized as always.
    """

    def __init__(self, tokenizer: str, special: Collection[str]) -> None:
        """`tokenizer` is tokenizer.json."""
        from tokenizers import Tokenizer

        described = json.loads(tokenizer) | {"truncation": None, "padding": None}
        self._names = {token: token_hex(16) for token in special}
        ids: dict[str, int] = {}
        for token in described["added_tokens"]:
            if token["content"] in special:
                token |= {"content": self._names[token["content"]], "special": False}
                token |= {"normalized": False, "single_word": False}  # the name is unlike any text
            ids[token["content"]] = token["id"]
        _rename(described["model"], self._names)
        self._tokenizer = Tokenizer.from_str(json.dumps(described))
        self._ids = {self._tokenizer.token_to_id(name): number for name, number in ids.items()}
        """The added tokens' ids, by their ids in the copy."""

    def tokens(self, written: Rendered) -> Tokens:
        """See the function `tokens`."""
        named, begins, begins_in_text, done = "", [0], [0], 0
        for piece, token in _pieces(written):
            for shown, part in ((piece, piece), (self._names[token] if token else "", token)):
                named, done = named + shown, done + len(part)
                begins.append(len(named))
                begins_in_text.append(done)

        def located(place: int) -> int:
            part = bisect_right(begins, place) - 1
            return begins_in_text[part] + place - begins[part]

        encoding = self._tokenizer.encode(named, add_special_tokens=False)
        return Tokens(
            [self._ids.get(number, number) for number in encoding.ids],
            [(located(start), located(end)) for start, end in encoding.offsets],
        )


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Renames tokens in the `model` of a tokenizer.json."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    elif not names.keys().isdisjoint(vocabulary):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
        if "merges" in model:
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            # no merge may produce a special token
            model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


_known: WeakKeyDictionary[PreTrainedTokenizerBase, TokenizerState] = WeakKeyDictionary()


def state_of(tokenizer: PreTrainedTokenizerBase) -> TokenizerState:
    """Returns the state of a tokenizer, which lives as long as the tokenizer."""
    if tokenizer not in _known:
        _known[tokenizer] = TokenizerState(tokenizer)
    return _known[tokenizer]
