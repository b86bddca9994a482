"""Describes runs as JSON documents. The live page requests them one by one; a report embeds them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from ratchet.flows.alerts import Alert, Metrics, alerts_of
from ratchet.flows.shown_metrics import REPORT, shown_in
from ratchet.infra.progress import note
from ratchet.infra.runs.listing import State, state_of
from ratchet.infra.runs.pictures import Picture
from ratchet.infra.runs.run import OnDamage, Run
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.records import Fork, StageCommit
from ratchet.infra.store.run_store import VALIDATE
from ratchet.rlhf.agents.timelines import Timeline, timeline
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.data.placeholders import Fold, Part, first_images, folds_of, parts_of
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.metrics import BY_NAME, STEP, VALIDATION, stderr_of
from ratchet.rlhf.models.tokenizers import reading_tokenizer
from ratchet.rlhf.schema import IMAGES

if TYPE_CHECKING:
    import pandas as pd

Decode = Callable[[tuple[int, ...]], str]
Row = Mapping[Any, Any]
"""A row of a frame, from `DataFrame.to_dict("records")`."""

CURVES = {display.name: display.heading for display in shown_in(REPORT)}
WHOLE_SECONDS = ("timing_s/stages", "timing_s/step")
"""Times of whole iterations, in addition to those of their stages."""
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
"""Keys of the config that are shown for a single run."""
STDERRS = "val-aux/"
"""Prefix of validation metrics that are drawn with others, not as curves of their own."""
CLIP = 600
"""Largest number of characters of a response in a list."""
THUMBNAILS = 4
"""Largest number of images of a trajectory in a list."""


class Document(BaseModel):
    model_config = ConfigDict(frozen=True)


class Stage(Document):
    name: str
    label: str
    progress: str
    """From `Run.progress`; empty if the stage has no commit."""
    seconds: float | None
    """Compute time of the committed shards."""


class RunView(Document):
    """A run: its state, metrics and config."""

    name: str
    url: str
    state: State
    closed: int
    iterations: int | None
    """The number of iterations of the config; None for a fine-tuning run, and if it is unknown."""
    trainer: str | None
    """The trainer that computes the run; None: Ratchet."""
    snapshots: list[int]
    parent: str | None
    stages: list[Stage]
    metrics: dict[str, list[float | None]]
    """By column, `iteration` first. The last row may be the validation of the open iteration."""
    titles: dict[str, str]
    """Headings of the metrics that are drawn as curves."""
    stderrs: dict[str, list[float | None]]
    """Standard errors of metrics, by the metric's name."""
    alerts: list[Alert]
    config: dict[str, str]
    main_keys: list[str]
    damages: list[str]


class TrajectoryLine(Document):
    id: str
    iteration: int
    prompt_id: str
    score: float | None
    length: int | None
    """Number of tokens; None: unknown."""
    finish_reason: str
    response: str
    """The first `CLIP` characters."""
    images: list[str] = []
    """The digests of the first `THUMBNAILS` images."""
    more_images: int = 0
    """The number of the others."""


class Bar(Document):
    """A bar of a histogram: the number of values from `low` to `high`, both of which occur."""

    low: float
    high: float
    count: int


class Trajectories(Document):
    """The first trajectories that match a filter, their number, and histograms over all that match."""

    lines: list[TrajectoryLine]
    scores: list[Bar]
    lengths: list[Bar]
    matching: int
    total: int
    damages: list[str]
    """Data that could not be read, and is left out."""


class ImageView(Document):
    """An image of a trajectory."""

    digest: str
    told: str
    """What it is, such as ``56×56 PNG, 1.2 kB, 3f2a1b4c``; or why it cannot be shown."""
    is_shown: bool = True


