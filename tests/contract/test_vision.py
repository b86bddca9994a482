"""What every vision-language model promises: rollout, trainer and transformers' own processor and model agree.

The reference reads one unpadded sequence at a time, with the inputs of the family's processor, without a cache. Models
compute in float32; another image moves log-probs by more than 1e-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.algorithms.objectives import SupervisedObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import LoRAConfig, ModelConfig
from ratchet.rlhf.data.chat_turns import state_of
from ratchet.rlhf.data.formats import Chat
from ratchet.rlhf.data.images import digest_of
from ratchet.rlhf.data.prompts import tokenize_chat
from ratchet.rlhf.environments.dialogues import Beginning, Dialogue
from ratchet.rlhf.environments.environment import Observation
from ratchet.rlhf.environments.guarded_calls import EnvironmentCalls
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.families import VISION
from ratchet.rlhf.models.loading import load_actor, load_critic, save
from ratchet.rlhf.models.tokenizers import copy_tokenizer, image_processor, load_tokenizer
from ratchet.rlhf.models.vision import vision_of
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.rollout.hf_engine import HFRollout
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests.tiers import sampled
from tests.vision_models import WORDS, picture, tiny_vision_model

CLOSE = 1e-5
"""Some roundings of logits of up to 30 in float32; a wrong picture or position moves log-probs by more than 1e-2."""
SAMPLING = Sampling(temperature=0.7, top_p=1.0, max_tokens=10, seed=3)
PICTURES = {digest_of(image): image for image in (picture(1), picture(2, 100, 60), picture(3, 56, 56))}
FIRST, SECOND, THIRD = PICTURES
ROWS: list[tuple[list[str], str]] = [
    ([FIRST], "<image>w1 w2"),
    ([FIRST], "<image>w1 w2"),
    ([SECOND], "<image>w1 w2"),
    ([SECOND, FIRST, THIRD], "w3 <image>w4 <image><image>w5 w6 ?"),
    ([], "w7 w8 w9"),
]
"""Images and content of the prompts: the same twice, the same text with another image, several images, and none."""


def chat(digests: Sequence[str], content: str) -> Chat:
    message: Any = {"role": "user", "content": content}
    return Chat([message | {"images": list(digests)} if digests else message], (), tuple(map(PICTURES.get, digests)))  # type: ignore[arg-type]


def prompts(model: ModelConfig) -> list[list[int]]:
    tokenizer = load_tokenizer(model)
    return [tokenize_chat(chat(*row), tokenizer, "here")[1] for row in ROWS]


def own_inputs(model: ModelConfig, digests: Sequence[str], content: str) -> dict[str, Any]:
    """Returns the inputs that the family's processor makes."""
    from io import BytesIO

    from PIL import Image

    loaded = AutoModelForImageTextToText.from_pretrained(model.path)
    kind = PROCESSOR_MAPPING[type(loaded.config)]

    class WithoutVideos(kind):  # type: ignore[misc,valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> type:
            return object

    tokenizer = AutoTokenizer.from_pretrained(model.path)
    settings, _ = kind.get_processor_dict(model.path)
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(model.path, backend="pil"),
        "tokenizer": tokenizer,
    }
    processor = WithoutVideos.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], settings)
    texts = content.split("<image>")
    content_parts = [{"type": "text", "text": texts[0]}] if texts[0] else []
    for text in texts[1:]:
        content_parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    written = tokenizer.apply_chat_template(
        [{"role": "user", "content": content_parts}], tokenize=False, add_generation_prompt=True
    )
    images = [Image.open(BytesIO(PICTURES[digest])).convert("RGB") for digest in digests]
    return dict(processor(text=[written], images=[images] if images else None, return_tensors="pt"))


