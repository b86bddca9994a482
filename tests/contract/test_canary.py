"""Faults in transfers of weights: the check of the canary names each in the transfer in which it happens.

The trainer takes a step of Adam before each transfer, so that what is stale differs from what is new by the learning
rate in each weight. After each fault comes a good transfer, in which the check must find nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratchet.infra.store.records import CANARIES
from ratchet.rlhf.algorithms.objectives import SupervisedObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import LoRAConfig, ModelConfig
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.rollout.canary import DRAWN, TEXTS, TOKENS, Before, Canary, Finding, check, tolerance
from ratchet.rlhf.rollout.engine import RolloutEngine
from ratchet.rlhf.rollout.server_engine import ServerRollout
from ratchet.rlhf.rollout.vllm_engine import VLLMRollout
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests import cache_faults
from tests.contract.test_rollout_engines import hf_rollout
from tests.extras import needs
from tests.served import end_servers
from tests.tiny import model_folder, moe_folder
from tests.vllm_server import serving

Named = list[tuple[str, Tensor]]
Fault = Callable[[Named, Named], Named]
"""Changes a transfer, given the new weights and those of before."""
STEP = OptimizerPlan(
    lr=1e-3,
    optimizer=AdamW(betas=(0.9, 0.95), weight_decay=0.0),
    grad_clip=None,
    micro_batch_tokens=2000,
    mini_batches=(tuple(range(TEXTS)),),
    temperature=1.0,
)


def stale(part: str, share: float = 1.0) -> Fault:
    """The first rows of the tensors whose name contains `part` stay as they were."""

    def fault(new: Named, old: Named) -> Named:
        return [
            (name, mixed(tensor, before, share) if part in name else tensor)
            for (name, tensor), (_, before) in zip(new, old, strict=True)
        ]

    return fault


def mixed(new: Tensor, old: Tensor, share: float) -> Tensor:
    rows, result = int(len(new) * share), new.clone()
    result[:rows] = old[:rows]
    return result


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """The tensors whose name contains `part` arrive changed."""
    return lambda new, _: [(name, change(tensor).contiguous() if part in name else tensor) for name, tensor in new]


def swapped(part: str, other: str) -> Fault:
    """Two tensors arrive in each other's place."""

    def fault(new: Named, _: Named) -> Named:
        tensors = dict(new)
        places = {name: name.replace(part, other) for name in tensors if part in name}
        places |= {place: name for name, place in places.items()}
        return [(name, tensors[places.get(name, name)]) for name in tensors]

    return fault


def without(part: str) -> Fault:
    """Tensors never arrive."""
    return lambda new, _: [(name, tensor) for name, tensor in new if part not in name]


