"""Measures, in virtual time, how long the real driver generates on replicas that only take time.

    python benchmarks/cluster.py [REPLICAS:PROMPTS[:LOST_AT] ...]
    python benchmarks/cluster.py --iterations 24 --lost-every 3600 [REPLICAS:PROMPTS]

Each prompt has 8 trajectories; `LOST_AT` is the second in which a process dies. "Ideal" is all tokens at full speed,
and then the longest trajectory alone; "least" is the longer of the two, which no schedule stays below. With
`--iterations` also what a process costs that dies once in every so many seconds. See docs/decisions/047.
"""

from __future__ import annotations

import argparse

from tests.virtual.cluster import Cluster, Iteration, Work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", help="REPLICAS:PROMPTS[:LOST_AT]")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--lost-every", type=float, default=3600.0)
    parser.add_argument("--max-in-flight", type=int, default=Work.max_in_flight)
    parser.add_argument("--median", type=float, default=Work.median)
    options = parser.parse_args()
    if options.iterations:
        show_losses(options.work[0] if options.work else "64:4096", options.iterations, options.lost_every)
        return
    print("| replicas | trajectories | lost at | seconds | ideal | ratio | least | ratio | redrawn | driver's core |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for asked in options.work or ["16:2048", "64:4096", "64:12500", "64:4096:40"]:
        replicas, prompts, *lost_at = map(int, asked.split(":"))
        work = Work(replicas=replicas, prompts=prompts, max_in_flight=options.max_in_flight, median=options.median)
        cluster = Cluster(work)
        with cluster.driver() as driver:
            for at in lost_at:
                cluster.lose_at(at)
            iteration, _ = cluster.generated(driver)
        print(
            f"| {replicas} | {prompts * work.n:,} | {lost_at[0] if lost_at else ''} | {iteration.seconds:.1f} | "
            f"{iteration.ideal:.1f} | {iteration.ratio:.2f} | {iteration.least:.1f} | "
            f"{iteration.seconds / iteration.least:.2f} | {iteration.redrawn:,.0f} | {iteration.core:.2f} |",
            flush=True,
        )
        show_counts(cluster, iteration)


def show_counts(cluster: Cluster, iteration: Iteration) -> None:
    """Shows calls, requests to the store and bytes in it."""
    print(f"<!-- calls: {dict(iteration.calls)}; requests: {dict(iteration.requests)}")
    for (folder, kind), most in sorted(iteration.most_per_s.items()):
        print(f"     {folder}: at most {most} {kind} a second")
    print(f"     bytes: {dict(cluster.bucket.written)}; refused: {cluster.bucket.refused} -->", flush=True)


def show_losses(asked: str, count: int, lost_every: float) -> None:
    replicas, prompts = map(int, asked.split(":"))
    work = Work(replicas=replicas, prompts=prompts)
    took = []
    for loses in (False, True):
        cluster = Cluster(work)
        with cluster.driver() as driver:
            if loses:
                cluster.lose_every(lost_every)
            done = cluster.iterations(driver, count)
            losses, seconds = cluster.losses, cluster.time.now
        took.append(seconds)
        generating = sum(iteration.seconds for iteration in done)
        print(
            f"{losses} lost: {count} iterations in {seconds:,.0f} s, of which {generating:,.0f} generate "
            f"({max(iteration.core for iteration in done):.2f} of a core at most); "
            f"{sum(iteration.redrawn for iteration in done):,.0f} tokens drawn again; "
            f"slowest: {max(iteration.seconds for iteration in done):.0f} s",
            flush=True,
        )
    print(f"a loss costs {(took[1] - took[0]) / max(losses, 1):.0f} s, and the run {took[1] / took[0] - 1:.1%}")
    written = {folder: f"{size / count:,.0f}" for folder, size in sorted(cluster.bucket.written.items())}
    print(f"bytes written in an iteration: {written}")


if __name__ == "__main__":
    main()
