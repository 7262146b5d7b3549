"""The HTTP server of one process: /metrics, /health, and at the controller /targets.

`/targets` is Prometheus HTTP service discovery: the processes that are alive, so that the series
of one that died end with it.
"""

import hmac
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from flatpeak.workers.errors import ClusterError

StartResponse = Callable[..., Any]
Page = Callable[[], Any]
"""What a path answers, as JSON."""


NODE = "node"
"""As a host: the address by which the Ray cluster knows the process's node."""


@dataclass(frozen=True)
class Serving:
    """Where the metrics of a process are served, and for whom."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free one."""
    token: str | None = None
    """Bearer token that every path but /health asks for."""


def is_token(text: str) -> bool:
    """Whether a bearer token can be this: one word of printable ASCII."""
    return text.isascii() and text.isprintable() and " " not in text and text != ""


class _Quiet(WSGIRequestHandler):
    timeout = 10.0  # a client that says nothing holds a thread no longer

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is nothing to log."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # On Linux this lets a server take over a port whose last connections still linger.
    allow_reuse_address = True


class MetricsServer:
    """Serves `registry` on threads of its own until `close`.

    Raises `ClusterError` when the address cannot be had.
    """

    def __init__(
        self,
        serving: Serving,
        registry: CollectorRegistry,
        *,
        pages: Mapping[str, Page],
    ) -> None:
        app = _App(make_wsgi_app(registry), pages, serving.token)
        try:
            self._server = make_server(
                serving.host, serving.port, app, server_class=_Server, handler_class=_Quiet
            )
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ClusterError(
                f"metrics cannot be served at {serving.host}:{serving.port}: {reason}; "
                "set metrics.port to a free one, 0 for any, and metrics.host to an address of "
                "this machine"
            ) from None
        self.host, self.port = serving.host, self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _App:
    def __init__(
        self, metrics: Callable[..., Iterable[bytes]], pages: Mapping[str, Page], token: str | None
    ) -> None:
        self._metrics, self._pages, self._token = metrics, pages, token

    def __call__(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _answer(start, "405 Method Not Allowed", {"error": "read only"})
        if path != "/health" and not self._may_read(environ.get("HTTP_AUTHORIZATION", "")):
            return _answer(start, "401 Unauthorized", {"error": "a bearer token is asked for"})
        if path == "/metrics":
            return self._metrics(environ, start)
        if path in self._pages:
            return _answer(start, "200 OK", self._pages[path]())
        paths = ["/metrics", *self._pages]
        return _answer(start, "404 Not Found", {"error": f"there is {', '.join(paths)}"})

    def _may_read(self, given: str) -> bool:
        wanted = f"Bearer {self._token}"
        return self._token is None or hmac.compare_digest(given.encode(), wanted.encode())


def _answer(start: StartResponse, status: str, content: Any) -> list[bytes]:
    body = json.dumps(content).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    if status.startswith("401"):
        headers.append(("WWW-Authenticate", "Bearer"))
    start(status, headers)
    return [body]
