"""Rewards in processes of their own: one that hangs, dies or forks is ended, and costs its own row.

Each child has a session of its own, is given rows, and answers one after the other; who does not answer in time is
killed with everything that it started, and a new one goes on with the next row. What passes through the pipe is JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import psutil

from rlhf.data.prompts import structures
from rlhf.errors import NotFinite, RatchetError, UserError
from rlhf.rewards import BUILT_IN, KEY, RewardFailed, Score, auto

if TYPE_CHECKING:
    from rlhf.config.sections import RewardConfig
    from rlhf.data.prompts import Prompt

START_S = 300.0
"""For importing what the reward imports."""
WORTH_S = 0.5
"""A child takes about so long to start: for less work, one is enough."""

Row = tuple[str, str, Any, Any]
"""data_source, solution_str, ground_truth, extra_info; the last two are whatever JSON can hold"""

FAILURES: dict[str, type[RatchetError]] = {"UserError": UserError, "NotFinite": NotFinite}


class RewardPool:
    def __init__(
        self,
        function: str | Mapping[str, float],
        options: Mapping[str, Mapping[str, Any]],
        workers: int,
        timeout_s: float,
    ) -> None:
        """`function`: a name, or names and weights; then the score is the weighted sum, and each one's own score is a
        part of its name. `timeout_s` is for one response."""
        self.task = {
            "path": sys.path,
            "functions": {function: 1.0} if isinstance(function, str) else dict(function),
            "options": {k: dict(v) for k, v in options.items()},
        }
        self.timeout_s = timeout_s
        self._children = [_Child(self.task) for _ in range(workers)]
        self._row_s = 0.0
        """What a row took of late."""

    def score(self, rows: Sequence[Row]) -> list[Score | RatchetError]:
        """A score for each row, or why there is none."""
        started = time.monotonic()
        hands = max(1, min(len(self._children), len(rows))) if self._row_s * len(rows) > WORTH_S else 1
        shares = [rows[hand::hands] for hand in range(hands)]
        with ThreadPoolExecutor(hands) as threads:
            found = list(threads.map(self._share, self._children, shares))
        self._row_s = hands * (time.monotonic() - started) / max(len(rows), 1)
        return [found[row % hands][row // hands] for row in range(len(rows))]

    def _share(self, child: _Child, rows: Sequence[Row]) -> list[Score | RatchetError]:
        found: list[Score | RatchetError] = []
        with child.turn:
            while len(found) < len(rows):
                left = rows[len(found) :]
                child.ask(left)
                for row in left:
                    answer = child.answer(self.timeout_s)
                    if isinstance(answer, str):
                        found.append(RewardFailed(f"{answer} (data_source {row[0]}, response {row[1][:60]!r})"))
                        break  # the child is gone: the rest goes to a new one
                    found.append(_understood(answer))
        return found

    def close(self) -> None:
        for child in self._children:
            child.end()


SOURCES = 8
"""At most so many prompts are tried."""


def try_rewards(reward: RewardConfig, prompts: Iterable[Prompt]) -> Iterator[str]:
    """Score an answer to the first prompt of each data source of each file, before anything is generated.

    The answer is the ground truth itself, or a 0 where that is no text: what no reward should fail on.

    Returns:
        What fails, one line each, naming file and row.
    """
    files: dict[str, dict[str, Prompt]] = {}
    for prompt in prompts:
        sources = files.setdefault(prompt.where.rpartition(",")[0], {})
        if len(sources) < SOURCES:
            sources.setdefault(prompt.data_source, prompt)
    firsts = [prompt for sources in files.values() for prompt in sources.values()]
    if not reward.functions or not firsts:
        return
    rows = []
    for prompt in firsts:
        truth, extra = structures(prompt.ground_truth, prompt.ground_truth_is_json, prompt.extra_info)
        rows.append((prompt.data_source, truth if isinstance(truth, str) else "0", truth, extra))
    pool = RewardPool(reward.functions, reward.options, 1, reward.timeout_s)
    try:
        scores = pool.score(rows)
    finally:
        pool.close()
    for prompt, found in zip(firsts, scores, strict=True):
        if isinstance(found, RatchetError):
            yield (
                f"{prompt.where}: {KEY} {' + '.join(reward.functions)} cannot score an answer to this prompt: {found}"
                f"{_other_built_in(reward, prompt)}"
            )


def _other_built_in(reward: RewardConfig, prompt: Prompt) -> str:
    try:
        fits = auto.reward_of(prompt.data_source, None)
    except ValueError:
        return ""
    if fits in reward.functions or not all(name in BUILT_IN for name in reward.functions):
        return ""
    return f"; {prompt.data_source} has a built-in reward: set {KEY}: {fits}"


def _understood(answer: dict[str, Any]) -> Score | RatchetError:
    if "error" in answer:
        return FAILURES.get(answer["type"], RewardFailed)(answer["error"])
    return Score(answer["score"], answer["parts"])


class _Child:
    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = task
        self.turn = threading.Lock()
        """Stages that overlap may both ask for rewards."""
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection

    def ask(self, rows: Sequence[Row]) -> None:
        asked = json.dumps(rows).encode()
        if self.process is not None:
            try:
                return self.pipe.send_bytes(asked)
            except OSError:  # it died while it had nothing to do
                self.end()
        self._start()
        self.pipe.send_bytes(asked)

    def answer(self, timeout_s: float) -> dict[str, Any] | str:
        """What it says of the next row; or what became of it."""
        assert self.process is not None
        try:
            if self.pipe.poll(timeout_s):
                return dict(json.loads(self.pipe.recv_bytes()))
        except (EOFError, OSError):
            code = self.process.wait(5)
            self.end()
            return f"the reward's process died (exit code {code})"
        self.end()
        return f"the reward took longer than reward.timeout_s {timeout_s:g} s, and was ended"

    def end(self) -> None:
        if self.process is None:
            return
        with suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.process.pid).children(recursive=True):  # in sessions of their own, too
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and of what it has started, what has lost its parent
        self.process.wait()
        self.pipe.close()
        self.process = None

    def _start(self) -> None:
        here, there = Pipe()
        self.pipe = here
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlhf.rewards.child", str(there.fileno()), str(os.getpid())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        there.close()
        self.pipe.send_bytes(json.dumps(self.task).encode())
        ready = self.answer(START_S)
        if isinstance(ready, str) or "error" in ready:
            self.end()
            raise RewardFailed(ready if isinstance(ready, str) else ready["error"])
