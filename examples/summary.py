"""Sums up a run: held-out scores before and after, answers side by side, seconds per stage, and the learning curve.

python examples/summary.py RUN [--store URL]
"""

import argparse
from os.path import commonprefix
from pathlib import Path

import matplotlib
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ratchet.flows.commands.tables import mean_and_interval
from ratchet.flows.terminal import visible
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import Run, open_run

matplotlib.use("Agg")
from matplotlib import pyplot

ANSWERS = 10
"""Answers that are shown before and after training."""
BAR = 18
"""Characters of a bar for a score of 1."""


def scores(run: Run, validation: pd.DataFrame) -> Table:
    """The mean score of each validation with its 95 % interval, the means of the reward's parts, and the length."""
    parts = sorted(validation["reward_parts"].iloc[0])
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("iterations", "score", "95 %", *parts, "tokens"):
        table.add_column(column.replace("_", " "), justify="right")
    table.add_column("")
    for iteration, answers in validation.groupby("iteration"):
        mean, half = mean_and_interval(answers)
        means = [f"{answers['reward_parts'].map(lambda of, name=part: of[name]).mean():.1%}" for part in parts]
        tokens = answers["response_ids"].map(len).mean()
        table.add_row(
            f"{iteration}", f"{mean:.1%}", f"± {half:.1%}", *means, f"{tokens:.1f}", "█" * round(BAR * max(mean, 0))
        )
    table.title = f"{run.config.run.name}: {answers['prompt_id'].nunique()} prompts that training never saw"
    return table


def side_by_side(validation: pd.DataFrame) -> Table:
    """The same prompts answered before and after training: the first answer to each."""
    first = validation[validation["sample"] == 0]
    before, after = (
        first[first["iteration"] == iteration].reset_index(drop=True)  # the same prompts in the same order
        for iteration in (validation["iteration"].min(), validation["iteration"].max())
    )
    prompts = list(after["prompt"])
    start, end = (commonprefix(texts) for texts in (prompts, [prompt[::-1] for prompt in prompts]))  # noqa: RUF071
    table = Table(show_lines=True)
    for column in ("prompt", "before", "after"):
        table.add_column(column, ratio=1)
    for row in range(0, len(after), max(1, -(-len(after) // ANSWERS))):
        prompt = after["prompt"][row].removeprefix(start).removesuffix(end[::-1])
        texts = (prompt, before["response"][row], after["response"][row])
        table.add_row(*(Text(visible(text).strip()) for text in texts))
    return table


def stage_seconds(run: Run) -> Table:
    metrics = run.metrics()
    table = Table(title="seconds per iteration", box=box.SIMPLE_HEAD)
    for column in ("stage", "seconds", "share"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    timings = [name for name in metrics if name.startswith("timing_s/")]  # a stage that did not run took no time
    means = {name.removeprefix("timing_s/"): metrics[name].fillna(0.0).mean() for name in timings}
    total = means.pop("stages") + means["save_checkpoint"]
    del means["step"]  # wall-clock time, while stages may overlap
    for name, seconds in means.items():
        table.add_row(name, f"{seconds:.2f}", f"{seconds / total:.0%}")
    return table


def draw(run: Run, validation: pd.DataFrame, path: Path) -> None:
    metrics = run.metrics()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(metrics["iteration"], metrics["critic/score/mean"], label="training prompts", color="tab:blue", alpha=0.7)
    points = [(iteration, *mean_and_interval(answers)) for iteration, answers in validation.groupby("iteration")]
    iterations, means, halves = zip(*points, strict=True)
    axes.errorbar(
        iterations, means, yerr=halves, label="held-out prompts (95 %)", color="tab:red", marker="o", capsize=3
    )
    axes.set(xlabel="iteration", ylabel="score", title=run.config.run.name, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--store", default="file://./runs")
    arguments = parser.parse_args()
    run = open_run(run_url(arguments.store, arguments.run))
    validation = run.validation()
    console = Console()
    console.print(side_by_side(validation), scores(run, validation), stage_seconds(run))
    picture = Path(f"{arguments.run}.png")
    draw(run, validation, picture)
    commands = {
        "ratchet ui": "all of it in a browser",
        f'ratchet show {arguments.run} --where "score = 0" --limit 5': "what went wrong",
        f"ratchet export {arguments.run} exported": "the trained model",
    }
    console.print(f"learning curve: {picture.resolve()}\nnext:", highlight=False)
    for command, what in commands.items():
        console.print(f"  {command:<{max(map(len, commands))}}  {what}", highlight=False)


if __name__ == "__main__":
    main()
