"""Tables of correspondences between the settings of other programs and ours, one module per program.

`ratchet convert` converts by them, errors about unknown keys quote them, and `docs/migration.md` prints them.
"""

from ratchet.rlhf.config.counterparts.answers import answers
from ratchet.rlhf.config.counterparts.openrlhf import OPENRLHF
from ratchet.rlhf.config.counterparts.prime_rl import PRIME_RL
from ratchet.rlhf.config.counterparts.translation import (
    Assumed,
    Converted,
    Counterpart,
    NoEqual,
    Settings,
    Source,
    Value,
)
from ratchet.rlhf.config.counterparts.trl import GRPO, PPO
from ratchet.rlhf.config.counterparts.verl import VERL

__all__ = ["SOURCES", "Assumed", "Converted", "Counterpart", "NoEqual", "Settings", "Source", "Value", "answers"]
SOURCES: tuple[Source, ...] = (VERL, GRPO, PPO, OPENRLHF, PRIME_RL)
