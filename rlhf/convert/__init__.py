"""Converts the settings of other programs into a config of ours."""

from ratchet.rlhf.convert.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
