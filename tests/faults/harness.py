"""A harness process: `python -m tests.faults.harness PORT TOKEN TURNS JOURNAL SEED`. Asks again until each thing it says is answered.

What it was told is in its journal before it goes on. Imports nothing of ours, and nothing that is slow to import.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from random import Random
from typing import Any

PATIENCE_S = 90


def main(port: int, token: str, turns: int, journal: str, seed: int) -> None:
    """Exit code 3: no answer in time, 4: an answer that is no use; the journal's last line says what."""
    random = Random(seed)
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"turn {turn} {random.random()}"})
        call, reply = persistent(port, token, {"messages": messages, "stream": turn % 2 == 1}, file)
        note(file, turn=turn, call=call, text=reply)
        messages.append({"role": "assistant", "content": reply})
        time.sleep(random.random() * 0.2)


def persistent(port: int, token: str, body: dict[str, Any], file: int) -> tuple[int, str]:
    """The number of the call, and the reply."""
    until, wait = time.monotonic() + PATIENCE_S, 0.05
    problem = ""
    while time.monotonic() < until:
        try:
            status, call, data = post(port, token, body)
        except (OSError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if status == 200:
                text = read_stream(data) if body["stream"] else json.loads(data)["choices"][0]["message"]["content"]
                if text is not None:
                    return call, text
                problem = "a stream without its end"
            elif status in (429, 503, 507):
                problem = f"{status} {data[:200]!r}"
            else:
                note(file, failed=f"{status} {data[:500]!r}")
                sys.exit(4)
        time.sleep(wait)
        wait = min(1.0, 2 * wait)
    note(file, failed=f"no answer in {PATIENCE_S} s: {problem}")
    sys.exit(3)


def post(port: int, token: str, body: dict[str, Any]) -> tuple[int, int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, int(answer.headers.get("x-gyre-call", -1)), answer.read()
    finally:
        connection.close()


def read_stream(data: bytes) -> str | None:
    """The text, or None when the stream has no end."""
    text, ended = "", False
    for line in data.decode().splitlines():
        if line == "data: [DONE]":
            return text if ended else None
        if line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                return None
            for choice in event.get("choices", []):
                text += choice["delta"].get("content") or ""
                ended = ended or choice.get("finish_reason") is not None
    return None


def note(file: int, **entry: Any) -> None:
    os.write(file, json.dumps(entry).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
