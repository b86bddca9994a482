"""TRL's side of `compare.py`: one training run in TRL's own environment; prints the cost of each iteration as JSON.

GRPO is TRL's `GRPOTrainer`, PPO its experimental `PPOTrainer`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

MARKS: list[tuple[float, float]] = []


class Marks(TrainerCallback):  # type: ignore[misc]
    """Notes the process's CPU time and the clock after each iteration."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        MARKS.append((time.process_time(), time.perf_counter()))


def letters(completions: list[Any], **_: Any) -> list[float]:
    """Returns the rule's reward: the share of letters in a completion, which is a text or a list with a message."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(character.isalpha() for character in text) / max(len(text), 1) for text in texts]


def shared(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": str(arguments.root / "trl"),
        "per_device_train_batch_size": arguments.trajectories,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "bf16": arguments.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "steps" if arguments.snapshots else "no",
        "save_steps": 1,
        "save_total_limit": 3,
        "disable_tqdm": True,
        "logging_strategy": "no",
    }


def grpo(arguments: argparse.Namespace) -> None:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        num_generations=arguments.n,
        max_completion_length=arguments.response_tokens,
        generation_kwargs={"min_new_tokens": arguments.response_tokens},
        beta=0.04 if arguments.reference else 0.0,
        max_steps=arguments.iterations,
        **shared(arguments),
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.root / "model", dtype=torch.float32),
        reward_funcs=str(arguments.root / "reward_model") if arguments.reward_model else letters,
        args=config,
        train_dataset=load_dataset("json", data_files=str(arguments.root / "prompts.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(arguments.root / "model"),
        callbacks=[Marks()],
    ).train()


def ppo(arguments: argparse.Namespace) -> None:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(arguments.root / "model", padding_side="left")
    data = load_dataset("json", data_files=str(arguments.root / "prompts.jsonl"), split="train")

    def tokens(row: dict[str, Any]) -> dict[str, Any]:
        if isinstance(row["prompt"], str):
            return {"input_ids": tokenizer(row["prompt"])["input_ids"]}
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        return {"input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}

    data = data.map(tokens, remove_columns=data.column_names)

    def policy() -> Any:
        return AutoModelForCausalLM.from_pretrained(arguments.root / "model", dtype=torch.float32)

    def classifier() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(arguments.root / "reward_model", dtype=torch.float32)

    config = PPOConfig(
        response_length=arguments.response_tokens,
        num_ppo_epochs=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=arguments.trajectories,
        total_episodes=arguments.trajectories * arguments.iterations,
        kl_coef=0.01,
        num_sample_generations=0,
        **shared(arguments),
    )
    PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy(),
        ref_model=policy(),
        reward_model=classifier(),
        value_model=classifier(),
        train_dataset=data,
        eval_dataset=data.select(range(arguments.trajectories)),
        callbacks=[Marks()],
    ).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), required=True)
    for name in ("trajectories", "n", "response_tokens", "iterations"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    for name in ("reference", "reward_model", "snapshots"):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (grpo if arguments.algorithm == "grpo" else ppo)(arguments)
    print("marks", json.dumps(MARKS), flush=True)


if __name__ == "__main__":
    main()
