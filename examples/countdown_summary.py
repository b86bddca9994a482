"""Sums up a finished run: solve rates before and after, seconds per stage, and a picture of the reward curve.

python examples/countdown_summary.py RUN [--store URL]
"""

import argparse
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

from ratchet.flows.commands.tables import mean_and_interval
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import Run, open_run

matplotlib.use("Agg")
from matplotlib import pyplot


def solve_rates(run: Run) -> Table:
    validation = run.validation()
    table = Table(
        title=f"{run.config.run.name}: held-out prompts, sampled at temperature {run.config.validation.temperature:g}"
    )
    for column in ("after", "solved", "95 % interval", "well formed"):
        table.add_column(column, justify="right")
    for iteration, answers in validation.groupby("iteration"):
        mean, half = mean_and_interval(answers)
        formed = sum(parts["well_formed"] for parts in answers["reward_parts"]) / len(answers)
        interval = f"{mean - half:.1%} to {mean + half:.1%}"
        table.add_row(f"{iteration} iterations", f"{mean:.1%}", interval, f"{formed:.1%}")
    by_iteration = validation.groupby("iteration")
    means = [mean_and_interval(answers)[0] for _, answers in by_iteration]
    prompts = next(iter(by_iteration))[1]["prompt_id"].nunique()
    table.caption = f"{(means[-1] - means[0]) * 100:+.1f} points on {prompts} prompts that training never saw"
    return table


def stage_seconds(run: Run) -> Table:
    metrics = run.metrics()
    table = Table(title="seconds per stage (mean over the iterations)")
    for column in ("stage", "seconds", "share"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    timings = [name for name in metrics if name.startswith("timing_s/")]  # a stage that did not run took no time
    means = {name.removeprefix("timing_s/"): metrics[name].fillna(0.0).mean() for name in timings}
    total = means.pop("stages") + means["save_checkpoint"]
    del means["step"]  # wall-clock time, while stages may overlap
    for name, seconds in means.items():
        table.add_row(name, f"{seconds:.2f}", f"{seconds / total:.0%}")
    return table


def draw(run: Run, path: Path) -> None:
    metrics, validation = run.metrics(), run.validation()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(metrics["iteration"], metrics["critic/score/mean"], label="training prompts", color="tab:blue", alpha=0.7)
    points = [(iteration, *mean_and_interval(answers)) for iteration, answers in validation.groupby("iteration")]
    iterations, means, halves = zip(*points, strict=True)
    axes.errorbar(
        iterations, means, yerr=halves, label="held-out prompts (95 %)", color="tab:red", marker="o", capsize=3
    )
    axes.set(xlabel="PPO iteration", ylabel="solved", title=f"Countdown: {run.config.run.name}", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--store", default="file://./runs")
    arguments = parser.parse_args()
    run = open_run(run_url(arguments.store, arguments.run))
    console = Console()
    console.print(solve_rates(run), stage_seconds(run))
    picture = Path(f"{arguments.run}.png")
    draw(run, picture)
    console.print(
        f"reward curve: {picture.resolve()}\n"
        f"more:\n"
        f"  ratchet status {arguments.run}\n"
        f'  ratchet show {arguments.run} --where "score < 0.5" --limit 5',
        highlight=False,
    )
