"""Errors for users: one line that says what is wrong, where, and how to fix it."""

import sys
import traceback
from pathlib import Path


class RatchetError(Exception):
    """Base class of the errors that the command line prints as one line instead of a traceback."""

    exit_code = 1


class UserError(RatchetError):
    """The user's input is wrong: a config, a dataset, a model folder, a run's name."""

    exit_code = 2


class NotFinite(RatchetError):
    """A reward, a loss or a gradient is NaN or infinite; nothing of the stage is committed."""


class EngineLost(RatchetError):
    """A generation process died or hung. Only its current shard is lost; a new process starts."""


def raised(error: BaseException) -> str:
    """Describes an exception of user code and its location there, such as ``KeyError: 'a' at mine.py:12 in step``."""
    ours_or_installed = (Path(__file__).parents[1], sys.prefix, sys.base_prefix)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in ours_or_installed)
    ]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}: {in_one_line(error)}{where}"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as ``1 iteration`` or ``2 iterations``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def reached(done: int, total: int | None) -> str:
    """Describes the progress of a run, such as ``2 of 3 iterations``; a run may have more than its config asks for.
    Without a total it is ``2 iterations``."""
    if total is None:
        return counted(done, "iteration")
    if done <= total:
        return f"{done} of {counted(total, 'iteration')}"
    return f"{counted(done, 'iteration')}, more than train.iterations {total}"


def in_one_line(text: BaseException | str) -> str:
    """Returns the message of an error, or a text, without line breaks and tabs."""
    return " ".join(str(text).split())
