"""Compares the scores of two runs: whose policy is better, by how much, and whether that is more than noise.

Scores are paired: both runs answer the same prompts, and runs of one seed draw with the same random numbers. A
difference is the mean score of B minus that of A, over the answers that both gave.

Its interval (95 %) covers the noise of the prompts: it is about the two *policies*. Two runs that differ only in their
seed end in policies that truly differ, so one run a side says nothing of their *settings*; `settings_comparison`
compares several runs a side.

An interval that contains 0 shows that the policies are equal only if it is narrow. The verdict is "cannot tell" if the
interval is wider than `TOO_WIDE` of the range of the scores, if all scores are equal (a bootstrap then gives an
interval of width 0), or if the runs have different rewards.

Trajectories that another trainer made are paired by the text of their prompts: its numbers of prompts need not be
those of another run. Its seed is unknown, and so is its reward unless Ratchet has scored the answers again; `unknown`
says so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import JsonValue

from ratchet.infra.runs.intervals import PairedScores, Verdict, interval, verdict_of
from ratchet.infra.runs.run import Run, own_answers
from ratchet.infra.store.log import Corrupt, RunLog
from ratchet.infra.store.records import Fork, StageCommit
from ratchet.infra.store.run_store import VALIDATE
from ratchet.rlhf.config import RunConfig, yaml_text
from ratchet.rlhf.config import differences as config_differences
from ratchet.rlhf.config.sections import RewardConfig
from ratchet.rlhf.errors import UserError, counted
from ratchet.rlhf.metrics import STEP
from ratchet.rlhf.schema import TRAJECTORY

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["validation", "train"]
Doubt = Literal["different rewards", "equal scores", "one prompt", "wide interval"]
"""The reason for the verdict "cannot tell"."""

ALL = "all"
"""The data source of a difference over several data sources."""
COLUMNS = (
    *("trajectory_id", "prompt_id", "sample", "data_source", "prompt", "ground_truth", "score", "reward_error"),
    *("messages", "rollout_error"),
)
ANSWER = ("prompt_id", "sample")
MAJORITY = 0.5
"""A prompt is solved if this share of its answers is."""


@dataclass(frozen=True)
class Difference:
    """The difference between the runs in one iteration. Its interval covers the noise of the prompts only."""

    data_source: str
    """`ALL` for all of several data sources."""
    iteration: int
    kind: Kind
    prompts: int
    """Number of prompts that both runs answered."""
    a: float
    """Mean score of A over these prompts."""
    b: float
    difference: float
    """B minus A."""
    low: float | None
    """Lower end of the interval; None if there is only one prompt."""
    high: float | None


@dataclass(frozen=True)
class ScoredResponse:
    response: str
    score: float


@dataclass(frozen=True)
class Flip:
    """A prompt that one run solves and the other does not."""

    prompt_id: str
    data_source: str
    prompt: str
    solved_by: Literal["A", "B"]
    a: tuple[ScoredResponse, ...]
    """The answers of A, each paired with that of B."""
    b: tuple[ScoredResponse, ...]


@dataclass(frozen=True)
class Beside:
    """Other measurements of an iteration, on each run's own training batch; None: not measured.

    A validation after the last iteration has the metrics of that iteration.
    """

    iteration: int
    kl: tuple[float | None, float | None]
    """`actor/ref_kl` of A and B."""
    length: tuple[float | None, float | None]
    """`response_length/mean` of A and B."""


@dataclass(frozen=True)
class Rewards:
    """The difference between the rewards of two runs."""

    names: tuple[str, str]
    """The scorers of A and B, such as ``countdown``."""
    changed: Mapping[str, tuple[str, str]]
    """Keys of the config that differ, such as `reward.function`, with the values of A and B as text."""
    code: tuple[str, str] | None
    """Digests of the functions' code in A and B; None if it is the same."""


