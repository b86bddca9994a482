"""Converts other programs' settings into configs, and published datasets into prompt files."""

from ratchet.rlhf.convert.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
