"""Loading models: what is refused, the critic's head, dropout, and the folder that a checkpoint is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import LlamaForCausalLM

from ratchet.rlhf.config import LoRAConfig, ModelConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.custom_code import code_files, code_names
from ratchet.rlhf.models.hf_configs import generation_config, text_config
from ratchet.rlhf.models.loading import load_actor, load_critic, load_scorer, save
from ratchet.rlhf.models.model_folders import DOWNLOADED, files_digest, model_folder
from ratchet.rlhf.models.tokenizers import copy_tokenizer, eos_token_ids, load_tokenizer, tokenizer_digest
from ratchet.rlhf.train.torch_engine import TorchEngine
from ratchet.rlhf.weights.weight_files import write_weights
from tests import modes, tiny

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model"))


def model(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("path", ["./no/such/folder", "/no/such/folder", "nofolder", "a/b/c"])
def test_a_missing_folder(path: str) -> None:
    with pytest.raises(UserError, match=f"model.path {path} does not exist: name a model folder"):
        model_folder(ModelConfig(path=path))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config.json: it is not a Hugging Face model folder"):
        model_folder(model(tmp_path))


def test_weights_are_float32_and_nothing_drops_out(folder: Path, tmp_path: Path) -> None:
    path = tiny.model_folder(tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.5, "dtype": "bfloat16"}))
    actor = load_actor(model(path)).train()
    assert {parameter.dtype for parameter in actor.parameters()} == {torch.float32}
    assert torch.equal(actor(IDS).logits, load_actor(model(folder)).eval()(IDS).logits)


def test_a_new_critic_says_zero_and_a_saved_one_keeps_its_head(folder: Path, tmp_path: Path) -> None:
    critic = load_critic(model(folder))
    assert torch.equal(critic(IDS).logits, torch.zeros(1, 4, 1))
    assert torch.equal(critic.model.embed_tokens.weight, load_actor(model(folder)).model.embed_tokens.weight)
    with torch.no_grad():
        critic.score.weight.fill_(0.5)
        critic.score.bias.fill_(0.25)
    for name, content in TorchEngine(critic, "value").state().items():
        (tmp_path / name).write_bytes(content)
    again = load_critic(model(tmp_path))
    assert torch.equal(again(IDS).logits, critic(IDS).logits)
    assert not torch.equal(again(IDS).logits, torch.zeros(1, 4, 1))


def test_what_is_no_backbone(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model.norm.weight: it is not a backbone for a critic"):
        load_critic(model(tmp_path))
    with pytest.raises(UserError, match=r"lacks model.norm.weight: it is not a backbone for a reward model"):
        load_scorer(model(tmp_path))


@pytest.mark.parametrize("umask", [0o022, 0o027], ids=oct)
def test_weights_have_the_mode_that_the_umask_says(folder: Path, tmp_path: Path, umask: int) -> None:
    with modes.umask(umask):
        for name, lora in (("plain", None), ("merged", LoRAConfig(r=4))):
            policy = load_actor(ModelConfig(path=str(folder), lora=lora))
            save(policy, tmp_path / "given" / name)
            write_weights(policy.named_parameters(), tmp_path / "given", name)
    assert len(list((tmp_path / "given").rglob("*.safetensors"))) == 4
    assert modes.others(tmp_path / "given", umask) == {}


def test_a_checkpoint_of_tied_embeddings_is_a_model_folder(folder: Path, tmp_path: Path) -> None:
    """The head that is the embedding is stored once, as transformers itself does."""
    path = tiny.model_folder(tmp_path / "tied")
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    LlamaForCausalLM.from_pretrained(path).save_pretrained(path)
    engine = TorchEngine(load_actor(model(path)), "policy")
    with torch.no_grad():
        engine.model.model.embed_tokens.weight.mul_(2)
    (tmp_path / "checkpoint").mkdir()
    for name, content in engine.state().items():
        (tmp_path / "checkpoint" / name).write_bytes(content)
    again = load_actor(model(tmp_path / "checkpoint"))
    assert torch.equal(again(IDS).logits, engine.model(IDS).logits)
    assert TorchEngine(again, "policy").digest() == engine.digest()


def test_every_end_of_sequence_counts(folder: Path) -> None:
    actor, tokenizer = load_actor(model(folder)), load_tokenizer(model(folder))
    assert eos_token_ids(actor.generation_config, tokenizer) == (1,)
    actor.generation_config.eos_token_id = [7, 1, 3]
    assert eos_token_ids(actor.generation_config, tokenizer) == (1, 3, 7)
    actor.generation_config.eos_token_id = 7
    assert eos_token_ids(actor.generation_config, tokenizer) == (1, 7)
    actor.generation_config.eos_token_id = None
    assert eos_token_ids(actor.generation_config, tokenizer) == (1,)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tiny.model_folder(tmp_path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="has no end-of-sequence token"):
        load_tokenizer(model(path))


def test_the_digest_is_of_the_files_that_make_the_weights(folder: Path, tmp_path: Path) -> None:
    same, other = tiny.model_folder(tmp_path / "same"), tiny.model_folder(tmp_path / "other", seed=1)
    digest = files_digest(folder)
    assert files_digest(same) == digest != files_digest(other)
    (same / "README.md").write_text("not a weight")
    assert files_digest(same) == digest
    (same / "config.json").write_bytes((same / "config.json").read_bytes() + b" ")
    assert files_digest(same) != digest


def test_a_chat_template_of_ones_own(folder: Path, tmp_path: Path) -> None:
    """It takes the place of the tokenizer's, tells two runs apart, and goes with the tokenizer."""
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    own = ModelConfig(path=str(folder), chat_template=str(path))
    tokenizer = load_tokenizer(own)
    said = [{"role": "user", "content": "why"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "user: why"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(ModelConfig(path=str(shutil.copytree(folder, tmp_path / "saved", dirs_exist_ok=True))))
    assert again.apply_chat_template(said, tokenize=False) == "user: why"
    before = tokenizer_digest(own)
    assert before != tokenizer_digest(model(folder))
    path.write_text("{{ messages[0].content }}")
    assert tokenizer_digest(own) != before
    for text in ("{% for %}", "{{ messages[0].content "):
        path.write_text(text)
        with pytest.raises(UserError, match=r"own\.jinja is not a chat template"):
            load_tokenizer(own)
    with pytest.raises(UserError, match=r"none\.jinja is not a chat template: .*No such file"):
        load_tokenizer(ModelConfig(path=str(folder), chat_template="none.jinja"))


def test_a_model_on_the_hub_comes_with_its_code() -> None:
    needed = [
        "modeling_own.py",
        "custom_generate/generate.py",
        "added_tokens.json",
        "chat_template.jinja",
        "merges.txt",
    ]
    needed += ["tokenizer.model", "vocab.json", "qwen.tiktoken", "special_tokens_map.json", "model.safetensors"]
    offered = [*needed, "pytorch_model.bin", "README.md", "onnx/model.onnx"]
    assert list(filter_repo_objects(offered, allow_patterns=DOWNLOADED)) == needed


def test_the_code_of_a_model_is_what_it_names_and_what_that_imports(tmp_path: Path) -> None:
    classes = {"AutoModel": "modeling_a.Model", "AutoConfig": "somebody/else--configuration_b.Config"}
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": classes}))
    code = {"modeling_a": "from .inner import x", "inner": "from .deep import y", "deep": "", "configuration_b": ""}
    for name, text in (code | {"setup": ""}).items():
        (tmp_path / f"{name}.py").write_text(text)
    assert [path.stem for path in code_files(tmp_path)] == ["deep", "inner", "modeling_a"]
    assert code_names(tmp_path) == sorted(classes.values())


def test_a_model_whose_code_may_not_run_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tiny.with_own_code(tiny.model_folder(tmp_path))
    refused = rf"^model\.path {folder} has Python code of its own, .* set model\.trust_remote_code=true$"
    for load in (load_tokenizer, load_actor, load_critic, text_config, generation_config):
        if load is generation_config:
            (folder / "generation_config.json").unlink()
        with pytest.raises(UserError, match=refused):
            load(ModelConfig(path=str(folder), dtype="float32"))
    trusted = ModelConfig(path=str(folder), dtype="float32", trust_remote_code=True)
    assert type(load_actor(trusted)).__name__ == "OwnForCausalLM"
    copy = tmp_path / "copy"
    copy.mkdir()
    (folder / "custom_generate" / "beams").mkdir(parents=True)
    inner = {"custom_generate/generate.py", "custom_generate/beams/search.py"}
    for name in inner:
        (folder / name).write_text("pass\n")
    copy_tokenizer(trusted, copy)
    assert {*tiny.OWN_CODE, *inner} <= {str(path.relative_to(copy)) for path in copy.rglob("*.py")}
