"""Computes the cost of an iteration for models that this project has not run: seconds by part, and memory.

    python benchmarks/paper.py                                  # the tables of docs/benchmarks.md
    python benchmarks/paper.py --model 7B --gpus 8 --gpu H200   # one size

GRPO with a reference, all models on the same GPUs, taking turns (`offload_when_idle`), with `fsdp` (one GPU: `torch`)
and vLLM. Lengths, micro-batches and shared prompts are those of the project's own code; rates are of data sheets, times
the shares that software is assumed to reach (`costs.Assumed`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from benchmarks.costs import (
    ASSUMED,
    BFLOAT16,
    FLOAT32,
    HARDWARE,
    MODELS,
    Checkpointing,
    Hardware,
    Lengths,
    Model,
    slowed,
)
from ratchet.infra.execution.snapshots import is_affordable
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.config.engines import VLLMConfig
from ratchet.rlhf.config.sections import CheckpointConfig, RolloutConfig, TrainerConfig
from ratchet.rlhf.models.token_outputs import BLOCK_BYTES, LOGITS_BYTES
from ratchet.rlhf.train.micro_batches import by_prompt, deal, in_rounds
from ratchet.rlhf.train.model_engine import KEYS_PER_TOKEN
from ratchet.rlhf.weights.state_digest import MIX
from ratchet.tasks.shard_runner import ROWS_PER_RANK

SLOWER = (1.1, 1.7)
"""Measured iterations take so many times the seconds of this model (`checks`); the tables say both."""
SIZES = (("0.5B", 1), ("7B", 8), ("32B", 32), ("70B", 64))
"""Models and GPUs of the tables."""
STATE = FLOAT32 * (1 + len(AdamW.state))
"""Bytes of a parameter with its moments."""
SHA256_RATE = 1.8e9
"""Measured: bytes per second and core."""
PARQUET_RATE = 1e8
"""Measured: bytes of columns that a core writes as Parquet in a second (token ids; floats take half of the time)."""
COMMIT_S = 0.16
"""Measured: seconds per iteration of workflow, log and manifests (docs/benchmarks.md, PPO)."""
COLUMNS = 7
"""Columns with four bytes per response token that an iteration commits: ids, mask, rewards, advantages and log-probs of
the rollout, of the actor and of the reference."""
DIGEST_BYTES = 8 + (8 + 4 + 8) + 16 + len(MIX) * (16 + 16 + 24) + 2 * 8
"""Bytes that `state_digest.sums` reads and writes per element on a GPU: positions, plus bits, xor key; rounds of a
product, a shift and an xor of 64-bit numbers; two sums."""
STEP_BYTES = 28
"""Bytes per parameter that the optimizer reads and writes: parameter and moments both, the gradient only read."""
RESERVED = 2e9
"""Bytes of a GPU for the CUDA context, NCCL and fragmentation."""


@dataclass(frozen=True)
class Setup:
    """A model, its hardware and its batch."""

    model: Model
    hardware: Hardware
    gpus: int
    lengths: Lengths
    mini_batches: int = 4
    micro_batch_tokens: int = TrainerConfig.model_fields["micro_batch_tokens"].default

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.hardware.gpus_per_node)

    @property
    def weights(self) -> int:
        return BFLOAT16 * self.model.parameters

    @property
    def state(self) -> int:
        return STATE * self.model.parameters

    @property
    def rollout_gpus(self) -> int:
        """GPUs of a rollout engine: so many that its weights take at most half of their memory."""
        gpus = 1
        while self.weights / gpus > self.hardware.memory / 2:
            gpus *= 2
        return gpus

    @property
    def engines(self) -> int:
        return self.gpus // self.rollout_gpus

    @property
    def cache_bytes(self) -> float:
        share: float = VLLMConfig.model_fields["gpu_memory_utilization"].default
        return self.rollout_gpus * (share * self.hardware.memory - RESERVED) - self.weights


def generation(setup: Setup) -> float:
    """Returns the seconds of generation. A step reads the weights, and the keys and values of all running trajectories.

    There are as many steps as the longest response has tokens, or more if the cache cannot hold all trajectories.
    """
    model, hardware, lengths, gpus = setup.model, setup.hardware, setup.lengths, setup.rollout_gpus
    responses = lengths.responses
    share = 1 / setup.engines  # trajectories go to the engine that has room
    running = min(lengths.count * share, setup.cache_bytes / (model.key_value_bytes * lengths.tokens / lengths.count))
    steps = max(float(responses.max()), responses.sum() * share / running)
    read = steps * setup.weights + lengths.attended_by_responses * share * model.key_value_bytes
    prompts = responses.shape[0] * share
    prefill = model.forward_flops(prompts * lengths.prompt, prompts * lengths.prompt**2 / 2, prompts)
    latency = ASSUMED.step_s + (2 * model.layers * ASSUMED.reduce_s if gpus > 1 else 0.0)
    memory_s = read / gpus / (hardware.hbm * ASSUMED.decode)
    return memory_s + steps * latency + prefill / gpus / (hardware.flops * ASSUMED.mfu)


def dealt(setup: Setup, responses: np.ndarray) -> list[list[tuple[int, float]]]:
    """Divides trajectories into micro-batches as the engines do, with shared prompts.

    Args:
        responses: Tokens of the responses, shape (prompts, n).

    Returns:
        Tokens of each micro-batch, and FLOPs of its forward pass, by rank.
    """
    prompts, n = responses.shape
    prompt_of = np.repeat(np.arange(prompts), n)
    prompt = np.full(responses.size, setup.lengths.prompt)
    flat = responses.flatten() - 1
    read = flat + prompt // KEYS_PER_TOKEN
    groups, sizes = by_prompt(prompt_of, prompt, read, setup.micro_batch_tokens, setup.gpus)

    def flops(numbers: np.ndarray) -> float:
        rows = np.concatenate([groups[number] for number in numbers] or [np.arange(0)])
        own, once = flat[rows].astype(float), len(numbers) * setup.lengths.prompt
        attended = len(numbers) * setup.lengths.prompt**2 / 2 + (own * setup.lengths.prompt + own**2 / 2).sum()
        return setup.model.forward_flops(once + own.sum(), attended, own.sum() + len(rows))

    by_team = deal(sizes, setup.micro_batch_tokens, setup.gpus, packed=True)
    return [[(int(sizes[piece].sum()), flops(piece)) for piece in pieces] for pieces in by_team]


def micro_batch_flops(setup: Setup, responses: np.ndarray) -> np.ndarray:
    """Returns the FLOPs of the forward pass of each micro-batch, on the rank that has most: all compute in lockstep."""
    return np.array([[flops for _, flops in pieces] for pieces in dealt(setup, responses)]).max(0)


def together(setup: Setup, shards: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the FLOPs of each round of micro-batches of several shards, on the busiest rank; see `infer_each`."""
    pieces = [piece for shard in shards for of_rank in dealt(setup, shard) for piece in of_rank if piece[0]]
    by_rank = in_rounds(np.array([size for size, _ in pieces]), setup.gpus)
    flops = [[pieces[number][1] for number in numbers] for numbers in by_rank]
    return np.array([max(of_round) for of_round in zip_longest(*flops, fillvalue=0.0)])


