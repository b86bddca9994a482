"""A server of OpenEnv for tests, with an interpreter of its own: ``build/openenv/bin/python tests/openenv_server.py``.

Its environment counts: it asks for letters three times, and rewards as many as the policy writes. It prints its port.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PYTHON = Path(__file__).parents[1] / "build" / "openenv" / "bin" / "python"


@contextmanager
def server(kind: str = "text") -> Iterator[str]:
    """Starts a server; yields its URL.

    Args:
        kind: ``text``: actions are a text; ``point``: actions are two numbers.
    """
    with subprocess.Popen([PYTHON, __file__, kind], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            assert port.isdigit(), "the server has not started"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def main(kind: str) -> None:
    """Serves until it is killed."""
    import socket

    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Said(Action):
        text: str

    class Point(Action):
        x: int
        y: int

    class Asks(Observation):
        question: str

    class Letters(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.counted, self.seed = State(episode_id="", step_count=0), None

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> Asks:
            self.counted, self.seed = State(episode_id=episode_id or "", step_count=0), seed
            return Asks(question=f"seed {seed}: which letters?", done=False)

        def step(self, action: Said | Point, timeout_s: float | None = None, **_: object) -> Asks:
            if isinstance(action, Said) and action.text == "break":
                raise RuntimeError("broken")
            self.counted.step_count += 1
            reward = sum(map(str.isalpha, action.text)) if isinstance(action, Said) else action.x + action.y
            question = f"question {self.counted.step_count}"
            return Asks(question=question, reward=float(reward), done=self.counted.step_count == 3)

        @property
        def state(self) -> State:
            return self.counted

    listening = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Letters, Said if kind == "text" else Point, Asks, max_concurrent_envs=64)
    print(listening.getsockname()[1], flush=True)  # connections wait until it serves
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
