"""Predicts the seconds of an iteration at sizes that this project has not run, beside those that others measured.

    python benchmarks/paper.py                               # the tables of docs/benchmarks.md
    python benchmarks/paper.py --only "8 B on 8"             # some of their rows
    python benchmarks/paper.py --model "8 B" --gpus 16 --gpu h200

The product's own engine computes and updates a mini-batch as the first of its ranks, on a device that has shapes only
(tests/simulated). Its work is counted: FLOPs by PyTorch's formulas, bytes that kernels read and write, bytes that go to
other GPUs and to the host. It has one layer and then two; each other layer takes as much as the second. Rates are those
of data sheets. A kernel takes as long as its FLOPs or its bytes, whichever is slower (a roofline); kernels and
collectives run at the same time, and copies to the host after them. Only generation, which is vLLM's, has a formula.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ratchet.rlhf.algorithms import PPOClip
from ratchet.rlhf.algorithms.objectives import ActorObjective
from ratchet.rlhf.config.engines import VLLMConfig
from ratchet.rlhf.config.sections import TrainerConfig
from ratchet.rlhf.distributed.gpus import KNOWN
from ratchet.rlhf.models.activation_memory import DecoderSizes
from ratchet.rlhf.rollout.canary import DRAWN, TEXTS, TOKENS
from ratchet.rlhf.rollout.memory_ledger import CUDA
from tests.contract.on_hollow import Phase, estimate, ledger_here
from tests.simulated.device import library
from tests.sizes import MODELS, config_of

SLOWER = (1.7, 2.5)
"""Measured iterations take so many times the predicted seconds; see the second table."""
NIC = 50e9
"""Bytes per second of a GPU to other machines, each of which has `NODE` GPUs."""
NODE = 8
HOST_S = 28e-6
"""Seconds of a processor for each running request in a step of vLLM; measured (docs/benchmarks.md, Rollout engines)."""
IPC = 190e9
"""Bytes per second from a trainer to a vLLM on the same GPU; measured (docs/benchmarks.md, GPU)."""
PAGEABLE = 5e9
"""Bytes per second between a GPU and host memory that is not pinned; assumed."""
PHASES = ("log-probs", "update", "weights", "away", "back", "digest")
BUDGET: int = TrainerConfig.model_fields["micro_batch_tokens"].default
OBJECTIVE = ActorObjective(PPOClip(), kl_in_loss=0.001, kl_estimator="k3", entropy_coef=0.0, on_policy=False)


def drawn(prompts: int, n: int, mean: float, longest: int) -> np.ndarray:
    """Draws tokens of responses, shape (prompts, n): log-normal, of this mean after the limit."""
    noise = np.random.default_rng(0).lognormal(sigma=0.7, size=(prompts, n))
    scale = mean
    for _ in range(30):
        responses = np.clip(scale * noise, 1, longest).astype(np.int64)
        scale *= mean / responses.mean()
    return responses


@dataclass(frozen=True)
class Setup:
    """A model, its GPUs and its batch."""

    model: str
    gpus: int
    prompt: int
    """Tokens of a prompt."""
    responses: np.ndarray
    """Tokens of the responses, shape (prompts, n)."""
    steps: int = 4
    """Optimizer steps, each with so many trajectories. The first is counted, and the others are like it."""
    gpu: str = "h100"

    @cached_property
    def sizes(self) -> DecoderSizes:
        sizes = DecoderSizes.of(config_of(self.model), is_policy=True)
        assert sizes is not None
        return sizes

    @property
    def parameters(self) -> int:
        return self.sizes.layers * self.sizes.layer + self.sizes.ends

    @property
    def tokens(self) -> int:
        """Tokens of all trajectories."""
        return int(self.responses.sum()) + self.prompt * self.responses.size

    @property
    def engine(self) -> dict[str, Any]:
        """Options of the trainer's engine: the gradient checkpointing is the cheaper one, unless only full fits."""
        engine = {"engine": "torch"} if self.gpus == 1 else {}
        layout = {**engine, "rows": 100 * self.gpus, "micro_batch_tokens": BUDGET}
        room = KNOWN[self.gpu].memory - CUDA
        is_full = estimate(self.model, self.gpus, None, self.parameters, **layout)["update"] > room
        return {**engine, "gradient_checkpointing": is_full or None}

    def __str__(self) -> str:
        return f"{self.model} on {self.gpus}" + ("" if self.gpu == "h100" else f" {self.gpu.upper()}")


def counted(setup: Setup, layers: int) -> dict[str, np.ndarray]:
    """Runs a model of so many layers; returns what each phase takes of a rank, see `taken`."""
    lengths = setup.prompt, np.array_split(setup.responses, setup.steps)[0]
    options = {"micro_batch_tokens": BUDGET, "objective": OBJECTIVE, **setup.engine}
    ledger = ledger_here(setup.model, 0, setup.gpus, layers, lengths=lengths, varlen=True, counts=True, **options)
    return {name: taken(phase, setup.gpu) for name, phase in ledger.phases.items() if name in PHASES}


