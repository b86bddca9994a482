"""Consoles for the output, the notes and the errors of commands."""

from __future__ import annotations

from rich.console import Console

console = Console(soft_wrap=True, markup=False, emoji=False)
errors = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)
