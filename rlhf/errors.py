"""The errors a person is meant to read: one line that says what is wrong, where, and how to mend it."""


class RatchetError(Exception):
    """Base of every error that the command line prints as one line instead of a traceback."""

    exit_code = 1


class UserError(RatchetError):
    """The user's input is wrong: a config, a dataset, a model folder, a run's name."""

    exit_code = 2


class NotFinite(RatchetError):
    """A reward, a loss or a gradient is NaN or infinite; nothing of the stage is committed."""


class EngineLost(RatchetError):
    """A generating process died or hung: the shard at hand is lost, and nothing else; a new one starts."""
