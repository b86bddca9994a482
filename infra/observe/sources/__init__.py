"""Formats of other trainers' files, one module each: what they hold of each step, as rows of Ratchet's columns."""
