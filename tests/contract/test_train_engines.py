"""What every train engine promises. A new engine is one line in `ENGINES`.

The reference is naive on purpose: one row at a time, no padding, all logits, float64. The tiny model computes in
float32: an output is some hundred roundings of 6e-8 away from it, on values up to ten. 2e-6 is what one sees, and
`CLOSE` is five times that.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ratchet.rlhf.algorithms import PPOClip
from ratchet.rlhf.algorithms.distillation import Distillation, Divergence
from ratchet.rlhf.algorithms.masked import LossNormalizers
from ratchet.rlhf.algorithms.objectives import ActorObjective, CriticObjective, Objective, SupervisedObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.algorithms.policy_losses import ClipCov, KLCov, SelectingLoss
from ratchet.rlhf.batch import TrajectoryBatch, ragged
from ratchet.rlhf.config import LoRAConfig, ModelConfig
from ratchet.rlhf.distributed import host_buffers, ranks
from ratchet.rlhf.errors import NotFinite
from ratchet.rlhf.models import prefix_sharing, token_outputs
from ratchet.rlhf.models.loading import actor_skeleton, critic_skeleton, load_actor, load_critic
from ratchet.rlhf.models.segments import Segments
from ratchet.rlhf.models.skeleton import Skeleton
from ratchet.rlhf.train.deepspeed_engine import DeepSpeedEngine, ZeroStage
from ratchet.rlhf.train.engine import OptimizerPlan, TrainEngine
from ratchet.rlhf.train.fsdp_engine import FSDPEngine
from ratchet.rlhf.train.micro_batches import MicroBatch
from ratchet.rlhf.train.model_engine import ModelEngine, float32_model
from ratchet.rlhf.train.torch_engine import TorchEngine
from ratchet.rlhf.weights.stored_state import StoredState
from tests import megatron_on_cpu
from tests.tiers import sampled

pytestmark = sampled(12)

Head = Literal["policy", "value"]
LOAD = {"policy": load_actor, "value": load_critic}
CLOSE = 1e-5


def skeleton(folder: Path, head: Head, lora: LoRAConfig | None, options: dict[str, Any]) -> Skeleton:
    model = ModelConfig(path=str(folder), lora=lora, dtype=options.get("dtype", "float32"))
    return (
        critic_skeleton(model) if head == "value" else actor_skeleton(model, trainable=options.get("trainable", True))
    )


def torch_engine(folder: Path, head: Head, lora: LoRAConfig | None = None, **options: Any) -> TrainEngine:
    return TorchEngine(skeleton(folder, head, lora, options), head, **options)


def fsdp_engine(folder: Path, head: Head, lora: LoRAConfig | None = None, **options: Any) -> TrainEngine:
    return FSDPEngine(skeleton(folder, head, lora, options), head, **options)


def deepspeed_engine(
    folder: Path, head: Head, stage: ZeroStage, lora: LoRAConfig | None = None, **options: Any
) -> TrainEngine:
    return DeepSpeedEngine(skeleton(folder, head, lora, options), head, stage=stage, **options)


def megatron_engine(folder: Path, head: Head, lora: LoRAConfig | None = None, **options: Any) -> TrainEngine:
    if ranks.count() > 1:  # a process of tests.ranks; here the fixture does it, because other tests follow
        megatron_on_cpu.install()
    from ratchet.rlhf.train.megatron_engine import MegatronEngine
    from ratchet.rlhf.train.megatron_groups import Layout

    sizes = {name: options.pop(f"{name}_parallel", 1) for name in ("tensor", "pipeline", "context", "expert")}
    return MegatronEngine(skeleton(folder, head, lora, options), head, layout=Layout(**sizes), **options)


ENGINES: dict[str, Callable[..., TrainEngine]] = {
    "torch": torch_engine,
    "fsdp": fsdp_engine,
    "zero0": partial(deepspeed_engine, stage=0),
    "zero1": partial(deepspeed_engine, stage=1),
    "zero2": partial(deepspeed_engine, stage=2),
    "zero3": partial(deepspeed_engine, stage=3),
    "megatron": megatron_engine,
}


OF_TRANSFORMERS = [name for name in ENGINES if name != "megatron"]
"""Engines that compute with transformers' own layers, whatever the model."""


@pytest.fixture(autouse=True)
def _megatron_on_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    with megatron_on_cpu.installed() if "megatron" in request.node.name else nullcontext():
        yield


@dataclass(frozen=True)
class Kind:
    """One engine with one head, and what goes with that head."""

    engine: str
    head: Head
    folder: Path
    objective: Objective
    outputs: tuple[str, ...]
    learned_from: str
    """The column that a NaN may come in."""

    def build(self, folder: Path | None = None, **options: Any) -> TrainEngine:
        return ENGINES[self.engine](folder or self.folder, self.head, **options)


