"""Gives the simulated GPU to a whole run of pytest: `python -m pytest -p tests.simulated.plugin`."""

import os

from tests.simulated import device

os.environ[device.VARIABLE] = "1"
device.enable()