def gathered(setup: Setup, size: float) -> float:
    """Returns the seconds until every GPU has `size` bytes that are sharded; 0 on one GPU."""
    return slowed(setup.hardware).gathering(size, setup.gpus)


def log_probs(setup: Setup, rounds: Iterable[np.ndarray]) -> float:
    """Returns the seconds of a forward pass over all trajectories; layers are gathered while others compute.

    Args:
        rounds: FLOPs of the rounds of each call.
    """
    compute = np.concatenate(list(rounds)) / (setup.hardware.flops * ASSUMED.mfu)
    return float(np.maximum(compute, gathered(setup, setup.weights)).sum())


def at_once(setup: Setup) -> Iterator[np.ndarray]:
    """Yields the rounds as if the trajectories were one shard, in one call."""
    yield micro_batch_flops(setup, setup.lengths.responses)


def by_call(setup: Setup) -> Iterator[np.ndarray]:
    """Yields the rounds with as many shards in a call as the driver puts there if all are ready."""
    waiting = shards_of(setup)
    while waiting:
        call = [waiting.pop(0)]
        while waiting and setup.gpus > 1 and sum(shard.size for shard in call) < ROWS_PER_RANK * setup.gpus:
            call.append(waiting.pop(0))
        yield together(setup, call)


def shards_of(setup: Setup) -> list[np.ndarray]:
    responses, size = setup.lengths.responses, RolloutConfig().prompts_per_shard
    return [responses[start : start + size] for start in range(0, len(responses), size)]


