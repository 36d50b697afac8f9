"""`gyre serve`: its token is the owner's, kept over starts; mistakes are one line."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gyre_backend.service import cli
from gyre_backend.service.tokens import admin_token
from gyre_sdk.errors import ConfigError


def test_the_token_is_kept_and_the_owner_s(tmp_path: Path) -> None:
    token = admin_token(tmp_path / "run")
    path = tmp_path / "run/admin-token"
    assert admin_token(tmp_path / "run") == token == path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("")
    assert len(admin_token(tmp_path / "run")) > 30


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        cli.serve(tmp_path / "none.toml", run_dir=tmp_path / "run")
