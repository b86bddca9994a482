"""What the terminal is given of texts from outside."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from ratchet.flows.commands import runs, tables
from ratchet.flows.terminal import visible
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.errors import UserError
from tests.stored import STORED

HOSTILE = [
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "\x9b31m",
    "over\rwritten",
    "back\x08space",
    "\u202eright to left",
    "half \ud800 of a pair",
    "\x00",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_acts_on_a_terminal_is_shown(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert shown.isprintable(), repr(shown)


def test_a_files_name_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(STORED / "run", tmp_path / "run")
    for name in (b"\xff.txt", b"\x1b[2J"):
        (tmp_path / "run" / os.fsdecode(name)).touch()
    written = io.StringIO()
    monkeypatch.setattr(runs, "console", Console(file=written, markup=False))
    runs.vacuum("run", store=f"file://{tmp_path}", foreign=True)
    assert written.getvalue().splitlines()[:2] == ["\\x1b[2J", "\\udcff.txt"]


@pytest.mark.parametrize("text", ["plain", "two\nlines\tand a tab", "日本語, ñ, 🙂", "a\\x1b that is text"])
def test_what_does_not_stays(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize("format", ["table", "csv", "md", "json"])
@pytest.mark.parametrize("text", HOSTILE[:-2])
def test_trajectories_are_printed_as_text(format: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame(
        {"response": [text], "reward_parts": [{text: 1.0}], "turns": [[{"role": "a", "content": text}]]}
    )
    printed = io.StringIO()
    tables.rows(Console(file=printed, force_terminal=False, width=200), frame, format)
    found = printed.getvalue() + capsys.readouterr().out
    assert found
    assert all(character.isprintable() or character in "\n\t" for character in found), repr(found)


@pytest.mark.parametrize("place", ["prompt", "ground_truth", "extra_info"])
def test_half_a_surrogate_pair_is_refused_by_file_and_row(place: str, tmp_path: Path) -> None:
    row = {"data_source": "x", "prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}, "extra_info": {}}
    bad = "half \ud800 of a pair"
    row |= {
        "prompt": {"prompt": bad},
        "ground_truth": {"reward_model": {"ground_truth": bad}},
        "extra_info": {"extra_info": {"note": bad}},
    }[place]
    whole = {"data_source": "x", "prompt": "both \U0001f642 halves", "reward_model": {"ground_truth": "2"}}
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (whole, row)))
    with pytest.raises(UserError) as refused:
        list(PromptDataset([path]))
    assert str(refused.value).startswith(f"{path}, line 2 holds \\ud800, half of a surrogate pair")