@dataclass(frozen=True)
class Comparison:
    """The common ground of two runs, and the difference between their policies' scores."""

    compares: Literal["policies"]
    a: str
    """URL of the first run."""
    b: str
    fork: str | None
    """End of their common history, such as ``7`` or ``7:score``; None if they have none."""
    same_seed: bool | None
    """None if another trainer made the trajectories of a run: its seed is unknown."""
    config: tuple[str, ...]
    """The keys of the config that differ, such as ``actor.lr 1e-05 -> 2e-05``. Of a run that another trainer computes,
    they are that trainer's, and compared only with those of another such run."""
    unknown: tuple[str, ...]
    """What the comparison cannot know of runs that another trainer computes, in sentences."""
    differences: tuple[Difference, ...]
    beside: tuple[Beside, ...]
    """One for each iteration with a difference."""
    flips: tuple[Flip, ...] | None
    """Prompts that flipped in the iteration of the verdict; None if no score says whether an answer is right."""
    rewards: Rewards | None
    """Changes to the meaning of a score; None if there are none."""
    same_answers: bool
    """True if both runs score the same answers: one is the other scored again, or both score those of a third."""
    unpaired: dict[Kind, int]
    """Answers of both runs that are left out, because the other run has none to the same prompt. Training scores are
    compared only if the seed is the same: otherwise each run draws other prompts."""
    kind: Kind
    """The kind of scores of the verdict: training scores if the runs have no validation in common."""
    iteration: int
    """The last iteration, to which the verdict refers."""
    prompts: int
    answers: int
    """Number of paired answers behind the verdict."""
    difference: float
    """B minus A in that iteration, over all data sources."""
    low: float | None
    """Lower end of its interval; None for one prompt, or if all scores are equal."""
    high: float | None
    spread: float
    """The range of all scores that were compared, largest minus smallest."""
    verdict: Verdict
    doubt: Doubt | None
    """The reason for the verdict "cannot tell"; None for other verdicts."""

    def falls_short(self, margin: float) -> bool:
        """True if B must not pass as A + `margin`: the whole interval is below it, or the rewards differ, so that no
        margin between the scores means anything."""
        return falls_short(self.rewards, self.high, margin)


def falls_short(rewards: Rewards | None, high: float | None, margin: float) -> bool:
    """True if the rewards differ, or the whole interval is below the margin."""
    return rewards is not None or (high is not None and high < margin)


def judged(
    ends: tuple[float, float], spread: float, rewards: Rewards | None, *, are_equal: bool
) -> tuple[Verdict, Doubt | None]:
    """Returns the verdict on B, and the reason if it is "cannot tell".

    Args:
        ends: The ends of the interval.
        spread: The range of the scores that were compared.
        rewards: Changes to the meaning of a score.
        are_equal: Whether all scores of the verdict's iteration are equal.
    """
    if rewards is not None:
        return "cannot tell", "different rewards"
    if are_equal:
        return "cannot tell", "equal scores"
    verdict = verdict_of(*ends, spread)
    if verdict != "cannot tell":
        return verdict, None
    return verdict, "wide interval" if np.isfinite(ends).all() else "one prompt"


def compare(a: Run, b: Run) -> Comparison:
    """Compares the scores of run `b` with those of the baseline `a`.

    Raises:
        UserError: a run is a fine-tuning run, or nothing pairs.
        Corrupt: an object is missing or damaged.
    """
    runs = (a, b)
    configs = [run.config for run in runs]
    fork = parted_at(a, b)
    parted = 0 if fork is None else int(fork.partition(":")[0])
    unpaired: dict[Kind, int] = {"validation": 0, "train": 0}
    differences: list[Difference] = []
    whole: dict[Kind, dict[int, PairedScores]] = {"validation": {}, "train": {}}
    last_pairs: dict[Kind, pd.DataFrame] = {}
    seen: dict[Kind, list[float]] = {"validation": [], "train": []}
    trainers = [run.trainer for run in runs]
    same_seed = configs[0].run.seed == configs[1].run.seed if trainers == [None, None] else None
    talk = any(config.rollout.agent is not None for config in configs)
    kinds: tuple[Kind, ...] = ("validation",) if same_seed is False else ("validation", "train")
    for kind in kinds:
        for iteration, frames in scored_frames(runs, kind, parted):
            pairs = paired(*frames, same_text=not talk) if same_seed is not None else paired_by_text(*frames)
            unpaired[kind] += sum(map(len, frames)) - 2 * len(pairs)
            if len(pairs):
                differences += _differences(pairs, iteration, kind)
                whole[kind][iteration] = _scores(pairs)
                last_pairs[kind] = pairs
                seen[kind] += [end for side in "ab" for end in pairs[f"score_{side}"].agg(["min", "max"])]
    if not last_pairs:
        raise _nothing_pairs(runs, same_seed, unpaired)
    kind = next(iter(last_pairs))  # validations come first
    iteration, scores = max(whole[kind].items())
    scored = last_pairs[kind][["score_a", "score_b"]].to_numpy()
    are_equal = bool((scored == scored[0, 0]).all())
    low, high = (-np.inf, np.inf) if are_equal else interval(scores)
    spread = max(seen[kind]) - min(seen[kind])
    compared = {difference.iteration for difference in differences}
    rewards = rewards_of(runs, iteration, VALIDATE if kind == "validation" else "score")
    verdict, doubt = judged((low, high), spread, rewards, are_equal=are_equal)
    return Comparison(
        compares="policies",
        a=a.store.url,
        b=b.store.url,
        fork=fork,
        same_seed=same_seed,
        config=changed_keys(configs),
        unknown=tuple(_unknown(runs, iteration)),
        differences=tuple(differences),
        beside=_beside(runs, sorted(compared)),
        flips=_flips(runs, kind, iteration, last_pairs[kind]),
        rewards=rewards,
        same_answers=kind == "train" and not _sources(a).isdisjoint(_sources(b)),
        unpaired=unpaired,
        kind=kind,
        iteration=iteration,
        prompts=len(scores.answers),
        answers=int(scores.answers.sum()),
        difference=scores.difference,
        low=finite_or_none(low),
        high=finite_or_none(high),
        spread=spread,
        verdict=verdict,
        doubt=doubt,
    )


