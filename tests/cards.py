"""Runs the code in model cards as it stands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from markdown_it import MarkdownIt

from tests.ports import free_port
from tests.served import served


def code(folder: Path, language: str) -> str:
    text = (folder / "README.md").read_text().partition("\n---\n")[2]
    [block] = [token.content for token in MarkdownIt("commonmark").parse(text) if token.info == language]
    return block


def printed(folder: Path) -> str:
    """Returns the output of the card's Python, run in the folder, in a process of its own without a network."""
    seeded = "import torch; torch.manual_seed(0)\n"  # it samples: a tiny model may say nothing now and then
    command = [sys.executable, "-c", seeded + code(folder, "python")]
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def serving(folder: Path, options: Mapping[str, object]) -> str:
    """Starts the server of the card's command, with more options at its end; returns its URL."""
    port = free_port()
    options = {"port": port, "host": "127.0.0.1", **options}
    more = shlex.join(f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items())
    script = f"cd {shlex.quote(str(folder))} && exec {code(folder, 'bash').rstrip()} {more}"
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{_named_vllm(folder.parent / 'packages')}:{os.environ.get('PYTHONPATH', '')}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return served(["bash", "-c", script], port, folder.parent / f"serve-{port}.log", environment)


def _named_vllm(folder: Path) -> Path:
    """Returns a folder of packages in which vLLM has its name: the command asks for it, and the build for the CPU has
    another name."""
    told = folder / "vllm.dist-info" / "METADATA"
    told.parent.mkdir(parents=True, exist_ok=True)
    told.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return folder
