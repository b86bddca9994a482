"""The API of a Kubernetes cluster, as far as Prefect's worker asks it: Jobs are checked against Kubernetes' schema, and
their pods are processes of this machine.

It runs in the environment of `make kubernetes`: `build/kubernetes/bin/python tests/kubernetes_api.py FOLDER PORT
NAME=ENVIRONMENT ...`. An image is a Python environment: its programs are on a container's path, which starts in an
empty folder with the variables of the Job's manifest alone. A pod whose image has no such name waits for it, as in a
cluster. What was asked for is in FOLDER: `jobs.jsonl` and the output of each pod.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-not-found]  # of its own environment
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

VERSION = "1.37"
KINDS = {"namespaces": ("v1", "Namespace"), "pods": ("v1", "Pod"), "jobs": ("batch/v1", "Job")}


class Cluster:
    """Jobs and pods, their changes in order, and the processes of pods that run."""

    def __init__(self, folder: Path, images: dict[str, Path]) -> None:
        self.folder, self.images = folder, images
        self.objects: dict[str, dict[str, dict[str, Any]]] = {resource: {} for resource in KINDS}
        self.changes: list[tuple[str, str, dict[str, Any]]] = []
        self.changed = asyncio.Condition()
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.tasks = set[asyncio.Task[None]]()

    async def put(self, resource: str, kind: str, item: dict[str, Any]) -> None:
        """Records that an object was ADDED, MODIFIED or DELETED."""
        item["metadata"]["resourceVersion"] = str(len(self.changes) + 1)
        self.objects[resource][item["metadata"]["name"]] = item
        if kind == "DELETED":
            del self.objects[resource][item["metadata"]["name"]]
        async with self.changed:
            self.changes.append((resource, kind, json.loads(json.dumps(item))))
            self.changed.notify_all()

    async def create_job(self, namespace: str, job: dict[str, Any]) -> dict[str, Any]:
        metadata, template = job["metadata"], job["spec"]["template"]
        metadata.setdefault("name", f"{metadata.pop('generateName', 'job-')}{uuid.uuid4().hex[:5]}")
        metadata |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        job["status"] = {"active": 1}
        await self.put("jobs", "ADDED", job)
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{metadata['name']}-{uuid.uuid4().hex[:5]}",
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now(),
                "labels": {**template.get("metadata", {}).get("labels", {}), "job-name": metadata["name"]},
                "ownerReferences": [owner],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        await self.put("pods", "ADDED", pod)
        task = asyncio.create_task(self.run(job, pod))
        self.tasks.add(task)
        return job

    async def run(self, job: dict[str, Any], pod: dict[str, Any]) -> None:
        name, [container] = pod["metadata"]["name"], pod["spec"]["containers"]
        environment = self.images.get(container["image"])
        if environment is None:
            waiting = {"reason": "ImagePullBackOff", "message": f"no image {container['image']}"}
            await self.status(pod, "Pending", {"waiting": waiting})
            return
        home = self.folder / name
        home.mkdir()
        variables = {one["name"]: str(one.get("value", "")) for one in container.get("env", [])}
        command = [*container.get("command", []), *container.get("args", [])]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "KILL", *command),
                cwd=home,
                env={"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": str(home), **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        await self.status(pod, "Running", {"running": {"startedAt": now()}})
        code = await process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a container ends with its first process
        ended = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}}
        await self.status(pod, "Failed" if code else "Succeeded", ended)
        condition = {"type": "Failed" if code else "Complete", "status": "True", "lastTransitionTime": now()}
        job["status"] = {"failed" if code else "succeeded": 1, "conditions": [condition]}
        if code:
            condition["reason"] = "BackoffLimitExceeded"
        await self.put("jobs", "MODIFIED", job)

    async def status(self, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
        container = pod["spec"]["containers"][0]
        status = {"name": container["name"], "image": container["image"], "state": state, "ready": "running" in state}
        pod["status"] = {"phase": phase, "startTime": now(), "containerStatuses": [status]}
        await self.put("pods", "MODIFIED", pod)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def application(cluster: Cluster) -> Starlette:
    async def jobs(request: Request) -> Response:
        job = await request.json()
        job = {"apiVersion": "batch/v1", "kind": "Job", **job}
        try:
            # as a cluster by default: unknown fields are ignored, such as one of Prefect's own template
            kubernetes_validate.validate(job, VERSION)
        except kubernetes_validate.ValidationError as error:
            print("refused:", error)
            return JSONResponse({"kind": "Status", "code": 422, "message": str(error)}, 422)
        with (cluster.folder / "jobs.jsonl").open("a") as file:
            file.write(json.dumps(job) + "\n")
        return JSONResponse(await cluster.create_job(request.path_params["namespace"], job), 201)

    async def listed(request: Request) -> Response:
        resource = request.path_params["resource"]
        if resource not in KINDS:
            return JSONResponse({"kind": "Status", "code": 404, "message": resource}, 404)
        if request.query_params.get("watch") in ("true", "True", "1"):
            since = int(request.query_params.get("resourceVersion") or 0)
            return StreamingResponse(watched(resource, since), media_type="application/json")
        version, kind = KINDS[resource]
        wanted = dict(
            pair.split("=") for pair in request.query_params.get("labelSelector", "").split(",") if "=" in pair
        )
        items = [
            item
            for item in cluster.objects[resource].values()
            if all(item["metadata"].get("labels", {}).get(name) == value for name, value in wanted.items())
        ]
        metadata = {"resourceVersion": str(len(cluster.changes))}
        return JSONResponse({"apiVersion": version, "kind": f"{kind}List", "metadata": metadata, "items": items})

    async def watched(resource: str, since: int) -> AsyncIterator[str]:
        for position in itertools.count(since):
            async with cluster.changed:
                await cluster.changed.wait_for(lambda position=position: len(cluster.changes) > position)
            changed, kind, item = cluster.changes[position]
            if changed == resource:
                yield json.dumps({"type": kind, "object": item}) + "\n"

    async def one(request: Request) -> Response:
        resource, name = request.path_params["resource"], request.path_params["name"]
        item = cluster.objects.get(resource, {}).get(name)
        if item is None:
            return JSONResponse({"kind": "Status", "reason": "NotFound", "code": 404, "message": name}, 404)
        if request.method == "DELETE":
            await cluster.put(resource, "DELETED", item)
            for pod, process in cluster.processes.items():
                if pod == name or pod.startswith(f"{name}-"):
                    process.terminate()
        return JSONResponse(item)

    async def log(request: Request) -> Response:
        return PlainTextResponse((cluster.folder / f"{request.path_params['name']}.log").read_text())

    async def versions(_: Request) -> Response:
        return JSONResponse({"kind": "APIVersions", "versions": ["v1"]})

    async def groups(_: Request) -> Response:
        batch = {"groupVersion": "batch/v1", "version": "v1"}
        group = {"name": "batch", "versions": [batch], "preferredVersion": batch}
        return JSONResponse({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]})

    async def resources(request: Request) -> Response:
        here = "batch/v1" if request.url.path.endswith("batch/v1") else "v1"
        found = [
            {
                "name": name,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": name != "namespaces",
                "verbs": ["list", "watch"],
            }
            for name, (version, kind) in KINDS.items()
            if version == here
        ]
        return JSONResponse({"kind": "APIResourceList", "groupVersion": here, "resources": found})

    async def version(_: Request) -> Response:
        major, _, minor = VERSION.partition(".")
        return JSONResponse({"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0"})

    routes = [
        Route("/version", version),
        Route("/api", versions),
        Route("/apis", groups),
        Route("/api/v1", resources),
        Route("/apis/batch/v1", resources),
        Route("/apis/batch/v1/namespaces/{namespace}/jobs", jobs, methods=["POST"]),
    ]
    for base in ("/api/v1", "/apis/batch/v1"):
        routes += [
            Route(f"{base}/{{resource}}", listed),
            Route(f"{base}/namespaces/{{namespace}}/{{resource}}", listed),
            Route(f"{base}/namespaces/{{namespace}}/{{resource}}/{{name}}", one, methods=["GET", "DELETE"]),
            Route(f"{base}/namespaces/{{namespace}}/{{resource}}/{{name}}/log", log),
        ]

    @asynccontextmanager
    async def until_it_ends(_: Starlette) -> AsyncIterator[None]:
        yield
        for process in cluster.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    return Starlette(routes=routes, lifespan=until_it_ends)


if __name__ == "__main__":
    folder, port, *given = sys.argv[1:]
    images = {name: Path(environment) for name, _, environment in (image.partition("=") for image in given)}
    cluster = Cluster(Path(folder), images)
    # watches never end by themselves
    uvicorn.run(application(cluster), host="127.0.0.1", port=int(port), timeout_graceful_shutdown=1)