def kind_of(engine: str, head: Head, policy_folder: Path, critic_folder: Path) -> Kind:
    if head == "value":
        return Kind(engine, head, critic_folder, CriticObjective(0.5), ("values",), "returns")
    objective = ActorObjective(PPOClip(), kl_in_loss=0.1, kl_estimator="k3", entropy_coef=0.01, on_policy=False)
    outputs = ("log_probs", "entropy", "sum_pi_squared")
    return Kind(engine, head, policy_folder, objective, outputs, "advantages")


MIXTURES = [("torch", "qwen3_moe"), ("torch", "mixtral"), ("fsdp", "qwen3_moe"), ("megatron", "qwen3_moe")]
"""Engines and mixtures of experts; tests/contract/test_layouts.py has the others, by two processes."""


@pytest.fixture(params=[*((engine, head) for engine in ENGINES for head in LOAD), *MIXTURES], ids="-".join)
def kind(request: pytest.FixtureRequest, policy_folder: Path, critic_folder: Path, mixtures: dict[str, Path]) -> Kind:
    engine, head = request.param
    if head in mixtures:
        return kind_of(engine, "policy", mixtures[head], mixtures[head])
    return kind_of(engine, head, policy_folder, critic_folder)


ALL = tuple(range(8))
PLAN = OptimizerPlan(
    lr=1e-3,
    optimizer=AdamW(betas=(0.8, 0.95), weight_decay=0.1),
    grad_clip=0.25,
    micro_batch_tokens=45,
    mini_batches=((0, 2, 4, 6), (7, 5, 3, 1)),
    temperature=0.7,
)


Rows = dict[str, list[list[float]]]


def infer(engine: TrainEngine, kind: Kind, batch: TrajectoryBatch, budget: int = 45) -> Rows:
    found = engine.infer(batch, kind.outputs, temperature=0.7, micro_batch_tokens=budget)
    return {name: column.to_pylist() for name, column in found.items()}


def assert_close(found: Rows, expected: Rows, atol: float = CLOSE) -> None:
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        for row, values in zip(found[name], rows, strict=True):
            np.testing.assert_allclose(row, values, rtol=0, atol=atol, err_msg=name)


def doubled(kind: Kind) -> PreTrainedModel:
    """The model in float64, which the fast product of experts does not take."""
    model = LOAD[kind.head](ModelConfig(path=str(kind.folder))).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def naive(model: torch.nn.Module, head: Head, batch: TrajectoryBatch, temperature: float) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {"values": []} if head == "value" else {"log_probs": [], "entropy": []}
    if head != "value":
        found["sum_pi_squared"] = []
    for prompt, response in zip(batch.list("prompt_ids"), batch.list("response_ids"), strict=True):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        if head == "value":
            found["values"].append(logits[:, 0])
            continue
        log_probs = (logits / temperature).log_softmax(-1)
        found["log_probs"].append(log_probs[torch.arange(len(response)), response])
        found["entropy"].append(-(log_probs.exp() * log_probs).sum(-1))
        found["sum_pi_squared"].append(log_probs.exp().square().sum(-1))
    return found


