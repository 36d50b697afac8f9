"""Malformed requests of every dialect: each is answered, in time, with a status that says whose fault it is: not ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import anyio.from_thread
import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gyre_sdk.capture.config import GatewayConfig
from gyre_sdk.testing import Say
from gyre_sdk.wire.records import Outcome
from tests.faults.bodies import DIALECTS, mutated
from tests.gateway.conftest import Rig, make_rig

FINE = {200, 400, 401, 403, 404, 405, 413, 422, 429}
HEADERS = st.dictionaries(
    st.sampled_from(["content-type", "x-gyre-scope", "anthropic-beta", "x-claude-code-agent-id", "session-id", "x-codex-turn-metadata"]),
    st.sampled_from(["", "{", "application/json", "text/plain; charset=nonsense", '{"id": 3}', '{"kind": "fork"}', "x" * 3000]),
    max_size=2,
)  # fmt: skip


@contextmanager
def running(folder: Path) -> Iterator[tuple[Rig, httpx.Client]]:
    config = GatewayConfig(requests_per_s=1e6, request_burst=10**6)
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(make_rig(folder, [Say("ok")], config=config)) as rig,
        httpx.Client(base_url=rig.handle.base_url, headers=rig.http.headers, timeout=30) as http,
    ):
        yield rig, http
        rig_digest = portal.call(_check, rig)
        assert rig_digest


async def _check(rig: Rig) -> str:
    """The log gives the same graph, and the execution can still be sealed."""
    await rig.check_replay()
    await rig.gateway.seal(rig.handle.execution, Outcome(status="completed"))
    return rig.graph.digest()


def bombard(folder: Path, dialect: str, requests: int, caplog: pytest.LogCaptureFixture) -> None:
    paths, base = DIALECTS[dialect]
    seen: dict[int, int] = {}
    with running(folder) as (_, http), caplog.at_level(logging.ERROR):

        @settings(
            max_examples=requests,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(seed=st.integers(0, 2**32), path=st.sampled_from(paths), headers=HEADERS)
        def send(seed: int, path: str, headers: dict[str, str]) -> None:
            body = mutated(base, Random(seed))
            answer = http.post(path, content=body, headers=headers)
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert answer.status_code in FINE, (answer.status_code, answer.text[:500], path, body, headers)
            assert "Traceback" not in answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"], "an error in the dialect's shape"

        send()
        # It still works for those who ask properly.
        right = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}]})
        assert right.status_code == 200
    assert not caplog.records
    assert {200, 400} <= seen.keys(), seen


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_malformed_requests(tmp_path: Path, dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    bombard(tmp_path, dialect, 60, caplog)


@pytest.mark.faults
@pytest.mark.timeout(420)
@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_thousands_of_malformed_requests(tmp_path: Path, dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    """2,600 of each dialect: over 10,000 together."""
    bombard(tmp_path, dialect, 2600, caplog)


@pytest.mark.parametrize(
    "path", ["/", "/v1/nothing", "/v1/chat/completions/../../etc/passwd", "/v1/models/%00", "/gyre/v1/executions"]
)
def test_paths_and_methods_that_are_not_there(tmp_path: Path, path: str) -> None:
    with running(tmp_path) as (_, http):
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            assert http.request(method, path, content=b"{}").status_code < 500
