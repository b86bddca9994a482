"""The process that runs vLLM; `vllm_rollout` starts it and communicates with it through a pipe."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve method calls of the parent until the pipe closes."""
    pipe = Connection(int(sys.argv[1]))
    parent, scratch, options = pipe.recv()
    threading.Thread(target=_end_with, args=(parent, scratch), daemon=True).start()
    try:
        engine = Engine(options)
        pipe.send((True, None))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(engine, method)(*arguments)))
        except Exception as error:  # vLLM's state is now unknown: the parent starts a new process
            pipe.send((False, f"{type(error).__name__}: {error}"))


def _end_with(parent: int, scratch: Path) -> None:
    """Exit when the parent is gone, and remove its scratch folder: a killed parent can do neither."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


class Engine:
    """The methods that the parent calls."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Start vLLM; `options` are the arguments of vLLM's `LLM`."""
        from vllm import LLM

        self.llm = LLM(**options)

    def generate(
        self, prompts: list[list[int]], parameters: list[dict[str, Any]], adapter: tuple[int, Path] | None
    ) -> list[tuple[list[int], list[float], str]]:
        """Generate responses.

        Args:
            prompts: token ids of each prompt.
            parameters: arguments of vLLM's `SamplingParams` for each prompt.
            adapter: number and folder of the LoRA adapter; None: no adapter.

        Returns:
            Token ids, log-probs in nats and finish reason of each response.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest

        answers = self.llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
            [SamplingParams(**options) for options in parameters],
            use_tqdm=False,
            lora_request=None if adapter is None else LoRARequest(str(adapter[0]), adapter[0], str(adapter[1])),
        )
        responses = []
        for answer in answers:
            [output] = answer.outputs
            ids = list(output.token_ids)
            candidates: Any = output.logprobs
            log_probs = [float(candidates[place][token].logprob) for place, token in enumerate(ids)]
            responses.append((ids, log_probs, "stop" if output.finish_reason == "stop" else "length"))
        return responses

    def reload(self, folder: str) -> None:
        """Load the weights in a folder of safetensors files, and clear the prefix cache."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.llm.reset_prefix_cache()

    def forget(self, adapter: int | None) -> None:
        """Remove an old adapter, by number, and clear the prefix cache; the next request names the new adapter."""
        if adapter is not None:
            self.llm.llm_engine.remove_lora(adapter)
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Move the weights to host memory and free the cache."""
        self.llm.sleep(level=1)

    def wake(self) -> None:
        """Undo `sleep`."""
        self.llm.wake_up()


if __name__ == "__main__":
    main()
