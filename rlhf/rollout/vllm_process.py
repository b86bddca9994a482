"""Runs vLLM in its own process; `vllm_engine` starts it and talks to it through a pipe."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ratchet.rlhf.data.images import decoded
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.sent_prompts import SentPrompt, check_read

Submission = tuple[int, SentPrompt, dict[str, Any], "tuple[int, Path] | None"]
"""Request number, prompt, arguments of vLLM's `SamplingParams`, and number and folder of the LoRA adapter."""
NewTokens = tuple[int, list[int], list[float], "str | None", "np.ndarray | None"]
"""Number of the request, its new tokens, their log-probs in nats, the finish reason (None: it is incomplete), and
`Chunk.routes`."""

FLUSH_S = 0.2
"""Seconds between messages with the new tokens of unfinished responses. The parent takes silence for a hang."""


def main() -> None:
    """Serves the parent until the pipe closes.

    The parent sends `("submit", submissions)`, `("cancel", numbers)`, and `("call", method, arguments)`, with a method
    of `VLLM`. It receives `("tokens", new_tokens)`, `("mistake", number, reason)` for a request that cannot be right,
    `("answer", succeeded, result)`, and at the start `("refused", False, reasons)` if vLLM refuses its options.
    """
    # vLLM's worker processes join this process's group, which is killed as a whole. The tracker that then removes their
    # shared memory is not a member
    resource_tracker.ensure_running()
    os.setpgid(0, 0)
    pipe = Connection(int(sys.argv[1]))
    parent, scratch, options = pipe.recv()
    watcher = threading.Thread(target=_end_with, args=(parent, scratch), daemon=True)
    watcher.start()
    from pydantic import ValidationError

    try:
        engine = VLLM(options)
        pipe.send(("answer", True, None))
    except ValidationError as error:  # vLLM refuses its options; a retry would fail, too
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


def _serve(pipe: Connection, engine: VLLM) -> None:
    flushed = time.monotonic()
    while True:
        # blocks while there is nothing to generate
        while pipe.poll(0 if engine.is_busy else None):
            kind, *content = pipe.recv()
            if kind == "submit":
                for submission in content[0]:
                    try:
                        engine.submit(submission)
                    except UserError as error:
                        pipe.send(("mistake", submission[0], str(error)))
            elif kind == "cancel":
                engine.cancel(content[0])
            else:
                method, arguments = content
                pipe.send(("answer", True, method(engine, *arguments)))
        tokens = engine.step()
        if is_due := time.monotonic() - flushed > FLUSH_S:
            tokens += engine.new_tokens()
            flushed = time.monotonic()
        if tokens or is_due:
            pipe.send(("tokens", tokens))


