"""Renders the HTML of the page. A report is the same page with everything inside: one file without requests."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

STATIC = Path(__file__).parent / "static"
MODULES = ("dom", "address", "histograms", "source", "images", "charts", "plot", "runs", "timeline", "trajectories")
"""Modules that others import, as `ui/<module>`."""


def live_page() -> str:
    """Renders the page as `ratchet ui` serves it, with its files under ``static/``."""
    return _render("ratchet", imports={f"ui/{name}": f"./static/{name}.js" for name in MODULES})


def live_policy() -> str:
    """Returns the Content-Security-Policy of the live page: its own files, and the import map inside it."""
    import_map = live_page().partition('<script type="importmap">')[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(import_map.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def report_page(title: str, data: str, arms: Sequence[Mapping[str, str]] = ()) -> str:
    """Renders the page, with the JSON `data` of its content, as one file.

    `arms` has facts about the runs as arms of a sweep, by column; they are shown above everything else.
    """
    styles = (STATIC / "style.css").read_text()
    # `data:` URLs, because a file cannot import its own parts
    imports = {f"ui/{name}": _data_url((STATIC / f"{name}.js").read_bytes()) for name in MODULES}
    escaped = data.replace("<", "\\u003c")  # so that no string in it ends the script
    main = (STATIC / "main.js").read_text()
    return _render(title, imports=imports, styles=styles, main=main, data=escaped, arms=arms)


def _data_url(source: bytes) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(source).decode()}"


def _render(
    title: str,
    *,
    imports: dict[str, str],
    styles: str = "",
    main: str = "",
    data: str = "",
    arms: Sequence[Mapping[str, str]] = (),
) -> str:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    template = environment.get_template("page.html.jinja")
    import_map = json.dumps({"imports": imports})
    return template.render(title=title, imports=import_map, styles=styles, main=main, data=data, arms=arms)
