"""Conversations that a program asks the policy to continue, and their tokens.

The policy's own tokens are never tokenized again. A conversation that extends an earlier one keeps its tokens, and only
the new part is rendered; any other conversation starts a new branch. Tokenizing the policy's text again gives other
tokens than it drew (the drift that verl and prime-rl document), and so trains on tokens that were never sampled.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ratchet.rlhf.data.chat_turns import (
    by_template,
    check_sees,
    in_parts,
    render_contents,
    text_ids,
    token_ids,
    with_image_tokens,
)
from ratchet.rlhf.data.formats import Chat, Message
from ratchet.rlhf.data.images import MARK, digest_of, of_data_url
from ratchet.rlhf.data.prompts import tokenize_start
from ratchet.rlhf.environments.dialogues import Dialogue, content_ids
from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CannotRender(Exception):
    """The chat template refuses the messages, or a token does not exist."""


@dataclass
class Branch:
    """A conversation of a trajectory that only grows at its end."""

    number: int
    dialogue: Dialogue
    setting: str
    """Kind of the conversation, and its tools: other settings give other tokens from the start."""
    history: list[str] = field(default_factory=list)
    """The parts of the conversation (see `Conversation.parts`), with the policy's answers."""
    after: list[int] = field(default_factory=list)
    """For each answer, the number of parts up to and including it."""
    is_busy: bool = False
    """True while the policy writes its next answer."""


class Continuation(NamedTuple):
    """The extension of a branch by a conversation."""

    answers: int
    """Number of the branch's answers that it contains."""
    ids: list[int]
    """Tokens after the last of these answers."""
    history: list[str]
    """The parts of the conversation."""
    news: dict[str, Any]
    """The parts that it adds, as JSON."""
    images: tuple[bytes, ...] = ()
    """The images among its tokens, encoded, in order."""


class Conversation(ABC):
    """A conversation that the policy is asked to continue."""

    setting: str
    """See `Branch.setting`."""
    parts: list[str]
    """Its parts, as texts that are equal for equal parts."""
    images: tuple[bytes, ...] = ()
    """Its images, encoded, in order."""

    @abstractmethod
    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokenizes the whole conversation. Raises CannotRender."""

    @abstractmethod
    def continues(self, branch: Branch, tokenizer: PreTrainedTokenizerBase) -> Continuation | None:
        """Finds the last answer of a branch that the conversation contains, with everything before it; else None.

        Raises CannotRender if the chat template refuses what follows.
        """

    @property
    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole conversation as JSON."""

    @abstractmethod
    def answer_part(self, message: Mapping[str, Any]) -> str:
        """Returns an answer of the policy as a part."""


class ChatConversation(Conversation):
    """Messages, rendered by the chat template."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Takes messages, and schemas of the tools that the policy may call, as OpenAI defines them."""
        plain = [_plain(message) for message in messages]
        self._messages, self._images = [message for message, _ in plain], [images for _, images in plain]
        self.images = tuple(chain.from_iterable(self._images))
        self._tools = [dict(tool) for tool in tools]
        self.setting = "chat " + json.dumps(self._tools, sort_keys=True)
        self.parts = [_canonical(message) for message in self._messages]

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        if not tokenizer.chat_template:
            if self._tools:
                raise CannotRender("the model has no chat template that describes tools: set model.chat_template")
            return tokenize_start("\n".join(message["content"] for message in self._messages), tokenizer)
        template = tokenizer.chat_template
        if self._tools and "tools" not in (template if isinstance(template, str) else "".join(template.values())):
            raise CannotRender("the chat template does not describe tools: set model.chat_template")

        def rendered(contents: Mapping[str, Any]) -> str:
            return by_template(contents["messages"], tokenizer, tools=contents["tools"], add_generation_prompt=True)

        contents = {"messages": in_parts(self._messages, tokenizer), "tools": self._tools or None}
        chat = Chat(self._messages, images=self.images)
        try:
            check_sees(chat, tokenizer, "the call")
            written = token_ids(render_contents(rendered, contents, tokenizer), tokenizer)
            return with_image_tokens(written, chat, tokenizer, "the call")
        except UserError as error:
            raise CannotRender(str(error)) from None
        except Exception as error:  # a template may fail in any way on messages that it does not expect
            raise CannotRender(f"the chat template refuses the messages: {type(error).__name__}: {error}") from None

    def continues(self, branch: Branch, tokenizer: PreTrainedTokenizerBase) -> Continuation | None:
        if branch.setting != self.setting:
            return None
        common = next(
            (n for n, pair in enumerate(zip(self.parts, branch.history, strict=False)) if pair[0] != pair[1]),
            min(len(self.parts), len(branch.history)),
        )
        answers = sum(1 for count in branch.after if count <= common)
        # an answer that nothing follows cannot be continued
        if not answers or branch.after[answers - 1] == len(self.parts):
            return None
        first, dialogue = branch.after[answers - 1], branch.dialogue
        last = dialogue.ids[dialogue.turn_ends[answers - 1] - 1]
        try:
            images = tuple(chain.from_iterable(self._images[first:]))
            ids = content_ids(Chat(self._messages[first:], images=images), last, tokenizer)
        except Exception as error:
            raise CannotRender(f"the chat template refuses the messages: {error}") from None
        return Continuation(answers, ids, self.parts, {"messages": self._messages[first:]}, images)

    @property
    def whole(self) -> dict[str, Any]:
        return {"messages": self._messages} | ({"tools": self._tools} if self._tools else {})

    def answer_part(self, message: Mapping[str, Any]) -> str:
        return _canonical(_plain(message)[0])


