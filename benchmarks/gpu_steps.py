"""Steps of `make gpu` that measure the engines without a run: `python benchmarks/gpu_steps.py STEP --json FILE`.

Each prints Markdown, and appends what it measured to the file, a line of JSON each, as soon as it knows it. With
`--tiny` it has sizes that a simulated GPU can compute.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from benchmarks import engines
from ratchet.rlhf.algorithms import PPOClip
from ratchet.rlhf.algorithms.objectives import ActorObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ActorConfig, RunConfig
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.train import performance
from ratchet.rlhf.train.build import train_engine
from ratchet.rlhf.train.engine import OptimizerPlan

if TYPE_CHECKING:
    from torch import Tensor

    from ratchet.rlhf.rollout.engine import Generation
    from ratchet.rlhf.rollout.vllm_engine import VLLMRollout
    from ratchet.rlhf.train.model_engine import ModelEngine
    from ratchet.rlhf.weights.buckets import DeviceMemory, Packed, SharedMemory

GIB = 2**30
OBJECTIVE = ActorObjective(PPOClip(), None, "k3", 0.0, on_policy=False)
VOCABULARY = {True: 512, False: 128256}
SIGNAL_WHEN_THE_PARENT_DIES = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""
LARGEST_GAP = 0.05
"""Nats by which log-probs in bfloat16 may differ, in the mean over tokens; two kernels of attention differ by 0.01."""


@dataclass(frozen=True)
class Notes:
    """Where a step puts what it measured."""

    step: str
    file: Path | None

    def __call__(self, **measured: object) -> None:
        if self.file is not None:
            with self.file.open("a") as lines:
                lines.write(json.dumps({"step": self.step, **measured}) + "\n")


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def trained_engine(tiny: bool) -> ModelEngine:
    """Returns a train engine of 1 B parameters, or a few, whose random weights are always the same."""
    model = engines.random_model("tiny" if tiny else "1b", VOCABULARY[tiny])
    return train_engine(ActorConfig(), model, "policy", dtype="bfloat16")


def trajectories(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]
) -> TrajectoryBatch:
    """Returns trajectories with random advantages."""
    rng = np.random.default_rng(0)
    return TrajectoryBatch.of(
        {
            "trajectory_id": [f"it000000-p{row:05d}-s00" for row in range(len(prompts))],
            "prompt_ids": [list(ids) for ids in prompts],
            "response_ids": [list(ids) for ids in responses],
            "loss_mask": [[1] * len(ids) for ids in responses],
            "advantages": [rng.standard_normal(len(ids)).tolist() for ids in responses],
            "old_log_probs": [list(values) for values in log_probs],
        }
    )


def random_trajectories(tiny: bool) -> TrajectoryBatch:
    """Returns random trajectories, each prompt twice."""
    rng = np.random.default_rng(0)
    prompts, prompt, response = (2, 8, 12) if tiny else (4, 256, 768)
    lengths = rng.integers(response // 2, response, 2 * prompts)
    return trajectories(
        np.repeat(rng.integers(3, 500, (prompts, prompt)), 2, axis=0).tolist(),
        [rng.integers(3, 500, length).tolist() for length in lengths],
        [(rng.standard_normal(length) * 0.01 - 6).tolist() for length in lengths],
    )


def plan_of(batch: TrajectoryBatch, lr: float = 1e-5, micro_batch_tokens: int = 4096) -> OptimizerPlan:
    """Returns one step over all trajectories."""
    return OptimizerPlan(
        lr=lr,
        optimizer=AdamW(),
        grad_clip=1.0,
        micro_batch_tokens=micro_batch_tokens,
        mini_batches=(tuple(range(len(batch))),),
        temperature=1.0,
    )


def synchronize() -> None:
    accelerator.synchronize(accelerator.device())


def seconds_of(compute: Callable[[], object]) -> float:
    """Returns the seconds of a computation, whose first call, which allocates, does not count."""
    compute()
    synchronize()
    began = time.perf_counter()
    compute()
    synchronize()
    return time.perf_counter() - began


# vLLM beside the trainer.


def rollout_config(root: Path, prompt: int, response: int) -> RunConfig:
    """Returns a config with vLLM as it is on a GPU by default: it caches prefixes, and schedules asynchronously."""
    from benchmarks import parts

    engine = {"type": "vllm", "gpu_memory_utilization": 0.4, "args": {"async_scheduling": True}}
    rollout = {"engine": engine, "n": 4, "max_response_tokens": response}
    config = parts.run_config(root, "gpu", 8, {"max_prompt_tokens": prompt}, rollout)
    return config.with_values({"actor.offload_when_idle": True})


def vllm_of(config: RunConfig) -> VLLMRollout:
    from ratchet.rlhf.config.engines import VLLMConfig
    from ratchet.rlhf.models.tokenizers import load_tokenizer
    from ratchet.rlhf.rollout.build import vllm_rollout

    chosen = config.rollout.engine
    assert isinstance(chosen, VLLMConfig)
    return vllm_rollout(config, chosen, load_tokenizer(config.model))


def actor_of(config: RunConfig) -> ModelEngine:
    from ratchet.rlhf.models.loading import load_actor

    return train_engine(config.actor, load_actor(config.model), "policy", dtype=config.model.dtype)


def generated(
    rollout: VLLMRollout, prompts: Sequence[Sequence[int]], n: int, tokens: int, seed: int
) -> tuple[list[Sequence[int]], list[Generation]]:
    """Returns n responses of so many tokens to each prompt, and the prompt of each."""
    from ratchet.rlhf.rollout.engine import Request, Sampling

    repeated = [ids for ids in prompts for _ in range(n)]
    requests = [Request(f"it{seed:06d}-p{row:05d}-s00", tuple(ids)) for row, ids in enumerate(repeated)]
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=tokens, seed=seed, ignore_eos=True)
    return repeated, rollout.generate(requests, sampling)


def answered(prompts: Sequence[Sequence[int]], answers: Sequence[Generation]) -> TrajectoryBatch:
    return trajectories(prompts, [one.response_ids for one in answers], [one.log_probs for one in answers])


def log_probs_model(root: Path, tiny: bool) -> str:
    """Writes a model whose distributions are not flat; returns its name."""
    from benchmarks import parts
    from benchmarks.gpu_runs import smollm2
    from ratchet.rlhf.errors import UserError
    from ratchet.rlhf.models.loading import load_actor

    if not tiny:
        try:
            (root / "model").symlink_to(smollm2())
            return "SmolLM2-135M"
        except UserError as error:
            say(f"A random model, since SmolLM2 is not here: {error}.\n")
    from ratchet.rlhf.config import ModelConfig

    parts.model_folder(root / "model", "5M" if tiny else "1B")
    model = load_actor(ModelConfig(path=str(root / "model")))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 3
    model.save_pretrained(root / "model")
    return "a random Llama"


def step_log_probs(tiny: bool, note: Notes) -> None:
    """Compares vLLM's log-probs of its tokens with the trainer's: before and after an update, with a filled cache."""
    prompt, response, count = (32, 24, 4) if tiny else (256, 256, 16)
    with TemporaryDirectory() as folder:
        name = log_probs_model(Path(folder), tiny)
        config = rollout_config(Path(folder), prompt, response)
        prompts = np.random.default_rng(0).integers(3, 4096, (count, prompt)).tolist()
        with closing(vllm_of(config)) as rollout:
            say(
                f"{name}, bfloat16, {count} prompts of {prompt} tokens x 4, {response} tokens each; nats.\n",
                "| vLLM generates | mean of absolute differences | largest | mean difference | KL (k3) |",
                "|---|---|---|---|---|",
            )
            rollout.place(model=True, optimizer=True)
            answers = generated(rollout, prompts, 4, response, 0)
            again = generated(rollout, prompts, 4, response, 1)
            rollout.place(model=False, optimizer=False)
            actor = actor_of(config)
            gaps = [gap(note, "with the first weights", actor, *answers)]
            gaps.append(gap(note, "again, prompts cached", actor, *again))
            batch = answered(*answers)
            actor.update(batch, OBJECTIVE, plan_of(batch, lr=3e-4))
            stale = gap(note, "before it has the updated weights", actor, *again)
            rollout.load_weights(actor.weights(rollout.dtype))
            rollout.place(model=True, optimizer=True)
            gaps.append(gap(note, "with the updated weights", actor, *generated(rollout, prompts, 4, response, 2)))
    assert max(gaps) <= LARGEST_GAP, f"the log-probs of vLLM and of the trainer differ by {max(gaps):.3f} nats"
    assert stale > 1.5 * gaps[-1], "an update makes no difference: what was compared after it says nothing"


def gap(
    note: Notes, when: str, actor: ModelEngine, prompts: Sequence[Sequence[int]], answers: Sequence[Generation]
) -> float:
    """Prints how vLLM's log-probs differ from the trainer's; returns the mean of the absolute differences."""
    computed = actor.infer(answered(prompts, answers), ("log_probs",), temperature=1.0, micro_batch_tokens=8192)
    ours = np.concatenate([np.asarray(row) for row in computed["log_probs"].to_pylist()])
    differences = ours - np.concatenate([np.asarray(one.log_probs) for one in answers])
    mean, k3 = float(np.abs(differences).mean()), float((np.expm1(differences) - differences).mean())
    largest, signed = float(np.abs(differences).max()), float(differences.mean())
    say(f"| {when} | {mean:.4f} | {largest:.3f} | {signed:+.5f} | {k3:.5f} |")
    note(when=when, mean=mean, largest=largest, signed=signed, k3=k3)
    return mean


def step_speed(tiny: bool, note: Notes) -> None:
    """Measures tokens per second of generation by vLLM, of log-probs and of an update, and the share of peak FLOPs."""
    from benchmarks import parts

    size, prompt, response, count, n = ("5M", 32, 24, 2, 4) if tiny else ("1B", 256, 512, 32, 8)
    with TemporaryDirectory() as folder:
        parts.model_folder(Path(folder) / "model", size)
        config = rollout_config(Path(folder), prompt, response)
        prompts = np.random.default_rng(0).integers(3, 4096, (count, prompt)).tolist()
        with closing(vllm_of(config)) as rollout:
            generated(rollout, prompts, n, response, 0)
            began = time.perf_counter()
            batch = answered(*generated(rollout, prompts, n, response, 1))
            seconds = time.perf_counter() - began
            rollout.place(model=False, optimizer=False)
            say(
                f"Llama, {size}, bfloat16; {count} prompts of {prompt} tokens x {n}, {response} tokens each.\n",
                "| | s | tokens/s | MFU |\n|---|---|---|---|",
            )
            actor = actor_of(config)
            plan = plan_of(batch, micro_batch_tokens=16384)
            flops, answers = actor.update_flops(batch, plan), count * n * response
            tokens = answers + count * n * prompt

            def row(part: str, seconds: float, tokens: int, flops: float) -> None:
                mfu = performance.utilization(flops, seconds)
                share = "unknown" if mfu is None else f"{mfu:.1%}"
                say(f"| {part} | {seconds:.2f} | {tokens / seconds:,.0f} | {share} |")
                note(part=part, seconds=seconds, tokens=tokens, tokens_per_s=tokens / seconds, flops=flops, mfu=mfu)

            # forwards only: two of six FLOPs for each weight and token
            row("generation, tokens of answers", seconds, answers, flops / 3)

            def infer() -> None:
                actor.infer(batch, ("log_probs", "entropy"), temperature=1.0, micro_batch_tokens=16384)

            row("log-probs, all tokens", seconds_of(infer), tokens, flops / 3)
            row("update, all tokens", seconds_of(lambda: actor.update(batch, OBJECTIVE, plan)), tokens, flops)


# Memory.


def step_ledger(tiny: bool, note: Notes) -> None:
    """Compares the memory of an actor with the formulas of a dry run."""
    from ratchet.rlhf.config.engines import TorchConfig
    from ratchet.rlhf.models.activation_memory import Computation, DecoderSizes
    from ratchet.rlhf.rollout.device_memory import gradients, resident

    config = RunConfig.model_validate(
        {
            "model": {"path": "model", "dtype": "bfloat16"},
            "data": {"train": ["prompts"]},
            "algorithm": {"advantage": {"type": "grpo"}},
            "critic": None,
        }
    )
    actor, batch = trained_engine(tiny), random_trajectories(tiny)
    counts = {"actor": sum(parameter.numel() for parameter in actor.parameters.values())}
    held, grown = resident(config, counts, 1, idle=True), sum(gradients(config, counts, 1).values())
    formula = sum(held.values())
    sizes = DecoderSizes.of(actor.model.config, is_policy=True)
    assert sizes is not None
    computation, plan = Computation(sizes, TorchConfig(), width=2), plan_of(batch)
    all_tokens = int(batch.lengths("prompt_ids").sum()) // 2 + int(
        batch.lengths("response_ids").sum()
    )  # shared prompts
    tokens = min(all_tokens, plan.micro_batch_tokens)
    update = computation.update(tokens, grown, several=tokens < all_tokens)
    actor.update(batch, OBJECTIVE, plan)
    synchronize()
    gc.collect()
    measured = accelerator.allocated()
    say(f"{counts['actor'] / 1e6:,.0f} M parameters, bfloat16, `torch`; GiB.\n", "| | measured | formula | ratio |")
    say("|---|---|---|---|")
    rows = {"held between updates": (measured, formula)}
    for name, expected, compute in (
        ("peak of an update", formula + sum(update.values()), lambda: actor.update(batch, OBJECTIVE, plan)),
        (
            "peak of log-probs",
            formula + sum(computation.log_probs(tokens).values()),
            lambda: infer_all(actor, batch),
        ),
        ("peak of a digest", formula, actor.digest),
        ("peak of a snapshot", formula, actor.state),
    ):
        accelerator.reset_peaks()
        compute()
        synchronize()
        rows[name] = accelerator.peaks()[0], expected
    actor.place(model=False, optimizer=False)
    rows["held after `place`"] = accelerator.allocated(), 0.0
    for name, (found, expected) in rows.items():
        ratio = f"{found / expected:.3f}" if expected else ""
        say(f"| {name} | {found / GIB:.3f} | {expected / GIB:.3f} | {ratio} |")
        note(what=name, measured=found, formula=expected, parameters=counts["actor"])
    said = ", ".join(f"{what} {size / 1e9:.1f} GB" for what, size in held.items())
    say("", f"A start prints: {said}, gradients {grown / 1e9:.1f} GB.")
    assert abs(measured / formula - 1) <= 0.1, f"the formula is {formula / measured:.2f} of what is held"


def infer_all(actor: ModelEngine, batch: TrajectoryBatch) -> None:
    actor.infer(batch, ("log_probs", "entropy"), temperature=1.0, micro_batch_tokens=4096)


def started(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Starts another process that uses the device; returns it and a connection to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def step_memory(tiny: bool, note: Notes) -> None:
    """Checks that another process can have the memory that `place` frees, and that the state comes back unchanged."""
    torch.zeros(1, device=accelerator.device())  # CUDA takes memory of its own in both processes
    process, other = started(_other_process)
    with closing(other):
        first = other.recv()
        trained, batch = trained_engine(tiny), random_trajectories(tiny)
        trained.update(batch, OBJECTIVE, plan_of(batch))
        digest = trained.digest()
        synchronize()
        resident = _asked(other, 0)
        trained.place(model=False, optimizer=False)
        # a simulated GPU is memory of the host: any amount shows that the other process answers
        wanted = 2**24 if tiny else int(first["free"] - 1.5 * GIB)
        given = _asked(other, wanted)
        trained.place(model=True, optimizer=True)
        is_same = trained.digest() == digest
        trained.update(batch, OBJECTIVE, plan_of(batch))
        other.send(None)
    process.join()
    say("| another process sees | GiB |\n|---|---|")
    for name, value in (
        ("free at first", first["free"]),
        ("free beside the model and its moments", resident["free"]),
        ("free after `place`", given["free"]),
        ("allocated and written after `place`", given["allocated"]),
    ):
        say(f"| {name} | {value / GIB:.2f} |")
        note(what=name, bytes=value)
    assert given["allocated"] == wanted, f"it could not have {wanted / GIB:.1f} GiB: {given['error']}"
    assert is_same, "the state is not the same after it was moved away and back"


def _asked(other: Connection, nbytes: int) -> dict[str, Any]:
    other.send(nbytes)
    answer: dict[str, Any] = other.recv()
    return answer


def _other_process(pipe: Connection) -> None:
    """Reports how much memory is free, and allocates the requested bytes."""
    device = accelerator.device()
    torch.zeros(1, device=device)
    pipe.send({"free": accelerator.free_and_total()[0], "allocated": 0, "error": None})
    while (nbytes := pipe.recv()) is not None:
        available, error, allocated = accelerator.free_and_total()[0], None, 0
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
            accelerator.synchronize(device)
            allocated = len(memory)
            del memory
        except torch.OutOfMemoryError as full:
            error = str(full).splitlines()[0]
        accelerator.empty_cache(device)
        pipe.send({"free": available, "allocated": allocated, "error": error})


# Weights.


def step_sync(tiny: bool, note: Notes) -> None:
    """Sends weights to another process on the same device, as to vLLM; checks the bytes and measures the speed."""
    from ratchet.rlhf.weights.buckets import DeviceMemory, SharedMemory, send

    weights, left_out = _weights(tiny)
    size = sum(2 * tensor.numel() for _, tensor in weights)
    expected = {name: _checksum(tensor.to(torch.bfloat16)) for name, tensor in weights}
    say(f"{size / 1e9:.2f} GB in bfloat16, cast from float32{left_out}.\n")
    say("| through | first: s | again: s | GB/s | bytes sent / size of the model |\n|---|---|---|---|---|")
    for name in ("memory of the device", "host memory") if accelerator.has_cuda() else ("host memory",):
        process, other = started(_receiver)
        with closing(other):
            other.recv()
            seconds = []
            for _ in range(2):
                synchronize()
                began = time.perf_counter()
                if name == "host memory":
                    with closing(SharedMemory()) as one, closing(SharedMemory()) as another:
                        sent = send(iter(weights), torch.bfloat16, [one, another], _to_host(other))
                else:
                    with closing(DeviceMemory()) as memory:
                        sent = send(iter(weights), torch.bfloat16, [memory], _on_device(other))
                seconds.append(time.perf_counter() - began)
            other.send(None)
            received = other.recv()
        process.join()
        ratio = sent / size
        say(f"| {name} | {seconds[0]:.2f} | {seconds[1]:.2f} | {size / seconds[1] / 1e9:.1f} | {ratio:.3f} |")
        note(through=name, seconds=seconds, bytes=size, sent=sent)
        assert received == expected, "what has arrived is not what was sent"
        assert ratio <= 1.2


def _weights(tiny: bool) -> tuple[list[tuple[str, Tensor]], str]:
    """Returns random float32 weights of a 7 B model, or of as many of its layers as fit with a copy in bfloat16."""
    model = engines.random_model("tiny" if tiny else "7b", 512 if tiny else 152064, torch.device("meta"))
    named = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    budget = accelerator.free_and_total()[0] - 4 * GIB
    chosen: list[tuple[str, Tensor]] = []
    for name, shape in named:
        budget -= 6 * shape.numel()
        if budget < 0:
            break
        chosen.append((name, torch.randn(shape, device=accelerator.device())))
    left_out = f"; {len(named) - len(chosen)} of {len(named)} tensors do not fit" if len(chosen) < len(named) else ""
    return chosen, left_out


def _checksum(tensor: Tensor) -> int:
    return int(tensor.contiguous().view(torch.int16).sum(dtype=torch.int64))


def _to_host(other: Connection) -> Callable[[Packed, SharedMemory], None]:
    def deliver(packed: Packed, memory: SharedMemory) -> None:
        other.send((packed.as_json(), memory.path, None))
        other.recv()

    return deliver


def _on_device(other: Connection) -> Callable[[Packed, DeviceMemory], None]:
    def deliver(packed: Packed, memory: DeviceMemory) -> None:
        synchronize()
        [handle] = memory.handle.values()
        other.send((packed.as_json(), None, handle))
        other.recv()

    return deliver


def _receiver(pipe: Connection) -> None:
    """Copies the buckets into a model of its own; answers with a checksum of each tensor at the end."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from ratchet.rlhf.weights.buckets import Packed, mapped

    model: dict[str, torch.Tensor] = {}
    device = accelerator.device()
    torch.zeros(1, device=device)
    pipe.send("ready")
    handle, memory = None, torch.empty(0)
    while (message := pipe.recv()) is not None:
        fields, path, its_handle = message
        packed = Packed.from_json(fields)
        if path is not None:
            memory = mapped(path, packed.nbytes)
        elif its_handle != handle:
            del memory
            memory, handle = rebuild_cuda_tensor(*its_handle), its_handle
        for name, tensor in packed.tensors(memory):
            if name not in model:
                model[name] = torch.empty_like(tensor, device=device)
            model[name].copy_(tensor)
        accelerator.synchronize(device)
        pipe.send("loaded")
    pipe.send({name: _checksum(tensor) for name, tensor in model.items()})