def updates(setup: Setup) -> float:
    """Returns the seconds of all updates. Gradients are summed over the ranks once per mini-batch."""
    per_gpu = setup.model.parameters / setup.gpus
    gather, reduce = (gathered(setup, size * setup.model.parameters) for size in (BFLOAT16, FLOAT32))
    fits = checkpointing(setup)
    # the goal includes what selective checkpointing recomputes: every second matrix product
    recomputed = 0.0 if fits is not None and fits[0] == "selective" else 0.5
    seconds = 0.0
    for responses in np.array_split(setup.lengths.responses, setup.mini_batches):
        flops = (3 + recomputed) * micro_batch_flops(setup, responses)
        collectives = np.full(len(flops), 2 * gather)
        collectives[-1] += reduce
        seconds += float(np.maximum(flops / (setup.hardware.flops * ASSUMED.mfu), collectives).sum())
        seconds += per_gpu * STEP_BYTES / setup.hardware.hbm
    return seconds


def training_bytes(setup: Setup) -> dict[str, float]:
    """Returns the bytes of a GPU in an update, without activations."""
    model, per_gpu = setup.model, 1 / setup.gpus
    ends = model.vocabulary * model.hidden * (1 if model.tied else 2)
    # on one GPU, a layer's copy in the type of the computation
    whole = model.layer_parameters + ends if setup.gpus == 1 else 2 * model.layer_parameters + ends
    return {
        "weights, moments": setup.state * per_gpu,
        "gradients": FLOAT32 * model.parameters * per_gpu,
        "gathered layers": BFLOAT16 * whole + (0 if setup.gpus == 1 else FLOAT32 * ends),
        "logits": LOGITS_BYTES + 4 * BLOCK_BYTES["gpu"],
        "reserved": RESERVED,
    }


def checkpointing(setup: Setup) -> tuple[Checkpointing, float] | None:
    """Returns the cheapest gradient checkpointing that fits, and bytes of activations of a micro-batch; None: none
    fits.
    """
    choices: tuple[Checkpointing, ...] = ("selective", "full")
    left = setup.hardware.memory - sum(training_bytes(setup).values())
    for choice in choices:
        size = activations(setup, choice)
        if size <= left:
            return choice, size
    return None


def activations(setup: Setup, choice: Checkpointing) -> float:
    """Returns the bytes of activations of a micro-batch, with those of the layer that is recomputed."""
    whole = replace(setup.model, layers=1)
    per_token = setup.model.activation_bytes(choice)
    return float(setup.micro_batch_tokens * (per_token + whole.activation_bytes("none")))


def iteration(setup: Setup) -> dict[str, float]:
    hardware, gpus = setup.hardware, setup.gpus
    shards = setup.state / gpus
    parts = {
        "generate": generation(setup),
        "log-probs of actor and reference": 2 * log_probs(setup, by_call(setup)),
        "updates": updates(setup),
        "digest": shards / FLOAT32 * DIGEST_BYTES / (hardware.hbm * ASSUMED.decode),
        "weights to the rollout": gathered(setup, setup.weights) + transfer(setup),
        # vLLM's weights are discarded, not moved
        "turns": 2
        * max(
            (shards + setup.weights / gpus) / hardware.pcie,
            (setup.state + setup.weights) / setup.nodes / ASSUMED.host,
        ),
        "snapshot": 0.0,
        "commits": commits(setup),
    }
    return parts | {"snapshot": snapshot_wait(setup) / snapshot_every(setup, sum(parts.values()))}


