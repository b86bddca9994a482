"""Gives the simulated GPU to pytest and all processes that it starts: `python -m pytest -p tests.simulated.plugin`."""

import os
from pathlib import Path

from tests.simulated import device

device.enable()
os.environ[device.VARIABLE] = "1"
root, everywhere = Path(__file__).parents[2], Path(__file__).parent / "everywhere"
os.environ["PYTHONPATH"] = os.pathsep.join([str(everywhere), str(root), os.environ.get("PYTHONPATH", "")])
