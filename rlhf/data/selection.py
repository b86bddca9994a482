"""Options that select trajectories for training data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ratchet.rlhf.errors import UserError


class Kind(StrEnum):
    sft = "sft"
    dpo = "dpo"
    kto = "kto"
    reward_model = "reward-model"

    @property
    def is_of_pairs(self) -> bool:
        """True if a row has a preferred and a rejected answer."""
        return self in (Kind.dpo, Kind.reward_model)


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
