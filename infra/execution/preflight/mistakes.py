"""Collects the mistakes that checks find, so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ratchet.rlhf.errors import UserError


def refuse(mistakes: Iterable[str]) -> None:
    """Raise `UserError` with a line for each mistake, if there are any."""
    if lines := list(mistakes):
        raise UserError("\n".join(lines))


def check_all(*checks: Callable[[], object]) -> None:
    """Make all checks, each of which raises `UserError` if something is wrong; raise one `UserError` for all."""
    mistakes: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except UserError as error:
            mistakes |= dict.fromkeys(str(error).splitlines())
    refuse(mistakes)