class TrajectoryDocument(Document):
    """One trajectory, with the quantities that colour its tokens."""

    id: str
    prompt_id: str
    iteration: int
    prompt: str
    response: str
    ground_truth: str
    finish_reason: str
    score: float | None
    parts: dict[str, float | None]
    timeline: Timeline | None
    """All conversations of the trajectory; None if its run has neither an environment nor an agent."""
    errors: list[str]
    tokens: list[str] | None
    """The text of each token; None if the run's tokenizer was not found, or the tokens are unknown."""
    length: int | None
    """Number of tokens; None: unknown."""
    quantities: dict[str, list[float | None]]
    scales: dict[str, tuple[float, float]]
    """The values of full colour of each quantity, so that trajectories can be compared."""
    images: list[ImageView] = []
    prompt_parts: list[Part] = []
    response_parts: list[Part] = []
    """Prompt and response with folded runs of tokens for images; empty if there is none."""
    folds: list[Fold] = []
    """The same of `tokens`."""

    def line(self) -> TrajectoryLine:
        return TrajectoryLine(
            id=self.id,
            iteration=self.iteration,
            prompt_id=self.prompt_id,
            score=self.score,
            length=self.length,
            finish_reason=self.finish_reason,
            response=self.response[:CLIP],
            images=[image.digest for image in self.images[:THUMBNAILS]],
            more_images=len(self.images[THUMBNAILS:]),
        )


Order = Literal["best", "worst", "longest", "shortest", "newest"]


class Filter(Document):
    """The condition and the order of listed trajectories."""

    model_config = ConfigDict(extra="forbid")

    iteration: int | None = None
    where: str = ""
    """A condition in SQL over the columns of `trajectories`."""
    text: str = ""
    """A part of prompt, response or ground truth, in any case."""
    low: float | None = None
    high: float | None = None
    """The least and the largest score."""
    shortest: int | None = None
    longest: int | None = None
    """The least and the largest number of tokens."""
    prompt_id: str = ""
    like: str = ""
    """The id of a trajectory: only answers to its prompt."""
    order: Order = "best"


def run_view(run: Run, name: str, closed_metrics: Sequence[Metrics], damages: Iterable[str] = ()) -> RunView:
    """Describes a run, which the page calls `name`.

    Args:
        closed_metrics: The metrics of closed iterations.
        damages: Damages found so far; the description adds those it finds.
    """
    every_damage = dict.fromkeys(damages)

    def damaged(damage: Corrupt) -> None:
        every_damage[str(damage)] = None

    rows = [*closed_metrics, *_open_validation(run, damaged)]
    columns = dict.fromkeys(column for row in rows for column in row)
    claim = run.state.claim
    assert claim is not None
    parent = _parent(run, damaged)
    stages = [] if run.is_fit else _stages(run, damaged)
    titles = _titles(columns, run.is_fit)
    observed = None if run.is_fit else run.config.observed
    config = _flat(claim.config if observed is None else observed.config)
    return RunView(
        name=name,
        url=run.store.url,
        state=state_of(run, {int(row["iteration"]): row for row in rows}),
        closed=run.state.iteration,
        iterations=None if run.is_fit else run.config.known_iterations,
        trainer=None if observed is None else observed.trainer,
        snapshots=sorted(run.state.snapshots),
        parent=parent,
        stages=stages,
        metrics={column: [_number(row.get(column), 7) for row in rows] for column in ("iteration", *titles)},
        titles=titles,
        stderrs={
            column: [_number(row.get(stderr_of(column))) for row in rows]
            for column in titles
            if stderr_of(column) in columns
        },
        alerts=alerts_of(closed_metrics),
        config=config,
        main_keys=list(config) if run.is_fit or observed is not None else [key for key in MAIN_KEYS if key in config],
        damages=list(every_damage),
    )


def _titles(columns: Iterable[str], is_fit: bool) -> dict[str, str]:
    """Returns headings of the metrics that are drawn: the score, the validations, the others, then the user's own.

    The compute time of stages has none, because it is drawn in one chart.
    """
    present = [column for column in columns if column != "iteration"]
    if is_fit:
        return {column: column for column in present}
    held_out = [name for name in present if name.startswith(VALIDATION)]
    validations = {name: f"validation: {name.partition('/')[2]}" for name in held_out if not name.startswith(STDERRS)}
    curves = [name for name in CURVES if name in present]
    times = {name: "" for name in present if name.startswith("timing_s/") and name not in (*CURVES, *WHOLE_SECONDS)}
    first, others = ({name: CURVES[name] for name in names} for names in (curves[:1], curves[1:]))
    known = {*held_out, *times, *BY_NAME, STEP}
    return first | validations | others | {name: name for name in present if name not in known} | times