class Completion(Conversation):
    """A text, or tokens, that the policy continues."""

    def __init__(self, prompt: str | Sequence[int]) -> None:
        """`prompt` is a text or token ids."""
        self._prompt = prompt if isinstance(prompt, str) else list(prompt)
        self.setting = "text" if isinstance(prompt, str) else "tokens"
        self.parts = [prompt if isinstance(prompt, str) else json.dumps(self._prompt)]

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        if isinstance(self._prompt, str):
            return tokenize_start(self._prompt, tokenizer)
        if unknown := [token for token in self._prompt if not 0 <= token < len(tokenizer)]:
            raise CannotRender(f"prompt has the token {unknown[0]}, and the tokens are 0 to {len(tokenizer) - 1}")
        return list(self._prompt)

    def continues(self, branch: Branch, tokenizer: PreTrainedTokenizerBase) -> Continuation | None:
        if branch.setting != self.setting:
            return None
        # the longest match first
        for answers in range(len(branch.after), 0, -1):
            history, dialogue = branch.history[: branch.after[answers - 1]], branch.dialogue
            if isinstance(self._prompt, str):
                before = "".join(history)
                if self._prompt.startswith(before):
                    rest = self._prompt[len(before) :]
                    ids = text_ids(rest, tokenizer) if rest else []
                    return Continuation(answers, ids, [*history, rest], {"prompt": rest})
            else:
                known = [*dialogue.request.prompt_ids, *dialogue.ids[: dialogue.turn_ends[answers - 1]]]
                if self._prompt[: len(known)] == known:
                    ids = Completion(self._prompt[len(known) :]).ids(tokenizer)
                    return Continuation(answers, ids, [*history, json.dumps(ids)], {"prompt": ids})
        return None

    @property
    def whole(self) -> dict[str, Any]:
        return {"prompt": self._prompt}

    def answer_part(self, message: Mapping[str, Any]) -> str:
        return str(message["content"])


def _plain(message: Mapping[str, Any]) -> tuple[Message, tuple[bytes, ...]]:
    """Returns a message as chat templates expect it, and its images.

    Contents are texts with marks for images, and the arguments of tool calls are structures.
    """
    role, content = message["role"], message.get("content")
    parts: list[dict[str, Any]] = content if isinstance(content, list) else [{"text": content or ""}]
    images = tuple(of_data_url(part["image_url"]["url"]) for part in parts if "image_url" in part)
    text = "".join(MARK if "image_url" in part else part["text"] for part in parts)
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if images:
        plain["images"] = [digest_of(image) for image in images]
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _structure(call["function"]["arguments"])},
            }
            for call in message["tool_calls"]
        ]
    named = {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    return cast(Message, plain | named), images


def _structure(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _canonical(message: Mapping[str, Any]) -> str:
    return json.dumps(_as_everywhere(message), sort_keys=True, ensure_ascii=False)


def _as_everywhere(value: Any) -> Any:
    """Returns JSON whose numbers are written alike in all languages: in JavaScript, 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _as_everywhere(inner) for key, inner in value.items()}
    return [_as_everywhere(inner) for inner in value] if isinstance(value, list | tuple) else value
