"""Puts on the site what lies outside docs/: pages at the top of the repository, the notebook, and links."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")
NOTEBOOK = "examples/inspect.ipynb"
NOTEBOOK_PAGE = "notebook.md"
"""Shows the outputs that the notebook was saved with."""
LINK = re.compile(r"\[([^]\[]*)\]\(([\w./-]+)(#[\w-]+)?\)")


def on_config(config: MkDocsConfig) -> None:
    decisions = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    config.nav.append({"Decisions": [f"decisions/{name}" for name in decisions]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    for name in TOP:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    text, resources = MarkdownExporter().from_filename(ROOT / NOTEBOOK)
    files.append(File.generated(config, NOTEBOOK_PAGE, content=text))
    for name, picture in resources["outputs"].items():
        files.append(File.generated(config, name, content=picture))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets links lead to where files are on the site. Links to files that are not there become plain text."""
    here = page.file.src_uri
    folder = dirname(here if here in TOP else f"docs/{here}")

    def on_site(link: re.Match[str]) -> str:
        text, path, anchor = link.groups("")
        target = normpath(join(folder, path))
        target = f"docs/{NOTEBOOK_PAGE}" if target == NOTEBOOK else target
        name = target.removeprefix("docs/")
        if target in TOP or (target != name and files.get_file_from_path(name)):
            return f"[{text}]({relpath(name, dirname(here) or '.')}{anchor})"
        return text if (ROOT / target).exists() else link[0]

    return LINK.sub(on_site, markdown)
