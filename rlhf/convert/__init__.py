"""Converts what other programs use: their settings into a config of ours, published datasets into prompt files."""

from ratchet.rlhf.convert.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
