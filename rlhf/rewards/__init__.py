"""Rewards: functions that score responses.

The built-in rewards are modules of this package; other functions are named ``package.module:function`` or
``folder/file.py:function``. `functions` describes their arguments and results, `registry` finds them, and `pool` calls
them.
"""

from ratchet.rlhf.rewards.functions import Trajectory

__all__ = ["Trajectory"]
