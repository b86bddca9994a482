"""The failures of training that the page marks."""

from __future__ import annotations

from ratchet.flows.alerts import Alert, alerts_of

SOUND = {
    "critic/advantages/min": -1.0,
    "critic/advantages/max": 1.0,
    "actor/entropy": 1.0,
    "response_length/clip_ratio": 0.25,
    "actor/pg_clipfrac": 0.3,
    "rollout_corr/k3_kl": 0.1,
}


def found(*changes: dict[str, float]) -> list[tuple[str, int, int]]:
    alerts = alerts_of([{"iteration": 4 + row, **SOUND, **change} for row, change in enumerate(changes)])
    return [(alert.metric, alert.first, alert.last) for alert in alerts]


def test_a_sound_run_has_no_alert() -> None:
    assert not alerts_of([])
    assert not found({}, {})
    assert not alerts_of([{"iteration": 0.0}]), "nor one that trains nothing"


def test_iterations_in_a_row_are_one_alert() -> None:
    cut = {"response_length/clip_ratio": 0.26}
    assert found({}, cut, cut, {}, cut) == [("response_length/clip_ratio", 5, 6), ("response_length/clip_ratio", 8, 8)]


def test_each_failure_is_told_by_its_metric() -> None:
    equal = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    assert found({}, equal) == [("critic/score/mean", 5, 5)]
    assert found({"actor/entropy": 0.5}, {"actor/entropy": 0.051}, {"actor/entropy": 0.049}) == [
        ("actor/entropy", 6, 6)
    ]
    assert found({}, {"actor/pg_clipfrac": 0.31}) == [("actor/pg_clipfrac", 5, 5)]
    assert found({"rollout_corr/k3_kl": 0.11}, {}) == [("rollout_corr/k3_kl", 4, 4)]
    [alert] = alerts_of([{"iteration": 0.0, "response_length/clip_ratio": 0.5}])
    text = "more than 25 % of the responses are cut off at rollout.max_response_tokens"
    assert alert == Alert("response_length/clip_ratio", 0, 0, text)
