"""The head of a Ray cluster beside the test, as an administrator starts one: with a token."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TOKEN = "0123456789abcdef0123456789abcdef"
_PATIENCE_S = 90.0


@dataclass(frozen=True)
class Head:
    address: str
    """Of the dashboard, with the job server."""

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(f"{self.address}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def alive(self, what: str) -> list[dict[str, Any]]:
        """The actors or the placement_groups of all jobs that are not gone."""
        found = self.get(f"/api/v0/{what}")["data"]["result"]["result"]
        return [each for each in found if each["state"] not in ("DEAD", "REMOVED")]


@contextmanager
def ray_head(*, cores: int, **environment: str) -> Iterator[Head]:
    """A head with `cores` cores, started by `ray start` with this environment added to ours."""
    with TemporaryDirectory(prefix="flatpeak-ray-") as temporary:  # short: it has sockets in it
        folder = Path(temporary)
        (folder / "token").write_text(TOKEN)
        gcs, dashboard, client = _free_ports(3)
        options = {
            "--node-ip-address": "127.0.0.1",
            "--port": gcs,
            "--dashboard-host": "127.0.0.1",
            "--dashboard-port": dashboard,
            "--dashboard-agent-listen-port": 0,
            "--ray-client-server-port": client,
            "--num-cpus": cores,
            "--object-store-memory": 128 * 2**20,
            "--temp-dir": folder / "ray",
        }
        words = [str(word) for option in options.items() for word in option]
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
        with (folder / "head.log").open("w+") as log:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("ray"), "start", "--head", "--block", *words],
                env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"} | token | environment,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                head = Head(f"http://127.0.0.1:{dashboard}")
                _wait_for(head, process, folder / "head.log")
                yield head
            finally:
                process.send_signal(signal.SIGTERM)  # it ends what it has started, then itself
                process.wait(_PATIENCE_S)


def _free_ports(number: int) -> list[int]:
    with ExitStack() as held:
        sockets = [
            held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [each.getsockname()[1] for each in sockets]


def _wait_for(head: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not _has_nodes(head):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


def _has_nodes(head: Head) -> bool:
    try:
        return bool(head.get("/api/v0/nodes")["data"]["result"]["result"])
    except OSError:  # it does not listen yet, or cannot tell yet
        return False
