"""What every decoder promises: the rollout's log-probs, the trainer's, and those of a plain forward pass are equal.

The reference reads one unpadded sequence at a time, without a cache. Models compute in float32, with weights so large
that a token's neighbours matter to it: padding, or the state of another sequence, moves log-probs by more than 1e-2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4Config

from ratchet.infra.execution.preflight.models import check_models
from ratchet.infra.progress import listening
from ratchet.rlhf.algorithms.objectives import CriticObjective, SupervisedObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import LoRAConfig, ModelConfig, RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models import families
from ratchet.rlhf.models.families import NO_CRITIC, REFUSED, STATEFUL
from ratchet.rlhf.models.hf_configs import check_architecture
from ratchet.rlhf.models.loading import load_actor, load_critic, load_scorer, save
from ratchet.rlhf.models.support import check_adapters, check_decoder, check_packing, small_decoder
from ratchet.rlhf.rollout.engine import Request, RolloutEngine, Sampling
from ratchet.rlhf.rollout.hf_engine import HFRollout
from ratchet.rlhf.rollout.vllm_engine import VLLMRollout
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.torch_engine import TorchEngine
from ratchet.rlhf.weights.stored_state import StoredState
from tests import tiny
from tests.decoders import OF_VLLM, VOCABULARY, tiny_config
from tests.extras import needs
from tests.tiers import sampled

KINDS = families.text_decoders()
WHOLE = {"zamba"}
"""Families of which no smaller model can be built: they need all their layers."""
WORKING = [kind for kind in KINDS if kind not in REFUSED]
SAMPLING = Sampling(temperature=0.7, top_p=1.0, max_tokens=12, seed=3)
EOS = tuple(range(1, VOCABULARY, 8))
PROMPTS = [(3, 7, 11, 2, 40, 5, 6), (3, 7, 11, 2, 40, 5, 6), (9,), (4, 4, 12), (3, 7, 11, 2, 40, 5, 6), (9,)]
OWN_CLASSIFIER = {kind for kind in KINDS if families.has_own_classifier(kind)} | {"ctrl"}
CLOSE = 2e-4
"""Above what step by step and chunked sums differ by (1e-5 of the logits in zamba2, 1e-6 elsewhere)."""
LORA = LoRAConfig(r=4, alpha=8)


def folder(path: Path, kind: str, sizes: Mapping[str, Any] | None = None) -> ModelConfig:
    """Writes a tiny model whose outputs depend on all its tokens; see `tiny_config`."""
    config = tiny_config(kind, sizes)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=32**-0.5)
        model.save_pretrained(path)
    return ModelConfig(path=str(path), dtype="float32")


def sequences(responses: Sequence[Sequence[int]]) -> TrajectoryBatch:
    """Returns responses to `PROMPTS`."""
    return TrajectoryBatch.of(
        {
            "prompt_ids": [list(prompt) for prompt in PROMPTS],
            "response_ids": [list(response) for response in responses],
            "loss_mask": [[1] * len(response) for response in responses],
        }
    )


def generated(engine: RolloutEngine) -> tuple[TrajectoryBatch, np.ndarray]:
    """Generates responses to `PROMPTS`, with their log-probs."""
    generations = engine.generate([Request(f"t{row}", prompt) for row, prompt in enumerate(PROMPTS)], SAMPLING)
    log_probs = np.concatenate([generation.log_probs for generation in generations])
    return sequences([generation.response_ids for generation in generations]), log_probs


def computed(trainer: TorchEngine, batch: TrajectoryBatch) -> np.ndarray:
    log_probs = trainer.infer(batch, ["log_probs"], temperature=SAMPLING.temperature, micro_batch_tokens=64)
    return np.concatenate(log_probs["log_probs"].to_pylist())


def learn(trainer: TorchEngine, batch: TrajectoryBatch) -> dict[str, float]:
    """Takes one step; returns its metrics."""
    plan = OptimizerPlan(
        lr=1e-2,
        optimizer=AdamW(),
        grad_clip=None,
        micro_batch_tokens=64,
        mini_batches=(tuple(range(len(PROMPTS))),),
        temperature=SAMPLING.temperature,
    )
    return trainer.update(batch, SupervisedObjective(), plan)


def reference(path: str | Path, batch: TrajectoryBatch) -> np.ndarray:
    """Computes log-probs with a folder's model as transformers loads it."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt, response in zip(batch.list("prompt_ids"), batch.list("response_ids"), strict=True):
        with torch.no_grad():
            ids = torch.tensor([*prompt, *response])[None]
            logits = plain(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_probs = (logits / SAMPLING.temperature).log_softmax(-1)
        found.append(log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0].numpy())
    return np.concatenate(found)


