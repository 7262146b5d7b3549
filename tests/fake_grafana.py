"""A stand-in for Grafana's HTTP API: the routes that are used, and answers that go wrong."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_server import serving

TOKEN = "glsa_secret"


class FakeGrafana:
    """Keeps folders and dashboards by uid. `broken` answers every request so instead."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.annotations: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.broken: tuple[int, str] | None = None
        self.delay_s = 0.0
        self.url = ""

    def answer(self, method: str, path: str, content: bytes, token: str | None) -> tuple[int, str]:
        body = json.loads(content) if content else None
        self.requests.append((method, path, body))
        time.sleep(self.delay_s)
        if self.broken is not None:
            return self.broken
        if token != f"Bearer {TOKEN}":
            return 401, json.dumps({"message": "Invalid API key"})
        status, content = self._route(method, path, body)
        return status, json.dumps(content)

    def _route(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path.removeprefix("/grafana").split("/")[1:]:
            case "GET", ["api", "folders", uid]:
                if uid in self.folders:
                    return 200, {"uid": uid, "title": self.folders[uid]}
                return 404, {"message": "folder not found"}
            case "POST", ["api", "folders"]:
                self.folders[body["uid"]] = body["title"]
                return 200, body
            case "GET", ["api", "dashboards", "uid", uid]:
                if uid in self.dashboards:
                    return 200, {"dashboard": self.dashboards[uid], "meta": {"folderUid": "x"}}
                return 404, {"message": "Dashboard not found"}
            case "POST", ["api", "dashboards", "db"]:
                if body["folderUid"] not in self.folders:
                    return 400, {"message": "folder not found"}
                given = body["dashboard"]
                before = self.dashboards.get(given["uid"])
                if before is not None and not body.get("overwrite"):
                    return 412, {"message": "The dashboard has been changed by someone else"}
                version = 1 if before is None else before["version"] + 1
                self.dashboards[given["uid"]] = given | {"id": 7, "version": version}
                return 200, {"uid": given["uid"], "version": version, "status": "success"}
            case "POST", ["api", "annotations"]:
                self.annotations.append(body)
                return 200, {"message": "Annotation added", "id": len(self.annotations)}
        return 404, {"message": "Not found"}


@contextmanager
def fake_grafana() -> Iterator[FakeGrafana]:
    grafana = FakeGrafana()
    with serving(grafana.answer) as grafana.url:
        yield grafana
