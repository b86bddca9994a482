"""The maths of RL for language models: pure functions of tensors, no engine in sight.

Each algorithm is one frozen pydantic class: its fields are its configuration, `needs` names the inputs it asks for
(and so decides which stages an iteration runs), and calling it computes. To add one, write the class and name it in
the union below; nothing else branches on an algorithm's name.
"""

from typing import Annotated

from pydantic import Field

from rlhf.algorithms.advantages import GAE, GRPO
from rlhf.algorithms.kl import KLPenalty
from rlhf.algorithms.policy_losses import PPOClip

Advantage = Annotated[GAE | GRPO, Field(discriminator="type")]
PolicyLoss = PPOClip

__all__ = ["GAE", "GRPO", "Advantage", "KLPenalty", "PPOClip", "PolicyLoss"]
