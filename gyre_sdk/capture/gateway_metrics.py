"""What a gateway counts, as Prometheus reads it: `GET /metrics` with `GatewayConfig.metrics_token`.

The page has a token of its own because harnesses reach the gateway's port too, and an agent has no business with other
executions' numbers. It holds no texts and no execution ids.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gyre_sdk.wire.prometheus import CONTENT_TYPE, Family, to_text

if TYPE_CHECKING:
    from gyre_sdk.capture.recorder import Counters, Recorder
    from gyre_sdk.wire.records import Outcome

_TOTALS = {
    "calls": "Requests that became a call",
    "finished": "Calls with a whole reply on record",
    "failed": "Calls that ended without one",
    "replayed": "Requests that were answered with the earlier reply",
    "prompt_tokens": "Prompt tokens sent to the engine",
    "output_tokens": "Sampled tokens on record",
}


class GatewayMetrics:
    """Sums over all executions of a gateway: those that are open are asked, those that ended are remembered."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._rerenders: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()

    def ended(self, counters: Counters, outcome: Outcome) -> None:
        """An execution was sealed."""
        self._outcomes[outcome.status] += 1
        self._add(self._totals, self._rerenders, counters)

    @staticmethod
    def _add(totals: Counter[str], rerenders: Counter[str], counters: Counters) -> None:
        for name in _TOTALS:
            totals[name] += getattr(counters, name)
        rerenders.update(counters.rerenders)

    def text(self, recorders: Mapping[str, Recorder]) -> str:
        """The page. `recorders`: the open executions'."""
        totals, rerenders = Counter(self._totals), Counter(self._rerenders)
        for recorder in recorders.values():
            self._add(totals, rerenders, recorder.counters)
        return to_text([
            Family("gateway_executions_open", "gauge", "Executions that are not sealed", [({}, len(recorders))]),
            *(Family(f"gateway_{name}", "counter", about, [({}, totals[name])]) for name, about in _TOTALS.items()),
            _by("gateway_rerenders", "Contexts that were rendered anew, by reason", "reason", rerenders),
            _by("gateway_executions_sealed", "Executions that ended, by status", "status", self._outcomes),
        ])  # fmt: skip

    def answer(self, request: Request, token: str, recorders: Mapping[str, Recorder]) -> Response:
        """404 while no token is set, 401 for another one."""
        if not token:
            return PlainTextResponse("no metrics token is set", status_code=404)
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return PlainTextResponse("the metrics token is wanted as Authorization: Bearer", status_code=401)
        return PlainTextResponse(self.text(recorders), media_type=CONTENT_TYPE)


def _by(name: str, about: str, label: str, counts: Counter[str]) -> Family:
    return Family(name, "counter", about, [({label: key}, value) for key, value in sorted(counts.items())])
