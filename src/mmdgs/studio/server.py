"""What serves the studio: one process, on this machine alone unless told otherwise, with nothing from elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from mmdgs.errors import UsageError
from mmdgs.studio.downloads import Folder
from mmdgs.studio.guard import Guard, is_local
from mmdgs.studio.sources import MOST_BYTES, MOST_PIXELS
from mmdgs.studio.visitors import Visitors

HOST, PORT = "127.0.0.1", 7860
GRACE = 5.0
"""Seconds from the signal to end until the process ends, whatever still runs."""


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


@contextlib.contextmanager
def application(host: str = HOST, token: str | None = None) -> Iterator[Any]:
    """The studio as an ASGI application; its folder goes at the end. With a token it answers those who show it."""
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
        threading.Thread(target=controls.warm).start()  # torch aborts where it ends amid a load
        yield Guard(mounted, folder, Visitors(token), local=is_local(host))
    finally:
        controls.STOPS.end()
        Image.MAX_IMAGE_PIXELS = before
        folder.close()


def serve(
    host: str = HOST, port: int = PORT, *, token: str | None = None, tell: Callable[[str], object] = print
) -> None:
    """Serve the studio until it is interrupted; `tell` hears its address once it listens."""
    held = listening(host, port)
    import uvicorn

    with contextlib.closing(held), application(host, token) as app:
        from mmdgs.studio.controls import STOPS

        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        # uvicorn's own handlers raise the signal again at the end, and the folder would stay.
        server.capture_signals = contextlib.nullcontext

        def leave(*_: object) -> None:
            server.force_exit = server.should_exit  # asked twice: at once
            server.should_exit = True
            STOPS.end()  # pages that wait for work are let go
            last = threading.Timer(GRACE, end_now, [app.folder])
            last.daemon = True
            last.start()

        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, leave)
        shown = f"[{host}]" if ":" in host else host
        secret = "" if token is None else f"/?token={quote(token, safe='')}"
        tell(f"http://{shown}:{held.getsockname()[1]}{secret}")
        server.run(sockets=[held])


def end_now(folder: Folder) -> None:
    """End the process. Python would wait for threads, and work that is not at its next step yet may take long."""
    folder.close()
    os._exit(0)
