"""What serves the studio: one process, on this machine alone unless told otherwise, with nothing from elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from mmdgs.errors import UsageError
from mmdgs.studio.downloads import Folder
from mmdgs.studio.sources import MOST_BYTES, MOST_PIXELS

HOST, PORT = "127.0.0.1", 7860
LOCAL = ("127.0.0.1", "localhost", "[::1]", "::1")
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; frame-ancestors 'self'; "
    "form-action 'self'; base-uri 'self'"
)
"""What a browser may load: the studio's own files. Gradio's page needs inline scripts."""
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def is_local(host: str) -> bool:
    """Whether an address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(128)
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"the studio cannot listen at {host}:{port} ({reason}); choose another --port, or 0 for any"
        ) from error
    return found


class Guard:
    """Adds headers to every answer, and refuses requests for other hosts where the studio is local.

    A page elsewhere that makes its own name point to this machine (DNS rebinding) is refused by that.
    """

    def __init__(self, app: Callable[..., Awaitable[Any]], local: bool) -> None:
        self.app, self.local = app, local

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self.local and not _names_this_machine(given.get(b"host", "")):
            await send({"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"the studio answers on this machine alone\n"})
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        from starlette.requests import ClientDisconnect

        # A page was closed while it sent something, or the studio ends while one is open.
        with contextlib.suppress(ClientDisconnect, asyncio.CancelledError):
            await self.app(scope, receive, guarded)


def _names_this_machine(host: str) -> bool:
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    return name in LOCAL


@contextlib.contextmanager
def application(host: str = HOST) -> Iterator[Any]:
    """The studio as an ASGI application; its folder goes at the end."""
    folder = Folder()
    # Read when Gradio is imported or serves: everything it writes goes into the studio's own folder. It keeps a table
    # of the last 10,000 requests, and sums it up after each one; nobody looks at it here.
    os.environ |= {"GRADIO_TEMP_DIR": str(folder.path), "GRADIO_ANALYTICS_ENABLED": "False"}
    os.environ |= {"GRADIO_ANALYTICS_MAX_EVENTS": "1", "GRADIO_ANALYTICS_CACHE_FREQUENCY": str(sys.maxsize)}
    from fastapi import FastAPI
    from gradio import mount_gradio_app
    from PIL import Image

    from mmdgs.studio import controls, page

    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, MOST_PIXELS  # Gradio decodes what is painted by itself
    try:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        mounted = mount_gradio_app(
            app,
            page.build(folder),
            "/",
            server_name=host,
            footer_links=[],
            run_history=False,
            max_file_size=MOST_BYTES,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            theme=page.theme(),
            css=page.CSS,
            enable_monitoring=False,
        )
        folder.keep()
        folder.watch()
        threading.Thread(target=controls.warm, daemon=True).start()
        yield Guard(mounted, is_local(host))
    finally:
        controls.STOPS.end()
        Image.MAX_IMAGE_PIXELS = before
        folder.close()


def serve(host: str = HOST, port: int = PORT, *, tell: Callable[[str], object] = print) -> None:
    """Serve the studio until it is interrupted; `tell` hears its address once it listens."""
    held = listening(host, port)
    import uvicorn

    with contextlib.closing(held), application(host) as app:
        from mmdgs.studio.controls import STOPS

        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        # uvicorn's own handlers raise the signal again at the end, and the folder would stay.
        server.capture_signals = contextlib.nullcontext

        def leave(*_: object) -> None:
            server.force_exit = server.should_exit  # asked twice: at once
            server.should_exit = True
            STOPS.end()  # pages that wait for work are let go

        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, leave)
        shown = f"[{host}]" if ":" in host else host
        tell(f"http://{shown}:{held.getsockname()[1]}")
        server.run(sockets=[held])
