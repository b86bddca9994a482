"""Builds what users install, and makes environments with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(kind: str, source: Path, folder: Path) -> str:
    """Call a hook of the build backend, as pip does; returns the file's name."""
    script = f"import hatchling.build, sys; print(hatchling.build.build_{kind}(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=source, check=True, capture_output=True, text=True
    )
    return built.stdout.splitlines()[-1]


def environment(folder: Path, package: Path) -> Path:
    """A new environment with the package, and the dependencies of the environment of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(package)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    # a line of a .pth file is a folder to import from; the .pth files in that folder, an editable Ratchet's, do nothing
    dependencies = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    return folder
