"""An environment and an agent's program that show pictures to a policy."""

from __future__ import annotations

import base64
from typing import Any

from openai import OpenAI

from ratchet.rlhf.environments.environment import Observation
from tests.vision_models import picture

SHOWN = {1: [picture(1, 100, 60), picture(2, 56, 56)], 2: [], 3: [picture(3)]}
"""The pictures that follow each turn."""


def message(turn: int) -> dict[str, Any]:
    """Returns what answers a turn, with OpenAI's content parts."""
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in SHOWN[turn]]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts[:1], {"type": "text", "text": "w5"}, *parts[1:]]}


class Pointing:
    """An environment that answers three turns with the pictures of `SHOWN`, and then ends."""

    replayable = True
    stop = ("w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8")

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, messages: object, ground_truth: object, extra_info: object) -> None:
        self.turns = 0

    def step(self, turn: str) -> Observation:
        self.turns += 1
        if self.turns not in SHOWN:
            return Observation(None, reward=1.0)
        return Observation([message(self.turns)], reward=float(len(turn) % 3))


def looks(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """A program that shows the pictures of its prompt, and then those of `SHOWN`; the last turn in another branch."""
    client = OpenAI(base_url=base_url, api_key=api_key)

    def answer(messages: list[Any]) -> str:
        completion = client.chat.completions.create(model=model, messages=messages, max_tokens=3)
        return completion.choices[0].message.content or ""

    messages: list[Any] = list(task["messages"])
    for turn in (1, 2, 3):
        before, said = messages, {"role": "assistant", "content": answer(messages)}
        messages = [*messages, said, message(turn)]
    answer(messages)
    return float(len(answer([*before, {"role": "user", "content": "w9"}])) % 3)
