"""Environments that a policy talks to while it responds, such as tools, or the other player of a game.

The built-ins are modules of this package, each with a class `Environment`; other classes are named
``package.module:Class`` or ``folder/file.py:Class``. The text of an environment becomes part of the response with
`response_mask` 0: the policy reads it, but is not trained on it.
"""

from ratchet.rlhf.environments.environment import Environment, Observation

__all__ = ["Environment", "Observation"]
