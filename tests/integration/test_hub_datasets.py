"""Prompts from a dataset on the hub: a local server speaks the hub's protocol, and the package datasets asks it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.rlhf.data.prompts import PromptDataset
from tests import tiny
from tests.hub_server import READS, Hub, Repository, hub_server

ROWS = [{"question": f"{number} and 1?", "answer": f"One more.\n#### {number + 1}"} for number in range(7)]
CHATS = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "!"}]} for text in "ab"]
README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/tr-*.parquet}
  - {split: test, path: main/te.parquet}
- config_name: other
  data_files: other/*.parquet
---
"""
SAY = """
import json, sys
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.errors import RatchetError
for path in sys.argv[1:]:
    try:
        dataset = PromptDataset([path])
        prompts = [[prompt.messages[-1]["content"], prompt.ground_truth, prompt.data_source] for prompt in dataset]
        print(json.dumps({"digest": dataset.digest, "prompts": prompts, "at_5": dataset[len(dataset) - 1].where}))
    except RatchetError as error:
        print(json.dumps({"error": str(error)}))
"""
Python = Callable[..., str]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


FILES = {
    "README.md": README.encode(),
    "main/tr-0.parquet": parquet(ROWS[:4]),
    "main/tr-1.parquet": parquet(ROWS[4:]),
    "main/te.parquet": parquet(ROWS[:2]),
    "other/all.parquet": parquet(ROWS[:1]),
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        server.repositories["datasets/me/sums"] = Repository(private=True, files=dict(FILES))
        server.repositories["datasets/me/chats"] = Repository(private=False, files={"all.jsonl": lines(CHATS)})
        yield server


@pytest.fixture
def python(hub: Hub, tmp_path: Path) -> Python:
    """Runs Python with arguments, as a user of this hub; gives what it prints."""

    def run(*arguments: object, code: int = 0, **environment: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=clean | settings | {"HF_TOKEN": READS} | environment,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr if code else done.stdout

    return run


def told(python: Python, *paths: str, **environment: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in python("-c", SAY, *paths, **environment).splitlines()]


def test_a_dataset_of_the_hub_is_read_like_its_files(python: Python, hub: Hub, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name, data in FILES.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(data)
    commit = hub.repositories["datasets/me/sums"].commit
    names = ("me/sums:main/train", f"me/sums@{commit}:main/train", "hf://datasets/me/sums:main/train", "me/chats")
    downloaded, pinned, in_place, chats = told(python, *names)
    expected = [[row["question"], row["answer"], "me/sums"] for row in ROWS]
    assert downloaded["prompts"] == pinned["prompts"] == in_place["prompts"] == expected
    assert downloaded["digest"] == pinned["digest"] == in_place["digest"]
    assert downloaded["digest"] == PromptDataset([f"{copy}:main/train"]).digest, "that of the files on a disk"
    assert downloaded["at_5"].startswith(str(tmp_path / "home")) and downloaded["at_5"].endswith("tr-1.parquet, row 3")
    assert in_place["at_5"] == f"hf://datasets/me/sums@{commit}/main/tr-1.parquet, row 3"
    assert chats["prompts"] == [["a", "!", "me/chats"], ["b", "!", "me/chats"]]

    hub.requests.clear()
    [again] = told(python, "me/sums:main/train")
    assert again == downloaded
    assert not [request for request in hub.requests if request.startswith("GET /datasets/")], "they are in the cache"


def test_a_file_that_is_read_in_place_is_not_downloaded(python: Python, hub: Hub, tmp_path: Path) -> None:
    told(python, "hf://datasets/me/sums:main/train")
    assert not [*(tmp_path / "home").rglob("*.parquet")]


def test_without_the_hub_the_cache_is_used(python: Python, hub: Hub) -> None:
    [refused] = told(python, "me/sums:main/train", HF_HUB_OFFLINE="1")
    assert "`hf download --repo-type dataset me/sums` puts it there" in refused["error"]
    download = "from huggingface_hub import snapshot_download as get; get('me/sums', repo_type='dataset')"
    python("-c", download)
    online, offline = (told(python, "me/sums:main/train", HF_HUB_OFFLINE=flag) for flag in "01")
    assert online == offline
    assert told(python, "me/sums:main/train", HF_ENDPOINT="http://127.0.0.1:9")[0]["error"].startswith("cannot reach")


def test_what_the_hub_does_not_have_is_refused_in_one_line(python: Python, hub: Hub) -> None:
    hub.repositories["datasets/me/text"] = Repository(private=False, files={"a.txt": b"text"})
    hub.repositories["datasets/me/code"] = Repository(private=False, files={"code.py": b"1", "a.jsonl": lines(CHATS)})
    for name, says in (
        ("me/sums", "several configs: name one of main, other, such as me/sums:main"),
        ("me/sums:main", "several splits: name one of train, test, such as me/sums:main/train"),
        ("me/sums:main/dev", "no split dev: name one of train, test"),
        ("me/sums:chats/train", "no config chats: name one of main, other"),
        ("me/none", "me/none: there is no such file or folder here, and no such dataset on the hub that this token"),
        ("me/sums@v2:main/train", "no such dataset at v2 on the hub"),
        ("me/text", "the formats are Parquet"),
        ("me/code", "Dataset scripts are no longer supported"),
    ):
        [refused] = told(python, name)
        assert says in refused["error"] and "\n" not in refused["error"], name


def test_a_run_trains_on_a_dataset_of_the_hub(python: Python, hub: Hub, tmp_path: Path, prefect_server: str) -> None:
    tiny.model_folder(tmp_path / "model")
    config = tiny.config(
        tmp_path, **{"data.train": "me/sums:main/train", "train.iterations": 1, "reward.function": "gsm8k"}
    )
    (tmp_path / "run.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    ratchet = ("-m", "ratchet.flows.commands.app")
    python(*ratchet, "train", tmp_path / "run.yaml")
    store = ("--store", config.run.store)
    shown = python(*ratchet, "show", "tiny", *store, "--columns", "data_source", "--format", "json").splitlines()
    assert {json.loads(line)["data_source"] for line in shown} == {"me/sums"}

    again = (*ratchet, "train", tmp_path / "run.yaml")
    python(*again, "train.iterations=2", "data.train=hf://datasets/me/sums:main/train")
    hub.repositories["datasets/me/sums"].files["main/tr-1.parquet"] = parquet(ROWS[3:])
    assert "data.train" in python(*again, "train.iterations=3", code=2)
