"""Selects the tests that run: `make test` leaves out slow tests, `make test-all` runs all, CI runs some slow ones.

A test is slow if it is marked so, if it needs an extra that `make test` does not install, if it is a case of a
`sampled` test that is not drawn on this day, or if it starts whole runs without the mark `promise`. Days are numbered:
`RATCHET_DAY=739946` repeats one.
"""

from __future__ import annotations

import datetime
import os
from collections import defaultdict
from zlib import crc32

import pytest

from tests import extras

DAY = "RATCHET_DAY"
STARTS_RUNS = {"integration", "crash", "faults"}
"""Folders of tests that start whole runs."""
SLOW_PARTS = "RATCHET_SLOW_PARTS"
"""With 3, a third of the slow tests run, another third each day."""


def sampled(parts: int) -> pytest.MarkDecorator:
    """Returns the mark of a test with many similar cases: each day another one of so many parts is not slow."""
    return pytest.mark.sampled(parts)


def set_day() -> None:
    """Chooses the day, once for all workers of pytest-xdist: midnight may come before all have collected."""
    os.environ.setdefault(DAY, str(datetime.date.today().toordinal()))


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests as slow, and deselects the slow ones that do not run on this day."""
    day = int(os.environ[DAY])
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if extras.is_extra(item):
            item.add_marker("slow")
        elif item.get_closest_marker("sampled"):
            functions[item.nodeid.partition("[")[0]].append(item)
        elif item.path.parent.name in STARTS_RUNS and not item.get_closest_marker("promise"):
            item.add_marker("slow")
    for cases in functions.values():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        parts = min(mark.args[0], len(cases))
        for number, item in enumerate(sorted(cases, key=_shuffled)):
            if (number - day) % parts:
                item.add_marker("slow")

    parts = int(os.environ.get(SLOW_PARTS, "1"))
    others = [item for item in items if item.get_closest_marker("slow") and (_shuffled(item)[0] - day) % parts]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def _shuffled(item: pytest.Item) -> tuple[int, str]:
    """Returns a sort key unrelated to the parameters of cases, so that each part has some of every kind."""
    return crc32(item.nodeid.encode()), item.nodeid
