"""Coding harnesses of others, as they are installed, do a task with the policy: one for each dialect."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.extras import HARNESSES, needs
from tests.scripted import stage

THOUGHT = "<think>\nthe file is not there yet, so I write it\n</think>\n\n"
TASK = "Write the word there into out.txt."
WRITE = "echo there > out.txt"
Harness = Callable[[str, str, str], tuple[list[str], dict[str, str]]]
"""Returns the command for a base URL, a key and a model, and its environment."""


def claude_code(base_url: str, api_key: str, model: str) -> tuple[list[str], dict[str, str]]:
    own = {
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # else the system message begins with a text that changes with each call
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = [str(HARNESSES / "node_modules/.bin/claude"), "-p", TASK, "--tools", "Bash", "--allowedTools", "Bash"]
    return command, own


def codex(base_url: str, api_key: str, model: str) -> tuple[list[str], dict[str, str]]:
    provider = f'{{name = "ratchet", base_url = "{base_url}", env_key = "POLICY_KEY", wire_api = "responses"}}'
    settings = [
        f'model = "{model}"',
        'model_provider = "ratchet"',
        f"model_providers.ratchet = {provider}",
        # tools that are no functions
        'web_search = "disabled"',
        "features.multi_agent = false",
    ]
    command = [str(HARNESSES / "node_modules/.bin/codex"), "exec", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox"]
    return [*command, *(part for setting in settings for part in ("-c", setting)), TASK], {"POLICY_KEY": api_key}


def mini_swe_agent(base_url: str, api_key: str, model: str) -> tuple[list[str], dict[str, str]]:
    own = {
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    }
    command = [str(HARNESSES / "mini/bin/mini"), "-m", f"openai/{model}", "-t", TASK, "-y", "--exit-immediately"]
    return command, own


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.mark.slow
@needs("harness")
@pytest.mark.parametrize(
    ("harness", "script"),
    [
        (
            claude_code,
            [THOUGHT + call("Bash", f'{{"command": "{WRITE}"}}'), "<think>\nit is\n</think>\n\nIt is there."],
        ),
        (codex, [THOUGHT + call("exec_command", f'{{"cmd": "{WRITE}"}}'), "<think>\nit is\n</think>\n\nIt is there."]),
        (mini_swe_agent, [THOUGHT + call("bash", f'{{"command": "{c}"}}') for c in (WRITE, SUBMIT)]),
    ],
    ids=["claude-code", "codex", "mini-swe-agent"],
)
def test_a_harness_does_a_task_with_the_policy(harness: Harness, script: list[str], tmp_path: Path) -> None:
    """It needs no account, and each trained token is one that the policy drew: thoughts and calls included."""
    folder = tmp_path / "task"
    folder.mkdir()
    printed: list[str] = []

    def program(task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> float:
        command, own = harness(base_url, api_key, model)
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        done = subprocess.run(
            command,
            cwd=folder,
            env={**kept, **own, "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        printed.append(done.stdout)
        assert done.returncode == 0, done.stdout
        return float((folder / "out.txt").read_text() == "there\n")

    with stage(script) as staged:
        dialogue = staged.play(program)
        assert dialogue.error is None, f"{dialogue.error}: {printed}"
        assert dialogue.result is not None and dialogue.result.reward == 1.0
        [branch] = dialogue.branches
        assert len(branch.calls) == len(script), "the second call continues the first"
        assert staged.check_drawn(dialogue) == [f"{turn}<|end|>" for turn in script]
