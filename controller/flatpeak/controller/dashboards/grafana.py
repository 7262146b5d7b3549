"""A thin adapter of `grafana-api`: folders, dashboards by uid, annotations, and clear errors.

The package is old, and many of its routes are gone from Grafana; those used here are not:
/api/folders, /api/dashboards/db, /api/dashboards/uid and /api/annotations.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from grafana_api.grafana_api import GrafanaException
from grafana_api.grafana_face import GrafanaFace

from flatpeak.controller.dashboards.panels import Json
from flatpeak.workers.errors import ClusterError, InputError
from flatpeak.workers.metrics import is_token

TOKEN_VARIABLE = "GRAFANA_TOKEN"
FOLDER_UID, FOLDER_TITLE = "flatpeak", "Flatpeak"
_TIMEOUT_S = 10.0
_NOT_COMPARED = ("id", "version")  # Grafana counts them up

_Answer = TypeVar("_Answer")


class Grafana:
    """The Grafana at `url`, with the token of a service account that may edit dashboards.

    Raises `InputError` where URL, token or rights are wrong, and `ClusterError` where the server
    fails or does not answer in time. The token is in no message.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:  # a bracket without its pair, or a port beyond the last
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise InputError(
                f"{url} is no address of a Grafana; give one like http://localhost:3000"
            )
        self._api = GrafanaFace(
            token,
            protocol=parts.scheme,
            host=f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
            port=port,
            url_path_prefix=f"{parts.path.strip('/')}/" if parts.path.strip("/") else "",
            timeout=timeout_s,
        )
        self._timeout_s = timeout_s

    def push(self, dashboard: Json) -> bool:
        """Puts the dashboard into the folder; False where it is there as it is."""
        self._ensure_folder()
        uid = dashboard["uid"]
        there = self._find(lambda: self._api.dashboard.get_dashboard(uid))
        if there is not None and _content(there["dashboard"]) == _content(dashboard):
            return False
        # With `overwrite`, whatever version is there gives way: the code is the source.
        self._ask(
            lambda: self._api.dashboard.update_dashboard(
                {
                    "dashboard": dashboard | {"id": None},
                    "folderUid": FOLDER_UID,
                    "overwrite": True,
                    "message": "flatpeak dashboards push",
                }
            )
        )
        return True

    def annotate(self, text: str, *, tags: list[str], time_s: float) -> None:
        """Marks a moment, unix time, on every dashboard that shows these tags."""
        moment = int(1000 * time_s)
        self._ask(
            lambda: self._api.annotations.add_annotation(
                time_from=moment, time_to=moment, tags=tags, text=text
            )
        )

    def _ensure_folder(self) -> None:
        if self._find(lambda: self._api.folder.get_folder(FOLDER_UID)) is None:
            self._ask(lambda: self._api.folder.create_folder(FOLDER_TITLE, uid=FOLDER_UID))

    def _find(self, call: Callable[[], _Answer]) -> _Answer | None:
        """None where Grafana says, in JSON, that there is no such thing."""
        try:
            return self._ask(call)
        except _NotFound:
            return None

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        try:
            answer = call()
        except GrafanaException as error:
            raise self._explained(error) from None
        except requests.Timeout:
            raise ClusterError(
                f"Grafana at {self.url} did not answer within {self._timeout_s:g} s; try again, "
                "or check that it is up"
            ) from None
        except requests.exceptions.JSONDecodeError:
            raise self._no_grafana("it answers, but not in JSON") from None
        except requests.RequestException as error:
            raise ClusterError(
                f"no Grafana can be reached at {self.url}: {type(error).__name__}; check the "
                "address, and that it is up"
            ) from None
        if not isinstance(answer, dict):
            raise self._no_grafana("it answers with something else than an object")
        return answer

    def _explained(self, error: GrafanaException) -> Exception:
        said = error.response
        message = said.get("message") if isinstance(said, dict) else None
        match error.status_code:
            case 401 | 403:
                return InputError(
                    f"Grafana at {self.url} refuses the token ({error.status_code}); set "
                    f"{TOKEN_VARIABLE} to that of a service account with the role Editor"
                )
            case 404 if message is not None:
                return _NotFound(f"Grafana at {self.url} has no such thing: {message}")
            case 404:
                return self._no_grafana("it has no such path")
            case 412:
                return InputError(
                    f"Grafana at {self.url} refuses to replace a dashboard (412): {message}; "
                    "delete it there, or the one of the same title, and push again"
                )
            case status if status >= 500:
                return ClusterError(f"Grafana at {self.url} failed ({status}): {message}")
        return InputError(f"Grafana at {self.url} refuses ({error.status_code}): {message}")

    def _no_grafana(self, why: str) -> InputError:
        return InputError(
            f"there is no Grafana at {self.url}: {why}; give the address that a browser opens "
            "Grafana at, path included"
        )


class _NotFound(InputError):
    pass


def token_from_environment() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise InputError(
            f"no token for Grafana: set {TOKEN_VARIABLE} to that of a service account with the "
            "role Editor (Grafana, Administration, Service accounts)"
        )
    if not is_token(token):
        raise InputError(f"{TOKEN_VARIABLE} holds no token: it is not one word of printable ASCII")
    return token


def _content(dashboard: Json) -> dict[str, Any]:
    return {key: value for key, value in dashboard.items() if key not in _NOT_COMPARED}
