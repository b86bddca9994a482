"""The kinds of runs that are tortured: their commands, and whether they are reproducible to the bit."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests import tiny

LEDGERS = "environments with effects"
WORKSHOPS = "fifty turns in sandboxes"
CHANGES: dict[str, dict[str, Any]] = {
    "ppo": {"checkpoint": {"every": 1, "keep": {"last": 1, "every": None}}},
    "ppo, snapshots in the background": {"checkpoint": {"every": 2, "background": True}},
    "grpo, validated": {
        "rollout__n": 4,
        "algorithm": {"advantage": "grpo", "kl": {"in_loss": 0.01}},
        "validation": {"data": "{workspace}/held_out.parquet"},
    },
    "dapo": {
        "reward__function": "tests.rewards:mostly_flat",
        "algorithm": {"advantage": "grpo", "dynamic_sampling": {"max_prompts": 12}},
    },
    "remax": {"algorithm": {"advantage": "remax"}},
    "a reward model": {"reward": {"function": "tests.rewards:letters", "model": {"path": "{workspace}/judge"}}},
    "dialogues": {
        "rollout__environment": {"name": "tests.environments:Chatty", "options": {"worth": 0.5}, "max_turns": 6},
        "rollout__max_response_tokens": 48,
        "reward": {"function": None},
    },
    LEDGERS: {
        "rollout__environment": {
            "name": "tests.environments:Savings",
            "options": {"folder": "{folder}/books", "turns": 8},
            "max_turns": 10,
            "max_error_share": 1.0,
        },
        "rollout__continuations": 2,
        "algorithm": {"advantage": "vine_ppo"},
        "rollout__max_response_tokens": 96,
        "reward": {"function": None},
    },
    WORKSHOPS: {
        "rollout__environment": {
            "name": "tests.environments:Workshop",
            "options": {"folder": "{folder}/books", "turns": 50},
            "max_turns": 52,
            "max_error_share": 1.0,
        },
        "rollout__max_response_tokens": 700,
        "rollout__prompts_per_shard": 1,
        "data__prompts_per_iteration": 2,
        "train__iterations": 2,
        "algorithm": {"advantage": "grpo"},
        "actor__micro_batch_tokens": 2048,
        "reward": {"function": None},
    },
    "adapters": {"model__lora": {"r": 4, "alpha": 8}, "checkpoint__every": 2},
    "one step off": {"rollout__mode": "one_step_off"},
    "async": {"rollout__mode": "async", "rollout__max_staleness": 2},
    "on S3": {},
    "on Ray": {"pools": {"train": {"workers": 2}}, "actor__engine": "fsdp", "critic__engine": "deepspeed"},
}
FITS = ("sft", "reward model fit")


@dataclass(frozen=True)
class Kind:
    name: str
    workspace: Path

    @property
    def is_fit(self) -> bool:
        return self.name in FITS

    @property
    def is_exact(self) -> bool:
        """True if a run that was tortured has the weights and as many rows as one that was left alone, to the bit."""
        # a trajectory is dropped if a kill loses the answer to a turn that must not be repeated
        return self.name not in ("async", LEDGERS)

    @property
    def has_exact_rows(self) -> bool:
        """True if its rows are the same to the bit, too."""
        # log-probs of a trajectory that continues come from another batch, which rounds differently
        return self.is_exact and self.name != WORKSHOPS

    @property
    def on_s3(self) -> bool:
        return self.name == "on S3"

    @property
    def on_ray(self) -> bool:
        return self.name == "on Ray"

    def command(self, folder: Path, store: str) -> tuple[object, ...]:
        """Returns the arguments of `ratchet` that start or resume the run `run`."""
        if self.is_fit:
            return self._fit(folder, store)
        path = folder / "config.yaml"
        if not path.exists():
            changes: dict[str, Any] = {"reward__function": "tests.rewards:letters", **CHANGES[self.name]}
            if "reward" in changes:
                del changes["reward__function"]
            changes = json.loads(
                json.dumps(changes).replace("{workspace}", str(self.workspace)).replace("{folder}", str(folder))
            )
            config = tiny.config(self.workspace, run__name="run", run__store=store, **changes)
            path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return "train", path

    def _fit(self, folder: Path, store: str) -> tuple[object, ...]:
        common = ("--model", self.workspace / "model", "--output", folder / "run", "--store", store, "--lr", 0.01)
        if self.name == "sft":
            rows = self.workspace / "rows.jsonl"
            return ("sft", *common, "--data", rows, "--steps", 9, "--batch-examples", 8, "checkpoint_steps=3")
        pairs = self.workspace / "pairs.jsonl"
        return ("reward-model", *common, "--data", pairs, "--batch-pairs", 16, "--epochs", 2, "checkpoint_steps=2")


def workspace(folder: Path) -> Path:
    """Returns a folder with the inputs of all kinds."""
    tiny.workspace(folder)
    tiny.prompt_file(folder / "held_out.parquet", prompts=3)
    tiny.reward_model_folder(folder / "judge", folder / "model")
    rows = [{"prompt": f"say {number}", "response": "abc"[number % 3] * 5} for number in range(40)]
    pairs = [{"prompt": f"say {number}", "chosen": "abcde", "rejected": "12345"[number % 4 :]} for number in range(48)]
    for name, lines in (("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def kinds(folder: Path, ray: bool, chosen: Collection[str]) -> list[Kind]:
    """Returns the kinds chosen by name, or all, without those on Ray unless `ray`."""
    names = [*CHANGES, *FITS]
    return [Kind(name, folder) for name in names if (name in chosen if chosen else ray or name != "on Ray")]
