"""The process that runs vLLM; `vllm_rollout` starts it and communicates with it through a pipe."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Submission = tuple[int, list[int], dict[str, Any], "tuple[int, Path] | None"]
"""Number of the request, token ids of its prompt, arguments of vLLM's `SamplingParams`, and number and folder of the
LoRA adapter (None: no adapter)."""
NewTokens = tuple[int, list[int], list[float], "str | None"]
"""Number of the request, its new tokens, their log-probs in nats, and the finish reason (None: it is incomplete)."""

FLUSH_S = 0.2
"""Seconds after which new tokens are sent although no response has ended. The parent takes silence for a hang."""


def main() -> None:
    """Serve the parent until the pipe closes.

    Messages of the parent are `("submit", submissions)`, `("cancel", numbers)`, and `("call", method, arguments)`,
    with a method of `Engine`.
    Messages to the parent are `("tokens", new_tokens)`, `("answer", succeeded, result)`, and at the start
    `("refused", False, reasons)` if vLLM refuses its options.
    """
    # vLLM's worker processes join this process's group, which is killed as a whole. The process that then removes their
    # shared memory is not a member
    resource_tracker.ensure_running()
    os.setpgid(0, 0)
    pipe = Connection(int(sys.argv[1]))
    parent, scratch, options = pipe.recv()
    watcher = threading.Thread(target=_end_with, args=(parent, scratch), daemon=True)
    watcher.start()
    from pydantic import ValidationError

    try:
        engine = Engine(options)
        pipe.send(("answer", True, None))
    except ValidationError as error:  # vLLM refuses its options, and would again
        reasons = [reason["msg"].removeprefix("Value error, ").split("\n")[0] for reason in error.errors()]
        return pipe.send(("refused", False, "; ".join(reasons)))
    except Exception as error:
        pipe.send(("answer", False, f"{type(error).__name__}: {error}"))
        return
    with suppress(EOFError, BrokenPipeError):
        try:
            _serve(pipe, engine)
        except Exception as error:  # vLLM's state is now unknown: the parent starts a new process
            pipe.send(("answer", False, f"{type(error).__name__}: {error}"))
    watcher.join()  # the parent has died, or is about to kill this process


def _serve(pipe: Connection, engine: Engine) -> None:
    flushed = time.monotonic()
    while True:
        while pipe.poll(0 if engine.is_busy else None):
            kind, *content = pipe.recv()
            if kind == "submit":
                for submission in content[0]:
                    engine.submit(submission)
            elif kind == "cancel":
                engine.cancel(content[0])
            else:
                method, arguments = content
                pipe.send(("answer", True, method(engine, *arguments)))
        has_ended = engine.step()
        if has_ended or time.monotonic() - flushed > FLUSH_S:
            pipe.send(("tokens", engine.new_tokens()))
            flushed = time.monotonic()


def _end_with(parent: int, scratch: Path) -> None:
    """When the parent is gone, remove its scratch folder and end this group: a killed parent can do neither."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


class Engine:
    """The methods that the parent calls."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Start vLLM; `options` are the arguments of vLLM's `LLM`."""
        from vllm import LLM, SamplingParams, TokensPrompt

        self.llm = LLM(**options)
        self._transfer = {"packed": True} if options["weight_transfer_config"]["backend"] == "ipc" else {}
        # log-probs are compiled when they are first asked for, which takes seconds on the CPU: a request that took so
        # long would seem to hang, so it is part of the start
        first = SamplingParams(max_tokens=2, seed=0, logprobs=0)
        self.llm.generate(TokensPrompt(prompt_token_ids=[0]), first, use_tqdm=False)
        self._new: dict[int, tuple[list[int], list[float], str | None]] = {}
        """What is not sent yet, by number of the request."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is running."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def submit(self, submission: Submission) -> None:
        """Add a request to those that run."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        number, prompt, parameters, adapter = submission
        self.llm.llm_engine.add_request(
            str(number),
            TokensPrompt(prompt_token_ids=prompt),
            SamplingParams(**parameters, output_kind=RequestOutputKind.DELTA),
            lora_request=None if adapter is None else LoRARequest(str(adapter[0]), adapter[0], str(adapter[1])),
        )
        self._new[number] = ([], [], None)

    def cancel(self, numbers: list[int]) -> None:
        """Remove requests."""
        for number in numbers:
            self._new.pop(number, None)
        self.llm.llm_engine.abort_request([str(number) for number in numbers])

    def step(self) -> bool:
        """Generate a token for every running request; returns whether a response has ended."""
        has_ended = False
        for answer in self.llm.llm_engine.step():
            number = int(answer.request_id)
            if number not in self._new:
                continue  # cancelled
            [output] = answer.outputs
            ids, log_probs, _ = self._new[number]
            new = list(output.token_ids)
            candidates: Any = output.logprobs
            ids += new
            log_probs += [float(candidates[place][token].logprob) for place, token in enumerate(new)]
            if answer.finished:
                self._new[number] = (ids, log_probs, "stop" if output.finish_reason == "stop" else "length")
                has_ended = True
        return has_ended

    def new_tokens(self) -> list[NewTokens]:
        """The tokens since the last call."""
        new = [(number, *tokens) for number, tokens in self._new.items() if tokens[0] or tokens[2]]
        self._new = {number: ([], [], None) for number, (_, _, reason) in self._new.items() if reason is None}
        return new

    def begin_update(self) -> None:
        """Prepare for new weights, which `update` brings."""
        self.llm.collective_rpc("init_weight_transfer_engine", args=(self._transfer,))
        self.llm.collective_rpc("start_weight_update")

    def update(self, bucket: dict[str, Any]) -> None:
        """Load a bucket of new weights; see `VLLMRollout.load_weights`."""
        self.llm.collective_rpc("update_weights", args=(bucket,))

    def finish_update(self) -> None:
        """Generate with the new weights from now on, and clear the prefix cache."""
        self.llm.collective_rpc("finish_weight_update")
        self.llm.reset_prefix_cache()

    def forget(self, adapter: int | None) -> None:
        """Remove an old adapter, by number, and clear the prefix cache; the next request names the new adapter."""
        if adapter is not None:
            self.llm.llm_engine.remove_lora(adapter)
        self.llm.reset_prefix_cache()

    def sleep(self, level: int) -> None:
        """Free the cache, and the weights after a copy to host memory (level 1) or without one (level 2)."""
        self.llm.sleep(level=level)

    def wake(self, tags: list[str]) -> None:
        """Undo `sleep` for the memory with these tags; requests run once all of it is back."""
        self.llm.wake_up(tags=tags)


if __name__ == "__main__":
    from rlhf.engines import vllm_child

    vllm_child.main()  # the module under its name: the parent sends methods of this `Engine`
