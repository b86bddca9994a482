"""Compute rewards in child processes, so that a reward that hangs, dies or forks only costs its own row.

Each child runs in its own session, receives rows and answers them in order. A child that does not answer in time is
killed with all the processes that it started, and a new child continues with the next row. The pipe carries JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import psutil

from rlhf.data.formats import Messages
from rlhf.data.prompts import structures
from rlhf.errors import NotFinite, RatchetError, UserError
from rlhf.rewards import BUILT_IN, KEY, RewardFailed, Score, auto

if TYPE_CHECKING:
    from rlhf.config.sections import RewardConfig
    from rlhf.data.prompts import Prompt

START_S = 300.0
"""Time limit of starting a child, including the imports of the reward."""
WORTH_S = 0.5
"""About the time that a child takes to start: less work is done by a single child."""

Row = tuple[str, str, Any, Any, str | Messages]
"""data_source, solution_str, ground_truth, extra_info and prompt; ground_truth and extra_info are any JSON values."""

FAILURES: dict[str, type[RatchetError]] = {"UserError": UserError, "NotFinite": NotFinite}


class RewardPool:
    """Child processes that score responses."""

    def __init__(
        self,
        function: str | Mapping[str, float],
        options: Mapping[str, Mapping[str, Any]],
        workers: int,
        timeout_s: float,
    ) -> None:
        """Children start when they are first needed.

        Args:
            function: name of a reward function, or several names with their weights. With several, the score is the
                weighted sum, and the score of each function is a part with the function's name.
            options: keyword arguments of the functions, by name.
            workers: number of child processes.
            timeout_s: time limit of one response, in seconds.
        """
        self.task = {
            "path": sys.path,
            "functions": {function: 1.0} if isinstance(function, str) else dict(function),
            "options": {k: dict(v) for k, v in options.items()},
        }
        self.timeout_s = timeout_s
        self._children = [_Child(self.task) for _ in range(workers)]
        self._row_s = 0.0
        """Seconds that a row took in the last call."""

    def score(self, rows: Sequence[Row]) -> list[Score | RatchetError]:
        """Score some responses.

        Args:
            rows: the responses.

        Returns:
            For each row, in order, its score, or the error that prevented it.

        Raises:
            RewardFailed: a child could not start, for example because the reward cannot be imported.
        """
        started = time.monotonic()
        used = max(1, min(len(self._children), len(rows))) if self._row_s * len(rows) > WORTH_S else 1
        shares = [rows[index::used] for index in range(used)]
        with ThreadPoolExecutor(used) as threads:
            results = list(threads.map(self._share, self._children, shares))
        self._row_s = used * (time.monotonic() - started) / max(len(rows), 1)
        return [results[row % used][row // used] for row in range(len(rows))]

    def _share(self, child: _Child, rows: Sequence[Row]) -> list[Score | RatchetError]:
        results: list[Score | RatchetError] = []
        with child.turn:
            while len(results) < len(rows):
                remaining = rows[len(results) :]
                child.ask(remaining)
                for row in remaining:
                    answer = child.answer(self.timeout_s)
                    if isinstance(answer, str):
                        results.append(RewardFailed(f"{answer} (data_source {row[0]}, response {row[1][:60]!r})"))
                        break  # the child has ended: a new one takes the remaining rows
                    results.append(_result_of(answer))
        return results

    def close(self) -> None:
        """End the child processes; a later `score` starts new ones."""
        for child in self._children:
            child.end()


def try_rewards(reward: RewardConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Score an answer to each prompt, before anything is generated.

    The answer is the ground truth, or "0" if that is not a text. No reward should fail on it.

    Args:
        reward: the reward section of the config.
        prompts: a few prompts, such as the first of each file.

    Yields:
        One line for each failure, with the file and the row.

    Raises:
        RewardFailed: the reward process could not start.
    """
    if not reward.functions or not prompts:
        return
    rows: list[Row] = []
    for prompt in prompts:
        truth, extra = structures(prompt.ground_truth, prompt.ground_truth_is_json, prompt.extra_info)
        rows.append((prompt.data_source, truth if isinstance(truth, str) else "0", truth, extra, prompt.original))
    pool = RewardPool(reward.functions, reward.options, 1, reward.timeout_s)
    try:
        scores = pool.score(rows)
    finally:
        pool.close()
    for prompt, score in zip(prompts, scores, strict=True):
        if isinstance(score, RatchetError):
            yield (
                f"{prompt.where}: {KEY} {' + '.join(reward.functions)} cannot score an answer to this prompt: {score}"
                f"{_other_built_in(reward, prompt)}"
            )


def _other_built_in(reward: RewardConfig, prompt: Prompt) -> str:
    fitting_name = auto.reward_of(prompt.data_source, None)
    if (
        fitting_name is None
        or fitting_name in reward.functions
        or not all(name in BUILT_IN for name in reward.functions)
    ):
        return ""
    return f"; {prompt.data_source} has a built-in reward: set {KEY}: {fitting_name}"


def _result_of(answer: dict[str, Any]) -> Score | RatchetError:
    if "error" in answer:
        return FAILURES.get(answer["type"], RewardFailed)(answer["error"])
    return Score(answer["score"], answer["parts"])


class _Child:
    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = task
        self.turn = threading.Lock()
        """Held while rows are scored: overlapping stages may share the pool."""
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection

    def ask(self, rows: Sequence[Row]) -> None:
        request = json.dumps(rows).encode()
        if self.process is not None:
            try:
                return self.pipe.send_bytes(request)
            except OSError:  # the process died while it was idle
                self.end()
        self._start()
        self.pipe.send_bytes(request)

    def answer(self, timeout_s: float) -> dict[str, Any] | str:
        """The answer for the next row, or a text that says how the child ended."""
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
            for child in psutil.Process(self.process.pid).children(recursive=True):  # even those in other sessions
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # includes descendants that have lost their parent
        self.process.wait()
        self.pipe.close()
        self.process = None

    def _start(self) -> None:
        self.pipe, child_end = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlhf.rewards.child", str(child_end.fileno()), str(os.getpid())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        child_end.close()
        self.pipe.send_bytes(json.dumps(self.task).encode())
        ready = self.answer(START_S)
        if isinstance(ready, str) or "error" in ready:
            self.end()
            raise RewardFailed(ready if isinstance(ready, str) else ready["error"])
