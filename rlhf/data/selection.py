"""Options that select trajectories for training data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypedDict

from ratchet.rlhf.data.formats import Messages
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.named import load_named, raised, source_of


class Kind(StrEnum):
    sft = "sft"
    dpo = "dpo"
    kto = "kto"
    reward_model = "reward-model"

    @property
    def is_of_pairs(self) -> bool:
        """True if a row has a preferred and a rejected answer."""
        return self in (Kind.dpo, Kind.reward_model)


class Candidate(TypedDict):
    """A scored trajectory of one answer, as the function of `--filter` receives it."""

    run: str
    iteration: int
    trajectory_id: str
    prompt_id: str
    data_source: str
    messages: Messages
    """What the policy answered."""
    prompt: str
    """The same, rendered by the chat template."""
    response: str
    finish_reason: str
    """stop, or length: the answer is cut off."""
    ground_truth: Any
    """As in the dataset; None if the prompt has none."""
    extra_info: Any
    score: float
    reward_parts: Mapping[str, float]


Filter = Callable[[Candidate], bool]


def load_filter(name: str) -> tuple[Filter, str]:
    """Loads a function that returns True for the trajectories to keep, and the sha256 of its module's source.

    The function raises UserError if the user's code raises an exception, or returns something else than True or False.

    Args:
        name: ``package.module:function`` or ``file.py:function``.
    """
    function = load_named(name, "--filter", "", ("keep",), ())

    def keeps(candidate: Candidate) -> bool:
        where = f"--filter {name} (run {candidate['run']}, {candidate['trajectory_id']})"
        try:
            kept: object = function(candidate)
        except Exception as error:
            raise UserError(f"{where} {raised(error, function)}") from None
        if not isinstance(kept, bool):
            raise UserError(f"{where} returned {kept!r:.60}: return True to keep a trajectory, and False otherwise")
        return kept

    return keeps, hashlib.sha256(source_of(function, "--filter", name).encode()).hexdigest()


@dataclass(frozen=True)
class Selection:
    """The rows to make from trajectories."""

    kind: Kind
    min_score: float | None = None
    """Minimum score of an answer to train on: a group's best, a pair's preferred one, or one labelled true.

    None: for sft and kto the score of a solved answer, if the run knows it; otherwise there is no limit, and labels
    compare with the group's mean.
    """
    margin: float | None = None
    """Minimum difference of a pair's scores. None: any."""
    similarity: float = 0.9
    """Minimum Jaccard index of near-duplicate rows. 1: only exact duplicates are left out."""
    decontaminate: bool = True
    """True: rows that contain a validation prompt are left out."""
    balance: bool = False
    """True: each data source has as many rows as the smallest."""
    filter: str | None = None
    """Name of a function that chooses among the trajectories before groups are formed; see `load_filter`."""

    def __post_init__(self) -> None:
        """Raises UserError if a value is out of range, or does not fit the kind."""
        if self.margin is not None and not self.kind.is_of_pairs:
            raise UserError(
                f"--margin is the difference of a pair, and --kind {self.kind} makes none: leave it out, or choose "
                "dpo or reward-model"
            )
        if self.margin is not None and not self.margin > 0:
            raise UserError(f"--margin {self.margin:g}: write a difference of scores above 0")
        if not 0 < self.similarity <= 1:
            raise UserError(f"--similarity {self.similarity:g}: write a number above 0 and up to 1")