def reference(model: ModelConfig, batch: TrajectoryBatch) -> np.ndarray:
    """Computes log-probs as transformers does."""
    plain = AutoModelForImageTextToText.from_pretrained(model.path, dtype=torch.float32).eval()
    seen = image_processor(model)
    assert seen is not None
    log_probs = []
    for (digests, content), response in zip(ROWS, batch.list("response_ids"), strict=True):
        inputs = own_inputs(model, digests, content)
        read = [seen.stand_in if token == seen.token_id else token for token in response]
        ids = torch.cat([inputs.pop("input_ids"), torch.tensor([read])], dim=1)
        inputs.pop("attention_mask")
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = (ids == seen.token_id).int()
        with torch.no_grad():
            logits = plain(input_ids=ids, use_cache=False, **inputs).logits[0, -len(response) - 1 : -1]
        of_row = (logits / SAMPLING.temperature).log_softmax(-1)
        log_probs.append(of_row.gather(-1, torch.tensor(response)[:, None])[:, 0].numpy())
    return np.concatenate(log_probs)


def batch_of(model: ModelConfig, responses: Sequence[Sequence[int]]) -> TrajectoryBatch:
    return TrajectoryBatch.of(
        {
            "prompt_ids": prompts(model),
            "response_ids": [list(response) for response in responses],
            "loss_mask": [[1] * len(response) for response in responses],
            "images": [digests or None for digests, _ in ROWS],
        }
    )


def generated(model: ModelConfig) -> tuple[TrajectoryBatch, np.ndarray]:
    loaded = load_actor(model)
    make = vision_of(model, None)
    assert make is not None
    rollout = HFRollout(loaded, eos_token_ids=(2,), vision=make(loaded))
    assert rollout.shares_prompts
    requests = [
        Request(f"t{number}", tuple(ids), images=tuple(PICTURES[digest] for digest in digests))
        for number, (ids, (digests, _)) in enumerate(zip(prompts(model), ROWS, strict=True))
    ]
    answers = rollout.generate(requests, SAMPLING)
    rollout.close()
    log_probs = np.concatenate([answer.log_probs for answer in answers])
    return batch_of(model, [answer.response_ids for answer in answers]), log_probs


def engine(model: ModelConfig, **options: Any) -> TorchEngine:
    return TorchEngine(load_actor(model), "policy", vision=vision_of(model, PICTURES.__getitem__), **options)


def computed(trainer: TorchEngine, batch: TrajectoryBatch) -> np.ndarray:
    outputs = trainer.infer(batch, ["log_probs"], temperature=SAMPLING.temperature, micro_batch_tokens=10_000)
    return np.concatenate(outputs["log_probs"].to_pylist())


@sampled(3)
@pytest.mark.parametrize("kind", VISION)
def test_prompts_have_the_tokens_of_the_familys_processor(tmp_path: Path, kind: str) -> None:
    model = tiny_vision_model(tmp_path, kind)
    for row, ids in zip(ROWS, prompts(model), strict=True):
        assert ids == own_inputs(model, *row)["input_ids"][0].tolist()


@pytest.mark.parametrize("kind", VISION)
def test_collapsing_undoes_expanding(tmp_path: Path, kind: str) -> None:
    seen = image_processor(tiny_vision_model(tmp_path, kind))
    assert seen is not None
    images = list(PICTURES.values())
    short = [20, seen.token_id, seen.token_id, 21, seen.token_id]  # images may follow each other
    expanded = seen.expanded(short, images, "here")
    assert len(expanded) > len(short) + 6
    ids = np.array([*expanded, 22, seen.token_id, 23])
    drawn = np.arange(len(ids)) >= len(expanded)
    assert seen.collapsed(seen.readable(ids, drawn).tolist(), images) == [*short, 22, seen.stand_in, 23]


@pytest.mark.parametrize("kind", VISION)
def test_the_tokens_of_an_image_depend_on_its_size_only(tmp_path: Path, kind: str) -> None:
    model = tiny_vision_model(tmp_path, kind)
    seen = image_processor(model)
    assert seen is not None
    for width, height in ((60, 80), (200, 57), (33, 31), (1, 9)):
        of_pictures = [seen(picture(seed, width, height)) for seed in range(3)]
        assert len({image.tokens for image in of_pictures}) == 1
        pixels = [image.inputs["pixel_values"] for image in of_pictures]
        assert not torch.equal(pixels[0], pixels[1])


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"share_prompts": False},
    "packed": {"share_prompts": False, "packing": True},
    "shared": {"packing": True},
}


