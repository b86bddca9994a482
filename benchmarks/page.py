"""Measures `ratchet ui` over a store of many runs: seconds until its list is shown, and until all of it is; bytes sent,
compressed.

    ratchet demo countdown                       # once: the run
    python benchmarks/page.py --runs 300

The store has copies of one run. Chromium opens the page three times; the first time, the server has read nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Response

from ratchet.tasks import pipeline  # noqa: F401  (as `ratchet ui` does before it listens)
from tests.browser import chromium, opened, served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/countdown"), help="the folder of the run to copy")
    parser.add_argument("--runs", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.run.parent.parent) as store:
        for number in range(arguments.runs):
            shutil.copytree(arguments.run, f"{store}/run-{number}", copy_function=os.link)
        with chromium() as browser, served(f"file://{store}") as url:
            for visit in range(3):
                with opened(browser) as page:
                    sent: list[Response] = []
                    page.on("response", lambda response, to=sent: to.append(response))
                    started = time.perf_counter()
                    page.goto(url)
                    page.wait_for_selector("#list-of-runs li")
                    listed = time.perf_counter() - started
                    page.wait_for_selector("body[data-ready]")
                    shown = time.perf_counter() - started
                    size = sum(response.request.sizes()["responseBodySize"] for response in sent)
                    print(f"visit {visit + 1}: list {listed:.2f} s, all {shown:.2f} s, {size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
