"""Measures sending new weights to vLLM: in buckets of shared memory, and as whole float32 files.

Both ways take the weights of the same engine and give them to the same vLLM, in turns.

    python benchmarks/weight_sync.py --dtype bfloat16
    python benchmarks/weight_sync.py --experts 128 --layers 2

The second command gives vLLM the experts of a tiny mixture, matrix by matrix and stacked, in seconds of the processor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.rollout.vllm_engine import HOST_MEMORY
from ratchet.rlhf.train.torch_engine import TorchEngine
from ratchet.rlhf.weights.buckets import Packed, SharedMemory, send
from ratchet.rlhf.weights.weight_files import write_weights
from tests import tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.experts:
            shape = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
            experts = {"num_experts": arguments.experts, "moe_intermediate_size": 32}
            layers = {"num_hidden_layers": arguments.layers}
            return compare_experts(
                tiny.moe_folder(Path(scratch), "qwen3_moe", **shape, **experts, **layers), arguments.rounds
            )
        folder = tiny.model_folder(
            Path(scratch), hidden=arguments.hidden, layers=arguments.layers, intermediate=4 * arguments.hidden, heads=8
        )
        compare(folder, arguments.dtype, arguments.rounds)


def started(folder: Path, dtype: str) -> Any:
    from vllm import LLM

    return LLM(
        str(folder),
        dtype=dtype,
        max_model_len=256,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        weight_transfer_config={"backend": HOST_MEMORY},
        worker_extension_cls="ratchet.rlhf.rollout.vllm_weights.Extension",
    )


def compare_experts(folder: Path, rounds: int) -> None:
    """Prints the processor's cost of a tensor in the model's files, with and without stacks of experts."""
    llm = started(folder, "float32")
    engine = TorchEngine(load_actor(ModelConfig(path=str(folder), dtype="float32")), "policy")
    from ratchet.rlhf.rollout import vllm_weights

    take, count = vllm_weights.Experts.take, sum(1 for _ in engine.weights())
    ways: dict[str, Any] = {"matrix by matrix": lambda *tensor: False, "stacked": take}
    micros: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in list(ways) if number % 2 else list(ways)[::-1]:
            vllm_weights.Experts.take = ways[way]  # type: ignore[method-assign]
            began = time.process_time()
            by_buckets(llm, engine, torch.float32)
            micros[way].append(1e6 * (time.process_time() - began) / count)
    for way, taken in micros.items():
        each = ", ".join(f"{one:.0f}" for one in taken[1:])
        print(f"{way:17} {statistics.median(taken[1:]):6.0f} µs for each of {count} tensors ({each})")
    ratios = [old / new for old, new in zip(*(taken[1:] for taken in micros.values()), strict=True)]
    print(f"ratio within a round: {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")


def compare(folder: Path, dtype: str, rounds: int) -> None:
    llm = started(folder, dtype)
    engine = TorchEngine(load_actor(ModelConfig(path=str(folder), dtype=dtype)), "policy")
    seconds: dict[str, list[float]] = {"buckets": [], "files": []}
    moved: dict[str, int] = {}
    for _ in range(rounds):
        for way, transfer in (("buckets", by_buckets), ("files", by_files)):
            began = time.perf_counter()
            moved[way] = transfer(llm, engine, getattr(torch, dtype))
            seconds[way].append(time.perf_counter() - began)
    ratios = [new / old for new, old in zip(seconds["buckets"], seconds["files"], strict=True)]
    for way, taken in seconds.items():
        print(f"{way:8} {moved[way] / 1e6:7.0f} MB  {statistics.median(taken):6.2f} s")
    print(f"ratio of seconds, median of {rounds} rounds: {statistics.median(ratios):.2f}")


def by_buckets(llm: Any, engine: TorchEngine, dtype: torch.dtype) -> int:
    """Sends like `VLLMRollout.load_weights`; returns the bytes that were written."""

    def deliver(packed: Packed, memory: SharedMemory) -> None:
        bucket = {"path": memory.path, "nbytes": packed.nbytes, "packed": packed.as_json()}
        llm.collective_rpc("update_weights", args=(bucket,))

    llm.collective_rpc("start_weight_update")
    with closing(SharedMemory()) as first, closing(SharedMemory()) as second:
        sent = send(engine.weights(dtype), dtype, [first, second], deliver)
    llm.collective_rpc("finish_weight_update")
    return sent


def by_files(llm: Any, engine: TorchEngine, dtype: torch.dtype) -> int:
    """Writes a folder of float32 files in memory and lets vLLM read it; returns the bytes that were written."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        written = write_weights(engine.weights(), Path(folder), "model")
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    return written


if __name__ == "__main__":
    main()
