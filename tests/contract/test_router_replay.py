"""What router replay promises: a rollout tells the experts of all tokens, and a trainer computes with given experts.

The reference replaces the answers of routers by hand, in float64. The tiny mixtures have 2 layers of 4 experts, of
which a token goes to 2; `CLOSE` is that of tests/contract/test_train_engines.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratchet.rlhf.algorithms.masked import LossNormalizers
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models import families
from ratchet.rlhf.models.families import REFUSED
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.models.routes import Routers, number_of_experts
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling
from ratchet.rlhf.rollout.hf_engine import HFRollout
from ratchet.rlhf.schema import ROUTES
from ratchet.rlhf.train.engine import OptimizerPlan, TrainEngine
from ratchet.rlhf.train.torch_engine import TorchEngine
from ratchet.rlhf.weights.stored_state import StoredState
from tests import tiny
from tests.contract.test_architectures import folder as decoder_folder
from tests.contract.test_layouts import DEALT, run, together
from tests.contract.test_train_engines import (
    ALL,
    ENGINES,
    OF_TRANSFORMERS,
    PLAN,
    Kind,
    _megatron_on_cpu,
    assert_close,
    assert_same_update,
    doubled,
    infer,
    kind_of,
    naive,
    tensors,
)
from tests.extras import needs
from tests.ranks import Ranks
from tests.streams import chunks_of
from tests.tiers import sampled

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
SLOTS = LAYERS * CHOSEN
UNKNOWN = [-1] * SLOTS
__all__ = ["_megatron_on_cpu"]  # a fixture


def reads(batch: TrajectoryBatch) -> list[int]:
    pairs = zip(batch.list("prompt_ids"), batch.list("response_ids"), strict=True)
    return [len(prompt) + len(response) - 1 for prompt, response in pairs]


def with_routes(batch: TrajectoryBatch, cells: list[list[int]]) -> TrajectoryBatch:
    return TrajectoryBatch.of(
        {**{name: batch.array(name) for name in batch.columns}, ROUTES: pa.array(cells, pa.large_list(pa.int16()))}
    )


@pytest.fixture(scope="module")
def routed(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Any experts. Of two rows that share a prompt, its tokens went to the same ones (3 and 5), or not (2 and 4). Of
    row 6 the last tokens' are unknown, and of row 7 all."""
    rng = np.random.default_rng(5)
    cells = [
        np.concatenate([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(count * LAYERS)]).tolist()
        for count in reads(batch)
    ]
    cells[5][: 12 * SLOTS] = cells[3][: 12 * SLOTS]
    cells[6][-3 * SLOTS :] = 3 * UNKNOWN
    cells[7] = []
    return with_routes(batch, cells)


def kind_with_routes(engine: str, folder: Path) -> Kind:
    return kind_of(engine, "policy", folder, folder)


@pytest.fixture(params=[*((engine, "qwen3_moe") for engine in ENGINES), ("torch", "mixtral")], ids="-".join)
def kind(request: pytest.FixtureRequest, mixtures: dict[str, Path]) -> Kind:
    engine, mixture = request.param
    return kind_with_routes(engine, mixtures[mixture])


@contextmanager
def answering(model: PreTrainedModel, routes: Tensor) -> Iterator[None]:
    """Replaces what the routers answer for the tokens of one sequence, (tokens, layers, k)."""
    normed = getattr(model.config, "norm_topk_prob", True)

    def answer(layer: int) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, scores, chosen = outputs
            given = torch.where(routes[:, layer] < 0, chosen, routes[:, layer])
            weights = logits.softmax(-1).gather(-1, given)
            return logits, (weights / weights.sum(-1, keepdim=True) if normed else weights).to(scores.dtype), given

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(answer(number)) for number, layer in enumerate(model.model.layers)]
    yield
    for hook in hooks:
        hook.remove()


def naive_with_routes(model: PreTrainedModel, batch: TrajectoryBatch) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for row, (cell, count) in enumerate(zip(batch.list(ROUTES), reads(batch), strict=True)):
        # a naive pass reads the last token, too, which nothing depends on
        routes = torch.tensor((cell or count * UNKNOWN) + UNKNOWN).view(count + 1, LAYERS, CHOSEN)
        with answering(model, routes):
            for name, [values] in naive(model, "policy", batch.take([row]), 0.7).items():
                found.setdefault(name, []).append(values)
    return found