def changed_keys(configs: Sequence[RunConfig]) -> tuple[str, ...]:
    """Describes the differences of the configs; none if they are of different programs."""
    a, b = (config.observed for config in configs)
    if a is not None and b is not None:
        return tuple(config_differences(a.model_dump(mode="json"), b.model_dump(mode="json")))
    if a is not None or b is not None:
        return ()
    old, new = (config.model_dump(mode="json", exclude={"run": {"name", "store"}}) for config in configs)
    return tuple(config_differences(old, new))


def _unknown(runs: tuple[Run, Run], iteration: int) -> Iterator[str]:
    """Says what is not known of runs that other trainers compute."""
    observed = [run.config.observed for run in runs]
    names = [run.store.url.rpartition("/")[2] for run in runs]
    if of_others := [name for name, other in zip(names, observed, strict=True) if other is not None]:
        trainers = " and ".join(dict.fromkeys(other.trainer for other in observed if other is not None))
        yield (
            f"whether both have the same reward is unknown, since {trainers} scored {' and '.join(of_others)}: "
            "`ratchet rescore RUN --run NEW --reward R` scores the training answers of a run with one that is known"
        )
    if len(of_others) == 1:
        yield "their configs are of different programs, and not compared"
    steps = {}
    for run, name in zip(runs, names, strict=True):
        if name in of_others and iteration < run.state.iteration:
            steps[name] = run.metrics_of(run.store.index_of(iteration)).get(STEP, iteration)
    if any(step != iteration for step in steps.values()):
        yield f"iteration {iteration} is {' and '.join(f'step {step:.0f} of {name}' for name, step in steps.items())}"


def _sources(run: Run) -> set[str]:
    """Returns the URLs of the run and of the run whose generations it scores again, if it does."""
    source = run.config.data.generations
    return {run.store.url} if source is None else {run.store.url, source.rstrip("/")}


def rewards_of(runs: tuple[Run, Run], iteration: int, stage: str) -> Rewards | None:
    """Compares the rewards that a stage used in an iteration."""
    if any(run.config.observed is not None for run in runs):  # unknown
        return None
    a, b = (run.config.learned_from()["reward"] for run in runs)
    whole = [run.config.model_dump(mode="json")["reward"] for run in runs]
    names = [name for name in a if a[name] != b.get(name)]
    changed = {f"reward.{name}": (_one_line(whole[0][name]), _one_line(whole[1][name])) for name in names}
    digests = [run.store.manifests(iteration)[stage].fingerprint.parts.get("reward") for run in runs]
    code = (str(digests[0]), str(digests[1])) if None not in digests and digests[0] != digests[1] else None
    if not changed and code is None:
        return None
    scorers = [_scorer(run.config.reward) for run in runs]
    return Rewards((scorers[0], scorers[1]), changed, code)


def _scorer(reward: RewardConfig) -> str:
    """Names the scorer: the functions, the reward model, both, or the environment alone."""
    functions = [name if weight == 1 else f"{weight:g} {name}" for name, weight in reward.functions.items()]
    return " + ".join([*functions, *(["the reward model"] if reward.model is not None else [])]) or "the environment"


