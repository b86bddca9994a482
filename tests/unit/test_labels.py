"""Labels of pairs: tables, and what Label Studio exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.rlhf.data.labels import LABELING_CONFIG, label_studio_tasks, read_labels
from ratchet.rlhf.errors import UserError

IDS = {"p1", "p2", "p3", "p4"}


def annotation(selected: str | None, *, tie: bool = False, skipped: bool = False) -> dict[str, Any]:
    """As Label Studio 1.x exports it."""
    result: list[dict[str, Any]] = []
    if selected is not None:
        value = {"selected": selected}
        result.append({"from_name": "preferred", "to_name": "answer_a", "type": "pairwise", "value": value})
    if tie:
        value_of_tie = {"choices": ["tie"]}
        result.append({"from_name": "tie", "to_name": "prompt", "type": "choices", "value": value_of_tie})
    return {"id": 1, "result": result, "was_cancelled": skipped, "lead_time": 4.2, "completed_by": 3}


@pytest.mark.parametrize("name", ["l.parquet", "l.csv"])
def test_a_table_of_labels(tmp_path: Path, name: str) -> None:
    table = pa.table({"pair_id": ["p1", "p2", "p3", "p4"], "preferred": ["a", "B ", "tie", None]})
    if name == "l.csv":
        table.to_pandas().to_csv(tmp_path / name)
    else:
        pq.write_table(table, tmp_path / name)
    labels = read_labels(str(tmp_path / name), IDS)
    assert labels.preferred == {"p1": "a", "p2": "b", "p3": "tie"}
    assert labels.skipped == 1


def test_an_export_of_label_studio_in_which_most_win(tmp_path: Path) -> None:
    tasks = json.loads(
        label_studio_tasks({"pair_id": name, "prompt": "", "answer_a": "", "answer_b": ""} for name in IDS)
    )
    annotations = {
        "p1": [annotation("left"), annotation("right"), annotation("right")],
        "p2": [annotation("left"), annotation("right")],
        "p3": [annotation("left", tie=True), annotation(None, skipped=True)],
        "p4": [annotation(None, skipped=True)],
    }
    exported = [{"id": 7, **task, "annotations": annotations[task["data"]["pair_id"]]} for task in tasks]
    (tmp_path / "export.json").write_text(json.dumps(exported))
    labels = read_labels(str(tmp_path / "export.json"), IDS)
    assert labels.preferred == {"p1": "b", "p3": "tie"}
    assert labels.skipped == 2, "p2, about which as many disagree, and p4, which nobody judged"


def test_the_interface_shows_what_the_tasks_hold() -> None:
    [task] = json.loads(
        label_studio_tasks([{"pair_id": "p", "prompt": "q", "answer_a": "x", "answer_b": "y", "run": "r"}])
    )
    elements = ElementTree.fromstring(LABELING_CONFIG).iter()
    shown = {element.attrib["value"].removeprefix("$") for element in elements if element.tag == "Text"}
    assert task["data"].keys() == {*shown, "pair_id"}


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    rows = [
        {"pair_id": "p1", "preferred": "c"},
        {"pair_id": "p9", "preferred": "a"},
        {"id": "p1"},
        {"preferred": "a"},
        {"pair_id": "p2", "preferred": "a"},
    ]
    path = tmp_path / "l.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError) as error:
        read_labels(str(path), IDS)
    assert str(error.value).splitlines() == [
        f"{path}, line 1: preferred is 'c': write a, b or tie, or nothing for a pair that was skipped",
        f"{path}, line 2: there is no pair 'p9': label the pairs that this command wrote",
        f"{path}, line 3: labels are rows of pair_id and preferred, or Label Studio's JSON export; there are id",
        f"{path}, line 4: pair_id is missing: keep the one that the pair has",
    ]
    path.write_text("".join(json.dumps({"pair_id": "p9", "preferred": "a"}) + "\n" for _ in range(13)))
    with pytest.raises(UserError, match=r"line 10: .*\nand 3 more$"):
        read_labels(str(path), IDS)
    path.write_text(json.dumps({"pair_id": "p1", "preferred": None}))
    with pytest.raises(UserError, match="no pair has a label: set preferred to a, b or tie"):
        read_labels(str(path), IDS)
