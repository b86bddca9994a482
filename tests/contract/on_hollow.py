"""Engines of real sizes on a device that has shapes only; test_simulated_gpu.py runs this elsewhere.

What a rank holds and sends is counted from the engine's own calls, for models of 0.5 B to 235 B on up to 512 ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ratchet.infra.workers.batching import Together
from ratchet.rlhf.algorithms import PPOClip
from ratchet.rlhf.algorithms.objectives import ActorObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config.engines import FSDPConfig, TorchConfig
from ratchet.rlhf.models import segments
from ratchet.rlhf.models.activation_memory import Computation, DecoderSizes
from ratchet.rlhf.models.skeleton import without_memory
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.fsdp_engine import FSDPEngine
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests.simulated import device
from tests.simulated.operations import counted
from tests.sizes import config_of

PROMPT, RESPONSE, BUDGET = 512, 1536, 4096
HUGE = 2**50
"""Memory of the device in bytes: what does not fit a GPU is a number here."""


@dataclass
class Phase:
    """What a rank did between two marks."""

    peak: int
    """Bytes of the device."""
    reports: list[tuple[str, str, int]]
    operations: Counter[tuple[int, int]]
    """Numbers of operations by their FLOPs and bytes, if they are counted."""

    @property
    def collectives(self) -> list[tuple[str, int]]:
        """Operations and ranks, and bytes of this rank's input, in order."""
        return [(operation, size) for kind, operation, size in self.reports if kind == "collective"]


@dataclass
class Ledger:
    """What one rank held and sent."""

    parameters: int
    trained: int = 0
    """Bytes that it holds between updates."""
    before_step: int = 0
    """Bytes when all gradients are there."""
    pinned: int = 0
    """Bytes of pinned host memory while everything is away."""
    left: int = 0
    """Bytes of the device while everything is away."""
    written: int = 0
    """Bytes of its files of a snapshot, if it takes one."""
    phases: dict[str, Phase] = field(default_factory=dict)


def trajectories(prompt: int, responses: np.ndarray) -> TrajectoryBatch:
    """Makes trajectories of so many tokens; `responses` has the shape (prompts, n)."""
    rng = np.random.default_rng(0)
    prompts, n = responses.shape
    lengths = responses.flatten()

    def per_token() -> list[np.ndarray]:
        return [rng.standard_normal(length).astype(np.float32) for length in lengths]

    return TrajectoryBatch.of(
        {
            "trajectory_id": [f"it000000-p{row // n:05d}-s{row % n:02d}" for row in range(len(lengths))],
            "prompt_ids": [ids for ids in rng.integers(3, 78, (prompts, prompt)) for _ in range(n)],
            "response_ids": [rng.integers(3, 78, length) for length in lengths],
            "loss_mask": [np.ones(length, np.int64) for length in lengths],
            "advantages": per_token(),
            "old_log_probs": per_token(),
            "ref_log_probs": per_token(),
        }
    )


OBJECTIVE = ActorObjective(PPOClip(), kl_in_loss=0.1, kl_estimator="k3", entropy_coef=0.01, on_policy=False)