def _one_line(value: JsonValue) -> str:
    """Formats a value for the command line, with quotes that a shell leaves alone."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else yaml_text(value)


def parted_at(a: Run, b: Run) -> str | None:
    """Returns the end of the history that both share, such as ``7`` or ``7:score``; None if they share none."""
    ours, theirs = _history(a), _history(b)
    for url, left in ours.items():
        if url in theirs and (points := [at for at in (left, theirs[url]) if at is not None]):
            return min(points, key=_place)
    return None


def _history(run: Run) -> dict[str, str | None]:
    """Returns the URLs of the run and its ancestors, nearest first, and where the run leaves each; None for the run
    itself."""
    left: dict[str, str | None] = {run.store.url: None}
    objects, at = run.store.objects, None
    with suppress(Corrupt):  # an ancestor was deleted
        while isinstance(first := RunLog(objects).record(0).commits[0], Fork):
            objects = objects.of_run(first.parent)
            at = first.at if at is None else min(at, first.at, key=_place)
            left[objects.url] = at
    return left


def _place(at: str) -> tuple[int, int]:
    """Returns a sort key for places such as ``7`` and ``7:score``."""
    iteration, _, stage = at.partition(":")
    stages = ("", *TRAJECTORY.stages)
    return int(iteration), stages.index(stage) if stage in stages else len(stages)


def scored_frames(runs: Sequence[Run], kind: Kind, first: int) -> Iterator[tuple[int, list[pd.DataFrame]]]:
    """Yields the scores of the runs, in each iteration from `first` on that all have completed."""
    opened = min(run.state.iteration for run in runs)
    if kind == "train":
        for iteration in range(first, opened):
            yield iteration, [_counting(run, run.trajectories(iteration, [*COLUMNS, "replayed_from"])) for run in runs]
    else:
        for iteration in range(first, opened + 1):
            if all(isinstance(run.store.committed_stage(iteration, VALIDATE), StageCommit) for run in runs):
                yield iteration, [_counting(run, run.validation(iteration, COLUMNS)) for run in runs]


def _counting(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """Selects one row per answer that counts in metrics: not those whose environment failed, nor those whose reward
    failed if `reward.on_error` is drop."""
    rows = own_answers(rows[rows["rollout_error"].isna()])
    return rows[rows["reward_error"].isna()] if run.config.reward.on_error == "drop" else rows


def paired(a: pd.DataFrame, b: pd.DataFrame, *, same_text: bool) -> pd.DataFrame:
    """Pairs the answers of both runs to the same prompts, a row each; columns of A and B end in _a and _b."""
    if a.empty or b.empty:
        return a.iloc[:0]
    pairs = a.merge(b, on=[*ANSWER], suffixes=("_a", "_b"))
    # the row of an agent has the prompt of its last conversation, in which the policy may have written
    for name in ("data_source", "ground_truth", *(("prompt",) if same_text else ())):
        pairs = pairs[pairs[f"{name}_a"].fillna("") == pairs[f"{name}_b"].fillna("")]
    return pairs


def paired_by_text(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Pairs the answers of both runs to prompts of the same text, in their order, as `paired` does by number.

    A prompt is what its messages say. If none is the same, it is the text with the chat template, since some trainers
    store only that.
    """
    if a.empty or b.empty:
        return a.iloc[:0]
    questions = [
        frame.assign(question=[_question(*row) for row in zip(frame["messages"], frame["prompt"], strict=True)])
        for frame in (a, b)
    ]
    pairs = _merged(*questions)
    return _merged(a.assign(question=a["prompt"]), b.assign(question=b["prompt"])) if pairs.empty else pairs


