"""Gives the simulated GPU to each Python process that starts with this folder in its path."""

from tests.simulated import device

device.enable()