# The rollout tells.


SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=9, seed=3)
PROMPTS = [(3, 7, 11, 2, 40, 5, 6), (3, 7, 11, 2, 40, 5, 6), (9,), (4, 4, 12), (3, 7, 11, 2, 40, 5, 6), (9,)]
EOS = tuple(range(1, 78, 8))


def told(engine: RolloutEngine, prompts: list[tuple[int, ...]] = PROMPTS) -> list[tuple[list[int], Chunk]]:
    """All tokens of each conversation, and its last chunk."""
    requests = [Request(f"t{number}", prompt) for number, prompt in enumerate(prompts)]
    answers = chunks_of(engine, requests, SAMPLING)
    return [
        ([*prompt, *(token for chunk in chunks for token in chunk.response_ids)], chunks[-1])
        for prompt, chunks in zip(prompts, answers, strict=True)
    ]


@torch.no_grad()
def plain_routes(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with Routers.of(model).recording() as recorded:
        model(input_ids=torch.tensor([ids[:-1]], device=model.device), use_cache=False)
    return torch.cat([choice for [choice] in recorded], dim=-1).cpu().numpy()


def assert_routes_of_a_plain_pass(engine: HFRollout, model: PreTrainedModel) -> None:
    answers = told(engine)
    engine.close()
    assert len({len(ids) for ids, _ in answers}) > 2, "responses end at different steps"
    for ids, last in answers:
        assert last.routes is not None
        assert last.routes.dtype == np.int16
        assert last.routes.tolist() == plain_routes(model, ids).tolist()


@pytest.mark.parametrize("mixture", ["qwen3_moe", "mixtral"])
def test_the_rollout_tells_the_experts_of_a_plain_pass(mixture: str, mixtures: dict[str, Path]) -> None:
    model = load_actor(ModelConfig(path=str(mixtures[mixture])))
    assert_routes_of_a_plain_pass(HFRollout(model, eos_token_ids=EOS, records_routes=True), model)


def has_experts(kind: str) -> bool:
    try:
        return number_of_experts(decoder_config(kind)) > 0
    except UserError:
        return False


def decoder_config(kind: str) -> Any:
    from tests.decoders import tiny_config

    return tiny_config(kind, None)


UNFIT = {"doge", "gemma4_text", "longcat_flash", "phimoe", "zaya"}
"""Architectures that choose experts in another way than by one call of `topk` among all."""
MIXTURES = [kind for kind in families.text_decoders() if kind not in REFUSED and has_experts(kind)]


@sampled(15)
@pytest.mark.parametrize("kind", MIXTURES)
def test_architectures_take_routes_or_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    model = load_actor(decoder_folder(tmp_path, kind))
    if kind in UNFIT:
        with pytest.raises(
            UserError, match=rf"{type(model).__name__} chooses its experts in a way .*router_replay: false"
        ):
            Routers.of(model)
        return
    assert_routes_of_a_plain_pass(HFRollout(model, eos_token_ids=EOS, records_routes=True), model)


def test_a_model_without_experts_is_refused(policy_folder: Path) -> None:
    model = load_actor(ModelConfig(path=str(policy_folder)))
    with pytest.raises(UserError, match=r"model.path is a llama, whose config names no number of experts"):
        HFRollout(model, eos_token_ids=EOS, records_routes=True)


# The trainer follows.


@sampled(8)
def test_outputs_are_those_of_a_naive_pass_with_these_experts(kind: Kind, routed: TrajectoryBatch) -> None:
    engine = kind.build(follows_routes=True)
    free = infer(engine, kind, routed.take(ALL).without(ROUTES))
    with torch.no_grad():
        expected = {
            name: [row.tolist() for row in rows] for name, rows in naive_with_routes(doubled(kind), routed).items()
        }
    for budget in (1, 45, 100_000):
        assert_close(infer(engine, kind, routed, budget), expected)
    largest = [
        max(abs(np.subtract(*pair)).max() for pair in zip(free[name], expected[name], strict=True)) for name in expected
    ]
    assert min(largest) > 1e-2, "other experts compute something else"
    assert infer(engine, kind, routed.without(ROUTES)) == free, "without routes the model chooses again"


@pytest.mark.parametrize(
    "options", [{"packing": True}, {"share_prompts": False}, {"packing": True, "share_prompts": False}]
)
def test_how_it_is_computed_changes_nothing(
    options: dict[str, bool], routed: TrajectoryBatch, mixtures: dict[str, Path]
) -> None:
    kind = kind_with_routes("torch", mixtures["qwen3_moe"])
    engine, other = kind.build(follows_routes=True), kind.build(follows_routes=True, **options)
    for budget in (45, 100_000):
        assert_close(infer(other, kind, routed, budget), infer(engine, kind, routed))


def test_the_model_s_own_experts_give_the_same_bits(mixtures: dict[str, Path], batch: TrajectoryBatch) -> None:
    folder = mixtures["qwen3_moe"]
    kind, model = kind_with_routes("torch", folder), load_actor(ModelConfig(path=str(folder)))
    pairs = zip(batch.list("prompt_ids"), batch.list("response_ids"), strict=True)
    own = with_routes(batch, [plain_routes(model, [*prompt, *ids]).ravel().tolist() for prompt, ids in pairs])
    engine = kind.build(follows_routes=True)
    assert infer(engine, kind, own) == infer(engine, kind, batch)


RECOMPUTING: list[dict[str, Any]] = [{}, {"gradient_checkpointing": True}, {"gradient_checkpointing": "selective"}]


@sampled(6)
@pytest.mark.parametrize("options", RECOMPUTING, ids=str)
def test_a_step_is_that_of_autograd_with_these_experts(
    kind: Kind, options: dict[str, Any], routed: TrajectoryBatch
) -> None:
    """Also that of the router, and if activations are computed again."""
    engine = kind.build(follows_routes=True, **options)
    metrics = engine.update(routed, kind.objective, replace(PLAN, mini_batches=(ALL,)))
    model = doubled(kind)
    outputs = {
        name: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for name, rows in naive_with_routes(model, routed).items()
    }
    columns = {name: routed.padded(name).double() for name in kind.objective.columns}
    loss, expected = kind.objective(outputs, columns, LossNormalizers.of(columns["loss_mask"]))
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    expected = {**expected, "actor/grad_norm": norm}
    assert metrics == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-6)
    _, optimizer = tensors(engine)
    gates = 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad * (PLAN.grad_clip or 1) / norm
        moment = optimizer[f"exp_avg.{name}"].double() / (1 - 0.8)
        torch.testing.assert_close(moment, gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item())
        gates += bool("gate.weight" in name and gradient.abs().max() > 1e-4)
    assert gates == LAYERS, "each router learns"


