"""What rollout engines promise that have the model's own image processor: vLLM, and `vllm serve`.

They read what the trainer reads, so that log-probs agree with its own, and take new weights of all that sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.data.images import as_decoded, decoded
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.families import VLLM_CLOSE
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.models.tokenizers import image_processor
from ratchet.rlhf.models.vision import vision_of
from ratchet.rlhf.rollout.engine import Request, RolloutEngine, Sampling
from ratchet.rlhf.rollout.sent_prompts import drawn
from ratchet.rlhf.rollout.server_engine import ServerRollout
from ratchet.rlhf.rollout.vllm_engine import VLLMRollout
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests.contract.test_vision import PICTURES, ROWS, batch_of, computed, engine, prompts, step
from tests.extras import needs
from tests.served import end_servers
from tests.vision_models import picture, tiny_vision_model
from tests.vllm_server import serving

KIND = "idefics3"
"""The family for which vLLM needs no torchvision."""
SAMPLING = Sampling(temperature=0.7, top_p=1.0, max_tokens=10, seed=3)
OPTIONS = {"enable-scale-out": True, "mm-processor-kwargs": '{"backend": "pil"}'}
STARTED: list[RolloutEngine] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_vision_model(tmp_path_factory.mktemp("sees") / "model", KIND)


@cache  # a start takes half a minute
def vllm_rollout(model: ModelConfig) -> RolloutEngine:
    return VLLMRollout(
        model.path,
        eos_token_ids=(2,),
        max_model_len=256,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        images=image_processor(model),
    )


@cache
def server_rollout(model: ModelConfig) -> RolloutEngine:
    """`vllm serve`, on loopback."""
    folder = Path(model.path)
    return ServerRollout(
        [serving(folder, OPTIONS)],
        eos_token_ids=(2,),
        weights_folder=folder.parent / "served",
        model_folder=folder,
        images=image_processor(model),
    )


@pytest.fixture(params=[vllm_rollout, server_rollout], ids=["vllm", "server"])
def rollout(request: pytest.FixtureRequest, model: ModelConfig) -> RolloutEngine:
    """An engine with the model's first weights."""
    built: RolloutEngine = request.param(model)
    if built in STARTED:
        built.load_weights(engine(model).weights())
    else:
        STARTED.append(built)
    return built


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().close()
    end_servers()


def requests(model: ModelConfig) -> list[Request]:
    return [
        Request(f"t{number}", tuple(ids), images=tuple(PICTURES[digest] for digest in digests))
        for number, (ids, (digests, _)) in enumerate(zip(prompts(model), ROWS, strict=True))
    ]


def assert_the_trainer_agrees(rollout: RolloutEngine, model: ModelConfig, trainer: TorchEngine) -> np.ndarray:
    answers = rollout.generate(requests(model), SAMPLING)
    log_probs = np.concatenate([answer.log_probs for answer in answers])
    batch = batch_of(model, [answer.response_ids for answer in answers])
    np.testing.assert_allclose(log_probs, computed(trainer, batch), rtol=0, atol=VLLM_CLOSE)
    return batch


@needs("vllm")
def test_log_probs_are_the_trainers_after_each_update(rollout: RolloutEngine, model: ModelConfig) -> None:
    """Also those of a tower that learns, whose view of a picture an engine keeps."""
    first = engine(model)
    batch = assert_the_trainer_agrees(rollout, model, first)
    for freeze in (True, False):
        trainer = engine(model.model_copy(update={"freeze_vision": freeze}))
        step(trainer, batch)
        rollout.load_weights(trainer.weights())
        moved = assert_the_trainer_agrees(rollout, model, trainer)
        change = np.abs(computed(trainer, moved) - computed(first, moved)).max()
        assert change > 100 * VLLM_CLOSE, "other weights are noticed"