def half_turned(tensor: Tensor) -> Tensor:
    """Turns the rows of each head by half, as between the two layouts of rotary embeddings."""
    return tensor.reshape(-1, 2, 16, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


FAULTS: dict[str, Fault] = {
    "nothing arrives": stale(""),
    "a matrix is stale": stale("layers.0.mlp.down_proj"),
    "a norm is stale": stale("layers.1.input_layernorm"),
    "the embedding is stale": stale("embed_tokens"),
    "the head is left behind": stale("lm_head"),
    "the last layer is stale": stale("layers.1."),
    "half of the ranks are stale": stale("", 0.5),
    "half of a matrix is stale": stale("layers.0.mlp.gate_proj", 0.5),
    "a matrix never arrives": without("layers.1.self_attn.o_proj"),
    "a wrong scale": changed("layers.1.mlp.down_proj", lambda tensor: tensor * 1.01),
    "a scale of 8 bits is ignored": changed("self_attn.v_proj", lambda tensor: tensor * 448),
    "a matrix is transposed": changed("layers.0.self_attn.o_proj", lambda tensor: tensor.T),
    "two layers are swapped": swapped("layers.0.", "layers.1."),
    "gate and up are swapped": swapped("gate_proj", "up_proj"),
    "keys and values are swapped": swapped("k_proj", "v_proj"),
    "rotary halves": changed("q_proj", half_turned),
    "rounded on the way": changed("", lambda tensor: tensor.bfloat16().float()),
    "weights of another run": lambda new, _: [
        (name, tensor[torch.randperm(len(tensor), generator=torch.Generator().manual_seed(0))]) for name, tensor in new
    ],
}
OF_EXPERTS: dict[str, Fault] = {
    "experts are swapped": swapped(".experts.0.", ".experts.1."),
    "experts are transposed": changed(".experts.0.gate_proj", lambda tensor: tensor.T),
    "an expert is stale": stale(".experts.2."),
    "the router is stale": stale("mlp.gate.weight"),
}


class Checked:
    """A trainer, an engine that follows it, and the checks between them."""

    def __init__(self, trainer: TorchEngine, engine: RolloutEngine, dtype: str = "float32", lr: float = 1e-3) -> None:
        self.trainer, self.engine, self.dtype = trainer, engine, dtype
        self.plan = replace(STEP, lr=lr)
        numbers = np.random.default_rng(0)
        self.texts = tuple(tuple(numbers.integers(3, 78, TOKENS).tolist()) for _ in range(TEXTS))
        self.before: Before | None = None
        self.learned: list[float] = []
        for _ in range(CANARIES):
            self.sound()

    @property
    def weights(self) -> Named:
        return [(name, tensor.detach().clone()) for name, tensor in self.trainer.weights()]

    def step(self) -> None:
        answers = np.random.default_rng(len(self.learned)).integers(3, 78, (TEXTS, TOKENS)).tolist()
        columns = {"prompt_ids": [[3]] * TEXTS, "response_ids": answers, "loss_mask": [[1] * TOKENS] * TEXTS}
        self.trainer.update(TrajectoryBatch.of(columns), SupervisedObjective(), self.plan)

    def transfer(self, fault: Fault | None = None) -> Finding:
        """Takes a step and transfers the weights; returns the worst finding of the check."""
        old = self.weights
        self.step()
        new = self.weights
        self.engine.load_weights(new if fault is None else fault(new, old), self.trainer.adapter_config)
        return self.check()

    def check(self) -> Finding:
        split = {"prompt_ids": [text[:1] for text in self.texts], "response_ids": [text[1:] for text in self.texts]}
        outputs = self.trainer.infer(TrajectoryBatch.of(split), ["log_probs"], temperature=1.0, micro_batch_tokens=999)
        log_probs = tuple(map(tuple, outputs["log_probs"].to_pylist()))
        limit = tolerance(self.learned[:CANARIES] if len(self.learned) >= CANARIES else (), self.dtype, quantized=False)
        canary = Canary(self.texts, log_probs, self.before)
        scored = self.engine.score(self.texts, DRAWN)
        self.before = Before(
            log_probs, {name: tuple(text.log_probs for text in texts) for name, texts in scored.items()}
        )
        findings = [check(canary, name, texts, limit) for name, texts in scored.items()]
        return max(findings, key=lambda finding: (finding.problem is not None, finding.difference))

    def sound(self) -> None:
        """A transfer without a fault: nothing is found."""
        finding = self.transfer()
        assert finding.problem is None, finding
        self.learned.append(finding.difference)


def vllm(folder: Path, **options: Any) -> VLLMRollout:
    return VLLMRollout(
        folder, eos_token_ids=(1,), max_model_len=256, enforce_eager=True, gpu_memory_utilization=0.1, **options
    )


def trainer_of(folder: Path, **options: Any) -> TorchEngine:
    return TorchEngine(load_actor(ModelConfig(path=str(folder), **options)), "policy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("canary"), hidden=128, intermediate=128, key_value_heads=4)


@pytest.fixture(
    scope="module",
    params=["hf", pytest.param("vllm", marks=needs("vllm")), pytest.param("server", marks=needs("vllm"))],
)
def checked(request: pytest.FixtureRequest, folder: Path) -> Iterator[Checked]:
    engine: RolloutEngine
    if request.param == "server":
        served = folder.parent / "served"
        engine = ServerRollout([serving(folder)], eos_token_ids=(1,), weights_folder=served, model_folder=folder)
    else:
        engine = hf_rollout(folder) if request.param == "hf" else vllm(folder)
    yield Checked(trainer_of(folder), engine)
    engine.close()
    end_servers()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(checked: Checked, fault: str) -> None:
    finding = checked.transfer(FAULTS[fault])
    assert finding.problem is not None
    assert ("before the last update" in finding.problem) >= (fault == "nothing arrives")
    checked.sound()


@needs("vllm")
def test_what_is_cached_is_found(folder: Path) -> None:
    checked = Checked(trainer_of(folder), engine := vllm(folder, block_size=32))
    engine._running().call(cache_faults.keep_cache, True)
    finding = checked.transfer()
    assert finding.problem is not None and "has a prefix cache of other weights" in finding.problem
    engine._running().call(cache_faults.keep_cache, False)
    checked.sound()
    engine.close()


@needs("vllm")
def test_faults_of_experts_are_named(tmp_path: Path) -> None:
    size = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 128}
    folder = moe_folder(tmp_path / "moe", "qwen3_moe", scale=4, **size)
    checked = Checked(trainer_of(folder), engine := vllm(folder))
    for name, fault in OF_EXPERTS.items():
        finding = checked.transfer(fault)
        assert finding.problem is not None, name
        checked.sound()
    engine.close()


@needs("vllm")
def test_faults_of_adapters_are_named(folder: Path) -> None:
    lora = LoRAConfig(r=4, alpha=8)
    checked = Checked(trainer_of(folder, lora=lora), engine := vllm(folder, lora_rank=8))
    for name, fault in {
        "an old adapter": stale(""),
        "half of the ranks are stale": stale("", 0.5),
        "a wrong scale": changed("lora_B", lambda tensor: tensor * 2),
    }.items():
        finding = checked.transfer(fault)
        assert finding.problem is not None, name
        checked.sound()
    engine._adapter = None
    finding = checked.check()
    assert finding.problem is not None
    engine.close()
