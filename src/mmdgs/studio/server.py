"""What serves the studio: one process, on this machine alone unless told otherwise."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from mmdgs.errors import UsageError
from mmdgs.studio.folder import Folder
from mmdgs.studio.sources import MOST_BYTES, MOST_PIXELS, models, seconds_of
from mmdgs.studio.streaming import STOPS

GRACE = 5.0
"""Seconds from the signal to end until the process ends, whatever still runs."""


def is_local(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = f"{host}:{port} ({getattr(error, 'strerror', None) or error})"
        advice = "choose another --port, or 0 for any"
        raise UsageError(f"the studio cannot listen at {reason}; {advice}") from error
    return listener


@contextlib.contextmanager
def application(host: str = "127.0.0.1", token: str | None = None) -> Iterator[Any]:
    """The studio as an ASGI application for who shows the token; its folder goes at the end."""
    folder = Folder()
    # Read when Gradio is imported or serves: everything it writes goes into the studio's own
    # folder. It keeps a table of the last 10,000 requests, and sums it up after each one; nobody
    # looks at it here.
    os.environ |= {
        "GRADIO_TEMP_DIR": str(folder.path),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_ANALYTICS_MAX_EVENTS": "1",
        "GRADIO_ANALYTICS_CACHE_FREQUENCY": str(sys.maxsize),
    }
    from fastapi import FastAPI
    from gradio import mount_gradio_app
    from PIL import Image

    from mmdgs.studio import page
    from mmdgs.studio.guard import Guard, Visitors

    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS  # Gradio decodes what is painted by itself
    try:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        off = dict.fromkeys(("run_history", "ssr_mode", "pwa", "mcp_server"), False)
        options = {"server_name": host, "max_file_size": MOST_BYTES, "footer_links": [], **off}
        options |= {"enable_monitoring": False, "theme": page.theme(), "css": page.CSS}
        mounted = mount_gradio_app(app, page.build(folder), "/", **options)
        folder.keep()
        folder.watch()
        # The first click finds the models, and the time they take. No daemon: torch aborts where it
        # ends amid a load.
        threading.Thread(target=lambda: [seconds_of(name) for name in models()]).start()
        yield Guard(mounted, folder, Visitors(token), local=is_local(host))
    finally:
        STOPS.end()
        Image.MAX_IMAGE_PIXELS = before
        folder.close()


def serve(host: str, port: int, *, token: str | None, tell: Callable[[str], object]) -> None:
    """Serve the studio until it is interrupted; `tell` hears its address once it listens."""
    listener = listening(host, port)
    import uvicorn

    with contextlib.closing(listener), application(host, token) as app:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        # uvicorn's own handlers raise the signal again at the end, and the folder would stay.
        server.capture_signals = contextlib.nullcontext

        def end_now() -> None:
            """Python would wait for threads, and for work until its next step."""
            app.folder.close()
            os._exit(0)

        def leave(*_: object) -> None:
            server.force_exit = server.should_exit  # asked twice: at once
            server.should_exit = True
            STOPS.end()  # pages that wait for work are let go
            last = threading.Timer(GRACE, end_now)
            last.daemon = True
            last.start()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, leave)
        address = f"[{host}]" if ":" in host else host
        secret = "" if token is None else f"/?token={quote(token, safe='')}"
        tell(f"http://{address}:{listener.getsockname()[1]}{secret}")
        server.run(sockets=[listener])