@needs("vllm")
def test_pixels_are_those_that_the_trainer_decodes(rollout: RolloutEngine, model: ModelConfig) -> None:
    """Not blended with white where they are transparent, nor turned as a photograph's metadata asks."""
    seen = image_processor(model)
    assert seen is not None
    [prompt, *_] = prompts(model)
    first = next(iter(PICTURES))
    place = prompt.index(seen(PICTURES[first]).tokens[0])
    end = place + len(seen(PICTURES[first]).tokens)
    for number, image in enumerate((transparent(), turned())):
        ids = (*prompt[:place], *seen(image).tokens, *prompt[end:])
        [answer] = rollout.generate([Request(f"p{number}", ids, images=(image,))], SAMPLING)
        batch = TrajectoryBatch.of(
            {
                "prompt_ids": [ids],
                "response_ids": [list(answer.response_ids)],
                "loss_mask": [[1] * len(answer.response_ids)],
                "images": [[f"own {number}"]],
            }
        )
        trainer = TorchEngine(
            load_actor(model), "policy", vision=vision_of(model, {f"own {number}": image}.__getitem__)
        )
        np.testing.assert_allclose(answer.log_probs, computed(trainer, batch), rtol=0, atol=VLLM_CLOSE)


def transparent() -> bytes:
    image = Image.open(BytesIO(picture(4))).convert("RGBA")
    image.putalpha(60)
    return written(image, "PNG")


def turned() -> bytes:
    image = Image.open(BytesIO(picture(5)))
    exif = image.getexif()
    exif[0x0112] = 6  # orientation
    return written(image, "JPEG", exif=exif)


def written(image: Image.Image, format: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@needs("vllm")
def test_a_placeholder_that_the_policy_drew_is_no_image(rollout: RolloutEngine, model: ModelConfig) -> None:
    """It ends the response; if the trajectory continues, the model reads what the trainer does."""
    seen = image_processor(model)
    assert seen is not None
    many = [
        replace(one, trajectory_id=f"{number}{one.trajectory_id}") for number in range(30) for one in requests(model)
    ]
    answers = rollout.generate(many, replace(SAMPLING, temperature=2.0, ignore_eos=True))
    ended = [answer for answer in answers if seen.token_id in answer.response_ids]
    assert ended
    for answer in ended:
        assert answer.response_ids.index(seen.token_id) == len(answer.response_ids) - 1
        assert answer.finish_reason == "stop"
    before = (20, seen.token_id, 21)
    answers = rollout.generate(
        [replace(one, prompt_ids=one.prompt_ids + before, mask=(1,) * len(before)) for one in requests(model)],
        SAMPLING,
    )
    batch = batch_of(model, [before + answer.response_ids for answer in answers])
    expected = engine(model).infer(batch, ["log_probs"], temperature=SAMPLING.temperature, micro_batch_tokens=10_000)
    for answer, row in zip(answers, expected["log_probs"].to_pylist(), strict=True):
        np.testing.assert_allclose(answer.log_probs, row[len(before) :], rtol=0, atol=VLLM_CLOSE)


@needs("vllm")
def test_other_tokens_than_the_trainers_are_refused(rollout: RolloutEngine, model: ModelConfig, tmp_path: Path) -> None:
    asked = requests(model)[0]
    seen = image_processor(model)
    assert seen is not None
    tokens = seen(asked.images[0]).tokens
    place = asked.prompt_ids.index(tokens[0])
    shorter = tokens[:-2]  # as if the trainer's processor made fewer tiles
    other = replace(asked, prompt_ids=(*asked.prompt_ids[:place], *shorter, *asked.prompt_ids[place + len(tokens) :]))
    sizes = dict(seen._tokens_of)
    seen._tokens_of = dict.fromkeys(sizes, shorter)
    try:
        with pytest.raises(
            UserError, match=r"reads a prompt with images as .* tokens, and the trainer as .* other ones: let it load"
        ):
            rollout.generate([other], SAMPLING)
    finally:
        seen._tokens_of = sizes
    assert_the_trainer_agrees(rollout, model, engine(model))


def test_as_decoded_keeps_the_pixels() -> None:
    for image in (picture(1), transparent(), turned()):
        sent = as_decoded(image, "it")
        assert decoded(sent, "it").tobytes() == decoded(image, "it").tobytes()
        alone = Image.open(BytesIO(sent))
        assert (alone.mode, alone.info, dict(alone.getexif())) == ("RGB", {}, {})
    assert as_decoded(picture(1), "it") == picture(1)


def test_drawn_are_the_last_tokens() -> None:
    assert drawn(Request("t", (1, 2, 3, 4), mask=(1, 0, 1))).tolist() == [False, True, False, True]
