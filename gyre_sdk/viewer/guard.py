"""Who may read the page, and what the page may do: in front of every answer of the viewer."""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
COOKIE = "gyre_view"


class Guard:
    """Refuses foreign host names (DNS rebinding) on loopback, and anyone without the token when there is one.

    The token comes in the address once (`/?token=...`); the answer sets it as a cookie that no script can read and that
    other sites' requests never carry. `Authorization: Bearer` works too.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._token = token
        self._hosts = hosts
        """Host names that requests may name; None: any, for addresses off loopback, where the token decides."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            await self._refuse(405, "this page is read-only", scope, receive, send)
            return
        if self._hosts is not None and host_name(headers.get("host", "")) not in self._hosts:
            await self._refuse(403, "this address is not served under that host name", scope, receive, send)
            return
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if self._token is not None and not self._may(headers, asked):
            await self._refuse(
                401, "open the address that gyre view printed: it carries the token", scope, receive, send
            )
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    answer[name] = value
                if self._token is not None and asked:
                    answer.append("set-cookie", f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/")
            await send(message)

        await self._app(scope, receive, guarded)

    def _may(self, headers: Headers, asked: str) -> bool:
        assert self._token is not None
        given = [asked]
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given.append(value.strip())
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        if cookie is not None:
            given.append(cookie.value)
        return any(hmac.compare_digest(one.encode(), self._token.encode()) for one in given)

    async def _refuse(self, status: int, text: str, scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(text + "\n", status, headers=HEADERS)(scope, receive, send)


def host_name(value: str) -> str:
    """The name in a Host header, without its port: `[::1]:80` gives `::1`."""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.rpartition(":")[0].lower() if value.count(":") == 1 else value.lower()
