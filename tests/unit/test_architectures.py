"""What architectures do that would silently make training wrong: dropout, and attention that a kernel leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.hf_configs import attention_of, check_architecture, check_unquantized
from ratchet.rlhf.models.loading import load_actor, load_critic, save
from ratchet.rlhf.models.model_folders import check_weights
from ratchet.rlhf.models.token_outputs import Head
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests.tiers import sampled

SMALL: dict[str, dict[str, Any]] = {
    "biogpt": {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "layerdrop": 0.5},
    "bloom": {"n_layer": 1, "n_head": 2},
    "falcon": {"num_hidden_layers": 1, "num_attention_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "gpt_neox": {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "llama": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32},
    "mixtral": {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "num_local_experts": 2,
        "router_jitter_noise": 0.5,
    },
    "opt": {"num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "phi": {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "starcoder2": {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
    },
    "xglm": {"num_layers": 1, "attention_heads": 2, "ffn_dim": 32, "d_model": 16},
}

BATCH = TrajectoryBatch.of({"prompt_ids": [[3, 7], [5]], "response_ids": [[11, 2, 40], [9, 1, 1, 30]]})


def folder(path: Path, kind: str, head: Head = "policy", **sizes: Any) -> ModelConfig:
    """A model with random weights, and much dropout wherever its config names one."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "pad_token_id": 0} | SMALL.get(kind, {}) | sizes
    config = AutoConfig.for_model(kind, **sizes)
    for name in [name for name in vars(config) if "dropout" in name or "pdrop" in name]:
        setattr(config, name, 0.5)
    auto = AutoModelForCausalLM if head == "policy" else AutoModelForTokenClassification
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config.num_labels = 1
        auto.from_config(config).save_pretrained(path)
    return ModelConfig(path=str(path), dtype="float32")


@pytest.mark.parametrize("kind", ["llama", "trocr", "t5"])
def test_an_architecture_that_cannot_be_what_is_asked_for_is_refused(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **({"vocab_size": 50} | SMALL.get(kind, {})))
    config.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    if kind == "t5":
        with pytest.raises(UserError, match=r"model.path .*AutoModelForCausalLM for t5, so it cannot be the policy"):
            check_architecture(model, "model", is_critic=False)
    else:
        check_architecture(model, "model", is_critic=False)
    if kind == "trocr":  # transformers has its decoder only with a head of words
        with pytest.raises(
            UserError, match=r"critic.model.path .* for trocr, so it cannot be the critic: name another"
        ):
            check_architecture(model, "critic.model", is_critic=True)
    else:
        check_architecture(model, "critic.model", is_critic=True)


TROCR = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}


def test_a_fit_of_what_transformers_has_no_class_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="transformers has no AutoModelForTokenClassification for trocr: start from"):
        load_critic(
            folder(tmp_path, "trocr", d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32)
        )


@pytest.mark.slow
def test_transformers_loads_such_a_critic_after_a_line(tmp_path: Path) -> None:
    """As its model card says."""
    projecting = folder(tmp_path / "policy", "opt", word_embed_proj_dim=8)  # of its last hidden states
    save(load_critic(projecting), tmp_path / "critic")
    script = """
import sys
from transformers import AutoConfig, AutoModelForTokenClassification
from ratchet.rlhf.models import scalar_heads
scalar_heads.register(AutoConfig.from_pretrained(sys.argv[1]))
model, read = AutoModelForTokenClassification.from_pretrained(sys.argv[1], output_loading_info=True)
print(type(model).__name__, *read["missing_keys"], *read["unexpected_keys"])
"""
    command = [sys.executable, "-c", script, str(tmp_path / "critic")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["OPTTokenClassifier"]


def inferred(engine: TorchEngine) -> np.ndarray:
    name = {"policy": "log_probs", "value": "values"}[engine.head]
    return np.concatenate(engine.infer(BATCH, [name], temperature=1.0, micro_batch_tokens=64)[name].to_pylist())


@sampled(3)
@pytest.mark.parametrize(
    ("kind", "head"),
    [(kind, "policy") for kind in SMALL]
    + [(kind, "value") for kind in ("bloom", "falcon", "gpt2", "gpt_neox", "mixtral", "phi", "starcoder2")],
)
def test_nothing_is_random_while_activations_are_recomputed(tmp_path: Path, kind: str, head: Head) -> None:
    """Gradient checkpointing asks for a model in training mode, in which its layers would drop."""
    model = folder(tmp_path, kind, head)
    load = load_actor if head == "policy" else load_critic
    checkpointed = TorchEngine(load(model), head, gradient_checkpointing=True)
    assert checkpointed.model.training, "there is something to be tested"
    found = inferred(checkpointed)
    assert np.array_equal(found, inferred(checkpointed))
    plain = inferred(TorchEngine(load(model), head))
    # recomputing changes nothing; the tolerance is for kernels that differ between the modes
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5)


SOFT_CAPPED = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "head_dim": 8,
}


def test_soft_capped_attention_is_computed_eagerly(tmp_path: Path) -> None:
    """Gemma 2 under sdpa leaves its cap out."""
    config = AutoConfig.for_model(
        "gemma2", vocab_size=50, hidden_size=16, pad_token_id=0, attn_logit_softcapping=0.01, **SOFT_CAPPED
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in whole.parameters():
            torch.nn.init.normal_(parameter)
    whole.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="float32")
    assert attention_of(model) == ("eager", "it caps the logits of its attention, which sdpa leaves out")
    ids = torch.tensor([[3, 7, 11, 2, 40]])
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
        loaded = load_actor(model)
        capless = AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager", attn_logit_softcapping=None
        )
        without = capless(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
        assert (without - expected).abs().max() > 0.01, "the cap matters here"
    TorchEngine(loaded, "policy", packing=True)
    assert loaded.config._attn_implementation == "eager", "the engine's own checks leave it so"


def test_attention_that_is_asked_for_stays(tmp_path: Path) -> None:
    model = folder(tmp_path, "llama")
    assert attention_of(model) == ("sdpa", None)
    flex = model.model_copy(update={"attention": "flex_attention"})
    assert attention_of(flex) == ("flex_attention", None)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_quantized_model_is_not_trained(method: str, tmp_path: Path) -> None:
    model = folder(tmp_path, "llama")
    check_unquantized(model)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(UserError, match=rf"is quantized \({method}\), so it cannot be trained: name the unquantized"):
        check_unquantized(ModelConfig(path=str(tmp_path), dtype="float32"))


def test_gguf_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "small-q8.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"^critic.model.path .* holds GGUF weights \(small-q8.gguf\), which are"):
        check_weights(tmp_path, "critic.model")
