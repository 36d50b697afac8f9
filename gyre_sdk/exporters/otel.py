"""OpenTelemetry GenAI spans: an `invoke_agent` span per execution and per subagent, a `chat` span per call.
Needs the extra `otel`.

Times are those of the log. A typed edge of the graph (retry, fork, return, compaction, re-render) is a span
link with its kind and reason. Texts are not exported: they may hold secrets, and the log has them. The GenAI
conventions are still in development, so names may change with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gyre_sdk.errors import MissingExtraError
from gyre_sdk.graph import BranchGraph, Call

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


def export_spans(graphs: Iterable[BranchGraph], exporter: SpanExporter) -> int:
    """Sends the spans of these executions to `exporter` and shuts it down; returns how many. Raises
    MissingExtraError.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    except ImportError as error:
        raise MissingExtraError("opentelemetry-sdk", "otel") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "gyre"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("gyre")
    count = sum(_Spans(graph, tracer).write() for graph in graphs)
    provider.shutdown()
    return count


class _Spans:
    def __init__(self, graph: BranchGraph, tracer: Any) -> None:
        self.graph = graph
        self.tracer = tracer
        self.contexts: dict[int, Any] = {}
        self.agents: dict[int, Any] = {}

    def write(self) -> int:
        """All spans of the execution; returns how many."""
        from opentelemetry import trace

        graph = self.graph
        opened = graph.opened
        start = opened.at if opened else 0.0
        times = [t for call in graph.calls.values() for t in (call.at, call.done_at) if t is not None]
        end = graph.sealed.at if graph.sealed else max(times, default=start)
        name = (opened.harness if opened else "") or "agent"
        root = self.tracer.start_span(f"invoke_agent {name}", start_time=_ns(start), attributes=self._root_facts(name))
        inside = trace.set_span_in_context(root)
        forks = {link.target: link for link in graph.links() if link.kind == "forks"}
        agents: list[tuple[Any, float]] = []
        for number, call in sorted(graph.calls.items()):
            home = inside
            if number in forks:
                span = self.tracer.start_span(
                    "invoke_agent subagent",
                    context=self.contexts.get(forks[number].source, inside),
                    start_time=_ns(call.at),
                    attributes={"gen_ai.operation.name": "invoke_agent", "gyre.role": graph.role_of_call(number)},
                )
                self.agents[number] = trace.set_span_in_context(span)
                agents.append((span, self._last(number)))
            home = self._home(number, inside)
            self._call(number, call, home)
        for span, at in agents:
            span.end(_ns(at))
        if graph.outcome is not None and graph.outcome.status != "completed":
            root.set_status(trace.StatusCode.ERROR, graph.outcome.status)
        root.end(_ns(end))
        return 1 + len(agents) + len(graph.calls)

    def _home(self, number: int, inside: Any) -> Any:
        """The agent span a call belongs to: that of its own fork, or of the call it builds on."""
        seen = set[int]()
        while number >= 0 and number not in seen:
            if number in self.agents:
                return self.agents[number]
            seen.add(number)
            call = self.graph.calls[number]
            number = self.graph.parent_call(number) if call.done else call.base_call
        return inside

    def _last(self, first: int) -> float:
        """When the last call that builds on `first` ended."""
        family, last = {first}, self.graph.calls[first].done_at or self.graph.calls[first].at
        for number, call in sorted(self.graph.calls.items()):
            if (call.done and self.graph.parent_call(number) in family) or number == first:
                family.add(number)
                last = max(last, call.done_at or call.at)
        return last

    def _call(self, number: int, call: Call, home: Any) -> None:
        from opentelemetry import trace

        links = [
            trace.Link(
                trace.get_current_span(self.contexts[link.source]).get_span_context(),
                {"gyre.edge": link.kind, "gyre.reason": link.reason, "gyre.inferred": link.inferred},
            )
            for link in self.graph.links()
            if link.target == number and link.source in self.contexts
        ]
        facts: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "gyre",
            "gen_ai.request.model": (self.graph.opened.model if self.graph.opened else "") or "policy",
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": len(call.output_ids),
            "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
            "gen_ai.response.id": f"e{self.graph.execution}.c{number:06d}.",
            "gen_ai.response.finish_reasons": [call.finish or "none"],
            "gyre.call": number,
            "gyre.role": self.graph.role_of_call(number),
            "gyre.dialect": call.dialect,
            "gyre.policy_versions": sorted({span.version for span in call.versions}),
            "gyre.delivered": call.delivered is True,
        }
        sampling = call.sampling or {}
        for ours, theirs in {"temperature": "temperature", "top_p": "top_p", "max_new_tokens": "max_tokens"}.items():
            if ours in sampling:
                facts[f"gen_ai.request.{theirs}"] = sampling[ours]
        span = self.tracer.start_span(
            "chat", context=home, start_time=_ns(call.at), attributes=facts, links=links, kind=trace.SpanKind.CLIENT
        )
        if call.first_token_at is not None:
            span.add_event("first token", timestamp=_ns(call.first_token_at))
        if call.error:
            span.set_attribute("error.type", call.error.partition(":")[0])
            span.set_status(trace.StatusCode.ERROR, call.error)
        self.contexts[number] = trace.set_span_in_context(span)
        span.end(_ns(call.done_at or call.at))

    def _root_facts(self, name: str) -> dict[str, Any]:
        graph = self.graph
        facts: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": name,
            "gen_ai.conversation.id": graph.execution,
            "gyre.task": graph.opened.task if graph.opened else "",
            "gyre.group": graph.opened.group if graph.opened else "",
        }
        if graph.outcome is not None:
            facts |= {"gyre.status": graph.outcome.status, "gyre.valid": graph.outcome.valid}
            if graph.outcome.reward is not None:
                facts["gyre.reward"] = graph.outcome.reward
        return facts


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