@sampled(3)
@pytest.mark.parametrize("kind", VISION)
def test_rollout_trainer_and_transformers_agree(tmp_path: Path, kind: str) -> None:
    model = tiny_vision_model(tmp_path, kind)
    batch, log_probs = generated(model)
    expected = reference(model, batch)
    np.testing.assert_allclose(log_probs, expected, rtol=0, atol=CLOSE)
    for layout, options in LAYOUTS.items():
        np.testing.assert_allclose(
            computed(engine(model, **options), batch), expected, rtol=0, atol=CLOSE, err_msg=layout
        )


@sampled(3)
@pytest.mark.parametrize("kind", VISION)
def test_another_picture_is_seen(tmp_path: Path, kind: str) -> None:
    model = tiny_vision_model(tmp_path, kind)
    batch = batch_of(model, [[20, 21, 22, 23]] * len(ROWS))
    other = {digest: picture(9 + place, 60, 80) for place, digest in enumerate(PICTURES)}
    other |= {SECOND: picture(8, 100, 60), THIRD: picture(7, 56, 56)}
    image_processor.cache_clear()  # it keeps what it has processed by digest
    sees_other = TorchEngine(load_actor(model), "policy", vision=vision_of(model, other.__getitem__))
    of_other = computed(sees_other, batch).reshape(len(ROWS), -1)
    image_processor.cache_clear()
    of_own = computed(engine(model), batch).reshape(len(ROWS), -1)
    moved = np.abs(of_other - of_own).max(axis=1)
    assert (moved[:4] > 1e-2).all(), moved
    assert moved[4] == 0


@sampled(2)
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_a_placeholder_that_the_policy_drew_is_no_image(tmp_path: Path, kind: str) -> None:
    model = tiny_vision_model(tmp_path, kind)
    seen = image_processor(model)
    assert seen is not None
    drawn, stand_in = [20, seen.token_id, 21, 22], [20, seen.stand_in, 21, 22]
    batches = [batch_of(model, [response] * len(ROWS)) for response in (drawn, stand_in)]
    for options in LAYOUTS.values():
        of_drawn, of_stand_in = (
            computed(engine(model, **options), batch).reshape(len(ROWS), -1)[:4] for batch in batches
        )
        # what follows reads the same; the token itself is another
        np.testing.assert_allclose(of_drawn[:, 2:], of_stand_in[:, 2:], rtol=0, atol=CLOSE)
        assert np.abs(of_drawn[:, 1] - of_stand_in[:, 1]).min() > 1e-3
        # also in a micro-batch without images
        alone = [computed(engine(model, **options), batch.take([4])) for batch in batches]
        np.testing.assert_allclose(alone[0][2:], alone[1][2:], rtol=0, atol=CLOSE)


class Pointing:
    """An environment that answers with the pictures of `PICTURES`: two, none and one, then it ends."""

    stop = ()

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, messages: object, ground_truth: object, extra_info: object) -> None:
        self.turns = 0

    def step(self, turn: str) -> Observation:
        self.turns += 1
        shown = {1: [SECOND, THIRD], 2: [], 3: [FIRST]}.get(self.turns)
        if shown is None:
            return Observation(None, reward=1.0)
        images = [{"type": "image", "image": PICTURES[digest]} for digest in shown]
        return Observation([{"role": "user", "content": [*images[:1], {"type": "text", "text": "w5"}, *images[1:]]}])


