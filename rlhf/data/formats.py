"""Reads rows of published datasets, in the layouts of verl, TRL and ShareGPT, as prompts and their ground truths."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

from ratchet.rlhf.data.images import KEYS, MARK, ImageError, data_url, digest_of, image_bytes
from ratchet.rlhf.errors import UserError, counted, in_one_line


class Message(TypedDict):
    """A message of a conversation. Other keys, such as `name`, are for the chat template."""

    role: str
    content: str
    """Empty if the message only calls tools. With `images`, each `<image>` stands for one; without, it is text."""
    images: NotRequired[list[str]]
    """The digest of each image, in order; see `images.digest_of`."""
    tool_calls: NotRequired[list[dict[str, Any]]]
    """Each {function: {name, arguments}}, or {name, arguments}, with the arguments as an object."""
    tool_call_id: NotRequired[str]
    """In a message of the role `tool`, the call that it answers."""
    name: NotRequired[str]


Messages = list[Message]
"""A conversation."""
Tools = tuple[dict[str, Any], ...]
"""JSON schemas of functions, each {type: function, function: {name, …}}, or only {name, …}."""


class Chat(NamedTuple):
    """What a chat template renders."""

    messages: Messages
    tools: Tools = ()
    """The functions that the model may call."""
    images: tuple[bytes, ...] = ()
    """The images of all messages, encoded, in order."""


class Draft(NamedTuple):
    """A message whose images have not been read."""

    message: Message
    images: tuple[object, ...] = ()
    """What each image part of the content gives; None: an image of the row."""


SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Roles of ShareGPT's `from`."""
PROMPTS = ("prompt", "messages", "conversations", "question", "problem")
"""Columns of a prompt, in order of precedence; `question` is GSM8K's, `problem` that of MATH and its like."""
TRUTHS = ("ground_truth", "answer", "solution")
"""Columns of a ground truth outside `reward_model`, in order of precedence."""
IMAGES = ("images", "image")
"""Columns of a row's images, in order of precedence."""
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a content that are images."""
MEDIA = frozenset(("videos", "video", "audios", "audio"))
"""Columns, and keys of messages, of what no model sees or hears."""
UNSEEN = frozenset(("functions", "documents", "tool_calls", "function_call", "reasoning_content", "system"))
"""Columns that others show to a model, and that are no part of a prompt here."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages that hold what was thought before the content."""
LAYOUT = ("data_source", "prompt", "ability", "reward_model", "extra_info", "continues")
"""The columns of verl's layout, and the turns that `ratchet data prefixes` writes."""
_FORMULA = re.compile(r"(?<!\\)(\$\$?)(?!\$).+?(?<!\\)\1|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
CALLS = 'a list of {"function": {"name": ..., "arguments": {...}}}'
"""The form of `tool_calls`, for errors."""
SCHEMAS = 'a list of {"type": "function", "function": {"name": ..., "parameters": {...}}}, perhaps as JSON text'
"""The form of `tools`, for errors."""


class PromptRow(NamedTuple):
    """The prompt of a row."""

    messages: Messages
    tools: Tools
    is_text: bool
    """True if the row has it as text."""
    answer: str | list[dict[str, Any]] | None
    """The response in the row, if any: its text, or its tool calls."""
    columns: dict[str, Any]
    """The columns that are neither the messages nor in verl's layout; `tools` is a list."""
    unseen: tuple[str, ...]
    """Those of them that may belong to the prompt, and are not shown to the model."""
    images: tuple[bytes, ...]
    """The images of the messages, encoded, in order."""


def question_of(row: Mapping[str, Any], where: str, folder: str = "") -> PromptRow:
    """Finds the prompt of a row; raises UserError if there is none, it is empty or malformed, the row has videos or
    sounds, or an image cannot be read.

    Args:
        row: a row with `prompt`, and possibly `completion`; with `messages`; with ShareGPT's `conversations`; or with
            `question` or `problem`. A last message of the assistant in messages and conversations is the answer. Any of
            them may have `tools` and images (see `with_images`).
        folder: folder of the file, where relative paths of images begin.
    """
    check_media(row, where)
    column = next((name for name in PROMPTS if row.get(name) is not None), None)
    if column is None:
        if empty := [name for name in PROMPTS if name in row]:
            raise UserError(f"{where}: {' and '.join(empty)} of this row is empty: fill it in, or remove the row")
        raise UserError(
            f"{where}: prompt is missing; there are {in_one_line(', '.join(row))}. Rows have a prompt, messages, "
            "conversations, a question or a problem: rename the column, or write such rows with `ratchet data prompts "
            "OUT --source FILE --data-source NAME --prompt COLUMN --truth COLUMN`"
        )
    drafts, answer = drafts_of(row[column], where, column), None
    if column == "prompt":
        completion = row.get("completion")
        answer = completion if completion is None else _answer(messages_of(completion, where, "completion")[-1])
    elif column in ("messages", "conversations") and drafts[-1].message["role"] == "assistant":
        *drafts, last = drafts
        answer = _answer(without_images([last], f"{where}: the answer in {column}")[0])
    messages, images = with_images(drafts, row, where, folder)
    if column == "conversations":
        messages = with_system(messages, row)
    if not any(text_of(message).strip() for message in messages):
        raise UserError(f"{where}: the prompt is empty: give it at least one message with content")
    left = (column, *LAYOUT, *IMAGES)
    others, tools = {name: value for name, value in row.items() if name not in left}, tools_of(row, where)
    others |= {"tools": list(tools)} if "tools" in row else {}
    unseen = unseen_columns(row, messages)
    return PromptRow(messages, tools, isinstance(row[column], str), answer, others, unseen, images)


def _answer(message: Message) -> str | list[dict[str, Any]]:
    return message.get("tool_calls") or message["content"]


def check_media(row: Mapping[str, Any], where: str) -> None:
    """Raises UserError for videos or audio in a row, or in a message of the place `where`."""
    if not MEDIA.isdisjoint(row):
        _check_empty(row, where, MEDIA, "models see texts and images only")


def check_no_images(row: Mapping[str, Any], where: str, what: str) -> None:
    """Raises UserError for images in a row's columns, where there may be none: in `what`."""
    if not row.keys().isdisjoint(IMAGES):
        _check_empty(row, where, IMAGES, f"{what} have texts only")


def _check_empty(row: Mapping[str, Any], where: str, names: Container[str], why: str) -> None:
    for name in row:
        if name in names and _holds(row[name]):
            raise UserError(
                f"{where} has {name}, and {why}: leave out such rows, or remove {name} if the texts do without"
            )


def with_images(
    drafts: Sequence[Draft], row: Mapping[str, Any], where: str, folder: str
) -> tuple[Messages, tuple[bytes, ...]]:
    """Reads the images of messages: those that their parts give, and those in the row's columns `images` or `image`.

    The row's images stand where parts without data or marks in texts are, as verl has them; if there is none of these,
    before the text of the first message of the user, as TRL has them.

    Returns:
        The messages, and their images in order.

    Raises:
        ImageError: the number of the row's images is another, or an image cannot be read.
    """
    column = _column_of_images(row, where)
    if not column and not any(draft.images for draft in drafts):
        return [draft.message for draft in drafts], ()
    marked = [draft if draft.images or not column else _with_marks(draft) for draft in drafts]
    places = sum(image is None for draft in marked for image in draft.images)
    if column and not any(draft.images for draft in marked):
        first = next((at for at, draft in enumerate(marked) if draft.message["role"] == "user"), None)
        if first is None:
            raise ImageError(f"{where} has images, and no message of the user: write {MARK} where they belong")
        message = cast(
            Message, {**marked[first].message, "content": MARK * len(column) + marked[first].message["content"]}
        )
        marked[first] = Draft(message, (None,) * len(column))
    elif places != len(column):
        raise ImageError(
            f"{where} has {counted(len(column), 'image')} in its columns, and its messages have "
            f"{counted(places, 'place')} for them ({MARK}, or an image part without data): give each place an image"
        )
    others, images, messages = iter(column), list[bytes](), Messages()
    for message, values in marked:
        for value in values:
            given = next(others) if value is None else value
            images.append(image_bytes(given, folder, f"{where}: image {len(images) + 1}"))
        digests = [digest_of(data) for data in images[len(images) - len(values) :]]
        messages.append(cast(Message, {**message, "images": digests}) if digests else message)
    return messages, tuple(images)


def openai_parts(messages: Messages, images: Sequence[bytes]) -> list[dict[str, Any]]:
    """Returns messages with their images as OpenAI's content parts, in `data:` URLs; those without images as they are.

    Args:
        images: the images of all messages, encoded, in order.
    """
    rest, written = iter(images), list[dict[str, Any]]()
    for message in messages:
        others: dict[str, Any] = {name: value for name, value in message.items() if name != "images"}
        if message.get("images"):
            parts: list[dict[str, Any]] = []
            for number, text in enumerate(message["content"].split(MARK)):
                parts += [{"type": "image_url", "image_url": {"url": data_url(next(rest))}}] if number else []
                parts += [{"type": "text", "text": text}] if text else []
            others["content"] = parts
        written.append(others)
    return written


def image_values(row: Mapping[str, Any]) -> Iterator[object]:
    """Yields what the columns and the messages of a row give for its images, in their order; see `image_bytes`."""
    for name in IMAGES:
        value = row.get(name)
        yield from value if isinstance(value, list) else [value]
    for column in PROMPTS:
        messages = row.get(column)
        for message in messages if isinstance(messages, list) else ():
            parts = message.get("content") if isinstance(message, dict) else None
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                    yield _given(part)


def without_images(drafts: Sequence[Draft], at: str) -> Messages:
    """Returns the messages of drafts. Raises UserError if one has images; `at` says whose they are, for errors."""
    if any(draft.images for draft in drafts):
        raise UserError(f"{at} has an image, where only texts may be: leave out such rows, or the image")
    return [draft.message for draft in drafts]


def _column_of_images(row: Mapping[str, Any], where: str) -> list[object]:
    """Returns the images in the columns of a row; none if they are empty."""
    there = [name for name in IMAGES if _holds(row.get(name))]
    if len(there) > 1:
        raise ImageError(f"{where} has {' and '.join(there)}: write all of its images into images")
    value = row[there[0]] if there else []
    return value if isinstance(value, list) else [value]


def _with_marks(draft: Draft) -> Draft:
    """Counts the marks that a text spells as places of the row's images."""
    return Draft(draft.message, (None,) * draft.message["content"].count(MARK))


def unseen_columns(row: Mapping[str, Any], messages: Messages) -> tuple[str, ...]:
    """Returns the columns with content that may belong to the messages of a row, and are no part of them."""
    if UNSEEN.isdisjoint(row):
        return ()
    shown = "system" if messages[0]["role"] == "system" else None
    return tuple(name for name in row if name in UNSEEN and name != shown and _holds(row[name]))


def _holds(value: Any) -> bool:
    """True if a value, or one at any depth of it, is neither null nor empty."""
    if isinstance(value, dict):
        value = list(value.values())
    return any(map(_holds, value)) if isinstance(value, list) else bool(value)


def truth_of(row: Mapping[str, Any], answer: str | list[dict[str, Any]] | None, where: str) -> Any:
    """Returns the ground truth of a row: of `reward_model`, of a column in `TRUTHS`, or the row's `answer`."""
    reward_model = row.get("reward_model") or {}
    if not isinstance(reward_model, dict):
        raise UserError(f"{where}: reward_model should be an object {{style, ground_truth}}, not {reward_model!r:.60}")
    # beside an `answer`, a `solution` is its derivation (OpenR1-Math, NuminaMath)
    truths = (reward_model.get("ground_truth"), *map(row.get, TRUTHS), answer)
    return next((truth for truth in truths if truth is not None), None)


def formulas_of(text: str) -> list[str]:
    """Returns the formulas in a text with LaTeX, marked by dollars, ``\\(...\\)`` or ``\\[...\\]``."""
    return [match[0] for match in _FORMULA.finditer(text)]


def messages_of(value: Any, where: str, column: str = "prompt") -> Messages:
    """Validates messages without images, as `drafts_of` does."""
    return without_images(drafts_of(value, where, column), f"{where}: {column}")


def drafts_of(value: Any, where: str, column: str = "prompt") -> list[Draft]:
    """Validates messages; plain text becomes a message of the user.

    Keys that are null are left out, except in arguments. The arguments of `tool_calls` may be JSON text, as in OpenAI's
    API, and become an object, which chat templates expect (as in vLLM). A message that calls tools needs no content.

    Args:
        value: messages {role, content}, ShareGPT's {from, value}, or text.
    """
    if isinstance(value, str):
        return [Draft({"role": "user", "content": value})]
    if not isinstance(value, list):
        raise UserError(f"{where}: {column} should be a list of messages {{role, content}}, and is {_shown(value)}")
    if not value:
        raise UserError(f"{where}: {column} is an empty list: give it at least one message {{role, content}}")
    return [_draft(message, f"{where}: {column}[{number}]") for number, message in enumerate(value)]


def tools_of(row: Mapping[str, Any], where: str) -> Tools:
    """Returns the schemas in the column `tools` of a row, a list or JSON text; none if it is null or empty."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UserError(f"{where}: tools is a text that is not JSON ({error}): write {SCHEMAS}") from None
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise UserError(f"{where}: tools should be {SCHEMAS}, and is {_shown(tools)}")
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{where}: tools should be {SCHEMAS}, and tools[{number}] is {_shown(tool)}")
    return tuple(tools)


def tools_column(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Encodes schemas for a column `tools`, which `tools_of` reads; None if there are none."""
    return json.dumps(tools, ensure_ascii=False) if tools else None


def text_of(message: Message) -> str:
    """Returns the text of a message, with its tool calls as JSON, for readers without a chat template."""
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join([message["content"], *calls] if message["content"] else calls)


def without_nulls(value: Any, but: str | None = None) -> Any:
    """Returns JSON without the keys that are null, at any depth; the value of the key `but` is unchanged."""
    if isinstance(value, dict):
        return {
            name: member if name == but else without_nulls(member, but)
            for name, member in value.items()
            if member is not None
        }
    return [without_nulls(member, but) for member in value] if isinstance(value, list) else value


def with_system(messages: Messages, row: Mapping[str, Any]) -> Messages:
    """Returns the messages after the text in a ShareGPT row's column `system`, if it has one."""
    system = row.get("system")
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages


def _draft(value: Any, at: str) -> Draft:
    """Validates a message; `at` is its place, for errors."""
    if not isinstance(value, dict):
        raise UserError(f"{at} should be a message {{role, content}}, and is {_shown(value)}")
    given = without_nulls(value, but="arguments")
    is_sharegpt = "from" in value and "role" not in given
    check_media(given, at)
    for name in IMAGES:
        if _holds(given.pop(name, None)):
            raise ImageError(f'{at} has {name}: write each as a part of its content, {{"type": "image", "image": ...}}')
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    role = given.get(role_key)
    if not isinstance(role, str):
        raise UserError(f"{at} has {_state(value, role_key)}: say whose message it is, such as user or assistant")
    if is_sharegpt:
        if role not in SHAREGPT:
            raise UserError(f"{at} is from {_shown(role)}: from should be one of {', '.join(SHAREGPT)}")
        role = SHAREGPT[role]
        given = {"role": role, **({"content": given["value"]} if "value" in given else {})}
    at = f"{at} ({role})" if role.isidentifier() else at
    calls, content = given.pop("tool_calls", None) or [], given.get("content")
    if not calls and given.get("function_call"):
        raise UserError(f"{at} has function_call, of an old API: write it as tool_calls, {CALLS}")
    images: tuple[object, ...] = ()
    if isinstance(content, list) and any(isinstance(part, dict) for part in content):
        content, images = _joined(content, at)
    if calls and content is None:
        content = ""
    if content is None and role == "assistant":
        raise UserError(
            f"{at} has {_state(value, content_key)} and {_state(value, 'tool_calls')}: give it a text or calls of tools"
        )
    if not isinstance(content, str):
        empty = "" if role == "user" else ', or "" if it has none'
        raise UserError(f"{at} has {_state(value, content_key)}: write its text{empty}")
    message: dict[str, Any] = {**given, "content": content}
    if calls:
        if not isinstance(calls, list):
            raise UserError(f"{at}: tool_calls should be {CALLS}, and is {_shown(calls)}")
        message["tool_calls"] = [_call(call, at, number) for number, call in enumerate(calls)]
    return Draft(cast(Message, message), images)


def _joined(parts: Sequence[Any], at: str) -> tuple[str, tuple[object, ...]]:
    """Joins the parts of a content to its text, with marks, and what each image part gives."""
    texts, images = list[str](), list[object]()
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGE_PARTS:
            texts.append(MARK)
            images.append(_given(part))
        elif isinstance(part, dict) and kind == "text":
            texts.append(str(part.get("text", "")))
        elif isinstance(part, dict):
            raise UserError(
                f"{at} has content with {kind}, and models see texts and images only: leave out such rows, or these "
                "parts"
            )
    content = "".join(texts)
    if images and content.count(MARK) != len(images):
        raise ImageError(f"{at} has images, and its text spells {MARK}, which stands for one: change the text")
    return content, tuple(images)


def _given(part: Mapping[str, Any]) -> object:
    """Returns what an image part gives: an object for `image_bytes`; None if it has no data."""
    source = part.get("source")  # of Anthropic
    if isinstance(source, dict):
        return {"base64": source.get("data"), "url": source.get("url")}
    given = {name: value for name, value in part.items() if name not in ("type", "text") and _holds(value)}
    return given if any(name in given for name in KEYS) else None


def _call(call: Any, at: str, number: int) -> dict[str, Any]:
    """Validates a tool call, and makes its arguments an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise UserError(f"{at}: tool_calls should be {CALLS}, and tool_calls[{number}] is {_shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise UserError(f"{at} calls {_shown(name)} with arguments that are not JSON: {error}") from None
    if arguments in (None, ""):  # a function without parameters
        arguments = {}
    if not isinstance(arguments, dict):
        raise UserError(
            f"{at} calls {_shown(name)} with arguments {_shown(arguments)}: write an object that names each argument"
        )
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _state(message: Mapping[str, Any], key: str) -> str:
    """Describes what is wrong with a key."""
    return f"{key} {_shown(message[key])}" if key in message else f"no {key}"


def _shown(value: Any) -> str:
    """Returns the start of a value as JSON, which has no line breaks."""
    return f"{json.dumps(value, ensure_ascii=False, default=str):.60}"
