"""The image of infra/recipes/docker, built and used where there is no Docker."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from ratchet.infra.runs.run import open_run
from tests import tiny
from tests.extras import needs
from tests.image import Images


@needs("buildah")
def test_the_image_trains_as_somebody_who_is_not_root(workspace: Path, tmp_path: Path) -> None:
    images = Images(tmp_path)
    images.base("docker.io/library/python:3.11-slim")
    images.build("ratchet:cpu", "tracking")
    shared = tmp_path / "shared"
    shutil.copytree(workspace, shared / "workspace")
    config = tiny.config(workspace, run__name="inside", run__store="file:///shared/runs", train__iterations=1)
    text = yaml.safe_dump(config.model_dump(mode="json")).replace(str(workspace), "/shared/workspace")
    (shared / "run.yaml").write_text(text)
    for path in (shared, *shared.rglob("*")):
        path.chmod(0o777)
    with images.container("ratchet:cpu") as container:
        run = [*images.entrypoint(container), "sh", "-c", "id -u; pwd; ratchet train /shared/run.yaml"]
        printed = images.buildah("run", container, "--", *run, volumes=[f"{shared}:/shared"])
    assert printed.split("\n")[:2] == ["1000", "/home/ratchet"]
    assert "run inside has its 1 iteration" in printed
    assert open_run(f"file://{shared}/runs/inside").state.iteration == 1