def tensors(engine: TrainEngine) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and optimizer state, by names of parameters."""
    assert isinstance(engine, ModelEngine)
    files = engine.state()
    stored = load_safetensors(files["model.safetensors"])
    weights = {
        name: torch.cat([stored[tensor.name].flatten() for tensor in engine.layout[name]]).view(engine.shape(name))
        for name in engine.names()
    }
    return weights, load_safetensors(files["optimizer.safetensors"])


def folder_of(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_outputs_are_those_of_a_naive_pass(kind: Kind, batch: TrajectoryBatch) -> None:
    with torch.no_grad():
        expected = naive(doubled(kind), kind.head, batch, 0.7)
    engine = kind.build()
    before = engine.digest()
    assert_close(infer(engine, kind, batch), {name: [row.tolist() for row in rows] for name, rows in expected.items()})
    assert engine.digest() == before


def test_outputs_do_not_depend_on_micro_batches_order_or_company(kind: Kind, batch: TrajectoryBatch) -> None:
    engine = kind.build()
    expected = infer(engine, kind, batch)
    for budget in (1, 100_000):  # each row by itself; all in one
        assert_close(infer(engine, kind, batch, budget), expected)
    order = [5, 2, 7]
    some = {name: [rows[row] for row in order] for name, rows in expected.items()}
    assert_close(infer(engine, kind, batch.take(order)), some)


@pytest.mark.parametrize("grad_clip", [0.25, None])
def test_a_step_is_that_of_the_whole_mini_batch(kind: Kind, batch: TrajectoryBatch, grad_clip: float | None) -> None:
    """The gradient is autograd's of the naive loss; the step is AdamW's (arXiv 1711.05101), by hand."""
    engine = kind.build()
    metrics = engine.update(batch, kind.objective, replace(PLAN, mini_batches=(ALL,), grad_clip=grad_clip))

    model = doubled(kind)
    outputs = {
        name: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for name, rows in naive(model, kind.head, batch, PLAN.temperature).items()
    }
    columns = {name: batch.padded(name).double() for name in kind.objective.columns}
    loss, expected = kind.objective(outputs, columns, LossNormalizers.of(columns["loss_mask"]))
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert norm > 2, "or clipping is not tested, nor a default of 1 that stays"
    clipped = 1.0 if grad_clip is None else grad_clip / norm

    expected = {**expected, f"{'critic' if kind.head == 'value' else 'actor'}/grad_norm": norm}
    assert metrics == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-6)
    weights, optimizer = tensors(engine)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient, moment = parameter.grad * clipped, optimizer[f"exp_avg.{name}"].double() / (1 - 0.8)
        torch.testing.assert_close(moment, gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item())
        # From the engine's own moment: AdamW divides by the gradient's size, so where that is rounding, so is the step.
        step = PLAN.lr * moment / (moment.abs() + 1e-8)
        stepped = parameter * (1 - PLAN.lr * PLAN.optimizer.weight_decay) - step
        torch.testing.assert_close(weights[name].double(), stepped.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("change", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 100_000}, {"grad_clip": None}])
def test_updates_do_not_depend_on_micro_batches(kind: Kind, batch: TrajectoryBatch, change: dict[str, Any]) -> None:
    """Except for rounding (1e-6 of the gradient's norm), and there alone where AdamW magnifies it."""
    schedule = replace(PLAN, grad_clip=1e9)  # as good as none, which `grad_clip: null` is
    engine, other = kind.build(), kind.build()
    engine.update(batch, kind.objective, schedule)
    other.update(batch, kind.objective, replace(schedule, **change))
    assert_same_update(other, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "loss", [KLCov(kl_cov_ratio=0.2, ppo_kl_coef=50), ClipCov(clip_cov_ratio=0.2, clip_cov_lb=-100, clip_cov_ub=100)]
)
def test_a_loss_that_picks_tokens_sees_the_whole_mini_batch(
    engine: str, loss: SelectingLoss, policy_folder: Path, batch: TrajectoryBatch
) -> None:
    """Whatever the micro-batches, the same tokens are picked; and they make a difference."""
    lengths = batch.lengths("response_ids")
    noise = np.random.default_rng(0).random(lengths.sum(), dtype=np.float32)
    batch = batch.with_column("selection_noise", ragged(noise, lengths))
    objective = ActorObjective(loss, None, "k1", 0.0, on_policy=False)
    schedule = replace(PLAN, grad_clip=1e9)
    engines = [ENGINES[engine](policy_folder, "policy") for _ in range(3)]
    together = engines[0].update(batch, objective, replace(schedule, micro_batch_tokens=100_000))
    one_by_one = engines[1].update(batch, objective, replace(schedule, micro_batch_tokens=1))
    assert one_by_one == pytest.approx(together, rel=1e-3)
    assert_same_update(engines[1], engines[0])
    plain = engines[2].update(batch, ActorObjective(PPOClip(), None, "k1", 0.0, on_policy=False), schedule)
    assert plain["actor/pg_loss"] != pytest.approx(together["actor/pg_loss"], rel=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": "selective"},
        {"share_prompts": False},
        {"share_prompts": False, "packing": True},
    ],
)
def test_how_it_is_computed_changes_nothing(kind: Kind, batch: TrajectoryBatch, options: dict[str, Any]) -> None:
    engine, other = kind.build(), kind.build(**options)
    assert_close(infer(other, kind, batch), infer(engine, kind, batch))
    engine.update(batch, kind.objective, PLAN)
    other.update(batch, kind.objective, PLAN)
    assert_same_update(other, engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options"),
    [("torch", {}), ("fsdp", {"gradient_checkpointing": True, "share_prompts": False})],
    ids=["torch", "fsdp"],
)
def test_compiled_layers_change_nothing(
    engine: str, options: dict[str, bool], policy_folder: Path, batch: TrajectoryBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and differentiated as in a run, but not turned into machine code, which takes minutes."""
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    token_outputs.compiled_log_probs.cache_clear()
    assert_same_when_compiled(kind, batch, options)
    token_outputs.compiled_log_probs.cache_clear()


def assert_same_when_compiled(kind: Kind, batch: TrajectoryBatch, options: dict[str, bool]) -> None:
    """Fused sums round in another order: by the bounds of other layouts."""
    plain, compiled = kind.build(**options), kind.build(kernels="compile", **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert_close(infer(compiled, kind, batch), infer(plain, kind, batch))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "something was compiled"
    for one in (plain, compiled):
        one.update(batch, kind.objective, replace(PLAN, mini_batches=(ALL,)))
    assert_same_update(compiled, plain)


def sequences(prompts: list[int], responses: list[int]) -> TrajectoryBatch:
    """A batch with the given prompts, of ten tokens each, and lengths of responses."""
    return TrajectoryBatch.of(
        {
            "prompt_ids": [[3 + prompt] * 10 for prompt in prompts],
            "response_ids": [[5] * response for response in responses],
        }
    )


def cut(engine: TrainEngine, batch: TrajectoryBatch, budget: int) -> list[tuple[list[int], MicroBatch]]:
    assert isinstance(engine, TorchEngine)
    return [(rows.tolist(), micro) for rows, micro in engine._micro_batches(batch, budget)]


@pytest.mark.parametrize(
    ("prompts", "responses", "options", "tokens"),
    [
        ([0, 0, 0, 0], [5, 5, 5, 5], {}, 10 + 4 * 4),
        ([0, 1, 0, 1], [5, 5, 5, 5], {}, 2 * 10 + 4 * 4),
        ([0, 0, 0, 0], [5, 5, 5, 5], {"share_prompts": False}, None),
        ([0, 1, 2, 3], [5, 5, 5, 5], {}, None),
        ([0, 1, 2, 3], [5, 5, 5, 11], {}, 4 * 10 + 3 * 4 + 10),  # of 80, with padding
        ([0, 1, 2, 3], [5, 5, 5, 5], {"packing": True}, 4 * 10 + 4 * 4),
    ],
    ids=["one prompt", "two prompts", "off", "no prompt twice", "uneven", "packing"],
)
def test_prompts_are_shared_where_that_saves_work(
    prompts: list[int], responses: list[int], options: dict[str, bool], tokens: int | None, policy_folder: Path
) -> None:
    [(rows, micro)] = cut(torch_engine(policy_folder, "policy", **options), sequences(prompts, responses), 100)
    assert sorted(rows) == [0, 1, 2, 3]
    assert (micro.shared is not None) == (tokens is not None)
    assert micro.input_ids.numel() == (tokens or 4 * (10 + 4))


@pytest.mark.parametrize("engine", ["torch", "fsdp"])
@pytest.mark.parametrize("options", [{}, {"share_prompts": False}, {"packing": False}], ids=str)
def test_a_kernel_for_pieces_of_any_length_changes_nothing(
    engine: str, options: dict[str, bool], policy_folder: Path, batch: TrajectoryBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; here a loop over the pieces takes the kernel's place. Sequences are then packed by default."""
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    plain = kind.build()
    monkeypatch.setattr(prefix_sharing, "has_kernel", lambda model, device, dtype: True)
    varlen = kind.build(**options)
    for repeated, rows in ((False, [0, 1, 2, 7]), (True, [3, 5, 3, 5])):
        [(_, micro)] = cut(varlen, batch.take(rows), 100)
        is_packed = options.get("packing") is None
        is_shared = repeated and options.get("share_prompts") is None
        assert (micro.input_ids.shape[0] == 1) == isinstance(micro.shared, Segments) == (is_packed or is_shared)
        if is_packed and not is_shared:
            assert micro.input_ids.numel() == sum(len(batch.list("prompt_ids")[row]) for row in rows) + sum(
                len(batch.list("response_ids")[row]) - 1 for row in rows
            )
    assert_close(infer(varlen, kind, batch), infer(plain, kind, batch))
    plain.update(batch, kind.objective, PLAN)
    varlen.update(batch, kind.objective, PLAN)
    assert_same_update(varlen, plain)


def test_micro_batches_of_shared_prompts_are_full(policy_folder: Path) -> None:
    """A prompt counts once towards the budget, and each response's copy of its keys an eighth; what exceeds the budget
    is divided."""
    same = sequences([0] * 8, [5] * 8)
    sizes = [micro.input_ids.numel() for _, micro in cut(torch_engine(policy_folder, "policy"), same, 30)]
    assert sizes == [26, 26]
    different = sequences([0, 0, 1, 1, 2, 2], [9, 9, 2, 2, 2, 2])  # 26, 12 and 12 tokens
    sizes = [micro.input_ids.numel() for _, micro in cut(torch_engine(policy_folder, "policy"), different, 56)]
    assert sizes == [50]


def test_the_budget_bounds_the_keys_of_short_responses_to_a_long_prompt(policy_folder: Path) -> None:
    batch = TrajectoryBatch.of({"prompt_ids": [[3] * 800] * 64, "response_ids": [[5] * 3] * 64})
    micro_batches = [micro for _, micro in cut(torch_engine(policy_folder, "policy"), batch, 1600)]
    assert len(micro_batches) > 1
    for micro in micro_batches:
        assert micro.shared is not None
        assert sum(block.keys.numel() for block in micro.shared.blocks) < 8 * 1600


@pytest.mark.parametrize("sharing", [1, 2])
def test_the_responses_to_one_prompt_are_divided_among_the_ranks(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, sharing: int
) -> None:
    """Though all of them are within the budget of one rank; and the prompt is computed once by each."""
    engine = torch_engine(policy_folder, "policy")
    monkeypatch.setattr(ranks, "count", lambda: 2 * sharing)
    found: list[list[int]] = []
    for rank in range(2 * sharing):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(engine, "share", ranks.Share.of(sharing))
        [(rows, micro)] = cut(engine, sequences([0] * 8, [41] * 8), 1000)
        assert micro.shared is not None
        assert micro.input_ids.numel() == 10 + 4 * 40
        found.append(rows)
    assert sorted(row for rows in found for row in rows) == sorted(list(range(8)) * sharing)


@pytest.mark.parametrize("engine", ENGINES)
def test_logits_are_made_in_pieces(
    engine: str, policy_folder: Path, batch: TrajectoryBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never those of more than three tokens at once, forwards or backwards."""
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    whole, pieces = kind.build(), kind.build()
    expected = infer(whole, kind, batch)
    whole.update(batch, kind.objective, PLAN)
    assert isinstance(pieces, ModelEngine)
    seen: list[int] = []
    pieces.output_layer.register_forward_hook(lambda module, inputs, logits: seen.append(len(inputs[0])))
    monkeypatch.setattr(token_outputs, "LOGITS_BYTES", 3 * 4 * pieces.model.config.vocab_size)  # type: ignore[attr-defined]
    assert_close(infer(pieces, kind, batch), expected)
    pieces.update(batch, kind.objective, PLAN)
    assert_same_update(pieces, whole)
    assert max(seen) == 3


def assert_same_update(engine: TrainEngine, other: TrainEngine) -> None:
    (weights, optimizer), (expected_weights, expected_optimizer) = tensors(engine), tensors(other)
    assert optimizer.keys() == expected_optimizer.keys()
    for name, expected in expected_weights.items():
        moment = expected_optimizer[f"exp_avg.{name}"]
        size = moment.abs().max().item()
        torch.testing.assert_close(optimizer[f"exp_avg.{name}"], moment, rtol=1e-3, atol=1e-4 * size)
        sure = moment.abs() > 1e-2 * size  # elsewhere a step of full length may come from little more than rounding
        assert sure.float().mean() > 0.1
        torch.testing.assert_close(weights[name][sure], expected[sure], rtol=0, atol=0.02 * PLAN.lr)
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=4.1 * PLAN.lr)  # two steps, opposite


def test_the_same_update_gives_the_same_bits(kind: Kind, batch: TrajectoryBatch) -> None:
    engine, other = kind.build(), kind.build()
    assert engine.digest() == other.digest()
    first, metrics = engine.digest(), engine.update(batch, kind.objective, PLAN)
    assert other.update(batch, kind.objective, PLAN) == metrics
    assert engine.digest() == other.digest() != first


def test_metrics_are_means_over_the_steps_and_the_digest_covers_the_optimizer(
    kind: Kind, batch: TrajectoryBatch
) -> None:
    """At learning rate 0 every step starts from the same weights."""
    engine, still = kind.build(), replace(PLAN, lr=0.0)
    before, digest = engine.state()["model.safetensors"], engine.digest()
    both = engine.update(batch, kind.objective, still)
    each = [engine.update(batch, kind.objective, replace(still, mini_batches=(one,))) for one in PLAN.mini_batches]
    assert both == pytest.approx({name: (each[0][name] + each[1][name]) / 2 for name in both}, rel=1e-6)
    assert engine.state()["model.safetensors"] == before
    assert engine.digest() != digest


def test_more_keys_of_deepspeeds_config_are_passed_on(policy_folder: Path) -> None:
    args = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    built = ENGINES["zero2"](policy_folder, "policy", args=args)
    assert isinstance(built, DeepSpeedEngine)
    assert (built.engine.zero_reduce_bucket_size(), built.engine.wall_clock_breakdown()) == (1000, True)
    assert built.engine.zero_optimization_stage() == 2


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "zero3"])  # which the config refuses
@pytest.mark.parametrize("head", LOAD)
def test_making_room_changes_nothing(
    engine: str, head: Head, policy_folder: Path, critic_folder: Path, batch: TrajectoryBatch
) -> None:
    """The state can be read while it is away. What another process can have of a GPU is measured in tests/gpu."""
    kind = kind_of(engine, head, policy_folder, critic_folder)
    moved, other = with_own_memory(kind.build()), with_own_memory(kind.build())  # aligned, and summed, in the same way
    for _ in range(2):
        for model in (False, True):
            moved.place(model=model, optimizer=False)
            assert moved.digest() == other.digest()
            assert moved.state() == other.state()
            for name, tensor in moved.weights():
                assert torch.equal(tensor.cpu(), dict(other.weights())[name].cpu())
        assert infer(moved, kind, batch) == infer(other, kind, batch)
        moved.place(model=True, optimizer=True)
        moved.update(batch, kind.objective, PLAN)
        other.update(batch, kind.objective, PLAN)
        assert moved.digest() == other.digest()
    assert moved.state() == other.state()


def with_own_memory(engine: Any) -> Any:
    """Let an engine's weights leave: on the CPU their memory may be that of their file."""
    for parameter in engine.model.parameters():
        if not isinstance(parameter, DTensor) and not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    return engine


def resident() -> int:
    """Bytes of the tensors that exist."""
    gc.collect()
    plain = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in plain if not tensor.is_meta]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "zero3"])
