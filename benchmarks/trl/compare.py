"""Compares Ratchet and TRL on equal work, alternating: response tokens per CPU-second, and their ratio.

    make bench-trl            # or: python benchmarks/trl/compare.py [--only NAME] [--rounds 5]

The same weights, prompts, lengths, type and single thread: a Llama with 3.7 M parameters, 32 responses of 64 tokens to
prompts of 32 tokens, one optimizer step on all of them; or SmolLM2-135M-Instruct (models/smollm2, which `ratchet demo`
makes), 32 tokens, and prompts of the demo, of about 40 tokens. GRPO samples four responses per prompt, or eight; PPO
one, with four models, and the rollout's log-probs as the old ones, as TRL does. Each side is a process of its own that
runs three iterations to warm up and five that count (one and three with SmolLM2); the sides take turns, and each round
gives a ratio. Reported are medians over the rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from tests import tiny

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
WARM_UP, COUNTED = 3, 5
TRAJECTORIES, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 32, 64
TRL = {"grpo": "1.16.0", "ppo": "1.12.0"}


@dataclass(frozen=True)
class Work:
    name: str
    algorithm: str
    n: int
    flags: tuple[str, ...] = ()
    dtype: str = "float32"
    prompt_tokens: int = PROMPT_TOKENS
    response_tokens: int = RESPONSE_TOKENS
    pretrained: bool = False
    """Uses SmolLM2-135M-Instruct, and fewer iterations."""

    @property
    def warm_up(self) -> int:
        return 1 if self.pretrained else WARM_UP

    @property
    def counted(self) -> int:
        return 3 if self.pretrained else COUNTED


WORKS = (
    Work("GRPO", "grpo", 4),
    Work("GRPO, snapshots", "grpo", 4, ("--snapshots",)),
    Work("GRPO, reference", "grpo", 4, ("--reference",)),
    Work("GRPO, reference, reward model", "grpo", 4, ("--reference", "--reward-model")),
    Work("GRPO, reference, bfloat16", "grpo", 4, ("--reference",), dtype="bfloat16"),
    Work("GRPO, reference, n 8, prompts of 128", "grpo", 8, ("--reference",), prompt_tokens=128),
    Work("PPO, reward model", "ppo", 1, ("--reward-model",)),
    Work("PPO, reward model, bfloat16", "ppo", 1, ("--reward-model",), dtype="bfloat16"),
    Work("GRPO, SmolLM2, n 8", "grpo", 8, response_tokens=32, pretrained=True),
    Work("PPO, SmolLM2, reward model", "ppo", 1, ("--reward-model",), response_tokens=32, pretrained=True),
)


@dataclass(frozen=True)
class Cost:
    """CPU-seconds per iteration of one side."""

    own: float
    server: float = 0.0
    """CPU-seconds of the temporary Prefect server."""


def workspace(root: Path, work: Work) -> None:
    """Writes the models and prompts of both sides."""
    prompts: list[object]
    if work.pretrained:
        (root / "model").symlink_to(ROOT / "models/smollm2")
        task = runpy.run_path(str(ROOT / "examples/sentences/sentences.py"))
        prompts = [
            [{"role": "user", "content": text.format(word=word)}]
            for word in task["WORDS"].split()
            for text in task["PROMPTS"]
        ]
    else:
        shape = {"hidden": 256, "layers": 4, "intermediate": 688, "heads": 8, "key_value_heads": 8, "vocabulary": 1024}
        tiny.model_folder(root / "model", **shape)
        letters = "abcdefghijklmnopqrstuvwxyz" * (work.prompt_tokens // 26 + 1)
        prompts = [f"{number:03d} {letters[: work.prompt_tokens - 4]}" for number in range(256)]
    tiny.reward_model_folder(root / "reward_model", root / "model")
    rows = [{"data_source": "benchmark", "prompt": prompt} for prompt in prompts]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(root: Path, work: Work, *, is_trl: bool) -> Cost:
    """Runs one side; returns the mean cost of its counted iterations."""
    python = ROOT / f"build/trl-{TRL[work.algorithm]}/bin/python" if is_trl else Path(sys.executable)
    command = [
        str(python),
        str(FOLDER / ("trl_side.py" if is_trl else "ratchet_side.py")),
        str(root),
        *("--algorithm", work.algorithm, "--n", str(work.n), "--trajectories", str(TRAJECTORIES)),
        *("--response-tokens", str(work.response_tokens), "--iterations", str(WARM_UP + COUNTED)),
        *("--dtype", work.dtype, *work.flags),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "" if is_trl else f"{ROOT}/src:{ROOT}",
    }
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    marks = [line for line in done.stdout.splitlines() if line.startswith("marks ")]
    if not marks:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    points = json.loads(marks[-1].removeprefix("marks "))
    first, last = points[work.warm_up - 1], points[work.warm_up + work.counted - 1]
    own = (last[0] - first[0]) / work.counted
    return Cost(own) if is_trl else Cost(own, (last[2] - first[2]) / work.counted)


def spread(values: Sequence[float], digits: int) -> str:
    """Formats the median, with the smallest and the largest value."""
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low}–{high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=[work.name for work in WORKS])
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, width=160)
    table = Table(title=f"response tokens per CPU-second; {platform.machine()}, one thread, {arguments.rounds} rounds")
    for column in ("work", "TRL", "Ratchet", "ratio", "Ratchet, with the server", "ratio"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for work in WORKS:
        if arguments.only and work.name not in arguments.only:
            continue
        tokens = TRAJECTORIES * work.response_tokens
        theirs: list[float] = []
        ours: list[float] = []
        with_server: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            workspace(Path(folder), work)
            for number in range(arguments.rounds):
                trl, ratchet = run(Path(folder), work, is_trl=True), run(Path(folder), work, is_trl=False)
                theirs.append(tokens / trl.own)
                ours.append(tokens / ratchet.own)
                with_server.append(tokens / (ratchet.own + ratchet.server))
                console.print(
                    f"{work.name}, round {number + 1}: TRL {trl.own:.2f} s, Ratchet {ratchet.own:.2f} s, its server "
                    f"{ratchet.server:.2f} s",
                    highlight=False,
                )
        table.add_row(
            work.name,
            spread(theirs, 0),
            spread(ours, 0),
            spread([own / other for own, other in zip(ours, theirs, strict=True)], 2),
            spread(with_server, 0),
            spread([own / other for own, other in zip(with_server, theirs, strict=True)], 2),
        )
    console.print(table)


if __name__ == "__main__":
    main()
