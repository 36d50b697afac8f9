"""A small forward proxy for the allow-list network policy: CONNECT and absolute-form HTTP, to named hosts only."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

from gyre_sdk.environments.sandbox.relay import Target

_HEAD_LIMIT = 32_768
_PATIENCE_S = 30.0
_PORTS = frozenset({80, 443})


def host_allowed(host: str, allowed: tuple[str, ...]) -> bool:
    """Exact names, and `*.name` for everything below a name."""
    host = host.rstrip(".").lower()
    for pattern in allowed:
        pattern = pattern.rstrip(".").lower()
        if host == pattern or (pattern.startswith("*.") and host.endswith(pattern[1:])):
            return True
    return False


def to_allowed_hosts(allowed: tuple[str, ...]) -> Target:
    """The proxy as a relay's target."""

    async def connect(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _PATIENCE_S)
        if len(head) > _HEAD_LIMIT:
            await _refuse(writer, "431 Request Header Fields Too Large")
            return None
        try:
            host, port, rest = _parse(head)
        except ValueError:
            await _refuse(writer, "400 Bad Request")
            return None
        if not host_allowed(host, allowed) or port not in _PORTS:
            await _refuse(writer, "403 Forbidden", f"{host}:{port} is not on this task's list of hosts\n")
            return None
        try:
            address = await _public_address(host, port)
            far = await asyncio.wait_for(asyncio.open_connection(address, port), _PATIENCE_S)
        except (OSError, TimeoutError):
            await _refuse(writer, "502 Bad Gateway")
            return None
        if rest is None:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.drain()
        else:
            far[1].write(rest)
        return far

    return connect


def _parse(head: bytes) -> tuple[str, int, bytes | None]:
    """Host, port, and the request to send on (None for CONNECT). Raises ValueError."""
    line, _, headers = head.partition(b"\r\n")
    method, target, version = line.decode("latin-1").split(" ")
    if method == "CONNECT":
        host, _, port = target.rpartition(":")
        return host.strip("[]"), int(port), None
    url = urlsplit(target)
    if url.scheme != "http" or not url.hostname:
        raise ValueError(target)
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    kept = [h for h in headers.split(b"\r\n") if h and not h.lower().startswith((b"proxy-", b"connection:"))]
    # One request per connection: a second one on it could name another host.
    request = f"{method} {path} {version}\r\n".encode("latin-1") + b"\r\n".join([*kept, b"Connection: close", b"", b""])
    return url.hostname, url.port or 80, request


async def _public_address(host: str, port: int) -> str:
    """Resolve; an allowed name that points at this machine or its private network is refused. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified):
            return str(address[0])
    raise OSError(f"{host} leads to this machine")


async def _refuse(writer: asyncio.StreamWriter, status: str, text: str = "") -> None:
    body = text.encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    await writer.drain()
