"""What every request passes before Gradio sees it: host, token, route, whose file it is, bytes.

Gradio compares paths with the allowed ones only in an app that it launched itself, and this one is
mounted. Paths in the data of a call are checked by page.Page, which all calls go through.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse

from mmdgs.studio.folder import AGE, Folder
from mmdgs.studio.server import is_local
from mmdgs.studio.sources import MOST_BYTES

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

HEADERS = {
    # A browser loads the studio's own files alone. Gradio's page needs inline scripts.
    "content-security-policy": "default-src 'self'; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; "
    "frame-ancestors 'self'; form-action 'self'; base-uri 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
API = "/gradio_api/"
FILE, UPLOAD = f"{API}file=", f"{API}upload"
KEPT = (UPLOAD, f"{API}component_server")
"""Routes whose bodies the studio keeps for a while: files, and what was painted."""
ROUTES = {
    "GET": re.compile(
        r"/|/config/?|/(static|assets)/.+|/(favicon\.ico|theme\.css|manifest\.json|robots\.txt)"
        rf"|{API}(info/?|app_id/?|theme\.css|startup-events|upload_progress|heartbeat/[^/]+"
        r"|queue/(data|status)|call/.+|file=.+)",
        re.DOTALL,
    ),
    "POST": re.compile(
        rf"{API}(upload|component_server/?|queue/join|(run|api)/[^/]+/?|call/.+|cancel|reset/?)"
    ),
}
"""What the page and its clients ask for. Gradio has more: proxies, streams, recordings, editors."""
MOST_JSON, MULTIPART = 1_000_000, 100_000
"""Bytes of a request without files, and of what stands around a file."""
SENT_BY_VISITOR, SENT_BY_ADDRESS, SENT_BY_ALL = 64_000_000, 256_000_000, 512_000_000
"""Bytes that may be uploaded in half an hour, after which uploads are deleted."""


class Visitors:
    """Names of browsers, signed with a key of this process.

    Nobody can make one up or take another's, and whoever holds one has shown the token, if any.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token, self._key = token, secrets.token_bytes(32)

    def new(self) -> tuple[str, str]:
        """A visitor's name, and the cookie that proves it."""
        name = secrets.token_hex(16)
        return name, f"{name}.{self._signature(name)}"

    def name_in(self, cookie: str) -> str | None:
        """The visitor whose cookie this is; None where this process signed no such cookie."""
        name, _, signature = cookie.partition(".")
        same = hmac.compare_digest(signature.encode(), self._signature(name).encode())
        return name if same else None

    def admits(self, token: str) -> bool:
        """Whether this is the token, or none is needed."""
        return self.token is None or hmac.compare_digest(token.encode(), self.token.encode())

    def _signature(self, name: str) -> str:
        return hmac.new(self._key, name.encode(), hashlib.sha256).hexdigest()


class Allowance:
    """Bytes that were uploaded in the last half hour, by visitor, by address and in all."""

    def __init__(self) -> None:
        self._uploads: deque[tuple[float, Counter[str]]] = deque()
        self._totals: Counter[str] = Counter()

    def take(self, visitor: str, address: str, count: int) -> bool:
        """Count bytes of an upload; False, and nothing is counted, where that is too much."""
        now = time.monotonic()
        while self._uploads and self._uploads[0][0] < now - AGE:
            self._totals -= self._uploads.popleft()[1]  # and drops what has come to zero
        limits = {f"visitor {visitor}": SENT_BY_VISITOR, f"address {address}": SENT_BY_ADDRESS}
        limits["all"] = SENT_BY_ALL
        if any(self._totals[key] + count > limit for key, limit in limits.items()):
            return False
        upload = Counter(dict.fromkeys(limits, count))
        self._uploads.append((now, upload))
        self._totals.update(upload)
        return True


