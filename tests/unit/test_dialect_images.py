"""Images in calls of the endpoint: every dialect says the same, and what cannot be read is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ratchet.rlhf.agents.conversations import CannotRender, ChatConversation, Conversation
from ratchet.rlhf.agents.dialects import DIALECTS
from ratchet.rlhf.agents.sessions import Refused
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.data.formats import Chat, openai_parts
from ratchet.rlhf.data.images import digest_of
from ratchet.rlhf.data.prompts import tokenize_chat
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.rollout.engine import Sampling
from tests import tiny
from tests.vision_models import picture, tiny_vision_model

FIRST, SECOND = picture(1), picture(2, 100, 60)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=8, seed=0)


def base64_of(image: bytes) -> str:
    return base64.b64encode(image).decode()


def url_of(image: bytes) -> str:
    return f"data:image/png;base64,{base64_of(image)}"


def conversation_of(path: str, tokenizer: PreTrainedTokenizerBase, **body: Any) -> Conversation:
    dialect = next(dialect for dialect in DIALECTS if dialect.path == path)
    [asked] = dialect.parse(json.dumps({"model": "policy", **body}).encode(), SAMPLING, tokenizer).asked
    return asked.conversation


def chat(first: str, second: str) -> dict[str, Any]:
    show = {"type": "image_url", "image_url": {"url": first}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "w1"}, show, {"type": "text", "text": "w2"}]},
            {"role": "assistant", "content": "w3", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url", "image_url": {"url": second}}]},
        ]
    }


def messages(first: str, second: str) -> dict[str, Any]:
    def block(url: str) -> dict[str, Any]:
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}

    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    return {
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "w1"}, block(first), {"type": "text", "text": "w2"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "w3"}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [block(second)]}]},
        ],
    }


def responses(first: str, second: str) -> dict[str, Any]:
    def part(url: str) -> dict[str, Any]:
        return {"type": "input_image", "image_url": url}

    def text(words: str) -> dict[str, Any]:
        return {"type": "input_text", "text": words}

    return {
        "input": [
            {"role": "user", "content": [text("w1"), part(first), text("w2")]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "w3"}]},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [part(second)]},
        ]
    }


SPELLED = {"chat/completions": chat, "messages": messages, "responses": responses}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))


@pytest.mark.parametrize("path", SPELLED)
def test_every_dialect_shows_the_same(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = conversation_of(path, tokenizer, **SPELLED[path](url_of(FIRST), url_of(SECOND)))
    assert conversation.images == (FIRST, SECOND)
    said = [json.loads(part) for part in conversation.parts]
    assert [message["content"] for message in said] == ["w1<image>w2", "w3", "<image>"]
    assert [message.get("images") for message in said] == [[digest_of(FIRST)], None, [digest_of(SECOND)]]
    alone = Chat(said[:1], images=(FIRST,))
    assert (
        ChatConversation(openai_parts(alone.messages, alone.images), []).ids(tokenizer)
        == (tokenize_chat(alone, tokenizer, "here")[1])
    )
    assert base64_of(FIRST)[:40] not in json.dumps(conversation.whole)


BROKEN = {"data:image/png;base64,AAAA": "an image cannot be decoded", "data:image/png;base64,?": "is not base64"}
ELSEWHERE = dict.fromkeys(
    ("file:///etc/passwd", "https://example.com/a.png"), "send its bytes, as data:image/png;base64"
)


@pytest.mark.parametrize(
    ("path", "url", "error"),
    [
        (path, url, error)
        for path in SPELLED
        # blocks of `messages` have no addresses
        for url, error in (BROKEN if path == "messages" else BROKEN | ELSEWHERE).items()
    ],
)
def test_what_is_no_image_is_refused(path: str, url: str, error: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Refused, match=error):
        conversation_of(path, tokenizer, **SPELLED[path](url, url_of(SECOND)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "URL"}}]}]},
        ),
        ("responses", {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "URL"}]}]}),
    ],
)
def test_answers_have_no_images(path: str, body: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    shown = json.loads(json.dumps(body).replace("URL", url_of(FIRST)))
    with pytest.raises(Refused, match="the policy answers in text, and this answer has images"):
        conversation_of(path, tokenizer, **shown)


def test_a_model_that_reads_texts_only_is_shown_no_image(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny.model_folder(tmp_path))))
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    conversation = conversation_of("chat/completions", tokenizer, **chat(url_of(FIRST), url_of(SECOND)))
    with pytest.raises(CannotRender, match="the call has images, and the model reads text only"):
        conversation.ids(tokenizer)
