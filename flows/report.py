"""A report of runs, side by side: one HTML file that needs nothing else, with curves, configs and trajectories.

It reads what is committed and claims nothing, so it can be written again and again while the runs go on.
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
from rlhf.models import load_tokenizer

if TYPE_CHECKING:
    import pandas as pd

CURVES = {metric.name: metric.heading for metric in shown_in(REPORT)}
VALIDATION, SECONDS, ALL_SECONDS = "val/", "timing_s/", "timing_s/stages"
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
"""Of a run, at most: a browser reads a page of some ten megabytes with ease, and not one of hundreds."""

Decode = Callable[[tuple[int, ...]], str]


def write(runs: Sequence[Run], path: Path) -> None:
    """Write the report, or replace it: who reads the file meanwhile sees the old one or the new one."""
    text = page(runs)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"--output {path}: cannot write there: {error.strerror}; name a file in a folder") from None


def page(runs: Sequence[Run]) -> str:
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
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # and keys stay in their order
    template = environment.get_template("report.html.jinja")
    return template.render(title=", ".join(names), report=report, plotly=get_plotlyjs())


def _names(runs: Sequence[Run]) -> list[str]:
    """The runs' names, or their URLs where names are the same."""
    urls = [run.store.url for run in runs]
    twice = [url for url, count in Counter(urls).items() if count > 1]
    if twice:
        raise UserError(f"the run at {twice[0]} is named twice: name each run once")
    names = [url.rpartition("/")[2] for url in urls]
    return [name if names.count(name) == 1 else url for name, url in zip(names, urls, strict=True)]


def _run(run: Run) -> dict[str, Any]:
    damages: dict[str, None] = {}  # a page of an index is met once for each of its iterations

    def damaged(damage: Corrupt) -> None:
        damages[str(damage)] = None

    shown = {
        "url": run.store.url,
        "closed": run.state.iteration,
        "iterations": run.config.train.iterations,
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
    """Columns of numbers, those that the report draws; the open iteration gives its validation, if it is committed."""
    rows: list[Mapping[Any, Any]] = [*run.metrics(damaged=damaged).to_dict("records")]
    validation = run.state.stages.get("validate")
    if isinstance(validation, StageCommit):
        try:
            rows.append({"iteration": run.state.iteration, **run.store.manifest(validation).metrics})
        except Corrupt as damage:
            damaged(damage)
    names = dict.fromkeys(name for row in rows for name in row)
    stages = (name for name in names if name.startswith(SECONDS) and name != ALL_SECONDS)
    drawn = [*CURVES, *stages, *(name for name in names if name.startswith(VALIDATION))]
    return {name: [_number(row.get(name), 7) for row in rows] for name in ("iteration", *drawn) if name in names}


def _config(configs: Sequence[RunConfig]) -> dict[str, list[str]]:
    """Values by key, one a run: the keys in which the runs differ, or the main ones of a run alone."""
    flat = [_flat(config.model_dump(mode="json")) for config in configs]
    keys = MAIN_KEYS if len(flat) == 1 else dict.fromkeys(key for one in flat for key in one if key != "run.name")
    rows = {key: [one.get(key, "–") for one in flat] for key in keys if any(key in one for one in flat)}
    return {key: values for key, values in rows.items() if len(flat) == 1 or len(set(values)) > 1}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict) and value
        found |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": json.dumps(value).strip('"')}
    return found


def _trajectories(run: Run, damaged: OnDamage) -> list[dict[str, Any]]:
    """A sample of the newest closed iterations, with what each token is coloured by."""
    closed = run.state.iteration
    newest = range(max(0, closed - SAMPLED_ITERATIONS), closed)
    frame = run.trajectories(newest, damaged=damaged)
    if "score" in frame:  # else nothing could be scored
        frame = frame.dropna(subset=["score"])
    if "score" not in frame or frame.empty:
        return []
    decode = _decoder(run.config)
    return [_trajectory(row, decode) for row in _sample(frame).to_dict("records")]


def _sample(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each iteration alike many: the best, the worst, and others evenly spread between them by score."""
    longest = int(frame["response_ids"].map(len).max())
    each = min(SAMPLED_TRAJECTORIES, SAMPLED_TOKENS // max(longest, 1)) // frame["iteration"].nunique()
    ordered = frame.sort_values(["iteration", "score", "trajectory_id"], ascending=[False, False, True])
    kept: list[int] = []
    for rows in ordered.groupby("iteration", sort=False).indices.values():
        chosen = np.linspace(0, len(rows) - 1, min(len(rows), max(each, 2))).round().astype(int)
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
    """What a token may be coloured by, as far as the run has it."""
    there = {name: value for name, value in row.items() if isinstance(value, np.ndarray)}
    old = there.get("old_log_probs", there["rollout_log_probs"])
    found = {"advantage": there["advantages"]} if "advantages" in there else {}
    if "ref_log_probs" in there:
        found["log-prob less the reference's"] = old - there["ref_log_probs"]
    if "old_log_probs" in there:
        found["log-prob less the rollout's"] = old - there["rollout_log_probs"]
    if not there["response_mask"].all():
        found["written by the policy"] = there["response_mask"]
    return found | ({"entropy": there["entropy"]} if "entropy" in there else {})


def _decoder(config: RunConfig) -> Decode | None:
    """Of the run's tokenizer; None where its files are not to be had, so that a report needs no model."""
    try:
        tokenizer = load_tokenizer(config.model)
    except UserError:
        return None

    @cache
    def decode(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def token_texts(ids: tuple[int, ...], decode: Decode) -> list[str]:
    """The text that each token adds. Decoded alone, tokens lose spaces and parts of characters, so each is decoded with
    what stands before it; a character of several tokens stands with the last of them."""
    texts: list[str] = []
    context = shown = 0  # ids[context:shown] is what stands before
    for end in range(1, len(ids) + 1):
        text = decode(ids[context:end])
        if text.endswith("\ufffd") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(decode(ids[context:shown])) :])
        context, shown = shown, end
    return texts


def _number(value: Any, digits: int = 4) -> float | None:
    """As many digits as can be seen; None for what is missing or infinite, which JSON does not know."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None
