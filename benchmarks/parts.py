"""Parts of the benchmarks of rollouts: models, prompts, a driver that only generates, and vLLM called directly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ratchet.infra.execution.driver import Driver, driving
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.config import RunConfig, parse_config
from ratchet.rlhf.config.engines import VLLMConfig
from ratchet.rlhf.distributed import accelerator
from ratchet.tasks.pipeline import dependencies
from ratchet.tasks.restore import ensure_weights
from ratchet.tasks.shard_runner import run_rows
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.stages.generate import GENERATE

SIZES = {
    "5M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "heads": 8},
    "20M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "heads": 6},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "heads": 32},
    "4B": {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 28, "heads": 24},
}
VOCABULARY = 4096


def model_folder(folder: Path, size: str) -> None:
    """Writes a Llama with random weights; its tokenizer turns "t7 t12" into the tokens 7 and 12."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = dict(SIZES[size])
    heads = shape.pop("heads")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=heads, num_key_value_heads=heads, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens = ["<pad>", "<eos>", *(f"t{number}" for number in range(2, VOCABULARY))]
    words = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def prompt_ids(count: int, tokens: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, VOCABULARY, (count, tokens)).tolist()  # type: ignore[no-any-return]


def prompt_file(path: Path, prompts: Sequence[Sequence[int]]) -> None:
    """Writes a dataset of these prompts; `extra_info` has the number of each."""
    rows = (
        {
            "data_source": "benchmark",
            "prompt": " ".join(f"t{token}" for token in ids),
            "extra_info": {"number": number},
        }
        for number, ids in enumerate(prompts)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_config(root: Path, name: str, prompts: int, data: dict[str, Any], rollout: dict[str, Any]) -> RunConfig:
    """Returns the config of a run whose iterations draw `prompts` prompts from the files in `root`."""
    return parse_config(
        {
            "run": {"name": name, "store": f"file://{root}/runs"},
            "model": {"path": str(root / "model"), "dtype": "bfloat16" if accelerator.is_available() else "float32"},
            "data": {"train": [str(root / "prompts.jsonl")], "prompts_per_iteration": prompts, **data},
            "rollout": rollout,
            "reward": {"function": "length"},
            "algorithm": {"advantage": {"type": "reinforce_plus_plus"}, "kl": {"in_reward": None}},
            "critic": None,
            "actor": {"mini_batch_trajectories": prompts * rollout["n"]},
            "train": {"iterations": 1000},
        },
        "benchmark",
    )


@contextmanager
def opened(config: RunConfig) -> Iterator[Driver]:
    with driving(config, dependencies(config)) as driver:
        yield driver


def generated(driver: Driver, stage: RowsStage[Any, Any] = GENERATE) -> tuple[float, Manifest]:
    """Runs the generate stage of the open iteration; returns the seconds until its commit, and its manifest."""
    handle = StageHandle(stage.name)
    started = time.perf_counter()
    manifest, _ = run_rows(driver, stage, driver.state.iteration, {}, handle)
    return time.perf_counter() - started, manifest


def synced(driver: Driver) -> float:
    """Copies the weights of the open iteration to the rollout; returns the seconds of the copy."""
    newest, group = driver.state.starting["actor"], driver.groups.of("rollout")
    ensure_weights(driver, "actor", newest)
    started = time.perf_counter()
    group.call(Worker.pause)
    assert group.call(Worker.copy_to_rollout, newest) or group.call(Worker.rollout_is_actor)
    return time.perf_counter() - started


def vllm_options(config: RunConfig) -> dict[str, Any]:
    from ratchet.rlhf.models.tokenizers import load_tokenizer
    from ratchet.rlhf.rollout.build import vllm_rollout

    chosen = config.rollout.engine
    assert isinstance(chosen, VLLMConfig)
    engine = vllm_rollout(config, chosen, load_tokenizer(config.model))
    engine.close()
    return engine.options


class Direct:
    """A process that answers lines of JSON: a script that calls itself with `--direct`."""

    def __init__(self, script: str, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, "--direct", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        )
        self._answer()

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, question: Any = None) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"the process ended with exit code {self._process.wait()}")


def answer(result: Any = None) -> None:
    """Answers a question, in the process of `Direct`."""
    print("answer", json.dumps(result), flush=True)


def questions() -> Iterator[Any]:
    """Yields the questions of `Direct`, in its process."""
    answer()
    for line in sys.stdin:
        yield json.loads(line)
