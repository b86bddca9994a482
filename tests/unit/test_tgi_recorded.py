"""TGI was never run here. These answers were recorded by its own tests, from a server of huggyllama/llama-7b
(github.com/huggingface/text-generation-inference, integration-tests/models/__snapshots__/test_flash_llama: `simple` and
`all_params`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.rollout.server_engine import ServerRollout
from tests.tiny import model_folder

STOPPED = (
    "stop_sequence",
    ((5229, -2.5839844), (29901, -0.44970703), (4829, -1.8339844), (297, -1.0556641), (1243, 0.0)),
)
CUT = ("length", ((363, -1.5351562), (847, -2.5722656), (2754, -2.2714844)))
"""The first three of its ten tokens."""


class Replay(ThreadingHTTPServer):
    """Gives a recorded answer, and keeps what it was asked."""

    answer: tuple[str, tuple[tuple[int, float], ...]] = STOPPED
    asked: Any = None


class Handler(BaseHTTPRequestHandler):
    server: Replay

    def do_POST(self) -> None:
        assert self.path == "/generate"
        self.server.asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        reason, tokens = self.server.answer
        rows = [{"id": token, "logprob": log_prob, "special": False} for token, log_prob in tokens]
        details = {"finish_reason": reason, "generated_tokens": len(rows), "prefill": [], "tokens": rows}
        content = json.dumps({"generated_text": "", "details": details}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def replay() -> Iterator[Replay]:
    with Replay(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(("recorded", "reason"), [(STOPPED, "stop"), (CUT, "length")])
def test_a_recorded_answer_is_read(replay: Replay, tmp_path: Path, recorded: Any, reason: str) -> None:
    replay.answer = recorded
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder(tmp_path / "model"))))
    url = f"http://127.0.0.1:{replay.server_port}"
    engine = ServerRollout([url], api="tgi", eos_token_ids=(2,), tokenizer=tokenizer)
    prompt = tuple(tokenizer("3 plus 4")["input_ids"])
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=10, max_tokens=10, seed=0, stop=("test",))
    [found] = engine.generate([Request("it000000-p00000-s00", prompt)], sampling)
    engine.close()
    assert tuple(zip(found.response_ids, found.log_probs, strict=True)) == recorded[1]
    assert found.finish_reason == reason
    assert replay.asked["inputs"] == tokenizer.decode(list(prompt))
    expected = {"max_new_tokens": 10, "temperature": 0.5, "top_p": 0.9, "top_k": 10, "stop": ["test"]}
    assert expected.items() <= replay.asked["parameters"].items()
