"""`make site` builds docs/ without warnings: links and anchors lead somewhere, and each public name has its place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import ratchet
from ratchet import testing
from tests.extras import MKDOCS, needs

ROOT = Path(__file__).parents[2]


def site(sources: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(MKDOCS), "build", "--site-dir", str(folder)]
    # without the packages of this process
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)


@needs("site")
def test_the_site_has_every_page_and_every_public_name(tmp_path: Path) -> None:
    done = site(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert '<h1 id="ratchet">' in (tmp_path / "index.html").read_text(), "README is the home page"
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    made = {page.parent.relative_to(tmp_path) for page in tmp_path.rglob("index.html")}
    assert made == pages | {Path(name) for name in (".", "CONTRIBUTING", "AGENTS", "CHANGELOG", "notebook")}
    assert "<img" in (tmp_path / "notebook" / "index.html").read_text(), "the notebook's curve"
    described = set(
        re.findall(r'id="(ratchet\.[\w.]+)"', "".join(p.read_text() for p in tmp_path.glob("api/*/*.html")))
    )
    public = {f"ratchet.{name}" for name in ratchet.__all__} | {f"ratchet.testing.{name}" for name in testing.__all__}
    assert public <= described


@needs("site")
def test_links_that_lead_nowhere_fail_the_site(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(ROOT / "docs", sources / "docs")
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, sources)
    for name in ("src", "examples"):
        (sources / name).symlink_to(ROOT / name)
    wrong = ("gone.md", "metrics.md#gone", "../gone.md", "../CONTRIBUTING.md#gone")
    with (sources / "docs" / "ui.md").open("a") as page:
        page.writelines(f"\n[a link]({link})\n" for link in wrong)
    done = site(sources, tmp_path / "site")
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING") and "'ui.md'" in line]
    assert len(warnings) == len(wrong), done.stderr
