"""Adapters on every train engine: the base never moves, and checkpoints are small and PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load as load_safetensors
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import LoRAConfig, ModelConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.hub_layout import copy_weights
from ratchet.rlhf.models.loading import load_actor, load_critic, save
from ratchet.rlhf.train.model_engine import ModelEngine, WithoutAdapters
from ratchet.rlhf.weights.stored_state import StoredState
from tests.contract.test_layouts import DEALT, Files, ranks
from tests.contract.test_train_engines import (
    ENGINES,
    LOAD,
    OF_TRANSFORMERS,
    PLAN,
    Kind,
    assert_close,
    folder_of,
    infer,
    kind_of,
)
from tests.ranks import Ranks
from tests.tiers import sampled

pytestmark = sampled(16)

__all__ = ["ranks"]
LORA = LoRAConfig(r=4, alpha=8)
AUTO = {"policy": AutoModelForCausalLM, "value": AutoModelForTokenClassification}


@pytest.fixture(params=[(engine, head) for engine in OF_TRANSFORMERS for head in ("policy", "value")], ids="-".join)
def kind(request: pytest.FixtureRequest, policy_folder: Path, critic_folder: Path) -> Kind:
    engine, head = request.param
    return kind_of(engine, head, policy_folder, critic_folder)


def adapted(kind: Kind, engine: str | None = None, **options: Any) -> Any:
    return ENGINES[engine or kind.engine](kind.folder, kind.head, lora=LORA, **options)


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[5, 9, 30, 31, 7]])).logits  # type: ignore[no-any-return]


def test_adapters_learn_and_the_base_stays(kind: Kind, batch: TrajectoryBatch, tmp_path: Path) -> None:
    engine, base = adapted(kind), kind.build()
    expected = infer(base, kind, batch)
    assert_close(infer(engine, kind, batch), expected)
    engine.update(batch, kind.objective, PLAN)
    learned = infer(engine, kind, batch)
    name = kind.outputs[0]
    assert learned[name] != infer(base, kind, batch)[name]
    if kind.head == "policy":
        assert_close(infer(WithoutAdapters(engine), kind, batch), expected)  # type: ignore[arg-type]
        assert infer(engine, kind, batch) == learned, "and they are on again"

    # a checkpoint holds nothing of the base, and PEFT reads it
    files = engine.state()
    weights = load_safetensors(files["adapter_model.safetensors"])
    assert all(".lora_A." in name or ".lora_B." in name or ".score." in name for name in weights)
    assert sum(map(len, files.values())) < sum(map(len, base.state().values()))
    base_model = AUTO[kind.head].from_pretrained(kind.folder, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base_model, folder_of(files, tmp_path))
    plain = LOAD[kind.head](ModelConfig(path=str(kind.folder), lora=LORA))
    copy_weights(StoredState.of(files).tensors(), plain)
    torch.testing.assert_close(logits_of(peft), logits_of(plain), rtol=0, atol=1e-6)

    # merged, it is a plain model folder: W + alpha/r B A rounds once more than W x + alpha/r B A x
    save(plain, tmp_path / "merged")
    merged = AUTO[kind.head].from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged), logits_of(plain), rtol=1e-5, atol=1e-5)
    assert (logits_of(merged) - logits_of(LOAD[kind.head](ModelConfig(path=str(kind.folder))))).abs().max() > 1e-3


@pytest.mark.parametrize("mixture", ["qwen3_moe", "mixtral"])
def test_adapters_beside_experts(
    mixture: str, mixtures: dict[str, Path], batch: TrajectoryBatch, tmp_path: Path
) -> None:
    """Attention learns; merged, the experts have the hub's names again."""
    kind = kind_of("torch", "policy", mixtures[mixture], mixtures[mixture])
    engine = adapted(kind)
    engine.update(batch, kind.objective, PLAN)
    files = engine.state()
    assert {name.split(".")[-3] for name in StoredState.of(files).weights} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    plain = load_actor(ModelConfig(path=str(kind.folder), lora=LORA))
    copy_weights(StoredState.of(files).tensors(), plain)
    save(plain, tmp_path)
    names = load_safetensors((tmp_path / "model.safetensors").read_bytes()).keys()
    assert sum(".experts." in name for name in names) == 2 * 4 * 3, "each matrix of each expert of each layer"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged), logits_of(plain), rtol=1e-5, atol=1e-5)
    named = LoRAConfig(target_modules=("q_proj", {"qwen3_moe": "up_proj", "mixtral": "w1"}[mixture]))
    with pytest.raises(UserError, match=r"target_modules names (w\d|\w+_proj), but experts cannot have adapters: name"):
        load_actor(ModelConfig(path=str(kind.folder), lora=named))