def transfer(setup: Setup) -> float:
    """Returns the seconds in which whole weights go from a trainer's process to the rollout's (`weight_transfer`).

    On one GPU through memory of the GPU: a bucket is written, read, and written to its place. To an engine that spans
    GPUs through buckets of host memory, which are filled while others are read; each GPU reads every bucket. That
    memory is not pinned.
    """
    if setup.rollout_gpus == 1:
        return 3 * setup.weights / (setup.hardware.hbm * ASSUMED.decode)
    copied = (1 + setup.rollout_gpus) * setup.weights * setup.engines / setup.nodes
    return max(setup.weights / ASSUMED.pageable, copied / ASSUMED.host)


def snapshot_wait(setup: Setup) -> float:
    """Returns the seconds for which training waits for a snapshot: until it is in host memory."""
    return gathered(setup, setup.state) + setup.state / setup.gpus / ASSUMED.pageable


def snapshot_written(setup: Setup) -> float:
    """Returns the seconds until a snapshot in host memory is hashed, as files and by blocks, and written."""
    return 2 * setup.state / setup.gpus / SHA256_RATE + setup.state / (setup.hardware.disk * setup.nodes)


def snapshot_every(setup: Setup, iteration_s: float) -> int:
    """Returns the iterations between snapshots, of which one is written at a time."""
    defaults = CheckpointConfig()
    number = 1
    while number < defaults.max_replay and not (
        is_affordable(snapshot_wait(setup), number * iteration_s, defaults.max_share)
        and snapshot_written(setup) <= number * iteration_s
    ):
        number += 1
    return number


def commits(setup: Setup) -> float:
    """Returns the seconds of workflow and commits; one process encodes the columns and writes them."""
    size = 4 * COLUMNS * float(setup.lengths.responses.sum())
    return COMMIT_S + size / PARQUET_RATE