@sampled(16)
@pytest.mark.parametrize("kind", WORKING)
def test_rollout_trainer_and_a_plain_forward_pass_agree(tmp_path: Path, kind: str) -> None:
    model = folder(tmp_path, kind)
    rollout = HFRollout(load_actor(model), eos_token_ids=EOS)
    batch, log_probs = generated(rollout)
    rollout.close()
    assert len(set(batch.lengths("response_ids").tolist())) > 1, "responses end at different steps"
    expected = reference(model.path, batch)
    np.testing.assert_allclose(log_probs, expected, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(computed(TorchEngine(load_actor(model), "policy"), batch), expected, rtol=0, atol=CLOSE)


RESPONSES = sequences([[5, 6, 7, 8]] * len(PROMPTS))


@sampled(16)
@pytest.mark.parametrize("kind", WORKING)
def test_a_checkpoint_is_the_whole_trainer_and_a_plain_model(tmp_path: Path, kind: str) -> None:
    model = folder(tmp_path / "model", kind)
    trainer = TorchEngine(load_actor(model), "policy")
    before = {name: weights.clone() for name, weights in trainer.weights()}
    metrics = learn(trainer, RESPONSES)
    assert 0 < metrics["actor/grad_norm"] < np.inf
    assert any(not torch.equal(weights, before[name]) for name, weights in trainer.weights())
    assert all(weights.isfinite().all() for _, weights in trainer.weights() if weights.is_floating_point())

    files = trainer.state()
    again = TorchEngine(load_actor(model), "policy")
    again.load_state(StoredState.of(files))
    loaded = dict(again.weights())
    assert all(torch.equal(loaded.pop(name), weights) for name, weights in trainer.weights())
    assert not loaded
    learned = computed(trainer, RESPONSES)
    np.testing.assert_array_equal(computed(again, RESPONSES), learned)
    assert learn(again, RESPONSES) == learn(trainer, RESPONSES), "the optimizer has its moments, too"

    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    np.testing.assert_allclose(reference(tmp_path, RESPONSES), learned, rtol=0, atol=CLOSE)


@sampled(16)
@pytest.mark.parametrize("kind", WORKING)
def test_adapters_learn_and_are_merged_into_a_plain_model(tmp_path: Path, kind: str) -> None:
    model = folder(tmp_path / "model", kind)
    trainer = TorchEngine(load_actor(model.model_copy(update={"lora": LORA})), "policy")
    before = computed(trainer, RESPONSES)
    np.testing.assert_allclose(reference(model.path, RESPONSES), before, rtol=0, atol=CLOSE)
    learn(trainer, RESPONSES)
    learned = computed(trainer, RESPONSES)
    assert np.abs(learned - before).max() > 0.01
    save(trainer.model, tmp_path / "merged")
    np.testing.assert_allclose(reference(tmp_path / "merged", RESPONSES), learned, rtol=0, atol=CLOSE)


@needs("vllm")
@pytest.mark.parametrize("kind", families.VLLM)
def test_vllm_generates_with_the_log_probs_of_the_trainer(tmp_path: Path, kind: str) -> None:
    """With the weights of a folder, and with those that the trainer has learned."""
    model = folder(tmp_path, kind, OF_VLLM)
    trainer = TorchEngine(load_actor(model), "policy")
    rollout = VLLMRollout(
        model.path,
        eos_token_ids=EOS,
        max_model_len=64,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
    )
    try:
        batch, log_probs = generated(rollout)
        np.testing.assert_allclose(log_probs, computed(trainer, batch), rtol=0, atol=families.VLLM_CLOSE)
        learn(trainer, batch)
        rollout.load_weights(trainer.weights())
        batch, log_probs = generated(rollout)
        np.testing.assert_allclose(log_probs, computed(trainer, batch), rtol=0, atol=families.VLLM_CLOSE)
    finally:
        rollout.close()


@sampled(16)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WHOLE])
def test_a_small_model_shows_before_the_start_what_works(tmp_path: Path, kind: str) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="float32", lora=LORA)
    small = small_decoder(model)
    assert small is not None
    if kind in WORKING:
        check_adapters(model, deepcopy(small))
    if kind in REFUSED:
        message = rf"^model.path x: (?=.*\b{kind}\b).*{REFUSED[kind]}.*: (set|choose) [^\n]*$"
        with pytest.raises(UserError, match=message):
            check_decoder(small, "model.path x", generates=True)
    else:
        assert check_decoder(small, "model.path x", generates=True) is not None


def test_a_decoder_that_cannot_be_a_critic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks model\.hc_head\.hc_base: it is not a backbone for a critic$"):
        load_critic(folder(tmp_path, "hy_v4"))


