"""What `make test` leaves out, and what CI runs of it each day."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from tests import conftest, tiers

FILES = {
    "crash/test_runs.py": """
@pytest.mark.promise
def test_promised(): ...

def test_slow(): ...

@tiers.sampled(5)
@pytest.mark.parametrize("case", range(12))
def test_many(case): ...

@tiers.sampled(8)
@pytest.mark.parametrize("case", range(3))
def test_few(case): ...
""",
    "unit/test_parts.py": """
def test_fast(): ...

@extras.needs("vllm")
def test_extra(): ...

@tiers.sampled(2)
@pytest.mark.parametrize("case", range(30))
def test_in_halves(case): ...
""",
}
ALWAYS, NEVER = {"test_promised", "test_fast"}, {"test_slow", "test_extra"}
"""Tests of which `make test` runs each, or none, on any day."""
CASES = {"test_many": 12, "test_few": 3, "test_in_halves": 30}
EVERY = ALWAYS | NEVER | {f"{name}[{case}]" for name, count in CASES.items() for case in range(count)}


class Collecting:
    """Chooses tests as the tests' conftest does, and remembers them."""

    pytest_collection_modifyitems = staticmethod(conftest.pytest_collection_modifyitems)

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tests")
    for name, text in FILES.items():
        (root / name).parent.mkdir()
        (root / name).write_text(f"import pytest\nfrom tests import extras, tiers\n{text}")
    return root


@cache
def collected(folder: Path, marks: str, day: int, slow_parts: int = 1) -> list[str]:
    """The tests that `pytest -m marks` runs on a day."""
    found = Collecting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tiers.DAY, str(day))
        patch.setenv(tiers.SLOW_PARTS, str(slow_parts))
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        options = ["--collect-only", "-c", os.devnull, "--rootdir", str(folder), "--import-mode=importlib"]
        options += ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]  # the second collects all garbage, often
        pytest.main([*options, "-m", marks, str(folder)], plugins=[found])
    assert len(found.names) == len(set(found.names))
    return found.names


def test_a_part_of_every_sampled_test_is_not_slow_and_another_one_each_day(folder: Path) -> None:
    days = [set(collected(folder, "not slow", day)) for day in range(5)]
    for day, fast in enumerate(days):
        assert fast >= ALWAYS
        assert not NEVER & fast
        sampled = {name: sum(one.startswith(f"{name}[") for one in fast) for name in CASES}
        assert (sampled["test_many"] in (2, 3), sampled["test_few"], sampled["test_in_halves"]) == (True, 1, 15)
        assert set(collected(folder, "slow", day)) == EVERY - fast
    assert set().union(*days) == EVERY - NEVER


@pytest.mark.parametrize("first", range(3))
def test_three_days_of_ci_run_every_test(folder: Path, first: int) -> None:
    """Each slow test once, unless it is not slow on the day of its part."""
    days = range(first, first + 3)
    fast = [set(collected(folder, "not slow", day, slow_parts=3)) for day in days]
    assert fast == [set(collected(folder, "not slow", day)) for day in days]
    slow = [collected(folder, "slow", day, slow_parts=3) for day in days]
    in_parts = [name for part in slow for name in part]
    assert len(in_parts) == len(set(in_parts))
    assert set(in_parts).union(*fast) == EVERY
    assert NEVER | EVERY.difference(*fast, ALWAYS) <= set(in_parts)
    assert all(slow), "a third each"
