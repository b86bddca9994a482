"""The maths of RL for language models: pure functions of tensors, independent of any engine.

Each algorithm is a frozen pydantic class. Its fields are its configuration, `needs` names its inputs (and so decides
which stages an iteration runs), and calling it runs the computation. To add an algorithm, write a class and add it to
the union at the end of its module; no other code branches on an algorithm's name.
"""

from ratchet.rlhf.algorithms.advantages import GAE, GRPO, Advantage
from ratchet.rlhf.algorithms.distillation import Distillation
from ratchet.rlhf.algorithms.experts import LUFFY, Experts
from ratchet.rlhf.algorithms.kl import KLPenalty
from ratchet.rlhf.algorithms.policy_losses import PolicyLoss, PPOClip
from ratchet.rlhf.algorithms.reward_shaping import OverlongPenalty
from ratchet.rlhf.algorithms.rollout_correction import RolloutCorrection

__all__ = [
    "GAE",
    "GRPO",
    "LUFFY",
    "Advantage",
    "Distillation",
    "Experts",
    "KLPenalty",
    "OverlongPenalty",
    "PPOClip",
    "PolicyLoss",
    "RolloutCorrection",
]