@sampled(16)
@pytest.mark.parametrize("kind", [kind for kind in WORKING if kind not in OWN_CLASSIFIER | NO_CRITIC.keys()])
def test_any_decoder_can_be_a_critic_and_a_reward_model(tmp_path: Path, kind: str) -> None:
    model = folder(tmp_path / "policy", kind)
    check_architecture(model, "critic.model", is_critic=True)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        hidden = load_actor(model).eval().base_model(input_ids=ids, use_cache=False).last_hidden_state
    for number, load in enumerate((load_critic, load_scorer)):
        classifier = load(model).eval()
        assert not classifier.score.weight.any(), "a new head starts at zero"
        torch.nn.init.normal_(classifier.score.weight)
        save(classifier, tmp_path / f"{number}")
        again = load(ModelConfig(path=str(tmp_path / f"{number}"), dtype="float32")).eval()
        with torch.no_grad():
            expected = torch.nn.functional.linear(hidden, classifier.score.weight, classifier.score.bias)
            scores = again(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(scores, expected if load is load_critic else expected[:, -1])


@sampled(8)
@pytest.mark.parametrize("kind", sorted(STATEFUL - WHOLE))
def test_a_critic_with_states_learns(tmp_path: Path, kind: str) -> None:
    made = folder(tmp_path, kind)
    ones = [[1.0] * 3 for _ in PROMPTS]
    batch = TrajectoryBatch.of(
        {
            "prompt_ids": [list(prompt) for prompt in PROMPTS],
            "response_ids": [[5, 6, 7] for _ in PROMPTS],
            **{name: pa.array(ones, pa.list_(pa.float32())) for name in ("loss_mask", "returns", "values")},
        }
    )
    engine = TorchEngine(load_critic(made), "value")
    mini_batches = (tuple(range(len(PROMPTS))),) * 20
    plan = OptimizerPlan(
        lr=0.01, optimizer=AdamW(), grad_clip=None, micro_batch_tokens=64, mini_batches=mini_batches, temperature=1.0
    )
    engine.update(batch, CriticObjective(cliprange_value=None), plan)
    values = engine.infer(batch, ["values"], temperature=1.0, micro_batch_tokens=64)["values"]
    assert np.abs(np.concatenate(values.to_pylist()) - 1).mean() < 0.5, "it began at 0"


@sampled(4)
@pytest.mark.parametrize("kind", sorted(STATEFUL - WHOLE))
def test_sequences_that_would_share_a_state_are_not_packed(tmp_path: Path, kind: str) -> None:
    model = folder(tmp_path, kind)
    small = small_decoder(model)
    assert small is not None
    with pytest.raises(UserError, match=rf"actor.packing true: {kind} does not tell .*: remove actor.packing$"):
        check_packing(small, "actor.packing")
    # prompts are shared on the CPU wherever that is right
    engine = TorchEngine(load_actor(model), "policy", share_prompts=True)
    assert not engine.module.shares_prompts
    assert not engine.packing


def run(root: Path, kind: str) -> RunConfig:
    """Returns a run whose policy is a tiny model of a type."""
    tiny.workspace(root)
    config = tiny_config(kind)
    config.vocab_size = len(tiny.character_tokenizer())
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "model")
    return tiny.config(root, algorithm__advantage="grpo", data__max_prompt_tokens=64)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("rwkv", {}, r"model.path .*/model: rollout.engine hf cannot generate with rwkv: .*: set rollout.engine: vllm"),
        ("llama4_text", {}, r"model.path .*/model: llama4_text cannot be trained .*: choose a model of"),
        (
            "mamba2",
            {"model.lora": {"target_modules": ["in_proj", "out_proj"]}},
            r"model.lora.target_modules names out_proj, but a layer whose weights a Mamba2Mixer reads itself cannot",
        ),
        ("qwen3_next", {"actor.packing": True}, "actor.packing true: qwen3_next does not tell packed sequences apart"),
        (
            "qwen3_next",
            {"actor.engine": {"type": "torch", "sequence_parallel": 2}, "pools": {"all": {"workers": 2}}},
            r"actor.engine: sequence_parallel needs full attention in every layer, but .*'linear_attention'\]: remove",
        ),
    ],
)
def test_what_an_architecture_cannot_do_is_refused_before_the_start(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    config = run(tmp_path, kind).with_values(changes)
    with pytest.raises(UserError, match=f"{message}[^\n]*$"):
        check_models(config)


def test_a_small_model_is_made_of_a_large_one_whose_layers_are_listed_by_number(tmp_path: Path) -> None:
    """llama4 of the usual sizes, with experts in all 48 layers."""
    Llama4Config().save_pretrained(tmp_path)
    small = small_decoder(ModelConfig(path=str(tmp_path), dtype="float32"))
    assert small is not None
    with pytest.raises(UserError, match=r"^model.path x: llama4_text cannot be trained [^\n]*$"):
        check_decoder(small, "model.path x", generates=True)


@pytest.mark.parametrize(("kind", "expected"), [("qwen3_next", []), ("mamba", ["only prompts of the same length"])])
def test_a_slow_way_to_generate_is_said_once(tmp_path: Path, kind: str, expected: list[str]) -> None:
    notes: list[object] = []
    with listening(notes.append):
        check_models(run(tmp_path, kind))
    said = [str(note) for note in notes if "is slow with" in str(note)]
    assert len(said) == len(expected)
    assert all(part in text for part, text in zip(expected, said, strict=True))