def misfits(setup: Setup) -> list[str]:
    """Describes everything that does not fit into memory, with its arithmetic, in GB."""
    chosen = checkpointing(setup)
    if chosen is not None and chosen[0] == "selective":
        return []
    size, rest = activations(setup, "selective"), sum(training_bytes(setup).values())
    remedy = "nothing fits: fewer tokens" if chosen is None else "full checkpointing"
    return [
        f"micro-batches of {setup.micro_batch_tokens:,} tokens with selective checkpointing: {_gb(size)} + {_gb(rest)} "
        f"of {_gb(setup.hardware.memory)}; {remedy}"
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 1e10 else f"{size / 1e9:,.1f} GB"


def memory_rows(setup: Setup) -> list[tuple[str, float]]:
    rest = training_bytes(setup)
    chosen = checkpointing(setup) or ("full", activations(setup, "full"))
    update = {**rest, f"activations, {chosen[0]}": chosen[1]}
    vllm = {"vLLM's weights": setup.weights / setup.rollout_gpus, "cache": setup.cache_bytes / setup.rollout_gpus}
    return [*update.items(), ("**update**", sum(update.values())), *vllm.items()]


def table(setups: Sequence[Setup]) -> str:
    columns = [iteration(setup) for setup in setups]
    heads = [f"{setup.model.name} on {setup.gpus}" for setup in setups]
    lines = ["| seconds | " + " | ".join(heads) + " |", "|---" * (1 + len(setups)) + "|"]
    for part in columns[0]:
        lines.append(f"| {part} | " + " | ".join(f"{parts[part]:.1f}" for parts in columns) + " |")
    sums = [sum(parts.values()) for parts in columns]
    lines.append("| **iteration** | " + " | ".join(f"**{seconds:.0f}**" for seconds in sums) + " |")
    lines.append("| as measured ones, from | " + " | ".join(f"{SLOWER[0] * seconds:.0f}" for seconds in sums) + " |")
    lines.append("| to | " + " | ".join(f"{SLOWER[1] * seconds:.0f}" for seconds in sums) + " |")
    every = [f"{snapshot_every(setup, seconds)}" for setup, seconds in zip(setups, sums, strict=True)]
    lines.append("| snapshot every … iterations | " + " | ".join(every) + " |")
    ratios = [f"{log_probs(setup, by_call(setup)) / log_probs(setup, at_once(setup)):.2f}" for setup in setups]
    lines.append("| log-probs, to those of one shard | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def memory_table(setups: Sequence[Setup]) -> str:
    rows = [memory_rows(setup) for setup in setups]
    heads = [f"{setup.model.name} on {setup.gpus}" for setup in setups]
    lines = ["| GB of a GPU | " + " | ".join(heads) + " |", "|---" * (1 + len(setups)) + "|"]
    for cells in zip(*rows, strict=True):
        names = {name for name, _ in cells}
        name = names.pop() if len(names) == 1 else "activations"
        shown = [
            f"{size / 1e9:.1f}" + (f" ({label.partition(', ')[2]})" if name == "activations" else "")
            for label, size in cells
        ]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def checks() -> list[tuple[str, Setup, dict[str, float]]]:
    """Returns iterations that were measured on H100s: what they were, and seconds by part."""
    llama = Model("Llama 3.1 8B", 4096, 14336, 32, 32, 8, 128256, tied=False, biased=False)
    own = Model("1B", 2048, 8192, 16, 32, 32, 4096, tied=False, biased=False)
    nemo = "NeMo-RL 0.4, its performance summary"
    ours = {"generate": 4.6, "log-probs of actor and reference": 2.4, "updates": 3.6, "iteration": 12.3}
    return [
        (nemo, Setup(llama, HARDWARE["H100"], 16, _of_mean(64, 32, 150, 910, 3946)), {"iteration": 97.7}),
        (nemo, Setup(MODELS["32B"], HARDWARE["H100"], 32, _of_mean(64, 32, 150, 3056, 3946)), {"iteration": 393.0}),
        ("this project, one run", Setup(own, HARDWARE["H100"], 1, _of_mean(32, 8, 32, 458, 512)), ours),
    ]


def _of_mean(prompts: int, n: int, prompt: int, response: int, longest: int) -> Lengths:
    """Draws lengths whose mean is `response` after the limit, too."""
    before = float(response)
    for _ in range(30):
        lengths = Lengths.drawn(prompts, n, prompt, round(before), longest)
        before *= response / lengths.responses.mean()
    return lengths


def check_table() -> str:
    lines = ["| measured by | model | part | measured, s | computed, s | factor |", "|---|---|---|---|---|---|"]
    for source, setup, measured in checks():
        parts = iteration(setup)
        # the measured iterations contain no snapshot
        parts["iteration"] = sum(parts.values()) - parts["snapshot"]
        for part, seconds in measured.items():
            model = f"{setup.model.name} on {setup.gpus}"
            lines.append(
                f"| {source} | {model} | {part} | {seconds:.1f} | {parts[part]:.1f} | **{seconds / parts[part]:.2f}** |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="one size; otherwise those of docs/benchmarks.md")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of that one size")
    parser.add_argument("--gpu", choices=HARDWARE, default="H100", help="kind of GPU")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--n", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--response-tokens", type=int, default=2110, help="mean; lengths are log-normal")
    parser.add_argument("--longest", type=int, default=8192, help="limit on the tokens of a response")
    parser.add_argument("--mini-batches", type=int, default=4, help="optimizer steps")
    for rate in ("nvlink", "pcie", "nic", "disk"):
        parser.add_argument(f"--{rate}", type=float, help="GB/s; otherwise of the data sheet")
    options = parser.parse_args()
    rates = {name: 1e9 * value for name in ("nvlink", "pcie", "nic", "disk") if (value := getattr(options, name))}
    hardware = replace(HARDWARE[options.gpu], **rates)
    lengths = Lengths.drawn(options.prompts, options.n, options.prompt_tokens, options.response_tokens, options.longest)
    sizes = SIZES if options.model is None else ((options.model, options.gpus),)
    setups = [Setup(MODELS[name], hardware, gpus, lengths, options.mini_batches) for name, gpus in sizes]
    print(
        f"{options.gpu}; {options.prompts} prompts x {options.n}, {lengths.tokens / 1e6:.2f} M tokens, longest "
        f"response {lengths.responses.max():,}; {options.mini_batches} optimizer steps\n"
    )
    print(table(setups))
    if options.model is None:
        print(f"\n{check_table()}")
    print(f"\n{memory_table(setups)}\n\nWhat does not fit:\n")
    for setup in setups:
        for note in misfits(setup):
            print(f"- {setup.model.name} on {setup.gpus}: {note}")


if __name__ == "__main__":
    main()
