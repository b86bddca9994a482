"""Labels of pairs of answers: tables of `pair_id` and `preferred`, and Label Studio's import and export."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ratchet.rlhf.data.files import read
from ratchet.rlhf.errors import UserError, in_one_line

Preferred = Literal["a", "b", "tie"]
MEANS: Mapping[str, Preferred] = {"a": "a", "b": "b", "tie": "tie", "left": "a", "right": "b"}
"""Meanings of labels; Label Studio's pairwise comparison uses left and right."""
LABELING_CONFIG = """<View>
  <Text name="prompt" value="$prompt"/>
  <Header value="Select the better answer, or a tie"/>
  <Pairwise name="preferred" toName="answer_a,answer_b"/>
  <View style="display: flex; gap: 1em">
    <View style="flex: 1"><Text name="answer_a" value="$answer_a"/></View>
    <View style="flex: 1"><Text name="answer_b" value="$answer_b"/></View>
  </View>
  <Choices name="tie" toName="prompt" choice="single" required="false"><Choice value="tie"/></Choices>
</View>
"""
"""Label Studio's labeling interface for the tasks of `label_studio_tasks`."""
MISTAKES = 10
"""Maximum number of a file's mistakes that an error lists."""


@dataclass(frozen=True)
class Labels:
    """The labels of some pairs."""

    preferred: Mapping[str, Preferred]
    """The better answer, or a tie, by the pair's id."""
    skipped: int
    """Number of pairs without a label: not judged, or with a tied vote."""


def label_studio_tasks(pairs: Iterable[Mapping[str, Any]]) -> str:
    """Formats pairs as tasks, in JSON, that Label Studio imports.

    `pairs` are rows of `pair_id`, `prompt`, `answer_a` and `answer_b`.
    """
    names = ("pair_id", "prompt", "answer_a", "answer_b")
    return json.dumps([{"data": {name: pair[name] for name in names}} for pair in pairs], ensure_ascii=False, indent=1)


def read_labels(url: str, pair_ids: Collection[str]) -> Labels:
    """Reads the labels of pairs.

    Args:
        url: Parquet or JSON file, a path or any fsspec URL: rows of `pair_id` and `preferred` (a, b, tie, or null for a
            skipped pair), or Label Studio's JSON export. A pair may have several labels: the majority wins.

    Raises:
        UserError: rows are malformed, or of no pair, with up to ten of them; or there is no label.
    """
    votes: dict[str, list[Preferred | None]] = defaultdict(list)
    mistakes: list[str] = []
    for where, row in read(url):
        try:
            pair_id, preferred = _label(row)
        except ValueError as error:
            mistakes.append(f"{where}: {in_one_line(error)}")
            continue
        if pair_id in pair_ids:
            votes[pair_id] += preferred
        else:
            mistakes.append(f"{where}: there is no pair {pair_id!r:.60}: label the pairs that this command wrote")
    if mistakes:
        more = [f"and {len(mistakes) - MISTAKES} more"] if len(mistakes) > MISTAKES else []
        raise UserError("\n".join([*mistakes[:MISTAKES], *more]))
    winners = {pair_id: _most(given) for pair_id, given in votes.items()}
    known = {pair_id: preferred for pair_id, preferred in winners.items() if preferred is not None}
    if not known:
        raise UserError(f"{url}: no pair has a label: set preferred to a, b or tie")
    return Labels(known, len(pair_ids) - len(known))


def _label(row: Mapping[str, Any]) -> tuple[str, list[Preferred | None]]:
    """Returns the pair of a row, and the preference of each of its labellers."""
    task = row.get("data")
    if isinstance(task, Mapping):
        pair_id, said = task.get("pair_id"), list(_annotations(row))
    elif "preferred" in row:
        pair_id, said = row.get("pair_id"), [row["preferred"]]
    else:
        raise ValueError(
            f"labels are rows of pair_id and preferred, or Label Studio's JSON export; there are {', '.join(row)}"
        )
    if not isinstance(pair_id, str):
        raise ValueError("pair_id is missing: keep the one that the pair has")
    return pair_id, list(map(_preferred, said))


def _annotations(task: Mapping[str, Any]) -> Iterator[object]:
    """Yields the labels of a Label Studio task; None for a skipped one."""
    for annotation in task.get("annotations") or ():
        values = [result.get("value") or {} for result in annotation.get("result") or ()]
        choices = [choice for value in values for choice in value.get("choices") or ()]
        selected = [value["selected"] for value in values if value.get("selected") is not None]
        said = [*choices, *selected]
        yield None if annotation.get("was_cancelled") or not said else said[0]


def _preferred(said: object) -> Preferred | None:
    if said is None:
        return None
    meant = MEANS.get(said.strip().lower()) if isinstance(said, str) else None
    if meant is None:
        raise ValueError(f"preferred is {said!r:.60}: write a, b or tie, or nothing for a pair that was skipped")
    return meant


def _most(votes: Iterable[Preferred | None]) -> Preferred | None:
    """Returns the majority's label; None without votes, or on a tie."""
    counts = Counter(vote for vote in votes if vote is not None).most_common(2)
    if not counts or (len(counts) == 2 and counts[0][1] == counts[1][1]):
        return None
    return counts[0][0]
