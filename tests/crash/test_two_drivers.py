"""Two drivers of one run: one of them wins, the other commits nothing more and says so by exit code 3."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from ratchet.rlhf.config import RunConfig
from tests.environments import check_books, entries
from tests.history import History
from tests.processes import Child, Fault, Processes


def wait_until(condition: Callable[[], bool], timeout: float = 900.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def sleeps(child: Child) -> bool:
    """Whether the process has stopped itself."""
    return psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED


def check_finished(config: RunConfig, uninterrupted: dict[int, History]) -> None:
    history = History.of(config)
    history.check_sound()
    assert history.results == uninterrupted[1].results


def test_two_started_at_once(
    config: RunConfig, config_file: Path, processes: Processes, uninterrupted: dict[int, History]
) -> None:
    barrier = Fault("create", "log/0+.json", "before", action=signal.SIGSTOP)  # both are about to claim slot 0
    drivers = [processes.cli("train", config_file, faults=(barrier,)) for _ in range(2)]
    for driver in drivers:
        wait_until(lambda driver=driver: sleeps(driver))  # type: ignore[misc]
    for driver in drivers:
        driver.signal(signal.SIGCONT)
    assert sorted(driver.wait() for driver in drivers) == [0, 3], [driver.text for driver in drivers]
    check_finished(config, uninterrupted)


@pytest.mark.parametrize(
    "asleep_before",
    [
        ("put", "trajectories/score/iteration=000001/.*part-00001"),
        ("create", '{"kind":"stage","iteration":1,"stage":"advantages"'),
        ("put", "metrics/iteration=000001"),
    ],
    ids=["data", "record", "close"],
)
def test_a_stopped_driver_wakes_after_a_take_over(
    asleep_before: tuple[str, str],
    config: RunConfig,
    config_file: Path,
    processes: Processes,
    uninterrupted: dict[int, History],
) -> None:
    first = processes.cli("train", config_file, faults=(Fault(*asleep_before, "before", action=signal.SIGSTOP),))
    wait_until(lambda: sleeps(first))

    refused = processes.cli("train", config_file)
    assert refused.wait() == 3
    assert refused.text.count("error:") == 1
    assert "--take-over" in refused.text.splitlines()[-1]
    assert len(History.of(config).state.open_terms) == 1, "a driver that is refused claims nothing"

    second = processes.cli("resume", config.run.name, "--store", config.run.store, "--take-over")
    assert second.wait() == 0, second.text
    records = History.of(config).records

    first.signal(signal.SIGCONT)
    assert first.wait() == 3, first.text
    assert "another driver (term 2" in first.text.splitlines()[-1]
    assert History.of(config).records == records, "it commits nothing"
    check_finished(config, uninterrupted)


def test_a_take_over_fences_a_driver_at_work(
    config: RunConfig, config_file: Path, processes: Processes, uninterrupted: dict[int, History]
) -> None:
    slow = Fault("put", "trajectories/.*/iteration=00000[12]", count=0, delay_s=5.0)
    first = processes.cli("train", config_file, faults=(slow,))
    wait_until(lambda: History.of(config).state.iteration == 1)
    second = processes.cli("train", config_file, "--take-over")
    assert (first.wait(), second.wait()) == (3, 0), first.text + second.text
    assert {record.term for record in History.of(config).records} == {1, 2}
    check_finished(config, uninterrupted)


def test_a_driver_whose_snapshot_was_retired_by_another_is_fenced(
    config: RunConfig, config_file: Path, processes: Processes, uninterrupted: dict[int, History]
) -> None:
    """It is no damage that the snapshot is gone from which it was about to go on."""
    killed = processes.cli("train", config_file, faults=(Fault("put", "trajectories/score/iteration=000001/"),))
    assert killed.wait() == -signal.SIGKILL
    asleep = Fault("create", '{"kind":"claim"', "after", action=signal.SIGSTOP)
    first = processes.cli("train", config_file, faults=(asleep,))
    wait_until(lambda: sleeps(first))
    second = processes.cli("train", config_file, "--take-over")
    assert second.wait() == 0, second.text
    first.signal(signal.SIGCONT)
    assert first.wait() == 3, first.text
    check_finished(config, uninterrupted)


def test_what_a_stopped_driver_stores_after_a_take_over_is_no_turn(
    config: RunConfig, config_file: Path, processes: Processes
) -> None:
    """The first driver is about to begin a trajectory again, because its environment failed, while the second plays it
    on. The third one continues what the second has stored."""
    books = processes.folder / "books"
    changes = {
        "data.prompts_per_iteration": 1,
        "rollout.n": 1,
        "rollout.max_response_tokens": 200,
        "rollout.environment": {
            "name": "tests.environments:Shaky",
            "options": {"folder": str(books)},
            "on_error": "retry",
        },
        "reward.function": None,
        "actor.mini_batch_trajectories": 1,
        "critic.mini_batch_trajectories": 1,
        "train.iterations": 1,
    }
    config_file.write_text(yaml.safe_dump(config.with_values(changes).model_dump(mode="json")))
    calls = "journals/iteration=000000/calls/generate/"
    # after a turn, its answer, and a turn without an answer: the first turn of the second attempt
    asleep = Fault("put", calls, "before", 4, action=signal.SIGSTOP)
    first = processes.cli("train", config_file, faults=(asleep,))
    wait_until(lambda: sleeps(first))
    # after the answer to the second turn, and the third turn
    second = processes.cli("train", config_file, "--take-over", faults=(Fault("put", calls, "after", 2),))
    assert second.wait() == -signal.SIGKILL, second.text
    first.signal(signal.SIGCONT)
    assert first.wait() == 3, first.text
    third = processes.cli("train", config_file)
    assert third.wait() == 0, third.text
    asked = [entry["key"].split("/")[3:5] for entry in entries(books, "calls")]
    assert asked == [["0", "0"], ["0", "1"], ["0", "1"], ["0", "2"], ["0", "3"]]
    check_books(books, drivers=3)
