"""Measures, in virtual time, how long the real driver generates an iteration on replicas that only take time.

    python benchmarks/cluster.py [REPLICAS:PROMPTS[:LOST_AT] ...]

Each prompt has 8 trajectories; `LOST_AT` is the second in which a process dies. "Ideal" is all tokens at full speed,
and then the longest trajectory alone: a bound that good schedules stay below. See docs/decisions/047.
"""

from __future__ import annotations

import sys

from tests.virtual.cluster import Cluster, Work


def main() -> None:
    print("| replicas | trajectories | lost at | seconds | ideal | ratio | requests | most per second | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for asked in sys.argv[1:] or ["16:2048", "64:4096", "64:12500", "64:4096:40"]:
        replicas, prompts, *lost_at = map(int, asked.split(":"))
        work = Work(replicas=replicas, prompts=prompts)
        cluster = Cluster(work)
        with cluster.driver() as driver:
            for at in lost_at:
                cluster.lose_at(at)
            iteration, _ = cluster.generated(driver)
        print(
            f"| {replicas} | {prompts * work.n:,} | {lost_at[0] if lost_at else ''} | {iteration.seconds:.1f} | "
            f"{iteration.ideal:.1f} | {iteration.ratio:.2f} | {iteration.requests.total():,} | "
            f"{iteration.most_requests_per_s} | {iteration.cpu_s:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