def _open_validation(run: Run, damaged: OnDamage) -> list[Metrics]:
    validation = run.state.stages.get(VALIDATE)
    if not isinstance(validation, StageCommit):
        return []
    try:
        return [{"iteration": run.state.iteration, **run.store.manifest(validation).metrics}]
    except Corrupt as damage:
        damaged(damage)
        return []


def _stages(run: Run, damaged: OnDamage) -> list[Stage]:
    from ratchet.tasks.pipeline import shown_stages  # imports torch

    progress, claim = run.progress(run.state.iteration), run.state.claim
    assert claim is not None, "run.config is the claim's"
    known = dict(progress)
    if run.config.observed is not None and run.state.iteration:  # the next iteration will have the same stages
        try:
            known |= run.progress(run.state.iteration - 1)
        except Corrupt as damage:
            damaged(damage)
    stages = []
    for name, label in shown_stages(run.config, claim.versions, known).items():
        committed = run.state.stages.get(name)
        shards = run.state.shards.get(name, {})
        seconds = sum(shard.seconds for shard in shards.values()) if shards else None
        if isinstance(committed, StageCommit):
            try:
                seconds = run.store.manifest(committed).seconds
            except Corrupt as damage:
                damaged(damage)
        if name in progress or name != VALIDATE:  # most iterations have no validation
            stages.append(Stage(name=name, label=label, progress=progress.get(name, ""), seconds=_number(seconds)))
    return stages


def _parent(run: Run, damaged: OnDamage) -> str | None:
    try:
        [first, *_] = run.store.log.record(0).commits
    except Corrupt as damage:
        damaged(damage)
        return None
    return f"{run.store.objects.of_run(first.parent).url} at {first.at}" if isinstance(first, Fork) else None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    values: dict[str, str] = {}
    for key, value in tree.items():
        # an empty section is a value itself
        inner = isinstance(value, dict) and value
        values |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": json.dumps(value).strip('"')}
    return values


def trajectory(
    row: Row,
    decode: Decode | None,
    scales: Mapping[str, tuple[float, float]],
    rows: Sequence[Row] = (),
    look: Callable[[str], ImageView] | None = None,
) -> TrajectoryDocument:
    """Describes a trajectory.

    Args:
        row: A row with the columns of all stages that have processed it.
        decode: Decodes tokens; None: they are not shown.
        scales: The values of full colour of each quantity.
        rows: All rows of the trajectory, if an agent had several conversations.
        look: Looks at an image by its digest; None: images are not shown.
    """
    known_ids = _present(row.get("response_ids"))
    ids = () if known_ids is None else tuple(int(token) for token in known_ids)
    quantities = {name: [_number(x) for x in values] for name, values in quantities_of(row).items()}
    told = timeline(rows or [row])
    images = [] if look is None else [look(str(digest)) for digest in image_digests(row)]
    prompt, response = _text(row["prompt"]), row["response"]
    tokens = token_texts(ids, decode) if known_ids is not None and decode is not None else None
    shown = response if tokens is None else "".join(tokens)
    in_prompt, in_response = first_images(prompt, shown, len(images))
    return TrajectoryDocument(
        id=row["trajectory_id"],
        prompt_id=row["prompt_id"],
        iteration=int(row["iteration"]),
        prompt=prompt,
        response=response,
        ground_truth=_text(row.get("ground_truth")),
        finish_reason=_text(row["finish_reason"]),
        score=_number(row.get("score")),
        parts={name: _number(value) for name, value in (_present(row.get("reward_parts")) or {}).items()},
        timeline=told if told.errors or any(part.turns for part in told.conversations) else None,
        errors=[text for name in ("rollout_error", "reward_error") if (text := _text(row.get(name)))],
        tokens=tokens,
        length=None if known_ids is None else len(ids),
        quantities=quantities,
        scales={name: scales[name] for name in quantities if name in scales},
        images=images,
        prompt_parts=_folded(prompt, in_prompt) if images else [],
        response_parts=_folded(response, in_response) if images else [],
        folds=folds_of(tokens, in_response) if images and tokens is not None else [],
    )


