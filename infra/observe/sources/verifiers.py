"""Evaluations of verifiers, and other files of its episodes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.infra.observe.sources.lines import complete_lines, is_cut, parsed, parsed_file
from ratchet.infra.observe.sources.source import Content, Unit
from ratchet.infra.observe.sources.traces import TRACES, content_of_episodes, episode_of, step_of
from ratchet.rlhf.errors import UserError


class Verifiers:
    """``traces.jsonl`` with an episode, or a trace, on each line.

    An evaluation is one step, 0: import it once it has ended. Episodes that a trainer played belong to its steps, or
    are validations.
    """

    trainer = "verifiers"

    def __init__(self, path: Path) -> None:
        """Takes the folder of a run of verifiers, or its ``traces.jsonl``.

        Raises:
            UserError: there is no such file.
        """
        self._file = path / TRACES if path.is_dir() else path
        if not self._file.is_file():
            raise UserError(
                f"{self._file}: there is no such file: name the folder of an evaluation of verifiers 0.2 or later. An "
                "older results.jsonl is imported with --from jsonl and --map."
            )
        resolved = self._file.parent / "configs" / "resolved" / "eval.json"
        self.config: Mapping[str, Any] = parsed_file(resolved) if resolved.is_file() else {}
        model = self.config.get("model")
        self.model: str | None = model if isinstance(model, str) else None

    def units(self) -> Iterator[Unit]:
        """See `Source.units`. If the last line is cut, the step before it is still being written, unless it is the only
        one: an evaluation that was killed."""
        places: dict[tuple[int, bool], array[int]] = {}
        digests: dict[tuple[int, bool], Any] = {}
        last: tuple[int, bool] | None = None
        for number, position, line in complete_lines(self._file):
            where = f"{self._file}, line {number}"
            last = key = step_of(episode_of(parsed(line, where), where))
            places.setdefault(key, array("q")).extend((number, position, len(line)))
            digests.setdefault(key, hashlib.sha256()).update(line)
        if last is not None and len(places) > 1 and is_cut(self._file):
            del places[last]
        for (step, is_validation), of_step in places.items():
            yield Unit(
                number=step,
                digest=digests[step, is_validation].hexdigest(),
                where=str(self._file),
                read=partial(self._read, of_step, is_validation),
                is_validation=is_validation,
            )

    def _read(self, places: array[int], is_validation: bool) -> Content:
        return content_of_episodes(self._episodes(places), is_validation)

    def _episodes(self, places: array[int]) -> Iterator[tuple[dict[str, Any], str]]:
        with self._file.open("rb") as opened:
            for number, position, size in zip(places[::3], places[1::3], places[2::3], strict=True):
                opened.seek(position)
                where = f"{self._file}, line {number}"
                yield episode_of(parsed(opened.read(size), where), where), where
