"""Measures what writing a run costs a trainer of TRL: its seconds with and without the callback, in turns.

    python examples/countdown/model.py models/countdown-base        # once
    OMP_NUM_THREADS=1 python benchmarks/observe.py --model models/countdown-base --steps 12 --pairs 4

The share is that of the callback's own calls in the time of training, which the trainer waits for. The ratio also has
what the thread that writes takes from the trainer on the same cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from ratchet.infra.runs.run import open_run
from ratchet.observe import TRLCallback


class Timed(TRLCallback):
    """Sums up the seconds of the calls that the trainer waits for."""

    seconds = 0.0

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in ("_generated", "on_log", "on_evaluate"):
            return value

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return value(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / 16 for text in completions]


def seconds(options: argparse.Namespace, store: str | None) -> tuple[float, float]:
    """Trains once; returns the seconds, and those of the callback."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            options.model,
            reward_funcs=digits,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=options.steps,
                num_generations=8,
                per_device_train_batch_size=options.trajectories,
                max_completion_length=options.tokens,
                logging_steps=1,
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": f"Count from {number}:"} for number in range(256)]),
            processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        )
        trainer.remove_callback(PrinterCallback)
        callback = None
        if store is not None:
            callback = Timed(trainer, "watched", store)
            trainer.add_callback(callback)
        began = time.perf_counter()
        trainer.train()
        return time.perf_counter() - began, 0.0 if callback is None else callback.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/countdown-base")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    ratios, shares = [], []
    for _ in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            plain, _ = seconds(options, None)
            watched, waited = seconds(options, f"file://{folder}")
            assert (
                len(open_run(f"file://{Path(folder)}/watched").trajectories()) == options.steps * options.trajectories
            )
        ratios.append(watched / plain)
        shares.append(waited / watched)
        print(
            f"{plain:.1f} s without, {watched:.1f} s with: {ratios[-1]:.3f}; {shares[-1]:.2%} of it waited", flush=True
        )
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"ratio: median {np.median(ratios):.3f} ({spread}); waited {np.median(shares):.2%}")


if __name__ == "__main__":
    main()
