"""A real HTTP server on loopback around a stand-in that answers by hand."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, str, bytes, str | None], tuple[int, str]]
"""Method, path, body and Authorization of a request to status and text."""


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Yields the address at which requests get what `answer` says."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = self.headers.get("Authorization")
            status, text = answer(self.command, self.path, body, token)
            try:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())
            except BrokenPipeError:
                pass  # the client had no more patience, as the test wants

        do_GET = do_POST = do_PUT = _handle

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
