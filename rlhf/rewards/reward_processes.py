"""Computes rewards in child processes, so that a reward that hangs, dies or forks only costs the rows of its own call.

Each child runs in its own session. It receives requests, each of which names functions and holds the trajectories of
one call, and reports which it has started and their outcomes. The pipe carries JSON.

Plain functions are called in order, by all children. A child that does not answer in time is killed with all the
processes that it started, and a new child continues with the next request. Async functions are called concurrently, by
a single child, so that the number of calls is bounded. If that child has to be killed, its running requests are
repeated one by one, to find the culprit.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import psutil

from ratchet.rlhf import child_processes
from ratchet.rlhf.built_in_rewards import BUILT_IN, COMPARING, JUDGE
from ratchet.rlhf.data.prompts import structures
from ratchet.rlhf.errors import NotFinite, RatchetError
from ratchet.rlhf.rewards import auto
from ratchet.rlhf.rewards.functions import (
    FAILURES,
    KEY,
    NotApplicable,
    Outcome,
    RewardFailed,
    Score,
    Trajectory,
    is_failure,
    place_of,
    took_too_long,
)
from ratchet.rlhf.rewards.registry import can_be_right

if TYPE_CHECKING:
    from ratchet.rlhf.config.sections import RewardConfig
    from ratchet.rlhf.data.prompts import Prompt

START_S = 300.0
"""Time limit of starting a child, including the imports of the reward."""
WORTH_S = 0.5
"""Approximate time to start a child: less work is done by a single child."""
BLOCKED_S = 5.0
"""Seconds beyond `reward.timeout_s` after which a child with async functions is killed if it sends no sign of life."""
KEEPERS = 16
"""Threads that read and keep answers."""


class AnswerStore(Protocol):
    """Answers of a judge, by the digest of the question. Used by several threads."""

    def get(self, digest: str) -> str | None:
        """Returns the answer to a question; None if there is none."""

    def keep(self, digest: str, answer: str) -> str:
        """Keeps the answer to a question unless there is one; returns the one that is kept."""


@dataclass(frozen=True)
class _Kind:
    """Calling convention of a function."""

    is_async: bool
    takes_several: bool
    takes_group: bool
    takes_ids: bool


@dataclass(frozen=True)
class _Request:
    """One call of each of some functions, given by their indices."""

    rewards: Sequence[int]
    rows: Sequence[int]
    """Indices of the trajectories in `group`."""
    group: Sequence[Trajectory]
    takes_ids: bool
    """True if a function takes the trajectories' tokens, which are large."""

    def as_json(self) -> dict[str, Any]:
        """Returns the request for the child."""
        left_out = {} if self.takes_ids else {"response_ids": None}
        return {"rewards": self.rewards, "group": [vars(trajectory) | left_out for trajectory in self.group]}


Outcomes = Sequence[Sequence[Outcome]]
"""Outcomes of a request: for each function, one per trajectory."""


