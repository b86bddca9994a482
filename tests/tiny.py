"""Tiny real parts for tests: a Hugging Face model folder, prompt files and configs that run in a second."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.rlhf.config import RunConfig, parse_config
from ratchet.rlhf.data import countdown_dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ratchet.rlhf.agents.agent_loop import Generator

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/()=<>.,? "
CHAT_TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}({{ m.role }}){{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}(assistant){% endif %}"
)
"""Messages, tools and calls of tools."""


def character_tokenizer(letters: str = LETTERS) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *letters])}
    characters = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model_folder(
    folder: Path,
    *,
    hidden: int = 32,
    layers: int = 2,
    intermediate: int = 64,
    heads: int = 4,
    key_value_heads: int = 2,
    vocabulary: int | None = None,
    letters: str = LETTERS,
    seed: int = 0,
    tied: bool = False,
) -> Path:
    """Writes a Llama with random weights and a character tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = character_tokenizer(letters)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary or len(tokenizer),
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            max_position_embeddings=1024,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
            tie_word_embeddings=tied,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


OWN_CODE = {
    "configuration_own.py": """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "modeling_own.py": """
from transformers import LlamaForCausalLM, LlamaForTokenClassification

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


class OwnForTokenClassification(LlamaForTokenClassification):
    config_class = OwnConfig
""",
    "tokenization_own.py": """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
""",
}
"""Modules of a model folder with code of its own, by file."""


def with_own_code(folder: Path, first_line: str = "") -> Path:
    """Gives the model in a folder code of its own, without which neither it nor its tokenizer can be loaded.

    Args:
        folder: The model's folder.
        first_line: First line of each of its modules.
    """
    for name, code in OWN_CODE.items():
        (folder / name).write_text(f"{first_line}\n{code}")
    classes = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        "AutoModelForTokenClassification": "modeling_own.OwnForTokenClassification",
    }
    for name, changes in (
        ("config.json", {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": classes}),
        (
            "tokenizer_config.json",
            {
                "tokenizer_class": "OwnTokenizer",
                "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
            },
        ),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@contextmanager
def chat_generator(folder: Path, *, version: int = 0, interruptible: bool = False) -> Iterator[Generator]:
    """Yields the generator of a new model in `folder`, whose tokenizer has `CHAT_TEMPLATE`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ratchet.rlhf.agents.agent_loop import Generator
    from ratchet.rlhf.rollout.hf_engine import HFRollout

    model_folder(folder, letters=LETTERS + '{}[]":_')
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    engine = HFRollout(AutoModelForCausalLM.from_pretrained(folder), eos_token_ids=(1,), tokenizer=tokenizer)
    generator = Generator(engine, tokenizer, interruptible=interruptible)
    generator.resume(version, engine)
    yield generator
    engine.close()


def moe_folder(folder: Path, kind: str, *, scale: float = 10, **changes: Any) -> Path:
    """Writes a mixture of experts on the same tokens, with a decided router.

    Args:
        folder: The folder to write.
        kind: Its type in transformers: `qwen3_moe` or `mixtral`.
        scale: Factor of its matrices, relative to the usual ones.
        changes: Keys of its config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_folder(folder)
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "intermediate_size": 64},
        "mixtral": {"num_local_experts": 4, "intermediate_size": 16},
    }[kind]
    tokens = {"vocab_size": 3 + len(LETTERS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    config = AutoConfig.for_model(
        kind, **tokens | shape | experts | {"num_experts_per_tok": 2, "max_position_embeddings": 512} | changes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= scale
    model.save_pretrained(folder)
    return folder


def reward_model_folder(folder: Path, base: Path, *, process: bool = False, labels: int = 1, **changes: Any) -> Path:
    """Writes a classifier on the same tokens, with random weights; `changes` are keys of its config."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification

    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    config = LlamaConfig.from_pretrained(base, num_labels=labels, architectures=None)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = (LlamaForTokenClassification if process else LlamaForSequenceClassification)(config)
        torch.nn.init.normal_(model.score.weight, std=0.5)
        model.save_pretrained(folder)
    return folder


def prompt_file(path: Path, prompts: int = 16, seed: int = 7) -> Path:
    import pyarrow.parquet as pq

    pq.write_table(countdown_dataset.rows(countdown_dataset.problems(seed=seed, count=prompts, high=9)), path)
    return path


def config(root: Path, **changes: Any) -> RunConfig:
    """Returns a PPO run of three iterations in `root`; `changes` are dotted keys with ``__`` for dots."""
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "store": f"file://{root}/runs"},
        "model": {"path": str(root / "model"), "dtype": "float32"},
        "data": {"train": [str(root / "prompts.parquet")], "prompts_per_iteration": 4, "max_prompt_tokens": 200},
        "rollout": {"n": 2, "max_response_tokens": 8, "prompts_per_shard": 2},
        "algorithm": {"kl": {"in_reward": 0.01}},
        "actor": {"lr": 1e-3, "mini_batch_trajectories": 4, "micro_batch_tokens": 512},
        "critic": {"lr": 1e-3, "mini_batch_trajectories": 4, "micro_batch_tokens": 512},
        "checkpoint": {"every": 1, "background": False},  # what is committed does not go by the pace of the machine
        "train": {"iterations": 3},
    }
    return parse_config(tree, "tests").with_values({key.replace("__", "."): value for key, value in changes.items()})


def workspace(root: Path) -> Path:
    """Returns a folder with everything that `config` names."""
    model_folder(root / "model")
    prompt_file(root / "prompts.parquet")
    return root
