"""Collects the mistakes that checks find, so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ratchet.rlhf.errors import UserError


def refuse(mistakes: Iterable[str]) -> None:
    """Raises `UserError` with a line for each mistake, if there are any."""
    if lines := list(mistakes):
        raise UserError("\n".join(lines))


def check_all(*checks: Callable[[], object]) -> None:
    """Runs all checks, each of which may raise `UserError`, and raises one `UserError` for all of them."""
    mistakes: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except UserError as error:
            mistakes |= dict.fromkeys(str(error).splitlines())
    refuse(mistakes)