@sampled(8)
def test_an_update_has_the_same_bits_again(kind: Kind, routed: TrajectoryBatch) -> None:
    engines = [kind.build(follows_routes=True) for _ in range(2)]
    for engine in engines:
        engine.update(routed, kind.objective, PLAN)
    first, second = (engine.digest() for engine in engines)
    assert first == second
    other = kind.build(follows_routes=True)
    other.update(routed.without(ROUTES), kind.objective, PLAN)
    assert other.digest() != first


def test_a_rollout_that_shares_the_model_chooses_itself(mixtures: dict[str, Path], routed: TrajectoryBatch) -> None:
    model = load_actor(ModelConfig(path=str(mixtures["qwen3_moe"])))
    engine = TorchEngine(model, "policy", follows_routes=True)
    kind = kind_with_routes("torch", mixtures["qwen3_moe"])
    infer(engine, kind, routed)
    engine.update(routed, kind.objective, PLAN)
    assert_routes_of_a_plain_pass(HFRollout(engine.model, eos_token_ids=EOS, records_routes=True), engine.model)


def damaged(cells: list[list[int]], how: str) -> list[list[int]]:
    cells = [list(cell) for cell in cells]
    if how == "length":
        cells[3] = cells[3][:-1]
    elif how == "layers":
        cells = [cell[: len(cell) // SLOTS * 3] for cell in cells]
    else:
        cells[3][7] = EXPERTS
    return cells


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("length", "p00003-s00 have another length than its tokens"),
        ("layers", "p00000-s00 are not of 2 layers with experts"),
        ("experts", "p00003-s00 name other experts than the model's 4"),
    ],
)
def test_routes_that_do_not_fit_are_refused(
    how: str, problem: str, routed: TrajectoryBatch, mixtures: dict[str, Path]
) -> None:
    kind = kind_with_routes("torch", mixtures["qwen3_moe"])
    engine = kind.build(follows_routes=True)
    spoiled = with_routes(routed.without(ROUTES), damaged(routed.list(ROUTES), how))
    with pytest.raises(UserError, match=rf"routed_experts of it000000-{problem}.*: generate the iteration again"):
        infer(engine, kind, spoiled)
    with pytest.raises(UserError, match=problem):
        engine.update(spoiled, kind.objective, PLAN)