@sampled(3)
@pytest.mark.parametrize("kind", VISION)
def test_images_of_observations_are_read_by_rollout_and_trainer(tmp_path: Path, kind: str) -> None:
    model = tiny_vision_model(tmp_path, kind)
    loaded, tokenizer, make = load_actor(model), load_tokenizer(model), vision_of(model, None)
    assert make is not None
    rollout = HFRollout(loaded, eos_token_ids=(2,), vision=make(loaded), tokenizer=tokenizer)
    generator = Generator(rollout, tokenizer, interruptible=False)
    beginning = Beginning([{"role": "user", "content": "?"}], None, False, "{}")
    dialogues = [
        Dialogue(Request(f"t{number}", tuple(ids), images=tuple(map(PICTURES.__getitem__, digests))), beginning)
        for number, (ids, (digests, _)) in enumerate(zip(prompts(model), ROWS, strict=True))
    ]
    # a turn has two tokens: its stop text is any, and the second one ends it
    sampling = replace(SAMPLING, max_tokens=200, stop=tuple(WORDS[1:60]))
    rules = Rules(sampling, EnvironmentCalls(Pointing, {}), max_turns=9)
    generator.resume(0)
    generator.submit([(dialogue, rules) for dialogue in dialogues])
    complete: list[Dialogue] = []
    while len(complete) < len(dialogues):
        complete += generator.wait(60)
    rollout.close()
    assert [dialogue.turn_images for dialogue in dialogues] == [[2, 0, 1]] * len(ROWS)
    assert all(dialogue.images == [PICTURES[digest] for digest in (SECOND, THIRD, FIRST)] for dialogue in dialogues)
    columns = {
        "prompt_ids": [list(dialogue.request.prompt_ids) for dialogue in dialogues],
        "response_ids": [dialogue.ids for dialogue in dialogues],
        "response_mask": [dialogue.mask for dialogue in dialogues],
        "loss_mask": [dialogue.mask for dialogue in dialogues],
        "images": [[*digests, SECOND, THIRD, FIRST] for digests, _ in ROWS],
        "turn_images": [[2, 0, 1, 0]] * len(ROWS),
    }
    drawn = np.concatenate([np.array(dialogue.mask, dtype=bool) for dialogue in dialogues])
    log_probs = np.concatenate([dialogue.log_probs for dialogue in dialogues])
    for layout, options in LAYOUTS.items():
        found = computed(engine(model, **options), TrajectoryBatch.of(columns))
        np.testing.assert_allclose(found[drawn], log_probs[drawn], rtol=0, atol=CLOSE, err_msg=layout)
    # the last turn, as an answer to a prompt that has all before it
    seen = image_processor(model)
    assert seen is not None
    starts = [dialogue.turn_starts[-1] for dialogue in dialogues]
    columns |= {
        "prompt_ids": [
            [
                *dialogue.request.prompt_ids,
                *seen.readable(np.array(dialogue.ids[:start]), np.array(dialogue.mask[:start], dtype=bool)).tolist(),
            ]
            for dialogue, start in zip(dialogues, starts, strict=True)
        ],
        "response_ids": [dialogue.ids[start:] for dialogue, start in zip(dialogues, starts, strict=True)],
        "loss_mask": [dialogue.mask[start:] for dialogue, start in zip(dialogues, starts, strict=True)],
    }
    del columns["response_mask"], columns["turn_images"]
    alone = computed(engine(model), TrajectoryBatch.of(columns))
    last = np.concatenate([dialogue.log_probs[start:] for dialogue, start in zip(dialogues, starts, strict=True)])
    np.testing.assert_allclose(alone, last, rtol=0, atol=CLOSE)


def step(trainer: TorchEngine, batch: TrajectoryBatch) -> dict[str, torch.Tensor]:
    plan = OptimizerPlan(
        lr=1e-2,
        optimizer=AdamW(),
        grad_clip=None,
        micro_batch_tokens=10_000,
        mini_batches=(tuple(range(len(batch))),),
        temperature=1.0,
    )
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.update(batch, SupervisedObjective(), plan)
    return {name: tensor - before[name] for name, tensor in trainer.weights()}


