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


def book(item: str, idempotency_key: str) -> str:
    """
    Book an item.

    Args:
        item: what
        idempotency_key: names the booking
    """
    return f"{item} as {idempotency_key}"


def pay(sum: int) -> str:
    """
    Pay a sum.

    Args:
        sum: how much
    """
    return f"paid {sum}"


pay.repeatable = False  # type: ignore[attr-defined]


def untyped(text) -> str:  # type: ignore[no-untyped-def]
    """No types."""
    return str(text)


def photograph(city: str) -> object:
    """
    A photograph of a city.

    Args:
        city: where
    """
    from PIL import Image

    return Image.new("RGB", (60, 80), "red")