def taken(phase: Phase, gpu: str) -> np.ndarray:
    """Returns the seconds of kernels, of collectives and of copies between GPU and host, and the FLOPs."""
    rates = KNOWN[gpu]
    kernels = sum(
        count * max(flops / rates.bf16_flops, size / rates.bandwidth)
        for (flops, size), count in phase.operations.items()
    )
    flops = sum(count * flops for (flops, _), count in phase.operations.items())
    copies = sum(
        size / (rates.to_host if kind.endswith("later") else PAGEABLE)
        for kind, operation, size in phase.reports
        if operation == "copy"
    )
    return np.array([kernels, sum(sent(*call, rates.to_gpus) for call in phase.collectives), copies, flops])


def sent(call: str, size: int, to_gpus: float) -> float:
    """Returns the seconds of a collective: in a machine and between machines, both at the same time."""
    operation, _, number = call.partition(" of ")
    ranks = int(number)
    whole = size * {"all_gather": ranks, "all_reduce": 2}.get(operation, 1)
    within, nodes = min(ranks, NODE), -(-ranks // NODE)
    return max(whole * (within - 1) / within / to_gpus, whole * (nodes - 1) / nodes / (NODE * NIC))


def of_all_layers(one: dict[str, np.ndarray], two: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    return {name: one[name] + (layers - 1) * (two[name] - one[name]) for name in one}


def generation(setup: Setup, flops: float) -> tuple[float, float]:
    """Returns the seconds of generation, and those until vLLM has new weights.

    A step takes as long as the slowest of: reading weights and the keys and values of all running trajectories, its
    FLOPs, and the scheduler on the host. If the cache is full, steps are repeated.

    Args:
        flops: FLOPs of a token.
    """
    gpu, weights, span = KNOWN[setup.gpu], 2 * setup.parameters, 1
    while weights / span > gpu.memory / 2:
        span *= 2
    engines = max(1, setup.gpus // span)
    token = np.arange(setup.responses.max())
    running = (setup.responses.reshape(-1, 1) > token).sum(0) / engines
    cache = running * (setup.prompt + token) * 2 * 2 * setup.sizes.keys * setup.sizes.layers
    room = span * (VLLMConfig().gpu_memory_utilization * gpu.memory - CUDA) - weights
    read = np.maximum(cache / room, 1) * weights + cache
    steps = np.maximum.reduce(
        [read / (span * gpu.bandwidth), running * flops / (span * gpu.bf16_flops), running * HOST_S]
    )
    prefill = len(setup.responses) * setup.prompt * flops / (engines * span * gpu.bf16_flops)
    return float(steps.sum() + prefill), weights / (IPC if span == 1 else PAGEABLE)


def iteration(setup: Setup, phases: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the seconds of an iteration's parts: GRPO with a reference, all models taking turns on the same GPUs.

    Neither snapshots nor commits are in it.
    """
    seconds = {name: max(kernels, network) + copies for name, (kernels, network, copies, _) in phases.items()}
    generated, loaded = generation(setup, phases["log-probs"][3] * setup.steps * setup.gpus / setup.tokens)
    return {
        "generate": generated,
        "log-probs": 2 * setup.steps * seconds["log-probs"],
        "updates": setup.steps * seconds["update"],
        "weights": seconds["weights"] + loaded,
        "turns": seconds["away"] + seconds["back"],
        "digest": seconds["digest"],
    }


def predicted(setups: Sequence[Setup]) -> Iterable[dict[str, float]]:
    """Yields the iteration of each setup; counts in a process for each core."""
    library()  # compiled before processes need it
    runs = [(setup, layers) for setup in setups for layers in (1, 2)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        results = [pool.apply_async(counted, run) for run in runs]
        for setup, one, two in zip(setups, results[::2], results[1::2], strict=True):
            yield iteration(setup, of_all_layers(one.get(), two.get(), setup.sizes.layers))


def canary(setup: Setup) -> tuple[float, float]:
    """Returns the seconds of a check of the rollout's weights, and those of an iteration.

    The trainer scores the texts, and each engine draws tokens after them and scores both.
    """
    texts = Setup(setup.model, setup.gpus, 1, np.full((TEXTS, 1), TOKENS + DRAWN), steps=1, gpu=setup.gpu)
    whole, scored = predicted([setup, texts])
    token = 2.0 * setup.parameters
    drawn_after, _ = generation(replace(texts, prompt=TOKENS, responses=np.full((TEXTS, 1), DRAWN), gpus=1), token)
    engine = drawn_after + texts.tokens * token / KNOWN[setup.gpu].bf16_flops
    return scored["log-probs"] / 2 + engine, sum(whole.values())


BATCH = 200, drawn(128, 8, 2000, 8192)
SIZES = [Setup(*size, *BATCH) for size in (("8 B", 8), ("32 B", 32), ("70 B", 64), ("235 B", 128))]
NEMO, PRIME, OWN = "NeMo-RL", "prime-rl", "this project"
LONG = np.full((16, 1), 16368)
"""Two sequences for each of eight GPUs, each of which is a micro-batch."""
UNEVEN = np.linspace(256, 1280, 16).astype(np.int64).reshape(-1, 1)
MEASURED: list[tuple[str, Setup, dict[str, float]]] = [
    (NEMO, Setup("8 B", 16, 150, drawn(64, 32, 910, 3946), 1), {"iteration": 97.7}),
    (NEMO, Setup("32 B", 32, 150, drawn(64, 32, 3056, 3946), 1), {"iteration": 393}),
    (NEMO, Setup("30 B", 32, 150, drawn(64, 32, 3053, 3946)), {"iteration": 192}),
    (NEMO, Setup("235 B", 128, 150, drawn(16, 32, 5548, 8042), 1), {"iteration": 395}),
    (NEMO, Setup("235 B", 256, 150, drawn(16, 32, 5563, 8042), 1), {"iteration": 312}),
    (
        OWN,
        Setup("1 B", 1, 32, drawn(32, 8, 458, 512)),
        {"iteration": 12.3, "generate": 4.6, "log-probs": 2.4, "updates": 3.6},
    ),
    (OWN, Setup("1.2 B", 1, 256, UNEVEN, 1), {"updates": 16384 / 39_623}),
    (f"{PRIME}, 16 k", Setup("0.6 B", 1, 16, LONG[:2], 1), {"updates": 1.99}),
    (f"{PRIME}, 16 k", Setup("4 B", 8, 16, LONG, 1), {"updates": 4.69}),
    (f"{PRIME}, 16 k", Setup("30 B", 8, 16, LONG, 1), {"updates": 8.17}),
    (f"{PRIME}, 64 k", Setup("0.6 B", 1, 16, 4 * LONG[:2], 1), {"updates": 12.18}),
    (f"{PRIME}, 64 k", Setup("4 B", 8, 16, 4 * LONG, 1), {"updates": 30.29}),
]
"""Source, what ran, and seconds by part."""


def say(*cells: object) -> None:
    """Prints a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help='some of the rows, such as "8 B on 8"')
    parser.add_argument("--model", choices=MODELS, help="another size, with the batch of the first table")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of that size")
    parser.add_argument("--gpu", choices=KNOWN, default="h100", help="kind of GPU")
    parser.add_argument("--canary", action="store_true", help="the check of the rollout's weights, for 8 B on 8 GPUs")
    options = parser.parse_args()
    if options.canary:
        seconds, total = canary(SIZES[0])
        print(f"{SIZES[0]}: a check takes {seconds:.3f} s, {seconds / total:.2%} of an iteration of {total:.0f} s")
        return
    sizes, measured = SIZES, MEASURED
    if options.model is not None:
        sizes, measured = [Setup(options.model, options.gpus, *BATCH, gpu=options.gpu)], []
    if options.only is not None:
        sizes = [setup for setup in sizes if str(setup) in options.only]
        measured = [row for row in measured if str(row[1]) in options.only]
    for number, (setup, parts) in enumerate(zip(sizes, predicted(sizes), strict=True)):
        if number == 0:
            say("seconds", *parts, "**iteration**", "expected", "tokens/s")
            say(*["---"] * (len(parts) + 4))
        total = sum(parts.values())
        low, high = (factor * total for factor in SLOWER)
        seconds = [f"{each:.1f}" for each in parts.values()]
        say(
            setup,
            *seconds,
            f"**{total:.0f}**",
            f"{low:.0f}–{high:.0f}",
            f"{setup.tokens / high:,.0f}–{setup.tokens / low:,.0f}",
        )
    if sizes and measured:
        print()
    if measured:
        say("measured by", "what", "part", "measured, s", "predicted, s", "tokens/s", "predicted", "factor")
        say(*["---"] * 8)
    for (source, setup, found), parts in zip(measured, predicted([row[1] for row in measured]), strict=True):
        parts["iteration"] = sum(parts.values())
        for part, took in found.items():
            both = took, parts[part]
            cells = [f"{seconds:.3g}" for seconds in both] + [f"{setup.tokens / seconds:,.0f}" for seconds in both]
            say(source, setup, part, *cells, f"**{took / parts[part]:.2f}**")


if __name__ == "__main__":
    main()