# Several processes.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    *((engine, {}) for engine in OF_TRANSFORMERS),
    ("torch", {"sequence_parallel": 2, "packing": True}),
    ("torch", {"sequence_parallel": 2}),
    ("fsdp", {"sequence_parallel": 2, "gradient_checkpointing": True}),
    ("zero3", {"gradient_checkpointing": True}),
    ("megatron", {}),
    ("megatron", {"tensor_parallel": 2}),
    ("megatron", {"pipeline_parallel": 2}),
    ("megatron", {"pipeline_parallel": 2, "gradient_checkpointing": True}),
    ("megatron", {"context_parallel": 2, "gradient_checkpointing": "selective"}),
    ("megatron", {"expert_parallel": 2}),
]


def run_routed(
    kind: Kind, batch: TrajectoryBatch, options: dict[str, Any], plan: OptimizerPlan = DEALT
) -> dict[str, Any]:
    return run(kind, batch, {"follows_routes": True, **options}, plan=plan)


@sampled(16)
@pytest.mark.parametrize(("engine", "options"), LAYOUTS, ids=str)
def test_two_processes_follow_routes_as_one_does(
    engine: str, options: dict[str, Any], routed: TrajectoryBatch, mixtures: dict[str, Path], ranks: Ranks
) -> None:
    kind = kind_with_routes(engine, mixtures["qwen3_moe"])
    one: TrainEngine = ENGINES["torch"](kind.folder, "policy", follows_routes=True)
    found = ranks(run_routed, kind, routed, options)
    assert found[0]["outputs"] == found[1]["outputs"] and found[0]["digest"] == found[1]["digest"]
    assert_close(found[0]["outputs"], infer(one, kind, routed))
    metrics = one.update(routed, kind.objective, DEALT)
    assert found[0]["metrics"] == pytest.approx(metrics, rel=2e-3, abs=1e-4)
    loaded: TrainEngine = ENGINES["torch"](kind.folder, "policy")
    loaded.load_state(StoredState.of(together(found)))
    assert_same_update(loaded, one)


@needs("vllm", "gpu")  # vLLM 0.32's runner that tells them needs Triton, which has no backend for the CPU
def test_vllm_tells_the_experts_of_a_plain_pass(tmp_path: Path) -> None:
    from ratchet.rlhf.rollout.vllm_engine import VLLMRollout

    folder = tiny.moe_folder(tmp_path, "qwen3_moe", head_dim=32)
    engine = VLLMRollout(
        folder,
        eos_token_ids=EOS,
        dtype="float32",
        max_model_len=64,
        on_gpu=True,
        gpu_memory_utilization=0.1,
        enforce_eager=True,
        records_routes=True,
    )
    model = load_actor(ModelConfig(path=str(folder)))
    for ids, last in told(engine):
        assert last.routes is not None
        own = plain_routes(model, ids).reshape(-1, LAYERS, CHOSEN)
        assert np.array_equal(np.sort(last.routes.reshape(own.shape)), np.sort(own))
    engine.close()