def _end_with(parent: int, scratch: Path) -> None:
    """Removes the scratch folder and kills this process group once the parent is gone: a killed parent cannot."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


@dataclass
class _Running:
    """A running request, and its tokens that are not sent yet."""

    number: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    """The experts of the tokens that it has read, step by step, shape (tokens, layers, k)."""


class VLLM:
    """The methods that the parent calls."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Starts vLLM; `options` are the arguments of vLLM's `LLM`."""
        from vllm import LLM, SamplingParams, TokensPrompt

        self.llm = LLM(**options)
        self._sees_images = bool(options.get("limit_mm_per_prompt"))
        if self._sees_images:
            self._process_with_pillow(options["model"])
        self._takes_adapters = bool(options.get("enable_lora"))
        self._layers: list[int] | None = None
        """The layers whose experts requests return; None: they return none."""
        if options.get("enable_return_routed_experts"):
            self._layers = self.llm.collective_rpc("layers_with_experts")[0]
        self._transfer = {"packed": True} if options["weight_transfer_config"]["backend"] == "ipc" else {}
        # log-probs are compiled on first use, which takes seconds on the CPU: a request that took so
        # long would seem to hang, so it is part of the start
        first = SamplingParams(max_tokens=2, seed=0, logprobs=0)
        self.llm.generate(TokensPrompt(prompt_token_ids=[0]), first, use_tqdm=False)
        self._running: dict[str, _Running] = {}
        """Requests by vLLM's own id."""
        self._with_stop: set[str] = set()
        """Ids of requests that have stop texts."""

    @property
    def is_busy(self) -> bool:
        """True if a request is running."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def _process_with_pillow(self, folder: str) -> None:
        """Makes vLLM process images as the trainer does: torchvision, where it is installed, rounds differently."""
        from transformers import AutoImageProcessor

        processor = self.llm.llm_engine.renderer.get_mm_processor().info.get_hf_processor()
        processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def _input(self, prompt: SentPrompt) -> Any:
        """Returns a prompt as the engine takes it. Raises UserError if it reads another one than the trainer."""
        from vllm import TokensPrompt
        from vllm.inputs import tokens_input

        if not prompt.images:
            return tokens_input(prompt.ids)
        pictures = [decoded(image, "an image") for image in prompt.images]
        [made] = self.llm.llm_engine.renderer.render_cmpl(
            [TokensPrompt(prompt_token_ids=prompt.short_ids, multi_modal_data={"image": pictures})]
        )
        check_read(prompt.ids, made["prompt_token_ids"], "vLLM")
        return made

    def submit(self, submission: Submission) -> None:
        """Adds a request to the running ones. Raises UserError if vLLM reads its images differently."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        number, prompt, parameters, adapter = submission
        own_id = self.llm.llm_engine.add_request(
            str(number),
            self._input(prompt),
            SamplingParams(**parameters, output_kind=RequestOutputKind.DELTA),
            lora_request=None if adapter is None else LoRARequest(str(adapter[0]), adapter[0], str(adapter[1])),
        )
        self._running[own_id] = _Running(number)
        if parameters["stop"]:
            self._with_stop.add(own_id)

    def cancel(self, numbers: list[int]) -> None:
        """Removes requests."""
        gone = set(numbers)
        cancelled = [own_id for own_id, running in self._running.items() if running.number in gone]
        self.llm.llm_engine.abort_request(cancelled, internal=True)
        for own_id in cancelled:
            self._forget(own_id)

    def step(self) -> list[NewTokens]:
        """Generates a token for every running request; returns the last tokens of responses that have ended."""
        engine = self.llm.llm_engine
        outputs = engine.engine_core.get_output().outputs
        # building an output object takes vLLM longer than everything else after a step: per request, it
        # gets only what it has to decide or to clear away
        decides = [one for one in outputs if one.finish_reason is not None or one.request_id in self._with_stop]
        processed = engine.output_processor.process_outputs(decides)
        engine.engine_core.abort_requests(processed.reqs_to_abort)  # a text has ended them; later tokens are removed
        # the engine core does not look for stop texts: it reports a length if the last allowed token completes one
        reasons = {one.request_id: one.outputs[0].finish_reason for one in processed.request_outputs}
        ended: list[NewTokens] = []
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue  # cancelled
            if output.new_token_ids:
                running.ids += output.new_token_ids
                running.log_probs += [candidates[0] for candidates in output.new_logprobs.logprobs.tolist()]
            if output.routed_experts is not None:
                running.routes.append(output.routed_experts)
            reason = reasons.get(str(running.number))
            if reason is not None:
                reason = "stop" if reason == "stop" else "length"
                ended.append((running.number, running.ids, running.log_probs, reason, self._routes(running)))
                self._forget(output.request_id)
        return ended

    def new_tokens(self) -> list[NewTokens]:
        """Returns the tokens that running requests generated since the last call."""
        new: list[NewTokens] = []
        for running in self._running.values():
            if running.ids:
                new.append((running.number, running.ids, running.log_probs, None, None))
                running.ids, running.log_probs = [], []
        return new

    def _routes(self, running: _Running) -> np.ndarray | None:
        """Returns `Chunk.routes` of a response that has ended."""
        if self._layers is None:
            return None
        # vLLM also has layers without experts
        routes: np.ndarray = np.concatenate(running.routes)[:, self._layers].astype(np.int16)
        return routes.reshape(len(routes), -1)

    def _forget(self, own_id: str) -> None:
        del self._running[own_id]
        self._with_stop.discard(own_id)

    def log_probs_of(self, texts: list[list[int]], adapter: tuple[int, Path] | None) -> list[list[float]]:
        """Computes the log-probs of each text's tokens but the first; no request may be running.

        vLLM takes nothing from its prefix cache for a request that asks for these, and computes them at temperature 1.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest

        # with adapters, vLLM 0.32 takes indices of requests for those of tokens in the last layer: right for one text
        batches = [[text] for text in texts] if self._takes_adapters else [texts]
        outputs = [
            output
            for batch in batches
            for output in self.llm.generate(
                [TokensPrompt(prompt_token_ids=text) for text in batch],
                SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False),
                use_tqdm=False,
                lora_request=None if adapter is None else LoRARequest(str(adapter[0]), adapter[0], str(adapter[1])),
            )
        ]
        return [
            [entry[token].logprob for token, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True)]
            for text, output in zip(texts, outputs, strict=True)
        ]

    def begin_update(self) -> None:
        """Prepares for new weights, which `update` brings."""
        self.llm.collective_rpc("init_weight_transfer_engine", args=(self._transfer,))
        self.llm.collective_rpc("start_weight_update")

    def update(self, bucket: dict[str, Any]) -> None:
        """Loads a bucket of new weights; see `VLLMRollout.load_weights`."""
        self.llm.collective_rpc("update_weights", args=(bucket,))

    def finish_update(self) -> None:
        """Switches to the new weights, and clears the prefix cache."""
        self.llm.collective_rpc("finish_weight_update")
        assert self.llm.reset_prefix_cache(), "a request is running: what old weights computed would be used again"
        if self._sees_images:
            self.llm.llm_engine.reset_encoder_cache()

    def forget_adapter(self, adapter: int | None) -> None:
        """Removes an old adapter, by number, and clears the prefix cache; the next request names the new adapter."""
        if adapter is not None:
            self.llm.llm_engine.remove_lora(adapter)
        assert self.llm.reset_prefix_cache(), "a request is running: what old weights computed would be used again"

    def sleep(self, level: int) -> None:
        """Frees the cache, and the weights after a copy to host memory (level 1) or without one (level 2)."""
        self.llm.sleep(level=level)

    def wake(self, tags: list[str]) -> None:
        """Undoes `sleep` for the memory with these tags; requests run once all of it is back."""
        self.llm.wake_up(tags=tags)


if __name__ == "__main__":
    from ratchet.rlhf.rollout import vllm_process

    vllm_process.main()  # not `__main__.main`: the parent pickles methods of `VLLM` under the module's own name
