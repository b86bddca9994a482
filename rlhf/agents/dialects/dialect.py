"""The interface of a dialect: how a vendor's API spells calls, answers, streams and errors.

Parameters that would draw from another distribution than the run's are refused, because the run would train on tokens
that its policy did not draw.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from ratchet.rlhf.agents.sessions import Asked, PolicyReply, Refused
from ratchet.rlhf.data.images import of_data_url
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"
"""Name of the model that the endpoint serves."""
LONGEST_STOP = 256
"""Maximum length of a stop text in characters, and maximum number of stop texts."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Parameters that must have the run's values."""
JSONObject: TypeAlias = dict[str, Any]
P = TypeVar("P", bound="Parameters")


class Unsupported(Refused):
    """The call does not fit the run, so its trajectory is not trained on."""


class Strict(BaseModel):
    """A part of a body. Unknown keys are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True)


def check_data_url(url: str) -> str:
    """Returns a `data:` URL of an image. Raises ValueError if it is none."""
    try:
        of_data_url(url)
    except UserError as error:
        raise ValueError(str(error)) from None
    return url


DataUrl = Annotated[str, AfterValidator(check_data_url)]
"""A `data:` URL of an image."""


class Parameters(Strict):
    """Parameters that all dialects have; those without a field are in `model_extra`."""

    ignored: ClassVar[frozenset[str]]
    """Parameters without an effect on the answer."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Parameters that would change how tokens are drawn, with the values that do not."""
    model: str
    stream: bool | None = None

    def check(self, sampling: Sampling) -> None:
        """Raises Unsupported if a parameter does not fit the run, and Refused if the model does not exist."""
        check_model(self.model)
        for name, value in (self.model_extra or {}).items():
            if value is None or name in self.ignored or (name in self.neutral and value in self.neutral[name]):
                continue
            if name in SAMPLING:
                if value == getattr(sampling, name):
                    continue
                raise unsupported(
                    name,
                    f"{name} {str(value)[:100]} is not the run's, so the run would learn from tokens that its policy "
                    f"did not draw: leave it out, or set rollout.{name}",
                )
            if name in self.neutral:
                raise unsupported(name, f"{name} {str(value)[:100]} would change how tokens are drawn: leave it out")
            raise Unsupported(
                f"unrecognized parameter {name[:100]}: leave it out", param=name[:100], code="unknown_parameter"
            )


@dataclass(frozen=True)
class ImagePart:
    """An image in a content."""

    url: str
    """A `data:` URL."""


class Exchange(ABC):
    """A call, and how its answers are written."""

    asked: Sequence[Asked]
    """The call, once for each choice."""
    streams: bool
    """True if the client wants a stream of events."""

    @abstractmethod
    def body(self, answers: Sequence[PolicyReply]) -> JSONObject:
        """Returns the answers to all choices as one body."""

    @abstractmethod
    def stream(self) -> Stream:
        """Returns a new stream."""


class Stream(ABC):
    """Writes answers as server-sent events. Each method returns the texts of the events that its news cause."""

    @abstractmethod
    def text(self, choice: int, text: str) -> Iterable[str]:
        """The answer to a choice has grown by a text."""

    @abstractmethod
    def answer(self, choice: int, answer: PolicyReply) -> Iterable[str]:
        """The answer to a choice is complete."""

    @abstractmethod
    def end(self, answers: Sequence[PolicyReply]) -> Iterable[str]:
        """All answers are complete."""

    @abstractmethod
    def error(self, refused: Refused) -> Iterable[str]:
        """The stream ends with an error after its first event."""


class Dialect(ABC):
    """One endpoint in a vendor's API."""

    path: str
    """Path of the endpoint after the base URL."""

    @abstractmethod
    def parse(self, body: bytes, sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> Exchange:
        """Reads a call.

        Args:
            body: JSON.
            sampling: how the run draws tokens.
            tokenizer: decodes the tokens whose log-probs are wanted.

        Raises:
            Unsupported: the call would change how tokens are drawn.
            Refused: the call is malformed.
        """

    def error(self, refused: Refused) -> JSONObject:
        """Returns an error as a body, in OpenAI's shape unless a dialect has another."""
        return openai_error(refused)


def openai_error(refused: Refused) -> JSONObject:
    """Returns an error in OpenAI's shape."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def read(kind: type[P], body: bytes, sampling: Sampling) -> P:
    """Reads and checks the parameters of a call. Raises Refused and Unsupported."""
    try:
        parameters = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explained(error) from None
    parameters.check(sampling)
    return parameters


def joined(parts: Iterable[str | ImagePart], between: str = "") -> str | list[JSONObject]:
    """Joins the texts of a content: to one text, or, if there are images, to OpenAI's parts."""
    contents: list[JSONObject] = []
    for part in parts:
        if isinstance(part, ImagePart):
            contents.append({"type": "image_url", "image_url": {"url": part.url}})
        elif contents and "text" in contents[-1]:
            contents[-1]["text"] += between + part
        else:
            contents.append({"type": "text", "text": part})
    has_images = any("image_url" in content for content in contents)
    return contents if has_images else "".join(content["text"] for content in contents)


def check_model(model: str) -> None:
    """Raises Refused if there is no such model."""
    if model != MODEL:
        raise Refused(
            f"there is no model {model[:100]!r}: use model={MODEL!r}",
            status=404,
            code="model_not_found",
            param="model",
        )


def unsupported(param: str, message: str) -> Unsupported:
    """Returns the error for a value that does not fit the run."""
    return Unsupported(message, param=param, code="unsupported_value")


def cannot_force(choice: str) -> Unsupported:
    """Returns the error for a choice of tools that the policy would have to be forced to."""
    return unsupported(
        "tool_choice",
        f"tool_choice {choice[:100]} would force tokens that the policy did not draw: use auto or none",
    )


def images_in_answer(param: str) -> Refused:
    """Returns the error for an answer of the policy, given back with images."""
    return Refused(f"{param}: the policy answers in text, and this answer has images: leave them out", param=param)


def event(data: JSONObject | str, name: str | None = None) -> str:
    """Formats a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def calls_of(answer: PolicyReply) -> Iterator[tuple[str, str, str]]:
    """Yields the id, the name and the arguments (as JSON) of each tool call of an answer."""
    for call in answer.message.get("tool_calls", ()):
        yield call["id"], call["function"]["name"], call["function"]["arguments"]


def function_schema(name: str, description: str | None, parameters: JSONObject | None) -> JSONObject:
    """Returns the schema of a tool as chat templates expect it."""
    function: JSONObject = {"name": name}
    if description:
        function["description"] = description
    return {"type": "function", "function": function | {"parameters": parameters or {}}}


def _explained(error: ValidationError) -> Refused:
    """Returns the error for malformed parameters."""
    # of the ways to read a value, the one that goes furthest is what was meant
    first = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
    param = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "function-")))
    return Refused(f"{param or 'the body'}: {first['msg']}", param=param or None)
