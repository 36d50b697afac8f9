"""ATIF 1.8 (Agent Trajectory Interchange Format): one document per branch of the main agent.

ATIF's steps are a flat list, so a branch graph becomes several documents: the branches of the main agent, in
order, each pointing to the next by `continued_trajectory_ref`; subagents are embedded where they were forked.
A step that an earlier document holds too is marked `is_copied_context`, so that nothing is trained twice.
Every step of ours carries the exact tokens and logprobs.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec

from gyre_sdk.exporters.conversation import Conversations, Said
from gyre_sdk.graph import BranchGraph, Leaf

SCHEMA = "ATIF-v1.8"


class ToolCall(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One call of a tool; `arguments` is an object, `{"input": text}` for what is no JSON object."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class SubagentRef(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Points to an embedded subagent trajectory."""

    trajectory_id: str
    session_id: str | None = None


class ObservationResult(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What came back from a tool, or from a subagent."""

    source_call_id: str | None = None
    content: str | None = None
    subagent_trajectory_ref: list[SubagentRef] | None = None


class Observation(msgspec.Struct, kw_only=True):
    """All that came back after a step."""

    results: list[ObservationResult]


class Metrics(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Of one call. `logprobs` belong to `completion_token_ids`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class Step(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One turn."""

    step_id: int
    source: str
    message: str
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None
    extra: dict[str, Any] | None = None


class Agent(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Who acted."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class FinalMetrics(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sums over the steps that are no copies."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_steps: int | None = None
    extra: dict[str, Any] | None = None


class Trajectory(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A document."""

    schema_version: str
    agent: Agent
    steps: list[Step]
    session_id: str | None = None
    trajectory_id: str | None = None
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[Trajectory] | None = None


def to_atif(graph: BranchGraph) -> list[Trajectory]:
    """The documents of one execution, main branches in order. `graph` was made with `keep_bodies=True`, else
    steps have no texts.

    A step's text comes from the log; a log of another program gives one step per call, with tokens only.
    """
    maker = _Maker(graph)
    leaves = graph.leaves()
    main = [leaf for leaf in leaves if leaf.role.startswith("main")] or leaves[:1]
    taken = {leaf.id for leaf in main}
    others = [leaf for leaf in leaves if leaf.id not in taken]
    documents = [maker.document(leaf) for leaf in main]
    for before, after in pairwise(documents):
        before.continued_trajectory_ref = file_name(after)
    for leaf in others:
        host = maker.host(leaf, main)
        if host is not None:
            maker.embed(documents[host], maker.document(leaf), leaf)
    if documents:
        extra = documents[0].extra or {}
        documents[0].extra = {"gyre": {**extra.get("gyre", {}), **maker.whole_execution()}}
    return documents


def to_json(document: Trajectory) -> bytes:
    """The document as JSON text."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def file_name(document: Trajectory) -> str:
    """The file a document is written to: its execution and id."""
    return f"{document.session_id}.{document.trajectory_id}.atif.json"


class _Maker:
    def __init__(self, graph: BranchGraph) -> None:
        self.graph = graph
        self.talk = Conversations(graph)
        self.told: set[int] = set()
        """Calls that a document holds already."""

    def document(self, leaf: Leaf) -> Trajectory:
        graph = self.graph
        opened = graph.opened
        said = self.talk.whole(leaf.call) or self._tokens_only(leaf)
        steps = self._steps(said)
        tools = [tool.as_openai() for tool in self.talk.tools(leaf.call)]
        facts: dict[str, Any] = {"role": leaf.role, "call": leaf.call, "orphan": leaf.orphan}
        if graph.outcome is not None:
            facts["outcome"] = msgspec.to_builtins(graph.outcome)
        return Trajectory(
            schema_version=SCHEMA,
            session_id=graph.execution or None,
            trajectory_id=f"call-{leaf.call}",
            agent=Agent(
                name=(opened.harness if opened else "") or "unknown",
                version="unknown",
                model_name=(opened.model if opened else "") or self.talk.model(leaf.call) or None,
                tool_definitions=tools or None,
            ),
            steps=steps,
            final_metrics=_sums(steps),
            extra={"gyre": facts},
        )

    def _tokens_only(self, leaf: Leaf) -> list[Said]:
        from gyre_sdk.capture.model import Part

        # A document has one step at least: of an empty reply too.
        calls = dict.fromkeys(node.call for node in leaf.nodes if node.call >= 0) or [leaf.call]
        return [Said(Part("text", ""), call) for call in calls]

    def _steps(self, said: list[Said]) -> list[Step]:
        steps: list[Step] = []
        for item in said:
            part = item.part
            if part.kind in ("system", "user"):
                steps.append(Step(step_id=len(steps) + 1, source=part.kind, message=part.text))
            elif part.kind == "result":
                _observe(steps, part.call_id, part.text)
            else:
                step = steps[-1] if steps else None
                if (
                    step is None
                    or step.source != "agent"
                    or step.observation is not None
                    or _call_of(step) != item.call
                ):
                    step = self._agent_step(len(steps) + 1, item.call)
                    steps.append(step)
                if part.kind == "reasoning":
                    step.reasoning_content = part.text
                elif part.kind == "text":
                    step.message = part.text
                else:
                    tool = ToolCall(tool_call_id=part.call_id, function_name=part.name, arguments=_arguments(part.text))
                    step.tool_calls = [*(step.tool_calls or []), tool]
        return steps

    def _agent_step(self, number: int, call: int) -> Step:
        step = Step(step_id=number, source="agent", message="", extra={"gyre": {"call": call}})
        if call < 0:
            # An assistant turn that came with a request and extends no reply of ours: re-rendered, or another
            # agent's.
            step.is_copied_context = True
            return step
        entry = self.graph.calls[call]
        step.timestamp = _time(entry.at)
        step.llm_call_count = 1
        step.is_copied_context = True if call in self.told else None
        if call not in self.told:
            step.extra = {"gyre": {"call": call, **self._place(call)}}
        self.told.add(call)
        versions = [[span.version, span.start, span.end] for span in entry.versions]
        step.metrics = Metrics(
            prompt_tokens=entry.prompt_tokens,
            completion_tokens=len(entry.output_ids),
            cached_tokens=entry.cached_tokens,
            completion_token_ids=entry.output_ids.tolist(),
            logprobs=[value if math.isfinite(value) else -3.4e38 for value in entry.logprobs.tolist()],
            extra={"policy_versions": versions, "finish": entry.finish or "", "delivered": entry.delivered is True},
        )
        return step

    def _place(self, call: int) -> dict[str, Any]:
        """Where a call's prompt comes from, each token once; `from_atif` makes the prompt from it again."""
        entry = self.graph.calls[call]
        delta = self.graph.prompt_ids(call)[entry.base_len :].tolist()
        place: dict[str, Any] = {"base_call": entry.base_call, "base_len": entry.base_len, "delta_token_ids": delta}
        place |= {"at": entry.at, "done_at": entry.done_at, "first_token_at": entry.first_token_at}
        place |= {"dialect": entry.dialect, "engine": entry.engine, "sampling": entry.sampling or {}}
        if entry.rerender:
            place |= {"rerender": entry.rerender, "rerender_of": entry.rerender_of}
        return place

    def whole_execution(self) -> dict[str, Any]:
        """What the steps can't say: links, labels and how the execution was opened; in its first document."""
        graph, opened = self.graph, self.graph.opened
        facts: dict[str, Any] = {
            "links": [[link.kind, link.source, link.target, link.reason, link.inferred] for link in graph.links()],
            "labels": [[call, role, reason] for call, (role, reason) in graph.labels.items()],
        }
        # Replies without a token or a word are in no branch, but others may build on their prompts.
        rest = [number for number, call in sorted(graph.calls.items()) if call.done and number not in self.told]
        if rest:
            facts["steps"] = [msgspec.to_builtins(self._agent_step(1, number)) for number in rest]
        if opened is not None:
            facts |= {"group": opened.group, "task": opened.task, "opened_at": opened.at}
        return facts

    def host(self, leaf: Leaf, main: list[Leaf]) -> int | None:
        """Index of the main branch that a branch was forked from, by its links; the first one when nothing
        says so.
        """
        own = {node.owner for node in leaf.nodes}
        sources = [
            link.source for link in self.graph.links() if link.target in own and link.kind in ("forks", "retries")
        ]
        for source in sources:
            for index, branch in enumerate(main):
                if any(node.call == source for node in branch.nodes):
                    return index
        return 0 if main else None

    def embed(self, document: Trajectory, child: Trajectory, leaf: Leaf) -> None:
        """Put a branch into its host, with a reference at the step that asked for it."""
        document.subagent_trajectories = [*(document.subagent_trajectories or []), child]
        own = {node.owner for node in leaf.nodes}
        for link in self.graph.links():
            if link.kind != "forks" or link.target not in own:
                continue
            for step in document.steps:
                if _call_of(step) == link.source and step.source == "agent":
                    reference = SubagentRef(trajectory_id=child.trajectory_id or "", session_id=child.session_id)
                    result = ObservationResult(subagent_trajectory_ref=[reference])
                    step.observation = Observation(
                        results=[*(step.observation.results if step.observation else []), result]
                    )
                    return


def _call_of(step: Step) -> int:
    return int((step.extra or {}).get("gyre", {}).get("call", -1))


def _observe(steps: list[Step], call_id: str, text: str) -> None:
    """Hang a tool's output on the step that called it."""
    for step in reversed(steps):
        if step.source == "agent" and any(call.tool_call_id == call_id for call in step.tool_calls or []):
            result = ObservationResult(source_call_id=call_id, content=text)
            step.observation = Observation(results=[*(step.observation.results if step.observation else []), result])
            return
    steps.append(
        Step(
            step_id=len(steps) + 1,
            source="system",
            message="",
            observation=Observation(results=[ObservationResult(content=text)]),
        )
    )


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {"input": text}
    return value if isinstance(value, dict) else {"input": text}


def _sums(steps: list[Step]) -> FinalMetrics:
    own = [step.metrics for step in steps if step.metrics is not None and not step.is_copied_context]
    return FinalMetrics(
        total_prompt_tokens=sum(m.prompt_tokens or 0 for m in own),
        total_completion_tokens=sum(m.completion_tokens or 0 for m in own),
        total_cached_tokens=sum(m.cached_tokens or 0 for m in own),
        total_steps=len(steps),
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
