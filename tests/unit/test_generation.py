"""A trajectory whose generation is interrupted continues from its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from transformers import AutoTokenizer

from ratchet.rlhf import event_loop
from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling
from tests import tiny


class Typist(RolloutEngine):
    """Writes a text, token by token, and waits after `pause_after` tokens until the request is cancelled."""

    def __init__(self, tokenizer: Any, text: str, pause_after: int) -> None:
        self.ids = tokenizer(text)["input_ids"]
        self.pause_after = pause_after
        self.has_paused = asyncio.Event()

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        for position in range(request.generated_tokens, len(self.ids)):
            if position == self.pause_after and not self.has_paused.is_set():
                self.has_paused.set()
                await asyncio.Event().wait()
            is_last = position == len(self.ids) - 1
            yield Chunk((self.ids[position],), (-1.0,), "length" if is_last else None)

    def load_weights(self, weights: Any, adapter_config: bytes | None = None) -> int:
        return 0

    def place(self, *, model: bool, optimizer: bool) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny.model_folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("pause_after", [2, 3, 5])
def test_a_stop_text_that_new_weights_split_ends_the_response(tokenizer: Any, pause_after: int) -> None:
    engine = Typist(tokenizer, "ab</c>de", pause_after)
    generator = Generator(engine, tokenizer, interruptible=True)
    generator.resume(version=1)
    dialogue = Dialogue(Request("it000000-p00000-s00", (5, 6)))
    generator.submit([(dialogue, Rules(Sampling(1.0, 1.0, 40, seed=0, stop=("</c>",))))])

    async def paused() -> None:
        await engine.has_paused.wait()

    event_loop.run(paused())
    generator.pause()
    assert len(dialogue.ids) == pause_after
    generator.resume(version=2)
    assert generator.wait(60) == [dialogue]
    assert tokenizer.decode(dialogue.ids) == "ab</c>", "though the engine was given only its end"
    assert (dialogue.finish_reason, dialogue.turn_ends) == ("stop", [6])
    assert dialogue.versions == [1] * pause_after + [2] * (6 - pause_after)
