"""What a sandbox with network needs of this machine's network settings: its certificate authorities and its proxy, never a password."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

CA_AT = "/etc/ssl/gyre-ca.crt"
_NAMED_BY = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE")
_SYSTEM = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_READ_BY = (*_NAMED_BY, "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy")


@cache
def authorities() -> Path | None:
    """The file with the certificate authorities that this machine trusts (a company's own among them), if there is one."""
    for name in (*(os.environ.get(variable, "") for variable in _NAMED_BY), *_SYSTEM):
        if name and Path(name).is_file():
            return Path(name).resolve()
    return None


def settings() -> Mapping[str, str]:
    """Variables for commands in a sandbox with network: tools trust what this machine trusts, and go through its proxy.

    A proxy with a user and password is left out: what runs inside must not learn them.
    """
    found = {name: os.environ[name] for name in _PROXIES if name in os.environ and not _has_password(os.environ[name])}
    if authorities() is not None:
        found |= dict.fromkeys(_READ_BY, CA_AT) | {"UV_NATIVE_TLS": "1"}
    return found


def _has_password(url: str) -> bool:
    try:
        return "@" in urlsplit(url if "//" in url else f"//{url}").netloc
    except ValueError:
        return True
