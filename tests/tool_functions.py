"""Tools of tests."""

from __future__ import annotations


def weather(city: str, days: int = 1) -> list[dict[str, object]]:
    """
    The weather of the next days.

    Args:
        city: where
        days: for how many days
    """
    return [{"day": day, "city": city, "sun": True} for day in range(days)]


async def shout(text: str) -> str:
    """
    Write a text in capitals.

    Args:
        text: the text
    """
    return text.upper()


def fails(reason: str) -> str:
    """
    Raise an error.

    Args:
        reason: why
    """
    raise RuntimeError(reason)


def untyped(text) -> str:  # type: ignore[no-untyped-def]
    """No types."""
    return str(text)
