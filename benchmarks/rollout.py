"""Tokens per second of the rollout engines, and of vLLM called directly, on the same prompts; seconds per weight sync.

    python benchmarks/rollout.py [--repeats 3] [--size 5M|20M|1B|4B]

A Llama with random weights, float32 (bfloat16 on a GPU); 64 requests of 32 prompt tokens and 128 response tokens,
end-of-sequence ignored, temperature 1. In each round every engine answers all requests; the first round is warm-up and
does not count. The direct loop calls `vllm.LLM.generate` on the same requests, with seeds and log-probs, in a separate
process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

SIZES = {
    "5M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "heads": 8},
    "20M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "heads": 6},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "heads": 32},
    "4B": {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 28, "heads": 24},
}
REQUESTS, PROMPT, RESPONSE = 64, 32, 128
DIRECT = "vllm called directly in a loop, with log-probs and seeds"


def model_folder(folder: Path, size: str) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = dict(SIZES[size])
    heads = shape.pop("heads")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=4096, num_attention_heads=heads, num_key_value_heads=heads, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(4096)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1").save_pretrained(folder)


def prompts() -> list[list[int]]:
    import numpy as np

    return np.random.default_rng(0).integers(3, 4096, (REQUESTS, PROMPT)).tolist()  # type: ignore[no-any-return]


def direct(folder: str, repeats: int) -> None:
    """Call vLLM directly; prints the seconds of each round."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    on_gpu = torch.cuda.is_available()
    llm = LLM(
        folder,
        dtype="bfloat16" if on_gpu else "float32",
        max_model_len=PROMPT + RESPONSE,
        gpu_memory_utilization=0.9 if on_gpu else 0.1,
        enforce_eager=not on_gpu,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
    )
    requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts()]
    for _ in range(repeats + 1):
        parameters = [
            SamplingParams(max_tokens=RESPONSE, ignore_eos=True, seed=seed, logprobs=0, detokenize=False)
            for seed in range(REQUESTS)
        ]
        started = time.perf_counter()
        llm.generate(requests, parameters, use_tqdm=False)
        print("seconds", time.perf_counter() - started, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="5M")
    parser.add_argument("--direct", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.direct:
        return direct(options.direct, options.repeats)
    import torch

    from rlhf.config import ModelConfig
    from rlhf.engines.base import Request, RolloutEngine, Sampling
    from rlhf.engines.hf_rollout import HFRollout
    from rlhf.engines.server_rollout import ServerRollout
    from rlhf.engines.torch_engine import TorchEngine
    from rlhf.engines.vllm_rollout import VLLMRollout
    from rlhf.models import load_actor
    from tests.vllm_server import serving

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_folder(folder / "model", options.size)
        on_gpu = torch.cuda.is_available()
        dtype = "bfloat16" if on_gpu else "float32"
        model = load_actor(ModelConfig(path=str(folder / "model")))
        trainer = TorchEngine(model, "policy")
        engines: dict[str, RolloutEngine] = {
            "hf": HFRollout(model, eos_token_ids=(0,), dtype=dtype),  # type: ignore[arg-type]
            "vllm": VLLMRollout(
                folder / "model",
                eos_token_ids=(0,),
                dtype=dtype,
                max_model_len=PROMPT + RESPONSE,
                on_gpu=on_gpu,
                gpu_memory_utilization=0.4 if on_gpu else 0.1,
                enforce_eager=not on_gpu,
                skip_tokenizer_init=True,
            ),
        }
        if not on_gpu:  # starts a `vllm serve` on loopback
            engines["server"] = ServerRollout([serving(folder / "model")], eos_token_ids=(0,))
        requests = [Request(f"it000000-p{row:05d}-s00", tuple(ids)) for row, ids in enumerate(prompts())]
        sampling = Sampling(1.0, 1.0, max_tokens=RESPONSE, seed=0, ignore_eos=True)
        seconds: dict[str, list[float]] = {engine: [] for engine in engines}
        syncs = []
        for _ in range(options.repeats + 1):
            for engine, rollout in engines.items():
                started = time.perf_counter()
                rollout.generate(requests, sampling)
                seconds[engine].append(time.perf_counter() - started)
            started = time.perf_counter()
            engines["vllm"].load_weights(trainer.weights())
            syncs.append(time.perf_counter() - started)
        engines["vllm"].close()
        command = [sys.executable, __file__, "--direct", str(folder / "model"), "--repeats", str(options.repeats)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds[DIRECT] = [float(line.split()[1]) for line in output.splitlines() if line.startswith("seconds")]
        print("| engine | tokens/s |\n|---|---|")
        medians = {engine: statistics.median(rounds[1:]) for engine, rounds in seconds.items()}
        for engine, median in medians.items():
            print(f"| {engine} | {REQUESTS * RESPONSE / median:,.0f} |")
        print(f"vllm through Ratchet, relative to a direct loop: {medians[DIRECT] / medians['vllm']:.2f}")
        print(f"weight sync: {statistics.median(syncs[1:]):.3f} s")


if __name__ == "__main__":
    main()
