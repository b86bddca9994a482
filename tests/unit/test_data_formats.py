"""Datasets as others publish them: layouts of rows, and folders."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ratchet.flows.commands.app import app
from ratchet.rlhf.data import files
from ratchet.rlhf.data.folders import data_files
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.errors import UserError

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
    elif path.name.removesuffix(".gz").endswith((".csv", ".tsv")):
        cells = [
            {name: cell if isinstance(cell, str) else json.dumps(cell) for name, cell in row.items()} for row in rows
        ]
        pd.DataFrame(cells).to_csv(path, sep="\t" if ".tsv" in path.name else ",", index=False)
    else:
        lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
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


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("b/val.jsonl", "val"),
        ("b/sums.jsonl.gz", "sums"),
        ("gsm8k/train.parquet", "train"),
        ("gsm8k/math-00000-of-00002.parquet", "math"),
        ("gsm8k/math.v2.csv", "math.v2"),
    ],
)
def test_a_row_without_a_data_source_has_its_files_name(tmp_path: Path, name: str, source: str) -> None:
    [prompt] = PromptDataset([write(tmp_path / name, {"prompt": "x"})])
    assert prompt.data_source == source


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json", "arrow", "csv", "tsv", "jsonl.gz", "csv.gz", "rows"])
def test_all_kinds_of_files_hold_the_same_rows(tmp_path: Path, ending: str) -> None:
    rows = [{"prompt": str(number), "answer": str(-number)} for number in range(3000)]
    opened = files.open_rows(write(tmp_path / f"a.{ending}", *rows))
    assert len(opened) == 3000
    assert [opened[index][1] for index in (2999, 0, 1500)] == [rows[2999], rows[0], rows[1500]]
    assert [row for _, row in opened] == rows
    assert opened[7][0] == list(opened)[7][0]
    assert opened[7][0].endswith("8")
    assert files.count(str(tmp_path / f"a.{ending}")) == 3000


def test_what_pandas_writes_as_csv(tmp_path: Path) -> None:
    """Cells are texts, and a cell that is empty is None. Messages and objects are JSON."""
    path = tmp_path / "sums.csv"
    frame = pd.DataFrame(
        {
            "prompt": [json.dumps([USER]), 'NA, "null"\nand [1, 2]'],
            "reward_model": [json.dumps({"ground_truth": {"a": [1]}}), None],
            "ground_truth": [None, "007"],
            "level": [1, None],
        }
    )
    frame.to_csv(path, index=False)
    first, second = PromptDataset([path])
    assert (first.messages, first.ground_truth) == ([USER], '{"a": [1]}')
    assert (second.original, second.ground_truth) == ('NA, "null"\nand [1, 2]', "007")
    assert json.loads(first.extra_info) == {"ground_truth": None, "level": "1.0"}


OTHER = "cannot read .*/a[.].*: the formats are Parquet .*Arrow .*JSON .*CSV "


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.csv",
            "prompt,answer\n1 + 1?,2\nAdd 1, 2,3\n",
            "row 2 has more cells than the header: quote texts that hold ','",
        ),
        ("a.tsv", "prompt\nAdd 1\t2\n", "row 1 has more cells than the header: quote texts that hold"),
        ("a.csv", "prompt;answer\nAdd 1, 2;3\n", "by ';', not by ',': save it with commas, or as .tsv with tabs"),
        ("a.csv", '"prompt, or so";"answer"\nx;3\n', "by ';', not by ',': save it with commas"),
        ("a.tsv", "prompt|answer\nx|3\n", r"by '\|', not by '\\t': save it with tabs, or as .csv with commas"),
        ("a.csv", "prompt\tanswer\nx\t3\n", r"a.csv: its cells are separated by '\\t', not by ',': name it .tsv"),
        ("a.tsv", "prompt,answer\nx,3\n", r"a.tsv: its cells are separated by ',', not by '\\t': name it .csv"),
        ("a.tsv", 'prompt\n"x" y\n', r"row 1 is not CSV in UTF-8: '\\t' expected"),
        ("a.csv", 'prompt\n"Add 1" to 2\n', "row 1 is not CSV in UTF-8"),
        ("a.csv", "prompt\n\udce9\n", "is not CSV in UTF-8"),
        ("a.csv", f'messages\n"{[USER]}"\n', "row 1: messages is not JSON .*: write lists and objects by json.dumps"),
        ("a.csv", "prompt,reward_model\nx,2\ny,{2\n", "row 2: reward_model is not JSON"),
        ("a.csv", "prompt\n\n", "no prompts"),
        ("a.csv", "", "no prompts"),
        ("a.xlsx", "PK", OTHER),
        ("a.txt", "prompt,answer\n", OTHER),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), OTHER),
        ("a.arrow.gz", gzip.compress(b"\xff\xff\xff\xff", mtime=0), OTHER),
        ("a.jsonl", "prompt,answer\n", "line 1 is not JSON"),
        ("a.jsonl.gz", "{}", "cannot read .*a.jsonl.gz"),
    ],
)
def test_another_format_is_refused_in_a_line(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=says) as refused:
        list(PromptDataset([path]))
    assert str(path) in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", '"one;or\nmore",prompt\nx,y\n'), ("a.tsv", '"a, b"\nx\n'), ("a.csv", "\ufeffprompt,b;c\r\nx,y\r\n")],
)
def test_other_separators_may_be_in_a_name_of_a_column(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, newline="")
    assert files.count(str(tmp_path / name)) == 1


@pytest.mark.parametrize(
    ("name", "says"), [("p.txt", "cannot read {}: the formats are Parquet"), ("", "--source {} has no train file, ")]
)
def test_data_prompts_refuses_what_it_cannot_read_as_a_start_does(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "p.txt").write_text("prompt\nx\n")
    source, out = str(tmp_path / name), tmp_path / "out"
    done = CliRunner().invoke(app, ["data", "prompts", str(out), "--source", source, "--data-source", "x"])
    assert isinstance(done.exception, UserError)
    assert says.format(source) in str(done.exception)
    assert not out.exists()


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
    (hub / "socratic" / "more.txt").write_text("prompt\nx\n")
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