def ledger_of(model: str, rank: int, count: int, layers: int | None, **options: Any) -> Ledger:
    """Builds an engine as one of `count` ranks, and goes through all that a run does with it; see `ledger_here`.

    In a process of its own: PyTorch remembers groups, and threads do not survive a fork.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(ledger_here, (model, rank, count, layers), options)


def ledger_here(
    model: str,
    rank: int,
    count: int,
    layers: int | None,
    *,
    rows: int | None = None,
    lengths: tuple[int, np.ndarray] | None = None,
    micro_batch_tokens: int = BUDGET,
    objective: ActorObjective = OBJECTIVE,
    varlen: bool = False,
    counts: bool = False,
    engine: Literal["fsdp", "torch"] = "fsdp",
    **options: Any,
) -> Ledger:
    """As `ledger_of`, in this process.

    Args:
        rows: number of trajectories of `PROMPT` and `RESPONSE` tokens; None: one for each rank, and at least 4.
        lengths: instead, the tokens of prompts, and those of responses, shape (prompts, n).
        varlen: attention has a kernel for sequences of different lengths, as on an H100.
        counts: count operations, too.
        options: of the engine.
    """
    device.enable(size=HUGE)
    if varlen:
        segments.has_kernel = lambda dim, on, dtype: dtype == torch.bfloat16  # type: ignore[assignment]
    held = torch.accelerator.memory_allocated
    config = config_of(model, layers)
    batch = trajectories(*(lengths or (PROMPT, np.full((rows or max(4, count), 1), RESPONSE))))
    options = {"dtype": "bfloat16", "gradient_checkpointing": None, **options}
    plan = OptimizerPlan(
        lr=1e-6,
        optimizer=AdamW(),
        grad_clip=1.0,
        micro_batch_tokens=micro_batch_tokens,
        mini_batches=(tuple(range(len(batch))),),
        temperature=1.0,
    )
    with device.hollow(rank, count):
        with without_memory():
            built = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        ledger = Ledger(sum(parameter.numel() for parameter in built.parameters()))
        trained: Any = (TorchEngine if engine == "torch" else FSDPEngine)(built, "policy", **options)
        if engine == "fsdp":
            trained._give_memory()
        trained.update(batch, objective, replace(plan, mini_batches=(tuple(range(min(count, len(batch)))),)))
        ledger.trained = held()

        @contextlib.contextmanager
        def noted(name: str) -> Iterator[None]:
            torch.accelerator.reset_peak_memory_stats()
            with contextlib.ExitStack() as stack:
                reports = stack.enter_context(device.reported())
                operations = stack.enter_context(counted()) if counts else Counter()
                yield
            ledger.phases[name] = Phase(torch.accelerator.max_memory_allocated(), reports, operations)

        with noted("log-probs"):
            trained.infer(batch, ("log_probs", "entropy"), temperature=1.0, micro_batch_tokens=micro_batch_tokens)
        take_step = trained._step

        def stepped(plan: OptimizerPlan) -> float:
            ledger.before_step = held()
            norm: float = take_step(plan)
            return norm

        trained._step = stepped
        with noted("update"):
            trained.update(batch, objective, plan)
        with noted("weights"):
            for _ in trained.weights(torch.bfloat16):
                pass
        with noted("digest"):
            trained.digest()
        if 12 * ledger.parameters / count < 2**33:  # the host's memory is real
            with noted("snapshot"):
                ledger.written = sum(map(len, trained.state().values()))
        with noted("away"):
            trained.place(model=False, optimizer=False)
        ledger.left, ledger.pinned = held(), device.pinned()
        with noted("back"):
            trained.place(model=True, optimizer=True)
        assert held() == pytest.approx(ledger.trained, rel=1e-3)
    return ledger


GIB = 2**30
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("0.5 B", 1, {"engine": "torch"}),
    ("7 B", 8, {}),
    ("7 B", 8, {"shard_size": 4}),
    ("7 B", 8, {"tensor_parallel": 2}),
    ("32 B", 64, {"tensor_parallel": 8}),
    ("70 B", 64, {}),
    ("235 B", 512, {}),
]


@pytest.mark.parametrize(("model", "count", "options"), LAYOUTS, ids=str)
def test_a_rank_holds_what_the_formulas_say(model: str, count: int, options: dict[str, Any]) -> None:
    """`infra` decides by these formulas whether a run fits its GPUs. Layers are alike, so a few say what all would."""
    ledger = ledger_of(model, count - 1, count, layers=4, **options)
    expected = estimate(model, count, 4, ledger.parameters, **options)
    # small parameters and biases do not divide evenly
    assert ledger.trained == pytest.approx(expected["held"], rel=0.05)
    # the micro-batch's last tensors are still there
    assert ledger.before_step - ledger.trained == pytest.approx(expected["gradients"], rel=0.1, abs=0.1 * GIB)


PEAKS: list[tuple[str, int, dict[str, Any]]] = [
    *LAYOUTS,
    *(("0.5 B", 1, {"engine": "torch", "gradient_checkpointing": kind}) for kind in (False, True)),
    *(("7 B", 1, {"engine": "torch", "dtype": "float32", "gradient_checkpointing": kind}) for kind in (None, False)),
    *(("235 B", 1, {"engine": "torch", "gradient_checkpointing": kind}) for kind in (None, False, True)),
    ("7 B", 8, {"rows": 128, "micro_batch_tokens": 16384}),
    ("7 B", 8, {"rows": 128, "micro_batch_tokens": 16384, "gradient_checkpointing": True}),
    ("7 B", 8, {"dtype": "float32", "gradient_checkpointing": False}),
    ("7 B", 8, {"reshard_after_forward": False}),
    ("7 B", 8, {"reshard_after_forward": False, "rows": 64}),
    ("70 B", 64, {"tensor_parallel": 8}),
]


@pytest.mark.parametrize(("model", "count", "options"), PEAKS, ids=str)
def test_phases_take_what_the_formulas_say(model: str, count: int, options: dict[str, Any]) -> None:
    """The largest sum of state, gradients, gathered weights and activations."""
    ledger = ledger_of(model, count - 1, count, layers=4, **options)
    expected = estimate(model, count, 4, ledger.parameters, **options)
    # what is split inside, as experts and tensors of teams are, takes up to twice as much on its way to a snapshot
    is_whole = "snapshot" in ledger.phases and model != "235 B" and "tensor_parallel" not in options
    whole = ("snapshot",) if is_whole else ()
    for phase in ("log-probs", "update", "weights", *whole):
        assert ledger.phases[phase].peak == pytest.approx(expected[phase], rel=0.1), phase


def estimate(model: str, count: int, layers: int | None, parameters: int, **options: Any) -> dict[str, float]:
    """Returns the bytes that a rank holds between updates, of gradients, and at most in each phase."""
    rows, budget = options.pop("rows", max(4, count)), options.pop("micro_batch_tokens", BUDGET)
    width = 4 if options.pop("dtype", "bfloat16") == "float32" else 2
    checkpointing = options.pop("gradient_checkpointing", None)
    config: Any = TorchConfig() if options.pop("engine", "fsdp") == "torch" else FSDPConfig(**options)
    sizes = DecoderSizes.of(config_of(model, layers), is_policy=True)
    assert sizes is not None
    shards = options.get("shard_size", count) // config.matrix_split
    kind = "selective" if checkpointing is None else checkpointing
    engine = Computation(sizes, config, width, kind, shards=shards)
    held = sum(config.held(parameters, parameters, 8 * parameters, width, count))
    gradients = 4 * parameters * config.gradient_share(count)
    longest = PROMPT + RESPONSE - 1
    rows_each, together = -(-rows * config.matrix_split // count), budget // longest
    update = engine.update(min(rows_each, together) * longest, gradients, several=rows_each > together)
    log_probs = engine.log_probs(min(rows_each, together) * longest)
    return {
        "held": held,
        "gradients": gradients,
        "log-probs": held + sum(log_probs.values()),
        "update": held + sum(update.values()),
        "weights": held + engine.whole_tensor(),
        "snapshot": held + (engine.whole_tensor() if config.gathers_layers else 0),
    }


@pytest.mark.parametrize(("model", "count", "options"), LAYOUTS, ids=str)
def test_what_leaves_the_device_is_pinned_once(model: str, count: int, options: dict[str, Any]) -> None:
    ledger = ledger_of(model, 0, count, layers=4, **options)
    assert ledger.left < 0.01 * ledger.trained
    assert ledger.trained <= ledger.pinned + ledger.left
    assert ledger.pinned <= 1.02 * ledger.trained + 2**25, "PyTorch pins powers of two"


@pytest.mark.parametrize(("model", "count", "options"), [layout for layout in LAYOUTS if layout[1] > 1], ids=str)
def test_all_ranks_make_the_same_calls_in_the_same_order(model: str, count: int, options: dict[str, Any]) -> None:
    """Two ranks that did not would wait for each other for ever."""
    first, *others = (ledger_of(model, rank, count, layers=2, **options) for rank in (0, count // 2, count - 1))
    for other in others:
        for name, phase in first.phases.items():
            calls = [operation for operation, _ in phase.collectives]
            assert [operation for operation, _ in other.phases[name].collectives] == calls, name
    assert first.phases["update"].collectives
    assert not first.phases["away"].collectives


@pytest.mark.parametrize("count", [64, 128, 512])
def test_experts_are_not_padded(count: int) -> None:
    """128 experts on 512 ranks were gathered as 512."""
    ledger = ledger_of("235 B", count - 1, count, layers=2)
    gathered = count * sum(
        size for call, size in ledger.phases["log-probs"].collectives if call.startswith("all_gather")
    )
    passes = -(-max(4, count) * (PROMPT + RESPONSE) // BUDGET // count)  # micro-batches of a rank
    assert gathered <= 1.02 * 2 * ledger.parameters * passes


def gathered(together: bool) -> int:
    """How often one of 512 ranks gathers weights for the log-probs of 16 shards with 128 trajectories each."""
    device.enable(size=HUGE)
    with device.hollow(511, 512):
        with without_memory():
            built = AutoModelForCausalLM.from_config(config_of("7 B", 1), attn_implementation="sdpa")
        engine = FSDPEngine(built, "policy", dtype="bfloat16", trainable=False)
        engine._give_memory()
        shards = [trajectories(PROMPT, np.full((128, 1), 64)) for _ in range(16)]
        calls = [shards] if together else [[shard] for shard in shards]
        with device.reported() as reports:
            for call in calls:
                asked = Together(lambda: engine, call)
                for shard in call:
                    asked.infer(shard, ("log_probs",), temperature=1.0, micro_batch_tokens=BUDGET)
    return sum(operation == "all_gather of 512" for _, operation, size in reports if size > 2**10)


def test_shards_are_dealt_together() -> None:
    """Each shard alone has a trajectory for every fourth rank: the others would compute one for nothing.

    The only layer is gathered in each round, all else once.
    """
    with multiprocessing.get_context("fork").Pool(2) as pool:
        together, alone = pool.map(gathered, [True, False], chunksize=1)
    assert (together, alone) == (4 + 1, 16 + 1)


def test_a_head_is_computed_in_pieces() -> None:
    """The logits of a micro-batch would take 4096 x 152064 x 4 bytes, 2.3 GiB, several times."""
    ledger = ledger_of("32 B", 0, 64, layers=1)
    layer = 2 * 5120 * 27648 * 3 + 4 * 5120 * 5120
    assert ledger.phases["log-probs"].peak < ledger.trained + 3 * 2 * layer + 2 * 2 * 152064 * 5120 + 2 * GIB


@pytest.mark.parametrize(
    "options",
    [{}, {"varlen": True}, {"sequence_parallel": 8}, {"sequence_parallel": 8, "packing": True, "varlen": True}],
    ids=str,
)
def test_memory_does_not_grow_with_the_square_of_the_length(options: dict[str, Any]) -> None:
    """A mask of all positions would take 16 GiB and then 64."""
    short, long = (
        ledger_of(
            "7 B",
            7,
            8,
            layers=1,
            lengths=(PROMPT, np.full((1, 1), length - PROMPT)),
            micro_batch_tokens=length,
            **options,
        )
        for length in (2**17, 2**18)
    )
    for phase in ("log-probs", "update"):
        assert short.phases[phase].peak < long.phases[phase].peak <= 2 * short.phases[phase].peak


def test_varlen_attention_takes_no_more_memory() -> None:
    """In bfloat16 an H100 computes attention by PyTorch's kernel for sequences of different lengths."""
    padded = ledger_of("7 B", 0, 8, layers=4)
    packed = ledger_of("7 B", 0, 8, layers=4, varlen=True)
    assert packed.phases["update"].peak <= 1.1 * padded.phases["update"].peak
    assert packed.trained == padded.trained
