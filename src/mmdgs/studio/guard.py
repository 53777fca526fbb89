"""What every request passes before Gradio sees it: the host, the token, the route, whose file it is, how many bytes.

Gradio compares paths with the allowed ones only in an app that it launched itself, and this one is mounted. Paths in
the data of a call are checked by page.Page, which all calls go through, queued or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from mmdgs.studio.downloads import Folder
from mmdgs.studio.sources import MOST_BYTES
from mmdgs.studio.visitors import Allowance, Visitors

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; frame-ancestors 'self'; "
    "form-action 'self'; base-uri 'self'"
)
"""What a browser may load: the studio's own files. Gradio's page needs inline scripts."""
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

API = "/gradio_api/"
FILE, UPLOAD = f"{API}file=", f"{API}upload"
KEPT = (UPLOAD, f"{API}component_server")
"""Routes whose bodies the studio keeps for a while: files, and what was painted."""
ROUTES = {
    "GET": re.compile(
        r"/|/config/?|/(static|assets)/.+|/(favicon\.ico|theme\.css|manifest\.json|robots\.txt)"
        rf"|{API}(info/?|app_id/?|theme\.css|startup-events|upload_progress|heartbeat/[^/]+|queue/(data|status)"
        r"|call/.+|file=.+)",
        re.DOTALL,
    ),
    "POST": re.compile(rf"{API}(upload|component_server/?|queue/join|(run|api)/[^/]+/?|call/.+|cancel|reset/?)"),
}
"""What the page and clients of its interface ask for. Gradio has more routes: proxies, streams, recordings, editors."""
MOST_JSON, MULTIPART = 1_000_000, 100_000
"""Bytes of a request without files, and of what stands around a file."""


def is_local(host: str) -> bool:
    """Whether an address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AnsweredError(Exception):
    """The answer to a request that Gradio does not see: a status and a sentence."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Guard:
    """Refuses what is not this visitor's to ask, and adds headers to every answer."""

    def __init__(self, app: Callable[..., Awaitable[Any]], folder: Folder, visitors: Visitors, *, local: bool) -> None:
        self.app, self.folder, self.visitors, self.local = app, folder, visitors, local
        self.allowance = Allowance()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # the page opens no websocket
            await send({"type": "websocket.close"})

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        more = dict(HEADERS)
        try:
            self._check_origin(scope, headers)
            visitor = self._visitor(scope, headers, more)
            self._check_route(scope, visitor)
        except AnsweredError as answered:
            more |= {"content-type": "text/plain; charset=utf-8"}
            await send({"type": "http.response.start", "status": answered.status, "headers": _encoded(more)})
            await send({"type": "http.response.body", "body": f"{answered}\n".encode()})
            return
        scope["mmdgs.visitor"] = visitor
        from starlette.requests import ClientDisconnect

        # A page was closed while it sent something, or the studio ends while one is open.
        with contextlib.suppress(ClientDisconnect, asyncio.CancelledError):
            await self.app(scope, self._bounded(scope, visitor, receive), self._answering(scope, visitor, more, send))

    def _check_origin(self, scope: Any, headers: dict[str, str]) -> None:
        """Refuse other names of this machine (DNS rebinding), and what pages of other sites send."""
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if self.local and not is_local(name.strip("[]")):
            raise AnsweredError(400, "the studio answers on this machine alone")
        if scope["method"] == "POST" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise AnsweredError(403, "the studio takes nothing from pages of other sites")

    def _visitor(self, scope: Any, headers: dict[str, str], more: dict[str, str]) -> str:
        """Who asks: by their cookie, or as somebody new, who needs the token and gets a cookie."""
        cookie = f"mmdgs-studio-{scope['server'][1]}"  # browsers do not tell ports apart
        with contextlib.suppress(CookieError, KeyError):
            visitor = self.visitors.name_in(SimpleCookie(headers.get("cookie", ""))[cookie].value)
            if visitor is not None:
                return visitor
        shown = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1]
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if not (self.visitors.admits(shown) or self.visitors.admits(bearer)):
            raise AnsweredError(401, "the studio needs its token: open the address that it printed when it started")
        visitor, value = self.visitors.new()
        more["set-cookie"] = f"{cookie}={value}; Path=/; HttpOnly; SameSite=Lax"
        if shown and scope["path"] == "/":
            more["location"] = "/"  # so that the token does not stay in the address of the page
            raise AnsweredError(303, "")
        return visitor

    def _check_route(self, scope: Any, visitor: str) -> None:
        method, path = scope["method"], scope["path"]
        route = ROUTES.get("GET" if method == "HEAD" else method)
        if route is None or not route.fullmatch(path):
            raise AnsweredError(404, "the studio has no such page")
        if path.startswith(FILE) and not self.folder.holds(visitor, path.removeprefix(FILE)):
            raise AnsweredError(403, "this is no file of yours; it may have been deleted")

    def _bounded(self, scope: Any, visitor: str, receive: Receive) -> Receive:
        """Receives what is sent until it is more than is allowed."""
        from fastapi import HTTPException

        kept = scope["path"].rstrip("/") in KEPT
        most = MOST_BYTES + MULTIPART if kept else MOST_JSON
        address, received = (scope.get("client") or ("",))[0], 0

        async def bounded() -> Any:
            nonlocal received
            message = await receive()
            count = len(message.get("body", b""))
            received += count
            if received > most:
                raise HTTPException(413, f"this request exceeds the maximum allowed size of {most:,} bytes")
            if kept and count and not self.allowance.take(visitor, address, count):
                raise HTTPException(413, "too much was uploaded in the last half hour; try again later")
            return message

        return bounded

    def _answering(self, scope: Any, visitor: str, more: dict[str, str], send: Send) -> Send:
        """Sends answers with our headers; files that an answer to an upload names become the visitor's."""
        uploading, answer = scope["path"] == UPLOAD, b""

        async def answering(message: Any) -> None:
            nonlocal uploading, answer
            if message["type"] == "http.response.start":
                uploading = uploading and message["status"] == 200
                message["headers"] = [*message.get("headers", []), *_encoded(more)]
            elif uploading:
                answer += message.get("body", b"")
                if not message.get("more_body", False):
                    for path in json.loads(answer):
                        self.folder.give(visitor, path)
            await send(message)

        return answering


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
