"""`ratchet data`: generates or converts prompt datasets."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import DEFAULT_STORE, Name, Store, make_folder, url_of
from ratchet.rlhf.config.reading import overridden
from ratchet.rlhf.errors import UserError, counted, in_one_line

if TYPE_CHECKING:
    import pyarrow as pa

data = typer.Typer(help="Write prompt datasets.", no_args_is_help=True)


@data.command()
def countdown(
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="folder for train.parquet, test.parquet and sft.parquet")
    ],
    train: Annotated[int, typer.Option(help="training problems", min=1)] = 6144,
    test: Annotated[int, typer.Option(help="held-out problems, disjoint from the training ones", min=1)] = 1024,
    operands: Annotated[int, typer.Option(help="numbers in a problem", min=2, max=5)] = 3,
    low: Annotated[int, typer.Option(help="smallest number", min=0)] = 1,
    high: Annotated[int, typer.Option(help="largest number", min=1)] = 20,
    high_product: Annotated[int, typer.Option(help="largest number in problems that need a product", min=1)] = 10,
    max_target: Annotated[int, typer.Option(help="largest target", min=1)] = 100,
    sft_per_problem: Annotated[
        int, typer.Option(help="worked solutions per training problem in sft.parquet", min=0)
    ] = 4,
    seed: Annotated[int, typer.Option(help="seed of the problems", min=0)] = 0,
) -> None:
    """Countdown: reach a target with the given numbers, using each once."""
    import pyarrow.parquet as pq

    from ratchet.rlhf.data import countdown_dataset as game

    try:
        problems = game.problems(
            seed=seed,
            count=train + test,
            operands=operands,
            low=low,
            high=high,
            max_target=max_target,
            high_product=high_product,
        )
    except ValueError as error:
        raise UserError(f"data countdown: {error}") from None
    training, held_out = game.split(problems, test)
    make_folder(output)
    pq.write_table(game.rows(training, split="train"), output / "train.parquet")
    pq.write_table(game.rows(held_out, split="test"), output / "test.parquet")
    if sft_per_problem:
        pq.write_table(game.sft_rows(training, seed=seed, per_problem=sft_per_problem), output / "sft.parquet")
    console.print(f"{len(training)} training and {len(held_out)} held-out problems in {output}")


@data.command()
def prefixes(
    name: Name,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="the file to write, OUT.jsonl")],
    trajectory: Annotated[str, typer.Option(help="the trajectory to continue, such as it000007-p00012-s03")],
    turn: Annotated[
        int | None, typer.Option(help="turns of the policy to keep; by default one prompt for each number", min=1)
    ] = None,
    store: Store = DEFAULT_STORE,
) -> None:
    """Turns of a stored trajectory as prompts: a fork or an evaluation with them continues it from there.

    `rollout.n` is the number of continuations. The kept turns are read and not learned; a durable environment is
    restored to the state after them, another one replays them.
    """
    import json

    from ratchet.infra.runs.run import open_run
    from ratchet.infra.runs.turn_prefixes import turn_prefixes

    if output.suffix != ".jsonl":
        raise UserError(f"data prefixes: {output} should end in .jsonl")
    rows = turn_prefixes(open_run(url_of(name, store)), trajectory, turn)
    make_folder(output.parent)
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    console.print(f"{counted(len(rows), 'prompt')} in {output}", markup=False)


Source = Annotated[
    str,
    typer.Option(
        help="path or URL of a file, or of a folder or hub dataset with train.* and test.* (Parquet, Arrow, JSON, CSV)"
    ),
]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="folder for train.parquet and test.parquet")]


@data.command()
def gsm8k(output: Output, source: Source = "hf://datasets/openai/gsm8k/main") -> None:
    """GSM8K: grade-school maths, from the original JSON lines (question, answer) or from the hub."""
    from ratchet.rlhf.convert import datasets

    _write_splits(output, source, datasets.gsm8k)


@data.command()
def math(output: Output, source: Source = "hf://datasets/DigitalLearningGmbH/MATH-lighteval/data") -> None:
    """MATH and similar datasets: rows of problem and solution, or problem and answer."""
    from ratchet.rlhf.convert import datasets

    _write_splits(output, source, datasets.math)


@data.command()
def prompts(
    output: Output,
    source: Source,
    data_source: Annotated[str, typer.Option(help="name of the dataset, for rewards and metrics")],
    prompt: Annotated[str, typer.Option(help="column of the prompt")] = "prompt",
    truth: Annotated[str | None, typer.Option(help="column of the ground truth")] = None,
    instruction: Annotated[str | None, typer.Option(help="text to append to each prompt")] = None,
) -> None:
    """Prompts from any table."""
    from functools import partial

    from ratchet.rlhf.convert import datasets

    _write_splits(
        output,
        source,
        partial(datasets.prompts, prompt=prompt, truth=truth, data_source=data_source, instruction=instruction),
    )


File = Annotated[Path, typer.Argument(metavar="OUT.parquet", help="file to write")]
Settings = Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="settings of it, with values in YAML")]


@data.command()
def verifiers(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of an installed taskset")],
    output: File,
    options: Settings = None,
    size: Annotated[int | None, typer.Option(help="largest number of tasks; all by default", min=1)] = None,
) -> None:
    """The tasks of a taskset of verifiers, for `rollout.environment: verifiers:NAME` with the same options."""
    from ratchet.rlhf.agents import verifiers as tasksets

    _write(output, tasksets.prompts(name, overridden({}, options or (), BaseModel), size))


@data.command()
def gymnasium(
    name: Annotated[str, typer.Argument(metavar="ID", help="the environment, or module:ID")],
    output: File,
    options: Settings = None,
    size: Annotated[int, typer.Option(help="number of episodes, each of its own seed", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="seed of the first episode", min=0)] = 0,
    instruction: Annotated[
        str | None,
        typer.Option(help="what the policy reads before the first observation; by default what an answer is"),
    ] = None,
) -> None:
    """Episodes of a Gymnasium environment, for `rollout.environment: gymnasium:ID` with the same options."""
    from ratchet.rlhf.environments import gymnasium as episodes

    seeds = range(seed, seed + size)
    _write(output, episodes.prompts(name, overridden({}, options or (), BaseModel), seeds, instruction))


@data.command("reasoning-gym")
def reasoning_gym(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="name of a dataset")],
    output: File,
    options: Settings = None,
    size: Annotated[int, typer.Option(help="number of problems", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="seed of the problems", min=0)] = 0,
) -> None:
    """Problems of reasoning-gym, which the package makes from a seed, for `reward.function: reasoning_gym`."""
    from ratchet.rlhf.convert import datasets

    _write(output, datasets.reasoning_gym(dataset, overridden({}, options or (), BaseModel), size, seed))


def _write(output: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    make_folder(output.parent)
    try:
        pq.write_table(table, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from None
    console.print(f"{counted(len(table), 'prompt')} in {output}")


def _write_splits(output: Path, source: str, convert: Callable[..., Any]) -> None:
    import fsspec
    import pyarrow.parquet as pq

    from ratchet.rlhf.config.sections import ENDINGS
    from ratchet.rlhf.data.files import read
    from ratchet.rlhf.data.folders import FORMATS

    try:
        files, path = fsspec.core.url_to_fs(source)
        is_there, is_folder = files.exists(path), files.isdir(path)
        names = files.glob(f"{path}/*") if is_folder else [path]
    except Exception as error:  # the hub has its own errors for missing data and for a network that fails
        raise UserError(f"--source {source}: {in_one_line(error)}") from None
    if not is_there:
        raise UserError(f"--source {source} does not exist")
    urls_of_split: dict[str, list[str]] = {}
    for name in sorted(names):
        # test.jsonl, test-00000-of-00001.parquet, but not test_socratic.jsonl; a single file is for training by default
        named_split = re.match(r"(train|test)[.-]", Path(name).name)
        if not is_folder or (named_split and name.endswith(ENDINGS)):
            url = files.unstrip_protocol(name) if is_folder else source
            urls_of_split.setdefault(named_split[1] if named_split else "train", []).append(url)
    if is_folder and "train" not in urls_of_split:
        raise UserError(f"--source {source} has no train file, such as train.jsonl: the formats are {FORMATS}")
    for split, urls in sorted(urls_of_split.items(), reverse=True):
        table = convert((row for url in urls for row in read(url)), split)
        make_folder(output)
        pq.write_table(table, output / f"{split}.parquet")
        console.print(f"{counted(len(table), 'prompt')} in {output / split}.parquet")