def image_digests(row: Row) -> list[str]:
    """Returns the digests of the images of a row, in their order."""
    digests = _present(row.get(IMAGES))
    return [] if digests is None else list(digests)


def image_view(digest: str, seen: Picture | str) -> ImageView:
    """Describes an image, or says why it cannot be shown; see `described`."""
    return ImageView(digest=digest, told=str(seen), is_shown=isinstance(seen, Picture))


def _folded(text: str, first: int | None) -> list[Part]:
    parts = parts_of(text, first)
    return parts if any(part.tokens for part in parts) else []


def quantities_of(row: Row) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the quantities that tokens may be coloured by, as far as the run has them."""
    ids = _present(row.get("response_ids"))
    if ids is None:
        return {}
    # another trainer may have written values of other tokens
    arrays = {name: value for name, value in row.items() if isinstance(value, np.ndarray) and len(value) == len(ids)}
    rollout = arrays.get("rollout_log_probs")
    old = arrays.get("old_log_probs", rollout)
    quantities = {"advantage": arrays["advantages"]} if "advantages" in arrays else {}
    for name, others in (
        ("log-prob less the reference's", arrays.get("ref_log_probs")),
        ("log-prob less the teacher's", arrays.get("teacher_log_probs")),
        ("log-prob less the rollout's", rollout if "old_log_probs" in arrays else None),
    ):
        if old is not None and others is not None:
            quantities[name] = old - others
    # only conversations have tokens that the policy did not write
    if "response_mask" in arrays and not arrays["response_mask"].all():
        quantities["written by the policy"] = arrays["response_mask"]
    return quantities | ({"entropy": arrays["entropy"]} if "entropy" in arrays else {})


def scales_of(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Returns the values of full colour by quantity, over trajectories with their token columns.

    The largest 2 % are beyond them. 0 is in the middle, except for the entropy.
    """
    by_name: dict[str, list[np.ndarray[Any, Any]]] = {}
    for row in frame.to_dict("records"):
        for name, values in quantities_of(row).items():
            by_name.setdefault(name, []).append(values)
    scales = {}
    for name, parts in by_name.items():
        values = np.concatenate(parts).astype(float)
        values = values[np.isfinite(values)]
        if values.size:
            low, high = np.quantile(values, (0.02, 0.98)) if name == "entropy" else (0, np.quantile(abs(values), 0.98))
            scales[name] = (float(low) if name == "entropy" else -float(high), float(high))
    return scales


def decoder(run: Run) -> Decode | None:
    """Returns the decode function of the run's tokenizer; None if it is unknown, has no files, or needs code of its
    own."""
    if not run.config.knows_model:
        return None
    try:
        tokenizer = reading_tokenizer(_found(run))
    except UserError as reason:
        note(f"responses are shown without their tokens: {reason}")
        return None

    @cache
    def decode(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def _found(run: Run) -> ModelConfig:
    """Returns the run's model. A folder that is not here may be beside the store: a run of ./runs was started there."""
    model, url = run.config.model, run.store.url
    if url.startswith("file://") and not Path(model.path).is_absolute() and not Path(model.path).exists():
        for folder in Path(url.removeprefix("file://")).parents:
            if (folder / model.path / "config.json").is_file():
                return model.model_copy(update={"path": str(folder / model.path)})
    return model


def token_texts(ids: tuple[int, ...], decode: Decode) -> list[str]:
    """Returns the text that each token adds.

    Tokens decoded alone lose spaces and parts of characters, so each is decoded together with the tokens before it.
    """
    texts: list[str] = []
    context = shown = 0  # ids[context:shown] are the tokens before
    for end in range(1, len(ids) + 1):
        text = decode(ids[context:end])
        # the token ends within a character, which belongs to its last token
        if text.endswith("\ufffd") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(decode(ids[context:shown])) :])
        context, shown = shown, end
    return texts


def _present(value: Any) -> Any:
    """Returns the value; None if it is missing, which pandas may represent as NaN."""
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _text(value: Any) -> str:
    return "" if _present(value) is None else str(value)


def _number(value: Any, digits: int = 4) -> float | None:
    """Rounds a value to `digits` digits; None if it is missing or not finite, which JSON cannot express."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None