class RewardPool:
    """Child processes that score responses."""

    def __init__(
        self,
        functions: Mapping[str, float],
        options: Mapping[str, Mapping[str, Any]],
        *,
        workers: int,
        timeout_s: float,
        concurrency: int,
        answers: AnswerStore | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepares the children, which start when first needed.

        Args:
            functions: weights of the reward functions, by name. With several, the score is the weighted sum, and the
                score of each function is a part with the function's name.
            options: keyword arguments of the functions, by name.
            timeout_s: time limit of one response, in seconds; for the judge, of a request.
            concurrency: maximum number of concurrent calls of async functions, and of questions to the judge.
            answers: stores the judge's answers; None: they are not stored.
            note: called once for each part of a score that is left out.
        """
        self.functions = dict(functions)
        self._note, self._noted = note, set[tuple[str, str]]()
        self.timeout_s = timeout_s
        task = {
            "path": sys.path,
            "rewards": {name: dict(options.get(name, {})) for name in functions},
            "timeout_s": timeout_s,
            "concurrency": concurrency,
        }
        self._children = [_Child(task, timeout_s, answers) for _ in range(workers)]
        self._row_s = 0.0
        """Seconds per row that the plain functions took in the last call."""

    @property
    def takes_groups(self) -> bool:
        """True if a function scores the trajectories of a prompt together, as `group`."""
        return any(kind.takes_group for kind in self._children[0].kinds())

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score | RatchetError]:
        """Scores some responses, of which those with the same `prompt_id` are a group. Raises RewardFailed."""
        if not trajectories:
            return []
        kinds = self._children[0].kinds()
        outcomes: list[dict[int, Outcome]] = [{} for _ in trajectories]
        """By function, for each trajectory."""

        def note(requests: Sequence[_Request], results: Sequence[Outcomes]) -> None:
            for request, result in zip(requests, results, strict=True):
                for reward, scores in zip(request.rewards, result, strict=True):
                    for row, outcome in zip(request.rows, scores, strict=True):
                        outcomes[row][reward] = outcome

        plain = [index for index, kind in enumerate(kinds) if not kind.is_async]
        if plain:
            started = time.monotonic()
            requests = _requests(trajectories, kinds, plain, together=True)
            # a single child does a little work before several have started
            is_slow = self._row_s * len(trajectories) > WORTH_S
            used = max(1, min(len(self._children), len(requests))) if is_slow else 1
            shares = [requests[index::used] for index in range(used)]
            with ThreadPoolExecutor(used) as threads:
                results = threads.map(lambda child, share: child.score(share, False), self._children, shares)
                for share, result in zip(shares, results, strict=True):
                    note(share, result)
            self._row_s = used * (time.monotonic() - started) / len(trajectories)
        if len(plain) < len(kinds):
            concurrent = [index for index, kind in enumerate(kinds) if kind.is_async]
            requests = _requests(trajectories, kinds, concurrent, together=False)
            # by a single child, so that the number of calls is bounded
            note(requests, self._children[0].score(requests, True))
        return [self._combined(row) for row in outcomes]

    def _combined(self, outcomes: Mapping[int, Outcome]) -> Score | RatchetError:
        """Combines the outcomes of a response's functions."""
        given = [(name, weight, outcomes[index]) for index, (name, weight) in enumerate(self.functions.items())]
        for _, _, outcome in given:
            if is_failure(outcome):
                assert isinstance(outcome, RatchetError)
                return outcome
        scores = [(name, weight, outcome) for name, weight, outcome in given if isinstance(outcome, Score)]
        for name, _, score in scores:
            for part, value in score.left_out.items():
                if (name, part) not in self._noted:
                    self._noted.add((name, part))
                    self._note(f"{KEY} {name}: the part {part} is left out where it is no finite number ({value})")
        if not scores:
            return next(outcome for _, _, outcome in given if isinstance(outcome, NotApplicable))
        if len(given) == 1:
            [(_, weight, score)] = scores
            return Score(weight * score.score, score.parts)
        parts: dict[str, float] = {}
        for name, _, score in scores:
            parts |= {name: score.score, **{f"{name}/{part}": value for part, value in score.parts.items()}}
        return Score(sum(weight * score.score for _, weight, score in scores), parts)

    def close(self) -> None:
        """Ends the child processes; a later `score` starts new ones."""
        for child in self._children:
            child.end()


def _requests(
    trajectories: Sequence[Trajectory], kinds: Sequence[_Kind], rewards: Sequence[int], *, together: bool
) -> list[_Request]:
    """Makes a request for each response and function that takes one (`together`: for all of them), and for each group
    and function that takes several."""
    single = [index for index in rewards if not kinds[index].takes_several]
    batches = [single] if single and together else [[index] for index in single]
    groups: dict[str, list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.metadata["prompt_id"], []).append(row)
    requests = [
        _Request(batch, [row], [trajectory], takes_ids=False)
        for row, trajectory in enumerate(trajectories)
        for batch in batches
    ]
    return requests + [
        _Request([index], rows, [trajectories[row] for row in rows], kinds[index].takes_ids)
        for index in rewards
        if kinds[index].takes_several
        for rows in groups.values()
    ]


_RANDOM = Random(0)
ANSWERS = (
    ("an empty answer", ""),
    ("a long answer", " ".join(_RANDOM.choices(("so", "the", "answer", "is", "12", "+", "3.5", "=", "not"), k=4096))),
    ("a random answer", "".join(_RANDOM.choices(f"{string.printable}é漢😀", k=256))),
)
"""Possible answers of a policy, the same at each start."""


class TrialAnswer(NamedTuple):
    """An answer after a prompt, as the policy's tokenizer and chat template make it."""

    prompt_tail: str
    """See `Trajectory.prompt_tail`."""
    ids: list[int]
    text: str
    """The text decoded from the tokens."""


def try_rewards(
    reward: RewardConfig,
    prompts: Sequence[Prompt],
    write: Callable[[Prompt, str], TrialAnswer],
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[str]:
    """Scores answers to each prompt, before anything is generated.

    The first is the ground truth, or "0" if that is not a text. A user's function also gets possible answers of a
    policy: for the first prompt of each data source an empty, a long and a random answer. No reward should fail on any.
    A function that takes groups gets each answer twice. Built-ins also get a right answer to the first prompt of each
    data source.

    Args:
        write: makes an answer as the policy would write it.
        note: called for each built-in that does not give 1 to a right answer.

    Yields:
        One line for each prompt whose answers cannot be scored, with the file, the row and the first failure; a user's
        function that fails with the same error for all prompts gets only one.
    """
    if not reward.functions or not prompts:
        return
    options = dict(reward.arguments)
    if JUDGE in options:
        # the user is waiting for the start
        options[JUDGE] = {**options[JUDGE], "retries": min(options[JUDGE]["retries"], 1)}
    pool = RewardPool(reward.functions, options, workers=1, timeout_s=reward.timeout_s, concurrency=reward.concurrency)
    try:
        samples = 2 if pool.takes_groups else 1
        is_own = any(name not in BUILT_IN for name in reward.functions)
        firsts = {prompt.data_source: n for n, prompt in reversed(list(enumerate(prompts)))}
        trials = [
            (n, kind, prompt, text)
            for n, prompt in enumerate(prompts)
            for kind, text in [("an answer", None), *(ANSWERS if is_own and firsts[prompt.data_source] == n else ())]
        ]
        right = [
            (n, name, prompts[n], text)
            for n in firsts.values()
            for name, text in _right_answers(reward, prompts[n], write)
        ]
        trials = [*trials, *right]
        answers = [
            _trial(f"trial-{number}", sample, prompt, text, write)
            for number, (_, _, prompt, text) in enumerate(trials)
            for sample in range(samples)
        ]
        scores = pool.score(answers)[::samples]
    finally:
        pool.close()
    reported = set[int | str]()
    for number, ((n, kind, prompt, _), score) in enumerate(zip(trials, scores, strict=True)):
        if number >= len(trials) - len(right):  # a right answer; another trial reports what cannot be scored
            answer = answers[number * samples]
            if isinstance(score, Score) and _share(score, kind, reward) < 1:
                note(
                    f"{prompt.where}: {KEY} {kind} gives {_share(score, kind, reward):g} to the right answer "
                    f"{answer.solution_str[:60]!r}, as the model's tokenizer has it, after a prompt that ends with "
                    f"{answer.prompt_tail[-30:]!r}: no response may ever get 1"
                )
            continue
        if not isinstance(score, RatchetError):
            continue
        bug = _without_place(str(score), answers[number * samples : (number + 1) * samples]) if is_own else n
        if reported.isdisjoint((n, bug)):
            remedy = _remedy(reward) if is_own and isinstance(score, RewardFailed | NotFinite) else ""
            yield (
                f"{prompt.where}: {KEY} {' + '.join(reward.functions)} cannot score {kind} to this prompt: {score}"
                f"{remedy}{_other_built_in(reward, prompt)}"
            )
        reported |= {n, bug}


def compare_columns(
    reward: RewardConfig, prompts: Sequence[Prompt], write: Callable[[Prompt, str], TrialAnswer]
) -> Iterator[str]:
    """Yields one line for each row's solution to which a built-in, which compares with the answer, gives 0."""
    names = {name: 1.0 for name in reward.functions if name in COMPARING and name != "code"}
    worked = [
        (prompt, solution)
        for prompt in prompts
        if isinstance(extra := json.loads(prompt.extra_info), dict)
        and isinstance(solution := extra.get("solution"), str)
        and solution != prompt.ground_truth
    ]
    if not names or not worked:
        return
    options = {name: chosen for name, chosen in reward.arguments.items() if name in names}
    pool = RewardPool(names, options, workers=1, timeout_s=reward.timeout_s, concurrency=reward.concurrency)
    try:
        trials = [_trial(f"trial-{n}", 0, *pair, write) for n, pair in enumerate(worked)]
        scores = pool.score(trials)
    finally:
        pool.close()
    for (prompt, solution), score in zip(worked, scores, strict=True):
        if isinstance(score, Score) and score.score == 0:
            yield (
                f"{prompt.where}: {KEY} {' + '.join(names)} gives the row's own solution ({solution!r:.60}) 0, because "
                f"the ground truth is {prompt.ground_truth!r:.40}: if that is wrong, call the column of the truth "
                "ground_truth"
            )


def _without_place(error: str, group: Sequence[Trajectory]) -> str:
    for asked in (group, group[:1]):
        error = error.removesuffix(f" ({place_of(asked)})")
    return error


def _remedy(reward: RewardConfig) -> str:
    remedy = ": return a score for such answers"
    if reward.on_error != "fail":
        return remedy
    share = f"reward.max_error_share {reward.max_error_share:g}"
    return f"{remedy}, or set reward.on_error=zero, which scores them 0 unless more than {share} of a shard's fail"


def _trial(
    prompt_id: str, sample: int, prompt: Prompt, text: str | None, write: Callable[[Prompt, str], TrialAnswer]
) -> Trajectory:
    """Builds a trajectory with an answer; None: the ground truth."""
    truth, extra = structures(prompt.ground_truth, prompt.ground_truth_is_json, prompt.extra_info)
    answer = text if text is not None else truth if isinstance(truth, str) else "0"
    written = write(prompt, answer)
    return Trajectory(
        data_source=prompt.data_source,
        solution_str=answer,
        ground_truth=truth,
        extra_info=extra,
        prompt=prompt.original,
        turns=[{"role": "policy", "content": answer}],
        metadata={
            "trajectory_id": f"{prompt_id}-s{sample:02d}",
            "prompt_id": prompt_id,
            "sample": sample,
            "iteration": None,
            "policy_version": None,
            "finish_reason": "stop",
            "response_length": None,
        },
        response_ids=written.ids,
        prompt_tail=written.prompt_tail,
    )


def _right_answers(
    reward: RewardConfig, prompt: Prompt, write: Callable[[Prompt, str], TrialAnswer]
) -> Iterator[tuple[str, str]]:
    """Yields the built-ins that can tell a right answer to a prompt, each with one."""
    truth, _ = structures(prompt.ground_truth, prompt.ground_truth_is_json, prompt.extra_info)
    for name in reward.functions:
        built_in = auto.reward_of(prompt.data_source, prompt.style) if name == "auto" else name
        if built_in not in ("format", "gsm8k", "math") or not can_be_right(reward.functions, prompt):
            continue
        text = import_module(f"ratchet.rlhf.rewards.{built_in}").right_answer(truth, **reward.options.get(name, {}))
        end = write(prompt, "").prompt_tail.rstrip()
        # what the end of the prompt already opens is left out of the answer, whose rest is decoded from its tokens
        begun = next((length for length in range(len(text), 1, -1) if end.endswith(text[:length])), 0)
        yield name, write(prompt, text[begun:]).text


def _share(score: Score, name: str, reward: RewardConfig) -> float:
    """Returns the score of one function."""
    return score.parts[name] if len(reward.functions) > 1 else score.score / reward.functions[name]


def _other_built_in(reward: RewardConfig, prompt: Prompt) -> str:
    fitting_name = auto.reward_of(prompt.data_source, None)
    if (
        fitting_name is None
        or fitting_name in reward.functions
        or not all(name in BUILT_IN for name in reward.functions)
    ):
        return ""
    return f"; {prompt.data_source} has a built-in reward: set {KEY}: {fitting_name}"


class _Child:
    def __init__(self, task: Mapping[str, Any], timeout_s: float, answers: AnswerStore | None) -> None:
        self.task = task
        self.timeout_s = timeout_s
        self.turn = threading.Lock()
        """Held while responses are scored: overlapping stages may share the pool."""
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection
        self._kinds: list[_Kind] = []
        self._answers = answers
        self._keepers = ThreadPoolExecutor(KEEPERS)
        self._sending = threading.Lock()
        self._store_error: Exception | None = None
        """Error in reading or keeping answers; raised once the child has ended because of it."""

    def kinds(self) -> list[_Kind]:
        """Returns the calling convention of each function."""
        if not self._kinds:
            with self.turn:
                if self.process is None:
                    self._start()
        return self._kinds

    def score(self, requests: Sequence[_Request], concurrently: bool) -> list[Outcomes]:
        """Returns the outcomes of some requests, in order."""
        results: dict[int, Outcomes] = {}
        batches = deque([list(range(len(requests)))])
        ended_idle = 0
        with self.turn:
            while batches:
                batch = {number: requests[number] for number in batches.popleft()}
                begun, cause = self._run(batch, concurrently, results)
                suspects = [number for number in begun if number not in results]
                rest = [number for number in batch if number not in begun]
                # the only one that was running when the child ended
                if len(suspects) == 1:
                    results[suspects[0]] = self._lost(requests[suspects[0]], cause, concurrently)
                else:
                    # one by one, so that only the request that ends the child is lost
                    batches.extend([number] for number in suspects)
                if rest:
                    # a child that ends twice before it starts any request is itself broken
                    ended_idle = 0 if begun else ended_idle + 1
                    if ended_idle > 1:
                        raise RewardFailed(cause or "the reward's process does not answer")
                    batches.append(rest)
        return [results[number] for number in range(len(requests))]

    def _run(
        self, requests: Mapping[int, _Request], concurrently: bool, results: dict[int, Outcomes]
    ) -> tuple[set[int], str | None]:
        """Sends some requests, and enters their outcomes in `results`.

        Returns:
            The requests that the child has started, and how it ended if that was before the last one was done; None: it
            was killed because it did not answer in time.
        """
        numbers = list(requests)
        self._ask({"requests": [request.as_json() for request in requests.values()], "concurrently": concurrently})
        begun: set[int] = set()
        limit_s, left = self.timeout_s + BLOCKED_S, len(numbers)
        while left:
            message = self._receive(limit_s)
            if not isinstance(message, dict):
                return begun, message
            if "begun" in message:
                number = numbers[message["begun"]]
                begun.add(number)
                if not concurrently:
                    limit_s = self.timeout_s * len(requests[number].group)
            elif "done" in message:
                results[numbers[message["done"]]] = [
                    [_outcome(outcome) for outcome in outcomes] for outcomes in message["outcomes"]
                ]
                left -= 1
            elif "number" in message and self.process is not None:
                self._keepers.submit(self._reply, self.process, self.pipe, message)
        return begun, None

    def _lost(self, request: _Request, cause: str | None, concurrently: bool) -> Outcomes:
        """Returns the outcomes of a request during which the child ended."""
        if cause is None and not concurrently:
            error = took_too_long(self.timeout_s, request.group)
        else:
            blocked = (
                f"the reward blocked its event loop for longer than reward.timeout_s {self.timeout_s:g} s, and was "
                "ended: await what takes time, or write a function that is not async"
            )
            error = RewardFailed(f"{cause or blocked} ({place_of(request.group)})")
        return [[error] * len(request.group)] * len(request.rewards)

    def _reply(self, process: subprocess.Popen[bytes], pipe: Connection, message: Mapping[str, Any]) -> None:
        """Reads or keeps an answer for the child."""
        try:
            if self._answers is None:
                answer = message.get("answer")
            elif "get" in message:
                answer = self._answers.get(message["get"])
            else:
                answer = self._answers.keep(message["keep"], message["answer"])
        except Exception as error:  # an error of the store, not of the reward
            self._store_error = error
            process.kill()
            return
        with suppress(OSError):  # the child has ended
            self._send(pipe, {"number": message["number"], "answer": answer})

    def _ask(self, message: Mapping[str, Any]) -> None:
        if self.process is not None:
            try:
                return self._send(self.pipe, message)
            except OSError:  # the process died while it was idle
                self.end()
        self._start()
        self._send(self.pipe, message)

    def _send(self, pipe: Connection, message: Mapping[str, Any]) -> None:
        with self._sending:
            pipe.send_bytes(json.dumps(message).encode())

    def _receive(self, timeout_s: float) -> dict[str, Any] | str | None:
        """Returns the child's next message, or how it ended; None: killed, because there was no message in time."""
        assert self.process is not None, "it was started"
        try:
            if self.pipe.poll(timeout_s):
                return dict(json.loads(self.pipe.recv_bytes()))
        except (EOFError, OSError):
            code = self.process.wait(5)
            self.end()
            if (error := self._store_error) is not None:
                self._store_error = None
                raise error from None
            return f"the reward's process died (exit code {code})"
        self.end()
        return None

    def end(self) -> None:
        if self.process is None:
            return
        descendants: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(self.process.pid).children(recursive=True)  # even those in other sessions
        child_processes.end(self.process, descendants)
        self.pipe.close()
        self.process = None

    def _start(self) -> None:
        self.pipe, child_end = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ratchet.rlhf.rewards.child", str(child_end.fileno()), str(os.getpid())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # the child can import what this process can
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        child_end.close()
        self._send(self.pipe, self.task)
        ready = self._receive(START_S)
        if not isinstance(ready, dict):
            raise RewardFailed(ready or f"the reward took longer than {START_S:g} s to start")
        if "error" in ready:
            self.end()
            raise RewardFailed(ready["error"])
        self._kinds = [_Kind(*kind) for kind in ready["rewards"]]


def _outcome(message: Mapping[str, Any]) -> Outcome:
    if "error" in message:
        return FAILURES[message["kind"]](message["error"])
    return Score(message["score"], message["parts"], left_out=message["left_out"])