# The same bits.


def step_digest(tiny: bool, note: Notes) -> None:
    """Checks that the digest equals the CPU's, however a tensor is cut, and that a flipped bit changes it; times it."""
    from ratchet.rlhf.weights import state_digest
    from ratchet.rlhf.weights.tensor_shards import TensorShard

    rows, columns = (64, 32) if tiny else (4096, 1024)
    device = accelerator.device()
    on_cpu = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    whole = on_cpu.to(device)

    def digest(parts: Iterator[TensorShard]) -> str:
        return state_digest.of_parts({"w": parts}, {"w": whole.shape}, "")

    def cut(down: int, across: int) -> Iterator[TensorShard]:
        for row in range(down):
            for column in range(across):
                block = whole.chunk(down, 0)[row].chunk(across, 1)[column].contiguous()
                yield TensorShard.block(block, whole.shape, (row * rows // down, column * columns // across))

    expected = digest(iter([TensorShard.flat(on_cpu)]))
    for layout in ((1, 1), (8, 1), (1, 4), (2, 4)):
        assert digest(cut(*layout)) == expected, f"cut {layout[0]} x {layout[1]}, the digest is another one"
    whole.view(torch.int32)[rows // 2, columns // 2] ^= 1
    assert digest(cut(2, 4)) != expected, "a flipped bit goes unnoticed"

    elements = 2**18 if tiny else 2**30
    large = TensorShard.flat(torch.randn(elements, device=device))
    seconds = seconds_of(lambda: state_digest.sums(large, 1))
    say("Equal on the CPU and on the device, whole, by 8 rows, by 4 columns, and by 2 x 4 blocks; one bit changes it.")
    say(f"{elements / 1e6:,.1f} M elements in {seconds:.3f} s: {1e9 * seconds / elements:.3f} ns per element.")
    note(elements=elements, seconds=seconds)


def step_twice(tiny: bool, note: Notes) -> None:
    """Checks that an update from the same weights gives the same bits twice, in deterministic mode."""
    from ratchet.rlhf.distributed import determinism

    determinism.enforce()
    digests, seconds = [], []
    for _ in range(2):
        trained, batch = trained_engine(tiny), random_trajectories(tiny)
        trained.update(batch, OBJECTIVE, plan_of(batch))  # allocates
        began = time.perf_counter()
        trained.update(batch, OBJECTIVE, plan_of(batch))
        synchronize()
        seconds.append(time.perf_counter() - began)
        digests.append(trained.digest())
        del trained
        gc.collect()
    say(f"An update takes {min(seconds):.2f} s; the digests are {'equal' if len(set(digests)) == 1 else digests}.")
    note(seconds=seconds, digests=digests)
    assert len(set(digests)) == 1, "two updates of the same weights differ"


STEPS: dict[str, Callable[[bool, Notes], None]] = {
    "log-probs": step_log_probs,
    "speed": step_speed,
    "ledger": step_ledger,
    "memory": step_memory,
    "sync": step_sync,
    "digest": step_digest,
    "twice": step_twice,
}


def main(steps: dict[str, Callable[[bool, Notes], None]], about: str | None) -> None:
    """Runs the step that the command line names."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=steps)
    parser.add_argument("--tiny", action="store_true", help="sizes for a simulated GPU")
    parser.add_argument("--json", type=Path, help="file to which what is measured is appended")
    options = parser.parse_args()
    # whoever kills the parent ends this step, and with it all that the step has started
    ctypes.CDLL(None).prctl(SIGNAL_WHEN_THE_PARENT_DIES, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    steps[options.step](options.tiny, Notes(options.step, options.json))


if __name__ == "__main__":
    main(STEPS, __doc__)
