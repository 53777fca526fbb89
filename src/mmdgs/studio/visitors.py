"""Who visits the studio: a signed cookie for each browser, the token, and how many bytes each may send."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import Counter, deque

from mmdgs.studio.downloads import AGE

SENT_BY_VISITOR, SENT_BY_ADDRESS, SENT_BY_ALL = 64_000_000, 256_000_000, 512_000_000
"""Bytes that a browser, an address and all together may upload in half an hour, after which uploads are deleted."""


class Visitors:
    """Names of browsers, signed with a key of this process.

    Nobody can make one up or take another's, and whoever holds one has shown the token (where there is one).
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self._key = secrets.token_bytes(32)

    def new(self) -> tuple[str, str]:
        """A visitor's name, and the cookie that proves it."""
        name = secrets.token_hex(16)
        return name, f"{name}.{self._signature(name)}"

    def name_in(self, cookie: str) -> str | None:
        """The visitor whose cookie this is; None where this process signed no such cookie."""
        name, _, signature = cookie.partition(".")
        return name if hmac.compare_digest(signature.encode(), self._signature(name).encode()) else None

    def admits(self, token: str) -> bool:
        """Whether this is the token, or none is needed."""
        return self.token is None or hmac.compare_digest(token.encode(), self.token.encode())

    def _signature(self, name: str) -> str:
        return hmac.new(self._key, name.encode(), hashlib.sha256).hexdigest()


class Allowance:
    """Bytes that were uploaded in the last half hour, by visitor, by address and in all."""

    def __init__(self) -> None:
        self._uploads: deque[tuple[float, tuple[str, ...], int]] = deque()
        self._totals: Counter[str] = Counter()

    def take(self, visitor: str, address: str, count: int) -> bool:
        """Count bytes of an upload; False, and nothing is counted, where they are more than is allowed."""
        now = time.monotonic()
        while self._uploads and self._uploads[0][0] < now - AGE:
            self._add(*self._uploads.popleft()[1:], sign=-1)
        limits = {f"visitor {visitor}": SENT_BY_VISITOR, f"address {address}": SENT_BY_ADDRESS, "all": SENT_BY_ALL}
        if any(self._totals[key] + count > limit for key, limit in limits.items()):
            return False
        self._uploads.append((now, tuple(limits), count))
        self._add(tuple(limits), count)
        return True

    def _add(self, keys: tuple[str, ...], count: int, sign: int = 1) -> None:
        for key in keys:
            self._totals[key] += sign * count
            if not self._totals[key]:
                del self._totals[key]
