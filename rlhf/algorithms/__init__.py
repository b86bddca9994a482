"""The maths of RL for language models: pure functions of tensors, no engine in sight.

Each algorithm is one frozen pydantic class: its fields are its configuration, `needs` names the inputs it asks for
(and so decides which stages an iteration runs), and calling it computes. To add one, write the class and name it in
the union at the end of its module; nothing else branches on an algorithm's name.
"""

from rlhf.algorithms.advantages import GAE, GRPO, Advantage
from rlhf.algorithms.kl import KLPenalty
from rlhf.algorithms.policy_losses import PolicyLoss, PPOClip
from rlhf.algorithms.reward_shaping import OverlongPenalty
from rlhf.algorithms.rollout_correction import RolloutCorrection

__all__ = ["GAE", "GRPO", "Advantage", "KLPenalty", "OverlongPenalty", "PPOClip", "PolicyLoss", "RolloutCorrection"]
