"""Runs an S3 server: moto, in memory, on loopback, with conditional writes one at a time.

By itself, moto looks for the object before it writes, so that several of its threads may win a race.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    # a text that nothing else holds: a test looks for it in every object of a store
    "AWS_SECRET_ACCESS_KEY": "c3VwZXItc2VjcmV0LW9mLXRoZS10ZXN0cw",
    "AWS_DEFAULT_REGION": "us-east-1",
}
BUCKET = "ratchet-tests"


@contextmanager
def s3_at(endpoint: str) -> Iterator[str]:
    """Yields the URL of a server's bucket. While it is open, the environment leads s3fs and pyarrow there, in children
    too."""
    import s3fs

    before = {name: os.environ.get(name) for name in (*CREDENTIALS, "AWS_ENDPOINT_URL")}
    os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=endpoint)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield f"s3://{BUCKET}"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make_bucket(endpoint: str) -> None:
    import s3fs

    with s3_at(endpoint):
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)


@contextmanager
def moto_server() -> Iterator[str]:
    """Yields the URL of moto, with a bucket."""
    port = free_port()
    command = [sys.executable, "-m", "tests.s3_server", str(port)]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(port, process)
        endpoint = f"http://127.0.0.1:{port}"
        make_bucket(endpoint)
        yield endpoint
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], limit_s: float = 600.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "moto did not start"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"moto does not listen on port {port}")


def serve(port: int) -> None:
    from moto.server import (  # type: ignore[attr-defined]
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import run_simple

    moto, writing = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def one_put_at_a_time(environ: Any, start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] != "PUT":
            return moto(environ, start_response)
        with writing:
            return list(moto(environ, start_response))

    run_simple("127.0.0.1", port, one_put_at_a_time, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
