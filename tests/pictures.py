"""Small pictures, and a run of another trainer that shows them."""

from __future__ import annotations

import io
import re
from pathlib import Path

from PIL import Image

from ratchet import observe
from ratchet.infra.runs.run import Run, open_run

PAD = "<|image_pad|>"
PROMPT = f"user: <|vision_start|>{PAD * 12}<|vision_end|>which colour? <b>&amp;"


def picture(colour: str, width: int = 24, height: int = 16, kind: str = "PNG") -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(sink, kind)
    return sink.getvalue()


def observed(store: str, name: str, model: Path | None = None) -> Run:
    """Writes a run of two steps, each with two answers about a red picture and one about a large blue one. The second
    answer has looked at a green picture in its middle."""
    from ratchet.rlhf.config import ModelConfig
    from ratchet.rlhf.models.tokenizers import reading_tokenizer

    red, blue, green = picture("red"), picture("blue", 900, 600, "JPEG"), picture("green", kind="WEBP")
    tokenizer = None if model is None else reading_tokenizer(ModelConfig(path=str(model)))

    def row(images: list[bytes], response: str) -> dict[str, object]:
        tokens = [token for token in re.split(f"({re.escape(PAD)}|.)", response) if token]
        known = {} if tokenizer is None else {"response_ids": tokenizer.convert_tokens_to_ids(tokens)}
        return {"prompt": PROMPT, "response": response, "images": images, **known}

    with observe.start(name, store, trainer="mine", model=None if model is None else str(model)) as run:
        for number in range(2):
            rows = [row([red], "red"), row([red, green], f"see {PAD * 5} no"), row([blue], "blue")]
            scores = [{"score": score} for score in (1.0, 0.5, 0.25)]
            advantages = [{"advantages": score} for score in (1.0, -0.5, 0.25)]
            run.step(number).write("generate", rows).write("score", scores).write("advantages", advantages).close()
    return open_run(f"{store}/{name}")
