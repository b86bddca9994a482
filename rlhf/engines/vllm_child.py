"""The process in which vLLM generates; `vllm_rollout` starts it and talks to it through a pipe."""

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
        except Exception as error:  # whatever state it is in now, the parent starts a new one
            pipe.send((False, f"{type(error).__name__}: {error}"))


def _end_with(parent: int, scratch: Path) -> None:
    """A parent that was killed cannot end its children, nor remove what it left in memory."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)

    def generate(
        self, prompts: list[list[int]], parameters: list[dict[str, Any]], adapter: tuple[int, Path] | None
    ) -> list[tuple[list[int], list[float], str]]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest

        answers = self.llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
            [SamplingParams(**each) for each in parameters],
            use_tqdm=False,
            lora_request=None if adapter is None else LoRARequest(str(adapter[0]), adapter[0], str(adapter[1])),
        )
        found = []
        for answer in answers:
            [output] = answer.outputs
            ids = list(output.token_ids)
            each: Any = output.logprobs
            log_probs = [float(each[place][token].logprob) for place, token in enumerate(ids)]
            found.append((ids, log_probs, "stop" if output.finish_reason == "stop" else "length"))
        return found

    def reload(self, folder: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.llm.reset_prefix_cache()

    def forget(self, adapter: int | None) -> None:
        """An older adapter; the next request brings the new one."""
        if adapter is not None:
            self.llm.llm_engine.remove_lora(adapter)
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        self.llm.sleep(level=1)

    def wake(self) -> None:
        self.llm.wake_up()


if __name__ == "__main__":
    main()
