"""Builds the image of infra/recipes/docker without Docker or a registry of images: buildah in a chroot, as root, on a
Debian that debootstrap makes, which stands for `python:3.11-slim`. `make buildah` installs both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "infra" / "recipes" / "docker"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


def is_here() -> bool:
    return os.getuid() == 0 and all(map(shutil.which, ("buildah", "debootstrap")))


@dataclass(frozen=True)
class Images:
    """A store of images in a folder."""

    folder: Path

    def buildah(self, *arguments: str, volumes: Sequence[str] = ()) -> str:
        """Runs a command of buildah; returns what it prints."""
        storage = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
        command, *others = arguments
        mounts = [f"--volume={volume}" for volume in volumes]
        done = subprocess.run(
            ["buildah", *storage, command, *mounts, *others], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout.strip()

    def base(self, name: str) -> None:
        """Makes an image with the Python of Debian, in the places where Python's own image has it."""
        container = self.buildah("from", "scratch")
        root = Path(self.buildah("mount", container))
        packages = "--include=python3,python3-venv,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", str(root)], check=True, stdout=-3)
        shutil.copy(f"/{CERTIFICATES}", root / CERTIFICATES)
        subprocess.run(["chroot", str(root), "python3", "-m", "venv", "/usr/local"], check=True)
        links = os.environ.get("PIP_FIND_LINKS", "")
        (root / "etc" / "pip.conf").write_text(f"[global]\ncert = /{CERTIFICATES}\nfind-links = {links}\n")
        self.buildah("umount", container)
        path = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.buildah("config", "--env", f"PATH={path}", container)
        self.buildah("commit", "--quiet", "--rm", container, name)

    def build(self, name: str, extras: str) -> None:
        """Builds the recipe from a clone of this repository, as after `git clone`."""
        source = self.folder / "source"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
        links = Path(os.environ.get("PIP_FIND_LINKS", "/nowhere"))
        recipe = ["--ignorefile", str(RECIPE / "Dockerfile.dockerignore"), "--file", str(RECIPE / "Dockerfile")]
        self.buildah(
            *("build", "--pull-never", "--layers=false", *recipe, "--build-arg", f"EXTRAS={extras}", "--tag", name),
            str(source),
            volumes=[f"{links}:{links}:ro"] if links.is_dir() else [],
        )

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        name = self.buildah("from", "--pull-never", image)
        yield name
        self.buildah("rm", name)

    def entrypoint(self, container: str) -> list[str]:
        shown = json.loads(self.buildah("inspect", container))
        return list(shown["OCIv1"]["config"]["Entrypoint"])
