"""The process that computes rewards. `pool` starts it and talks to it through a pipe."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from rlhf.errors import RatchetError
from rlhf.rewards import RewardFunction, Score, load_reward, score
from rlhf.rewards.trl import NotApplicable


def main() -> None:
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    watcher = threading.Thread(target=_end_with_parent, args=(parent,), daemon=True)
    watcher.start()
    try:
        task = json.loads(pipe.recv_bytes())
        sys.path[:] = task["path"]
        try:
            functions = [
                (name, weight, load_reward(name), task["options"].get(name))
                for name, weight in task["functions"].items()
            ]
        except RatchetError as error:
            return pipe.send_bytes(json.dumps({"error": str(error)}).encode())
        pipe.send_bytes(b"{}")
        own_pid = os.getpid()
        while True:
            for row in json.loads(pipe.recv_bytes()):
                answer = _scored(functions, row)
                if os.getpid() != own_pid:  # the reward forked, and its child returned here as well
                    os._exit(0)
                pipe.send_bytes(json.dumps(answer).encode())
    except (EOFError, OSError):  # the parent has died: what a reward has started ends, too
        watcher.join()


def _scored(functions: list[tuple[str, float, RewardFunction, Any]], row: list[Any]) -> dict[str, Any]:
    source, response, truth, extra, prompt = row
    scores: list[tuple[str, float, Score]] = []
    try:
        for name, weight, function, options in functions:
            try:
                result = score(function, source, response, truth, extra, prompt=prompt, options=options)
                scores.append((name, weight, result))
            except NotApplicable:
                if not scores and name == functions[-1][0]:
                    raise
    except RatchetError as error:
        return {"error": str(error), "type": type(error).__name__}
    if len(functions) == 1:
        [(_, weight, result)] = scores
        return {"score": weight * result.score, "parts": result.parts}
    parts: dict[str, float] = {}
    for name, _, result in scores:
        parts |= {name: result.score, **{f"{name}/{part}": value for part, value in result.parts.items()}}
    return {"score": sum(weight * result.score for _, weight, result in scores), "parts": parts}


def _end_with_parent(parent: int) -> None:
    """End this process group when the parent dies: a killed parent cannot do it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