def test_what_makes_room_leaves_nothing_behind(
    engine: str, policy_folder: Path, batch: TrajectoryBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither weights nor moments nor gradients. Some ids, positions and norms stay: less than 1 % of the 0.3 MB."""
    monkeypatch.setattr(host_buffers, "SMALL_SLAB", 2**8)  # so that slabs are as large as what is in them
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    kind.build().update(batch, kind.objective, PLAN)  # a library's own tensors stay
    before = resident()
    built = with_own_memory(kind.build())
    built.update(batch, kind.objective, PLAN)
    infer(built, kind, batch)
    taken = resident() - before
    built.place(model=False, optimizer=False)
    away = built.weights_buffers.size + built.optimizer_buffers.size
    assert resident() - before - away < 0.01 * taken
    assert away > 0.9 * taken  # all but what fsdp keeps gathered after a forward pass, which is freed


def test_state_round_trips_bit_by_bit(kind: Kind, batch: TrajectoryBatch) -> None:
    """Loaded into a fresh engine or over another history, it goes on as if nothing had happened."""
    engine = kind.build()
    for steps in range(2):  # the state of an engine that has never stepped is one, too
        files, digest = engine.state(), engine.digest()
        fresh, other = kind.build(), kind.build()
        other.update(batch, kind.objective, replace(PLAN, lr=0.1))
        engine.update(batch, kind.objective, PLAN)
        for loaded in (fresh, other):
            loaded.load_state(StoredState.of(files))
            assert loaded.digest() == digest, steps
            loaded.update(batch, kind.objective, PLAN)
            assert loaded.digest() == engine.digest()


def test_state_is_safetensors_and_json_and_a_model_folder(kind: Kind, batch: TrajectoryBatch, tmp_path: Path) -> None:
    engine = kind.build(dtype="bfloat16")
    engine.update(batch, kind.objective, PLAN)
    files = engine.state()
    for name, content in files.items():
        assert name.endswith((".safetensors", ".json")), name
        if name.endswith(".json"):
            assert isinstance(json.loads(content), dict)
        else:
            found = load_safetensors(content)
            assert found
            assert {tensor.dtype for tensor in found.values()} == {torch.float32}, "master weights stay float32"
    again = kind.build(folder_of(files, tmp_path), dtype="bfloat16")
    assert infer(again, kind, batch) == infer(engine, kind, batch)


def test_nan_is_refused_and_the_engine_can_be_loaded_anew(kind: Kind, batch: TrajectoryBatch) -> None:
    values = batch.list(kind.learned_from)
    values[3][0] = float("nan")
    spoiled = TrajectoryBatch.of(
        {name: values if name == kind.learned_from else batch.array(name) for name in batch.columns}
    )
    engine, healthy = kind.build(), kind.build()
    before = engine.state()
    with pytest.raises(NotFinite, match=r"norm is (nan|inf)"):
        engine.update(spoiled, kind.objective, PLAN)
    engine.load_state(StoredState.of(before))
    assert engine.digest() == healthy.digest()
    assert engine.update(batch, kind.objective, PLAN) == healthy.update(batch, kind.objective, PLAN)
    assert engine.digest() == healthy.digest()


def test_an_aborted_update_leaves_no_gradients_behind(kind: Kind, batch: TrajectoryBatch) -> None:
    """One that ends between two micro-batches of a mini-batch, as an interrupt or a full device ends it."""
    engine, healthy = kind.build(), kind.build()
    for steps in range(2):  # the state of an engine that has never stepped is one, too
        before = engine.state()
        with pytest.raises(KeyboardInterrupt):
            engine.update(batch, Aborts(kind.objective), replace(PLAN, mini_batches=(ALL,), micro_batch_tokens=15))
        engine.load_state(StoredState.of(before))
        assert engine.digest() == healthy.digest(), steps
        assert engine.update(batch, kind.objective, PLAN) == healthy.update(batch, kind.objective, PLAN)
        assert engine.digest() == healthy.digest()


class Aborts:
    """An objective that does not survive its third micro-batch."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.calls = objective, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objective, name)

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return self.objective(*inputs)


def test_without_a_step_nothing_changes(kind: Kind, batch: TrajectoryBatch) -> None:
    engine = kind.build()
    before = engine.digest()
    assert engine.update(batch, kind.objective, replace(PLAN, mini_batches=())) == {}
    assert engine.digest() == before


def test_masked_tokens_do_not_enter_an_update(kind: Kind, batch: TrajectoryBatch) -> None:
    values = batch.list(kind.learned_from)
    assert batch.list("loss_mask")[3][2] == 0
    values[3][2] = 1e6
    spoiled = TrajectoryBatch.of(
        {name: values if name == kind.learned_from else batch.array(name) for name in batch.columns}
    )
    engine, other = kind.build(), kind.build()
    engine.update(batch, kind.objective, PLAN)
    other.update(spoiled, kind.objective, PLAN)
    assert engine.digest() == other.digest()


def test_bfloat16_is_close_to_float32_and_not_the_same(kind: Kind, batch: TrajectoryBatch) -> None:
    """A bfloat16 has 8 bits: a rounding is 0.4 %, and logits of up to 10 go through a few."""
    engine, rounded = kind.build(), kind.build(dtype="bfloat16")
    expected, found = infer(engine, kind, batch), infer(rounded, kind, batch)
    assert found != expected
    assert_close(found, expected, atol=0.3)
    for one in (engine, rounded):
        one.update(batch, kind.objective, replace(PLAN, mini_batches=(ALL,)))
    moments, rounded_moments = (tensors(one)[1] for one in (engine, rounded))
    for name in (name for name in moments if name.startswith("exp_avg.")):
        assert torch.cosine_similarity(moments[name].flatten(), rounded_moments[name].flatten(), dim=0) > 0.97, name


@pytest.mark.parametrize("head", LOAD)
def test_bfloat16_is_used_throughout(
    head: Head, policy_folder: Path, critic_folder: Path, batch: TrajectoryBatch
) -> None:
    """What goes into each layer, and into attention, is bfloat16; what is exported is float32."""
    kind = kind_of("torch", head, policy_folder, critic_folder)
    engine: Any = kind.build(dtype="bfloat16")
    seen: set[torch.dtype] = set()
    for module in engine.model.modules():
        if isinstance(module, torch.nn.Linear | LlamaRMSNorm):
            module.register_forward_hook(lambda module, inputs, output: seen.update({inputs[0].dtype, output.dtype}))
    engine.update(batch, kind.objective, PLAN)
    assert seen == {torch.bfloat16}
    exported = dict(float32_model(engine).named_parameters())
    for name, weight in tensors(engine)[0].items():
        assert torch.equal(exported[name], weight)
        assert torch.equal(engine.model.get_parameter(name), weight.bfloat16())


def test_micro_batches_are_summed_in_float32(kind: Kind, batch: TrajectoryBatch) -> None:
    """Each of 64 equal micro-batches has the 64th part of the gradient of one, to the bit: only their sum rounds."""
    alone, together = kind.build(dtype="bfloat16"), kind.build(dtype="bfloat16")
    plan = replace(PLAN, grad_clip=None, micro_batch_tokens=1)
    alone.update(batch.take([3]), kind.objective, replace(plan, mini_batches=((0,),)))
    together.update(batch.take([3] * 64), kind.objective, replace(plan, mini_batches=(tuple(range(64)),)))
    once, summed = tensors(alone)[1], tensors(together)[1]
    for name in (name for name in once if name.startswith("exp_avg.")):
        # 64 sums in float32; in bfloat16 the error would be some percent
        error = (summed[name] - once[name]).norm()
        assert error <= 1e-5 * once[name].norm(), name


def test_it_learns(kind: Kind, batch: TrajectoryBatch) -> None:
    objective, name = (
        (SupervisedObjective(), "sft/loss") if kind.head == "policy" else (CriticObjective(None), "critic/vf_loss")
    )
    engine = kind.build()
    schedule = replace(PLAN, lr=1e-2, grad_clip=None, mini_batches=(ALL,), micro_batch_tokens=1000)
    losses = [engine.update(batch, objective, schedule)[name] for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_reference_holds_no_optimizer(kind: Kind, batch: TrajectoryBatch) -> None:
    reference = kind.build(trainable=False)
    assert infer(reference, kind, batch) == infer(kind.build(), kind, batch)
    assert tensors(reference)[1] == {}
    with pytest.raises(AssertionError):
        reference.update(batch, kind.objective, PLAN)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reference_has_the_type_of_the_computation(engine: str, policy_folder: Path, batch: TrajectoryBatch) -> None:
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    reference = kind.build(dtype="bfloat16", trainable=False)
    assert isinstance(reference, ModelEngine)
    assert {parameter.dtype for parameter in reference.model.parameters()} == {torch.bfloat16}
    for name, tensor in load_actor(ModelConfig(path=str(policy_folder))).named_parameters():
        assert torch.equal(reference.get("model", name).cpu(), tensor.bfloat16().float())
    # a bfloat16 has 8 bits, as above
    assert_close(infer(reference, kind, batch), infer(kind.build(), kind, batch), atol=0.3)


TOP = 7
LOSSES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jsd")


def taught(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch with the most likely tokens of a teacher that has another opinion of each token, and one token more
    than the model."""
    lengths = batch.lengths("response_ids")
    logits = 3 * torch.randn(lengths.sum(), 79, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    log_probs = logits.log_softmax(-1)
    log_probs[:, 78] = log_probs.amax(-1)
    top = log_probs.topk(TOP)
    tail = log_probs.scatter(-1, top.indices, -torch.inf).logsumexp(-1)
    for name, values in (
        ("teacher_topk_ids", ragged(top.indices.flatten().numpy(), TOP * lengths)),
        ("teacher_topk_log_probs", ragged(top.values.flatten().float().numpy(), TOP * lengths)),
        ("teacher_tail_log_probs", ragged(tail.float().numpy(), lengths)),
    ):
        batch = batch.with_column(name, values)
    return batch


def distilling(divergence: Divergence) -> ActorObjective:
    """The loss of the teacher beside that of the reward, with an entropy."""
    return ActorObjective(
        PPOClip(),
        kl_in_loss=None,
        kl_estimator="k3",
        entropy_coef=0.01,
        on_policy=False,
        distillation=Distillation(divergence=divergence, coef=2.0),
    )


def naive_top(model: torch.nn.Module, batch: TrajectoryBatch, ids: list[Tensor] | None) -> dict[str, list[Tensor]]:
    """Log-probs of tokens, or of the most likely ones, and of the rest, of each row."""
    found: dict[str, list[Tensor]] = {"topk_ids": [], "topk_log_probs": [], "tail_log_probs": []}
    for row, (prompt, response) in enumerate(zip(batch.list("prompt_ids"), batch.list("response_ids"), strict=True)):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
        log_probs = torch.cat([logits.log_softmax(-1), torch.full((len(logits), 1), token_outputs.NO_MASS)], -1)
        chosen = log_probs.topk(TOP).indices if ids is None else ids[row]
        found["topk_ids"].append(chosen)
        found["topk_log_probs"].append(log_probs.gather(-1, chosen))
        found["tail_log_probs"].append(log_probs.scatter(-1, chosen, -torch.inf).logsumexp(-1))
    return found


@pytest.mark.parametrize("engine", OF_TRANSFORMERS)
@pytest.mark.parametrize("logits", [2**29, 4 * 78 * 3])
def test_the_most_likely_tokens_are_those_of_a_naive_pass(
    engine: str, logits: int, policy_folder: Path, batch: TrajectoryBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_outputs, "LOGITS_BYTES", logits)  # all at once, or three tokens
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    names = ("log_probs", "topk_ids", "topk_log_probs", "tail_log_probs")
    with torch.no_grad():
        model = doubled(kind)
        expected = naive_top(model, batch, None) | {"log_probs": naive(model, "policy", batch, 0.7)["log_probs"]}
    built = kind.build()
    for budget in (45, 100_000):
        found = built.infer(batch, names, temperature=0.7, micro_batch_tokens=budget, top_k=TOP)
        rows = {name: [row.flatten().tolist() for row in expected[name]] for name in names}
        assert_close({name: found[name].to_pylist() for name in names}, rows)


@pytest.mark.parametrize("divergence", LOSSES)
@pytest.mark.parametrize("engine", OF_TRANSFORMERS)
def test_a_step_toward_a_teacher_is_that_of_autograd(
    engine: str, divergence: Divergence, policy_folder: Path, batch: TrajectoryBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logits in pieces, micro-batches and shared prompts, the gradient is that of a naive pass in float64."""
    monkeypatch.setattr(token_outputs, "LOGITS_BYTES", 4 * 78 * 3)
    kind = replace(kind_of(engine, "policy", policy_folder, policy_folder), objective=distilling(divergence))
    batch = taught(batch)
    built = kind.build()
    metrics = built.update(batch, kind.objective, replace(PLAN, mini_batches=(ALL,), grad_clip=None))

    model, horizon = doubled(kind), int(batch.lengths("response_ids").max())
    ids = [torch.tensor(row).view(-1, TOP) for row in batch.list("teacher_topk_ids")]
    outputs = naive(model, "policy", batch, 0.7) | naive_top(model, batch, ids)
    padded = {name: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for name, rows in outputs.items()}
    columns = {name: batch.padded(name).double() for name in kind.objective.columns}
    for name in ("teacher_topk_ids", "teacher_topk_log_probs"):
        columns[name] = columns[name].view(len(batch), horizon, TOP)
    loss, expected = kind.objective(padded, columns, LossNormalizers.of(columns["loss_mask"]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert expected["actor/distillation_loss"] > 0.5, "the teacher matters"
    values = {name: value.item() for name, value in expected.items()}
    assert {name: metrics[name] for name in values} == pytest.approx(values, rel=1e-4, abs=1e-6)
    _, optimizer = tensors(built)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        moment = optimizer[f"exp_avg.{name}"].double() / (1 - 0.8)
        bound = 1e-4 * parameter.grad.abs().max().item()
        torch.testing.assert_close(moment, parameter.grad, rtol=1e-4, atol=bound)
