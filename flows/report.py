"""A report that compares runs: one self-contained HTML file with curves, configs and trajectories.

It reads committed data and claims nothing, so it can be written at any time while the runs continue.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from flows.metrics import REPORT, shown_in
from infra.progress import note
from infra.runs import OnDamage, Run
from infra.store.log import Corrupt
from infra.store.records import Fork, StageCommit
from rlhf.config import RunConfig
from rlhf.errors import UserError
from rlhf.metrics import current
from rlhf.models import load_tokenizer

if TYPE_CHECKING:
    import pandas as pd

CURVES = {metric.name: metric.heading for metric in shown_in(REPORT)}
VALIDATION, SECONDS, WHOLE_SECONDS = ("val-core/", "val/"), "timing_s/", ("timing_s/stages", "timing_s/step")
MAIN_KEYS = (
    "model.path",
    "data.train",
    "data.prompts_per_iteration",
    "rollout.n",
    "rollout.temperature",
    "rollout.max_response_tokens",
    "reward.function",
    "algorithm.advantage.type",
    "algorithm.loss.type",
    "algorithm.kl.in_reward",
    "algorithm.kl.in_loss",
    "actor.lr",
    "actor.ppo_epochs",
    "actor.mini_batch_trajectories",
    "critic.lr",
    "run.seed",
)
SAMPLED_ITERATIONS = 3
SAMPLED_TRAJECTORIES = 150
SAMPLED_TOKENS = 200_000
"""Limits of the sample of a run: a browser handles a page of tens of megabytes, but not of hundreds."""

Decode = Callable[[tuple[int, ...]], str]


def write(runs: Sequence[Run], path: Path) -> None:
    """Write or replace the report atomically. Raises `UserError` if `path` cannot be written."""
    text = page(runs)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"--output {path}: cannot write there: {error.strerror}; name a file in a folder") from None


def page(runs: Sequence[Run]) -> str:
    """The report as HTML."""
    from plotly.offline import get_plotlyjs

    names = _names(runs)
    report = {
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "curves": CURVES,
        "runs": [{"name": name, **_run(run)} for name, run in zip(names, runs, strict=True)],
        "config": _config([run.config for run in runs]),
    }
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # without sort_keys, to keep the order
    template = environment.get_template("report.html.jinja")
    return template.render(title=", ".join(names), report=report, plotly=get_plotlyjs())


def _names(runs: Sequence[Run]) -> list[str]:
    """The names of the runs; the URL of a run whose name is not unique."""
    urls = [run.store.url for run in runs]
    duplicates = [url for url, count in Counter(urls).items() if count > 1]
    if duplicates:
        raise UserError(f"the run at {duplicates[0]} is named twice: name each run once")
    names = [url.rpartition("/")[2] for url in urls]
    return [name if names.count(name) == 1 else url for name, url in zip(names, urls, strict=True)]


def _run(run: Run) -> dict[str, Any]:
    damages: dict[str, None] = {}  # a dict, because a damaged page of an index is reported for each of its iterations

    def damaged(damage: Corrupt) -> None:
        damages[str(damage)] = None

    shown = {
        "url": run.store.url,
        "closed": run.state.iteration,
        "iterations": run.config.iterations,
        "snapshots": sorted(run.state.snapshots),
        "parent": _parent(run, damaged),
        "metrics": _metrics(run, damaged),
        "trajectories": _trajectories(run, damaged),
    }
    for damage in damages:
        note(f"the report leaves out what it could not read: {damage}")
    return {**shown, "damages": list(damages)}


def _parent(run: Run, damaged: OnDamage) -> str | None:
    try:
        [first, *_] = run.store.log.record(0).commits
    except Corrupt as damage:
        damaged(damage)
        return None
    return f"{run.store.objects.of_run(first.parent).url} at {first.at}" if isinstance(first, Fork) else None


def _metrics(run: Run, damaged: OnDamage) -> dict[str, list[Any]]:
    """The metrics that the report draws, as columns; the last row may be the validation of the open iteration."""
    rows: list[Mapping[Any, Any]] = [*run.metrics(damaged=damaged).to_dict("records")]
    validation = run.state.stages.get("validate")
    if isinstance(validation, StageCommit):
        try:
            rows.append({"iteration": run.state.iteration, **current(run.store.manifest(validation).metrics)})
        except Corrupt as damage:
            damaged(damage)
    names = dict.fromkeys(name for row in rows for name in row)
    stages = (name for name in names if name.startswith(SECONDS) and name not in WHOLE_SECONDS)
    drawn = [*CURVES, *stages, *(name for name in names if name.startswith(VALIDATION))]
    return {name: [_number(row.get(name), 7) for row in rows] for name in ("iteration", *drawn) if name in names}


def _config(configs: Sequence[RunConfig]) -> dict[str, list[str]]:
    """Values by key, one per run: the keys in which the runs differ, or the main keys of a single run."""
    flat = [_flat(config.model_dump(mode="json")) for config in configs]
    keys = MAIN_KEYS if len(flat) == 1 else dict.fromkeys(key for config in flat for key in config if key != "run.name")
    rows = {key: [config.get(key, "–") for config in flat] for key in keys if any(key in config for config in flat)}
    return {key: values for key, values in rows.items() if len(flat) == 1 or len(set(values)) > 1}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    values: dict[str, str] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict) and value
        values |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": json.dumps(value).strip('"')}
    return values


def _trajectories(run: Run, damaged: OnDamage) -> list[dict[str, Any]]:
    """A sample of trajectories of the newest closed iterations, with the quantities that tokens are coloured by."""
    closed = run.state.iteration
    newest = range(max(0, closed - SAMPLED_ITERATIONS), closed)
    frame = run.trajectories(newest, damaged=damaged)
    if "score" in frame:  # missing if all shards of scores are damaged
        frame = frame.dropna(subset=["score"])
    if "score" not in frame or frame.empty:
        return []
    decode = _decoder(run.config)
    return [_trajectory(row, decode) for row in _sample(frame).to_dict("records")]


def _sample(frame: pd.DataFrame) -> pd.DataFrame:
    """The same number of rows per iteration: the best, the worst, and others evenly spread between them by score."""
    longest = int(frame["response_ids"].map(len).max())
    rows_per_iteration = min(SAMPLED_TRAJECTORIES, SAMPLED_TOKENS // max(longest, 1)) // frame["iteration"].nunique()
    ordered = frame.sort_values(["iteration", "score", "trajectory_id"], ascending=[False, False, True])
    kept: list[int] = []
    for rows in ordered.groupby("iteration", sort=False).indices.values():
        chosen = np.linspace(0, len(rows) - 1, min(len(rows), max(rows_per_iteration, 2))).round().astype(int)
        kept += [int(rows[index]) for index in chosen]
    return ordered.iloc[kept]


def _trajectory(row: Mapping[Any, Any], decode: Decode | None) -> dict[str, Any]:
    ids = tuple(int(token) for token in row["response_ids"])
    return {
        "id": row["trajectory_id"],
        "iteration": int(row["iteration"]),
        "prompt": row["prompt"],
        "response": row["response"],
        "ground truth": row["ground_truth"],
        "finish reason": row["finish_reason"],
        "length": len(ids),
        "score": _number(row["score"]),
        "parts": {name: _number(value) for name, value in (row["reward_parts"] or {}).items()},
        "tokens": token_texts(ids, decode) if decode is not None else None,
        "quantities": {name: [_number(x) for x in values] for name, values in _quantities(row).items()},
    }


def _quantities(row: Mapping[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The quantities that tokens may be coloured by, those that the run has."""
    arrays = {name: value for name, value in row.items() if isinstance(value, np.ndarray)}
    old = arrays.get("old_log_probs", arrays["rollout_log_probs"])
    quantities = {"advantage": arrays["advantages"]} if "advantages" in arrays else {}
    if "ref_log_probs" in arrays:
        quantities["log-prob less the reference's"] = old - arrays["ref_log_probs"]
    if "old_log_probs" in arrays:
        quantities["log-prob less the rollout's"] = old - arrays["rollout_log_probs"]
    if not arrays["response_mask"].all():
        quantities["written by the policy"] = arrays["response_mask"]
    return quantities | ({"entropy": arrays["entropy"]} if "entropy" in arrays else {})


def _decoder(config: RunConfig) -> Decode | None:
    """The decode function of the run's tokenizer; None if its files are missing, so that a report needs no model."""
    try:
        tokenizer = load_tokenizer(config.model)
    except UserError:
        return None

    @cache
    def decode(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def token_texts(ids: tuple[int, ...], decode: Decode) -> list[str]:
    """The text that each token adds.

    Tokens decoded alone lose spaces and parts of characters, so each is decoded together with the tokens before it. A
    character of several tokens belongs to the last of them.
    """
    texts: list[str] = []
    context = shown = 0  # ids[context:shown] are the tokens before
    for end in range(1, len(ids) + 1):
        text = decode(ids[context:end])
        if text.endswith("\ufffd") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(decode(ids[context:shown])) :])
        context, shown = shown, end
    return texts


def _number(value: Any, digits: int = 4) -> float | None:
    """A value rounded to `digits` digits; None if it is missing or not finite, which JSON cannot express."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None