def _merged(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Pairs the answers to each `question`, in their order."""
    a, b = (frame.assign(number=frame.groupby("question").cumcount()) for frame in (a, b))
    pairs = a.merge(b, on=["question", "number"], suffixes=("_a", "_b"))
    pairs = pairs.assign(prompt_id=pairs.groupby("question")["prompt_id_a"].transform("first"))
    truths = [pairs[f"ground_truth_{side}"] for side in "ab"]
    same = (truths[0] == truths[1]) | truths[0].isna() | truths[1].isna()
    return pairs[same]


def _question(messages: object, prompt: object) -> str:
    """Returns what a prompt asks, without the system's message and the chat template."""
    heard = json.loads(messages) if isinstance(messages, str) else []
    said = [str(message.get("content")) for message in heard if message["role"] != "system"]
    return "\n".join(said) if said else str(prompt)


def _scores(pairs: pd.DataFrame) -> PairedScores:
    return PairedScores.of(pairs["prompt_id"].tolist(), pairs["score_a"].tolist(), pairs["score_b"].tolist())


def _differences(pairs: pd.DataFrame, iteration: int, kind: Kind) -> Iterator[Difference]:
    groups = [(str(source), group) for source, group in pairs.groupby("data_source_a")]
    for source, group in [*groups, *([(ALL, pairs)] if len(groups) > 1 else [])]:
        scores = _scores(group)
        low, high = interval(scores)
        (mean_a, mean_b), prompts = scores.means, len(scores.answers)
        ends = finite_or_none(low), finite_or_none(high)
        yield Difference(source, iteration, kind, prompts, mean_a, mean_b, scores.difference, *ends)


def finite_or_none(end: float) -> float | None:
    return end if np.isfinite(end) else None


def _beside(runs: tuple[Run, Run], iterations: Sequence[int]) -> tuple[Beside, ...]:
    """Returns the measurements of the iterations on their training batches."""
    entries = []
    for iteration in iterations:
        kl, length = [], []
        for run in runs:
            last = min(iteration, run.state.iteration - 1)
            metrics = run.metrics_of(run.store.index_of(last)) if last >= 0 else {}
            kl.append(metrics.get("actor/ref_kl"))
            length.append(metrics.get("response_length/mean"))
        entries.append(Beside(iteration, (kl[0], kl[1]), (length[0], length[1])))
    return tuple(entries)


def _flips(runs: tuple[Run, Run], kind: Kind, iteration: int, pairs: pd.DataFrame) -> tuple[Flip, ...] | None:
    """Returns the prompts that one run solves and the other does not, with all paired answers."""
    solved_a, solved_b = (run.config.solved_score for run in runs)
    if solved_a is None or solved_b is None:
        return None
    for run, suffix in zip(runs, ("_a", "_b"), strict=True):
        wanted = ["trajectory_id", "response"]
        rows = run.validation(iteration, wanted) if kind == "validation" else run.trajectories(iteration, wanted)
        pairs = pairs.merge(rows[wanted].rename(columns={name: f"{name}{suffix}" for name in wanted}))
    prompts: dict[str, tuple[str, str]] = {}
    answers: dict[str, tuple[list[ScoredResponse], list[ScoredResponse]]] = defaultdict(lambda: ([], []))
    names = ("prompt_id", "data_source_a", "prompt_a", "response_a", "score_a", "response_b", "score_b")
    columns = (pairs[name].tolist() for name in names)
    for prompt_id, source, prompt, response_a, score_a, response_b, score_b in zip(*columns, strict=True):
        prompts[prompt_id] = source, prompt
        answers[prompt_id][0].append(ScoredResponse(response_a, score_a))
        answers[prompt_id][1].append(ScoredResponse(response_b, score_b))
    flips = []
    for prompt_id, (a, b) in sorted(answers.items()):
        does_a, does_b = _solves(a, solved_a), _solves(b, solved_b)
        if does_a != does_b:
            flips.append(Flip(prompt_id, *prompts[prompt_id], "A" if does_a else "B", tuple(a), tuple(b)))
    return tuple(flips)


def _solves(answers: Sequence[ScoredResponse], solved: float) -> bool:
    return sum(answer.score >= solved for answer in answers) >= MAJORITY * len(answers)


def _nothing_pairs(runs: tuple[Run, Run], same_seed: bool | None, unpaired: dict[Kind, int]) -> UserError:
    names = [run.store.url.rpartition("/")[2] for run in runs]
    both = " and ".join(names)
    if unpaired["validation"]:
        return UserError(f"{both} have no prompt in common: compare runs with the same prompts in validation.data")
    if same_seed is None:
        return UserError(
            f"{both} cannot be compared: no iteration of both has scored answers to prompts of the same text (role "
            "system apart), in training or validation"
        )
    closed = " and ".join(counted(run.state.iteration, "iteration") for run in runs)
    why = f"they have {closed}, and none that both completed after they parted"
    if not same_seed:
        why = "with another run.seed each trains on other prompts"
    elif unpaired["train"]:
        why = "they train on other prompts (data.train)"
    return UserError(
        f"{both} cannot be compared: they have no validation in common, and {why}. Set validation.data and "
        "validation.every, or `ratchet resume` the run that is behind"
    )