class Guard:
    """Refuses what is not this visitor's to ask, and adds headers to every answer."""

    def __init__(
        self, app: Callable[..., Awaitable[Any]], folder: Folder, visitors: Visitors, *, local: bool
    ) -> None:
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
        request, headers = Request(scope), dict(HEADERS)
        try:
            self._check_origin(request)
            visitor = self._visitor(request, headers)
            self._check_route(request, visitor)
        except HTTPException as refused:
            refusal = PlainTextResponse(f"{refused.detail}\n", refused.status_code, headers)
            await refusal(scope, receive, send)
            return
        scope["mmdgs.visitor"] = visitor
        bounded = self._bounded(request, visitor, receive)
        # A page was closed while it sent something, or the studio ends while one is open.
        with contextlib.suppress(ClientDisconnect, asyncio.CancelledError):
            await self.app(scope, bounded, self._answering(request, visitor, headers, send))

    def _check_origin(self, request: Request) -> None:
        """Refuse other names of this machine (DNS rebinding), and posts of pages of other sites."""
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if self.local and not is_local(name.strip("[]")):
            raise HTTPException(400, "the studio answers on this machine alone")
        site = request.headers.get("sec-fetch-site", "same-origin")
        if request.method == "POST" and site not in ("same-origin", "none"):
            raise HTTPException(403, "the studio takes nothing from pages of other sites")

    def _visitor(self, request: Request, headers: dict[str, str]) -> str:
        """Who asks: by their cookie, or as somebody new, who needs the token and gets a cookie."""
        cookie = f"mmdgs-studio-{request.scope['server'][1]}"  # browsers do not tell ports apart
        visitor = self.visitors.name_in(request.cookies.get(cookie, ""))
        if visitor is not None:
            return visitor
        token = request.query_params.get("token", "")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not (self.visitors.admits(token) or self.visitors.admits(bearer)):
            words = "the studio needs its token: open the address that it printed when it started"
            raise HTTPException(401, words)
        visitor, value = self.visitors.new()
        headers["set-cookie"] = f"{cookie}={value}; Path=/; HttpOnly; SameSite=Lax"
        if token and request.scope["path"] == "/":
            headers["location"] = "/"  # so that the token does not stay in the page's address
            raise HTTPException(303, "")
        return visitor

    def _check_route(self, request: Request, visitor: str) -> None:
        path = request.scope["path"]
        route = ROUTES.get("GET" if request.method == "HEAD" else request.method)
        if route is None or not route.fullmatch(path):
            raise HTTPException(404, "the studio has no such page")
        if path.startswith(FILE) and not self.folder.holds(visitor, path.removeprefix(FILE)):
            raise HTTPException(403, "this is no file of yours; it may have been deleted")

    def _bounded(self, request: Request, visitor: str, receive: Receive) -> Receive:
        """Receives what is sent until it is more than is allowed."""
        kept = request.scope["path"].rstrip("/") in KEPT
        most = MOST_BYTES + MULTIPART if kept else MOST_JSON
        address, received = request.client.host if request.client else "", 0

        async def bounded() -> Any:
            nonlocal received
            message = await receive()
            count = len(message.get("body", b""))
            received += count
            if received > most:
                words = f"this request exceeds the maximum allowed size of {most:,} bytes"
                raise HTTPException(413, words)
            if kept and count and not self.allowance.take(visitor, address, count):
                words = "too much was uploaded in the last half hour; try again later"
                raise HTTPException(413, words)
            return message

        return bounded

    def _answering(
        self, request: Request, visitor: str, headers: dict[str, str], send: Send
    ) -> Send:
        """Sends answers with our headers; files that an upload's answer names are the visitor's."""
        uploading, answer = request.scope["path"] == UPLOAD, b""
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]

        async def answering(message: Any) -> None:
            nonlocal uploading, answer
            if message["type"] == "http.response.start":
                uploading = uploading and message["status"] == 200
                message["headers"] = [*message.get("headers", []), *encoded]
            elif uploading:
                answer += message.get("body", b"")
                if not message.get("more_body", False):
                    for path in json.loads(answer):
                        self.folder.give(visitor, path)
            await send(message)

        return answering
