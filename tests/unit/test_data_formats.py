"""Datasets as others publish them: layouts of rows, and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.data import files
from rlhf.data.folders import data_files
from rlhf.data.prompts import PromptDataset
from rlhf.errors import UserError

USER = {"role": "user", "content": "1 + 1?"}
ANSWER = {"role": "assistant", "content": "2"}


def write(path: Path, *rows: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(list(rows))
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "truth", "columns"),
    [
        ({"prompt": "1 + 1?", "solution": "2"}, "2", {"solution": "2"}),
        ({"prompt": [USER], "answer": "2", "level": 3}, "2", {"answer": "2", "level": 3}),
        ({"prompt": "1 + 1?", "completion": "2"}, "2", {"completion": "2"}),
        ({"prompt": [USER], "completion": [ANSWER]}, "2", {"completion": [ANSWER]}),
        ({"prompt": [USER], "ground_truth": {"a": 1}}, '{"a": 1}', {"ground_truth": {"a": 1}}),
        ({"messages": [USER, ANSWER]}, "2", {}),
        ({"messages": [USER]}, None, {}),
        ({"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]}, "2", {}),
        ({"prompt": [USER], "reward_model": {"ground_truth": "3"}, "answer": "2"}, "3", {"answer": "2"}),
    ],
)
def test_rows_of_verl_trl_and_sharegpt(
    tmp_path: Path, row: dict[str, Any], truth: str, columns: dict[str, Any]
) -> None:
    [prompt] = PromptDataset([write(tmp_path / "sums.jsonl", row)])
    assert prompt.messages == [USER]
    assert prompt.ground_truth == truth
    assert json.loads(prompt.extra_info) == columns
    assert prompt.data_source == "sums", "the file's name"
    assert prompt.original == row.get("prompt", [USER])


def test_sharegpt_may_have_a_system_message_and_several_turns(tmp_path: Path) -> None:
    turns = [("human", "1 + 1?"), ("gpt", "2"), ("human", "Sure?"), ("gpt", "Yes.")]
    row = {"system": "Add.", "conversations": [{"from": role, "value": text} for role, text in turns]}
    [prompt] = PromptDataset([write(tmp_path / "sharegpt.json", row)])
    roles = [message["role"] for message in prompt.messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert prompt.ground_truth == "Yes."


def test_a_file_named_after_its_split_has_its_folders_name(tmp_path: Path) -> None:
    [prompt] = PromptDataset([write(tmp_path / "gsm8k" / "train-00000-of-00001.parquet", {"prompt": "x"})])
    assert prompt.data_source == "gsm8k"


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json", "arrow"])
def test_all_kinds_of_files_hold_the_same_rows(tmp_path: Path, ending: str) -> None:
    rows = [{"prompt": str(number), "answer": str(-number)} for number in range(3000)]
    opened = files.open_rows(write(tmp_path / f"a.{ending}", *rows))
    assert len(opened) == 3000
    assert [opened[index][1] for index in (2999, 0, 1500)] == [rows[2999], rows[0], rows[1500]]
    assert [row for _, row in opened] == rows
    assert opened[7][0] == list(opened)[7][0]
    assert opened[7][0].endswith("8")


README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: socratic/*.jsonl
---
# Sums
"""


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A copy of a hub repository with a README."""
    folder = tmp_path / "sums"
    for split, answer in (("train-00000-of-00002", "0"), ("train-00001-of-00002", "1"), ("test-00000-of-00001", "2")):
        write(folder / "main" / f"{split}.parquet", {"prompt": "x", "answer": answer})
    write(folder / "socratic" / "all.jsonl", {"prompt": "x", "answer": "3"})
    (folder / "README.md").write_text(README)
    return folder


def answers(path: str) -> list[str | None]:
    return [prompt.ground_truth for prompt in PromptDataset([path])]


def remedy(error: UserError) -> str:
    """The path that an error names as the fix."""
    return str(error).rpartition("such as ")[2]


def test_a_hub_repository_is_read_as_its_readme_says(hub: Path) -> None:
    assert answers(f"{hub}:main/train") == ["0", "1"]
    assert answers(f"{hub}:main/test") == ["2"]
    assert answers(f"{hub}:socratic") == ["3"]
    assert {prompt.data_source for prompt in PromptDataset([f"{hub}:socratic"])} == {"sums"}
    with pytest.raises(UserError, match="has several configs: name one of main, socratic") as refused:
        data_files(str(hub))
    with pytest.raises(UserError, match="has several splits: name one of train, test") as again:
        data_files(remedy(refused.value))
    assert answers(remedy(again.value)) == ["0", "1"], "the fix works"
    with pytest.raises(UserError, match="has no split dev: name one of train, test") as unknown:
        data_files(f"{hub}:main/dev")
    assert answers(remedy(unknown.value)) == ["0", "1"]


def test_without_a_readme_the_names_of_files_tell_the_split(hub: Path) -> None:
    (hub / "README.md").unlink()
    assert answers(f"{hub}/main:test") == ["2"]
    assert answers(f"{hub}/socratic") == ["3"]
    (hub / "socratic" / "more.csv").write_text("prompt\nx\n")
    assert answers(f"{hub}/socratic") == ["3"]
    (hub / "empty").mkdir()
    with pytest.raises(UserError, match="has no data files"):
        data_files(f"{hub}/empty")


def test_a_readme_names_nothing_outside_its_folder(hub: Path) -> None:
    write(hub.parent / "secret.jsonl", {"prompt": "x"})
    for pattern in ("../secret.jsonl", "/etc/*.json"):
        (hub / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {pattern}\n---\n")
        with pytest.raises(UserError, match="which is outside the folder"):
            data_files(str(hub))


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    """Folders as datasets 4 writes them."""
    for split, answer in (("train", "0"), ("test", "1")):
        folder = tmp_path / "saved" / split
        write(folder / "data-00000-of-00001.arrow", {"prompt": "x", "answer": answer})
        (folder / "dataset_info.json").write_text("{}")
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert answers(f"{tmp_path}/saved:test") == ["1"]
    assert answers(f"{tmp_path}/saved/train") == ["0"]
    digests = {files.digest(f"{tmp_path}/saved:{split}") for split in ("train", "test")}
    assert len(digests) == 2
    state = {"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (tmp_path / "saved" / "train" / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"call flatten_indices\(\) before save_to_disk\(\)"):
        data_files(f"{tmp_path}/saved/train")