@sampled(3)
@pytest.mark.parametrize("kind", VISION)
def test_the_vision_tower_is_frozen_unless_it_learns(tmp_path: Path, kind: str) -> None:
    model = tiny_vision_model(tmp_path, kind)
    batch = batch_of(model, [[20, 21, 22, 23]] * len(ROWS))
    frozen = {name for name, change in step(engine(model), batch).items() if not change.any()}
    learned = step(engine(model.model_copy(update={"freeze_vision": False})), batch)
    tower = {name for name in learned if "vision" in name or "visual" in name}
    assert tower <= frozen, tower - frozen
    assert any(learned[name].abs().max() > 1e-3 for name in tower)
    assert not any("layers" in name and name not in tower for name in frozen), frozen - tower
    adapted = model.model_copy(update={"lora": LoRAConfig(r=4, alpha=8)})
    adapters = step(engine(adapted), batch)
    assert adapters and not any("vision" in name or "visual" in name for name in adapters)


@sampled(3)
@pytest.mark.parametrize("kind", VISION)
def test_a_trained_model_is_a_folder_of_transformers(tmp_path: Path, kind: str) -> None:
    model = tiny_vision_model(tmp_path / "model", kind)
    trainer = engine(model)
    batch = batch_of(model, [[20, 21, 22, 23]] * len(ROWS))
    step(trainer, batch)
    save(trainer.model, tmp_path / "trained")
    copy_tokenizer(model, tmp_path / "trained")
    trained = ModelConfig(path=str(tmp_path / "trained"), dtype="float32")
    expected = computed(trainer, batch) / 1.0
    np.testing.assert_allclose(computed(engine(trained), batch), expected, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(reference(trained, batch), expected, rtol=0, atol=CLOSE)


@sampled(3)
@pytest.mark.parametrize("kind", VISION)
def test_a_critic_sees(tmp_path: Path, kind: str) -> None:
    model = tiny_vision_model(tmp_path, kind)
    batch = batch_of(model, [[20, 21, 22, 23]] * len(ROWS))
    values = []
    for options in LAYOUTS.values():
        critic = TorchEngine(load_critic(model), "value", vision=vision_of(model, PICTURES.__getitem__), **options)
        with torch.no_grad():
            torch.nn.init.ones_(critic.model.score.weight)
        values.append(
            np.concatenate(
                critic.infer(batch, ["values"], temperature=1.0, micro_batch_tokens=10_000)["values"].to_pylist()
            )
        )
    np.testing.assert_allclose(values[1], values[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(values[2], values[0], rtol=0, atol=1e-4)
    of_rows = values[0].reshape(len(ROWS), -1)
    assert np.abs(of_rows[0] - of_rows[2]).max() > 1e-2, "another picture has other values"


def test_an_image_that_the_processor_refuses_is_named(tmp_path: Path) -> None:
    model = tiny_vision_model(tmp_path, "qwen2_5_vl")
    thin = picture(1, 900, 3)
    message: Any = {"role": "user", "content": "<image>", "images": [digest_of(thin)]}
    with pytest.raises(UserError, match="file, row 3: the model's processor refuses an image of 900 × 3 pixels: "):
        tokenize_chat(Chat([message], (), (thin,)), load_tokenizer(model), "file, row 3")


def test_images_need_a_model_that_sees(tmp_path: Path) -> None:
    model = tiny_vision_model(tmp_path, "qwen2_5_vl")
    tokenizer = load_tokenizer(model)
    state_of(tokenizer).images = None
    with pytest.raises(UserError, match="file, row 3 has images, and the model reads text only: choose a vision"):
        tokenize_chat(chat(*ROWS[0]), tokenizer, "file, row 3")
    blind = load_tokenizer(model)
    blind.chat_template = "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    with pytest.raises(UserError, match="file, row 3: the chat template writes 0 placeholders for 1 images"):
        tokenize_chat(chat(*ROWS[0]), blind, "file, row 3")
