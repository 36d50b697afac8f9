"""What an engine sampled, in its own words: one JSON line per ended call, for audits of what was trained."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from gyre_backend.engines.calls import Call
from gyre_sdk.errors import ConfigError


class Journal:
    """Appends to a file. Lines: rid, prompt_tokens, prompt_sha256 (of int32 ids), output_ids, logprobs, versions, finish."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"the engine's log {path} can't be written: {error.strerror}") from error
        self._encode = msgspec.json.Encoder().encode

    def write(self, call: Call, finish: dict[str, Any]) -> None:
        """Append one ended call, and flush."""
        line = {
            "rid": call.rid,
            "prompt_tokens": call.prompt_tokens,
            "prompt_sha256": hashlib.sha256(call.prompt.tobytes()).hexdigest(),
            "output_ids": call.output.tolist(),
            "logprobs": call.logprobs,
            "versions": call.versions(len(call.logprobs)),
            "finish": finish["type"],
        }
        self._file.write(self._encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