def test_adapters_round_trip_bit_by_bit(kind: Kind, batch: TrajectoryBatch) -> None:
    engine = adapted(kind)
    for _ in range(2):
        files, digest = engine.state(), engine.digest()
        other = adapted(kind)
        other.update(batch, kind.objective, DEALT)
        engine.update(batch, kind.objective, PLAN)
        other.load_state(StoredState.of(files))
        assert other.digest() == digest
        other.update(batch, kind.objective, PLAN)
        assert other.digest() == engine.digest()


def run_adapted(kind: Kind, batch: TrajectoryBatch, load: Files | None = None, **options: Any) -> dict[str, Any]:
    engine: ModelEngine = adapted(kind, **options)
    if load is not None:
        engine.load_state(StoredState.of(load))
    began, metrics = engine.digest(), engine.update(batch, kind.objective, DEALT)
    return {"began": began, "metrics": metrics, "digest": engine.digest(), "files": engine.state()}


@pytest.mark.slow
def test_adapters_by_two_processes(kind: Kind, batch: TrajectoryBatch, ranks: Ranks) -> None:
    """Each trains, each writes its share of the moments, and one process continues with plain PyTorch."""
    one = adapted(kind, "torch")
    told = ranks(run_adapted, kind, batch)
    assert told[0]["began"] == one.digest()
    metrics = one.update(batch, kind.objective, DEALT)
    assert told[0]["metrics"] == pytest.approx(metrics, rel=2e-3, abs=1e-4)
    files = {name: data for rank in told for name, data in rank["files"].items()}
    assert [sum(name.startswith("optimizer") for name in rank["files"]) for rank in told] == [1, 1]
    loaded = adapted(kind, "torch")
    loaded.load_state(StoredState.of(files))
    assert loaded.digest() == told[0]["digest"] == told[1]["digest"]
    assert ranks(run_adapted, kind, batch, files)[0]["began"] == loaded.digest()


def test_adapters_depend_on_the_runs_seed_alone(policy_folder: Path) -> None:
    model = ModelConfig(path=str(policy_folder), lora=LORA)
    names = {name for name, each in load_actor(model, 3).named_parameters() if each.requires_grad}
    assert names
    assert all("lora_" in name for name in names)
    torch.manual_seed(1)
    first, again, other = (dict(load_actor(model, seed).named_parameters()) for seed in (3, 3, 4))
    name = next(name for name in sorted(names) if "lora_A" in name)
    assert first[name].equal(again[name])
    assert not first[name].equal(other[name])


def test_only_the_layers_that_are_named_get_adapters(policy_folder: Path, critic_folder: Path) -> None:
    lora = LoRAConfig(target_modules=("q_proj", "v_proj"))
    critic = load_critic(ModelConfig(path=str(critic_folder), lora=lora))
    trained = {name.split(".lora_")[0].split(".")[-1] for name, each in critic.named_parameters() if each.requires_grad}
    assert trained == {"q_proj", "v_proj", "weight", "bias"}, "and the head learns as a whole"
    with pytest.raises(UserError, match=r"model\.lora\.target_modules: Target modules .*nothing.* not found"):
        load_actor(ModelConfig(path=str(policy_folder), lora=LoRAConfig(target_modules=("nothing",))))


def test_the_adapters_config_says_what_peft_needs(policy_folder: Path) -> None:
    engine = ENGINES["torch"](policy_folder, "policy", lora=LORA)
    told = json.loads(engine.state()["adapter_config.json"])
    assert (told["r"], told["lora_alpha"], told["peft_type"]) == (4, 8, "LORA")
    assert told["base_model_name_or_path"] == str(policy_folder)
