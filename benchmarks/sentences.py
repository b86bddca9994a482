"""Trains SmolLM2-135M-Instruct on the demo's task with several recipes, and measures what each has learned.

    ratchet demo                                # once: the data and the model
    python benchmarks/sentences.py grpo ppo rloo --seeds 0 1 2

Each run is examples/sentences/grpo.yaml with the changes of its recipe. Its last weights answer the held-out prompts,
four times each at temperature 1. Printed are the share of answers that solve the task; their diversity, which is the
share of beginnings (three words, the asked word left out) that differ among all answers; the KL divergence from the
model before training, in nats per answer, as the mean of log pi(answer) - log ref(answer); and the minutes of the run,
without validations. If the script is stopped, the same command continues.
"""

from __future__ import annotations

import argparse
import os
import runpy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.flows.commands.tables import mean_and_interval
from ratchet.flows.train import train
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig, load_config

FOLDER = Path(__file__).parents[1] / "examples/sentences"
TASK = runpy.run_path(str(FOLDER / "sentences.py"))
beginning, is_solved = TASK["beginning"], TASK["is_solved"]
CRITIC = {"lr": 1e-5, "mini_batch_trajectories": 64, "micro_batch_tokens": 2048, "warmup_iterations": 2}
PPO = {"algorithm.advantage": {"type": "gae", "gamma": 1.0, "lam": 1.0}, "critic": CRITIC}
ALONE = {"reward.options": {"share": False}}
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": PPO,
    "rloo": {"algorithm.advantage": {"type": "rloo"}},
    "lora": {"model.lora": {"r": 16}, "actor.lr": 2e-4},
    "vllm": {"rollout.engine": {"type": "vllm"}, "algorithm.rollout_correction": None},
    "reward-model": PPO
    | {
        "reward": {"model": {"path": "models/sentences-reward", "dtype": "float32"}},
        "critic": CRITIC | {"model": {"path": "models/sentences-reward", "dtype": "float32"}},
        "algorithm.kl.in_reward": 0.05,
    },
    "not shared": ALONE,
    "not shared, KL in loss": ALONE | {"algorithm.kl.in_loss": 0.05},
    "not shared, entropy": ALONE | {"algorithm.entropy_coef": 0.02},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), choices=[*RECIPES, []])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--store", default="file://./runs/recipes")
    options = parser.parse_args()
    console = Console(width=120)
    table = Table("recipe", "seed", "solved", "95 %", "diversity", "KL, nats", "tokens", "minutes")
    for recipe in options.recipes:
        for seed in options.seeds:
            changes = RECIPES[recipe] | {
                "run.name": f"{recipe.replace(', ', '-').replace(' ', '-').lower()}-{seed}",
                "run.store": options.store,
                "run.seed": seed,
                "validation.every": 0,
                "validation.before_train": False,
                "checkpoint.keep": {"last": 1, "every": None},
            }
            if options.iterations is not None:
                changes["train.iterations"] = options.iterations
            config = load_config(FOLDER / "grpo.yaml").with_values(changes)
            train(config)
            row = [recipe, str(seed), *measure(config)]
            console.print("  ".join(row), highlight=False)
            table.add_row(*row)
    console.print(table)


def measure(config: RunConfig) -> list[str]:
    run = open_run(run_url(config.run.store, config.run.name))
    answers = run.validation()
    answers = answers[answers["iteration"] == answers["iteration"].max()]
    texts = list(zip(answers["response"], answers["ground_truth"], strict=True))
    solved = [float(is_solved(response, word)) for response, word in texts]
    rate, half = mean_and_interval(answers.assign(score=solved))
    diversity = len({beginning(response.lower().replace(word, "")) for response, word in texts}) / len(answers)
    metrics = run.metrics()
    validating = metrics["timing_s/testing"].fillna(0.0) if "timing_s/testing" in metrics else 0.0
    minutes = float((metrics["timing_s/step"] - validating).sum()) / 60
    with TemporaryDirectory() as folder:
        trained = run.export(run.state.iteration, folder)
        kl = log_prob(trained, answers) - log_prob(Path(config.model.path), answers)
    tokens = answers["response_ids"].map(len).mean()
    return [
        f"{rate:.1%}", f"± {half:.1%}", f"{diversity:.1%}", f"{kl.mean():.1f}", f"{tokens:.1f}", f"{minutes:.1f}",
    ]  # fmt: skip


@torch.no_grad()
def log_prob(folder: Path, answers: pd.DataFrame) -> np.ndarray:
    """Returns the log-prob of each answer under a model, in nats, shape (answers,)."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    sums = []
    for row in answers.itertuples():
        prompt = tokenizer(row.prompt, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*prompt, *row.response_ids]])
        log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        sums.append(float(log_probs.gather(-1, ids[0, len(prompt) :, None]).sum()))
    return np.array(sums)


if __name__ == "__main__":
    main()
