"""Why a context exists: finds retries, forks, returns, compactions and roles from what a call says of itself.

The gateway tells a `Lineage` of every call at its intent and of every reply at its result, and records what
it finds as `Link` and `Labelled` records; so a replay needs no inference and gives the same graph. A
restarted gateway tells it again what the log holds (`restore` the recorded findings instead of looking for
new ones).

Marks (`Intent.marks`) that are understood; the dialects fill them from headers and metadata:

    role          declared role                          fork_of, compact_of, retry_of   declared source call
    agent         the harness's id of the thread         parent_agent                    of the thread that
    started it subagent      anything: this thread is a subagent's  request_kind
    "compaction", "title", "classifier", "probe" window        changes when a thread was compacted    schema
    anything: the reply must fit a JSON schema model         model name asked for                   system
    digest of the system prompt tools         number of tools offered
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gyre_sdk.graph.roles import ROLES, body_role, summary_role
from gyre_sdk.graph.texts import asks_for_summary, haystack, needle
from gyre_sdk.wire.records import EdgeKind, Labelled, Link, Role

MIN_PROMPT_CHARS = 12
"""A shorter tool argument is not taken for a subagent's prompt."""
MIN_SUMMARY_CHARS = 40
"""A shorter reply is not taken for a summary when it reappears, unless it was asked for as one."""
SEARCHED_CALLS = 200
"""How many of the latest replies a new context is searched for: a bound on the work per call."""
AUXILIARY_KINDS = ("title", "classifier", "probe")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What lineage needs to know of a call when it begins. Texts are looked at and not kept."""

    call: int
    at: float
    marks: Mapping[str, str] = field(default_factory=dict)
    extends: int = -1
    """Call whose prompt + reply this prompt extends; -1 when there is none."""
    same_prompt: int = -1
    """Latest earlier call with the same prompt ids; -1 when there is none."""
    rerender_of: int = -1
    """As in `Intent`."""
    system: str = ""
    first_user: str = ""
    """Text of the first user message."""
    last_user: str = ""
    """Text of the last message, when it is a user's."""
    new_users: Sequence[str] = ()
    """User messages that the extended context doesn't hold (all of them in a new context)."""
    new_results: Sequence[str] = ()
    """Tool results that the extended context doesn't hold."""


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """What lineage needs to know of a reply."""

    text: str = ""
    arguments: Sequence[str] = ()
    """String values in the arguments of its tool calls."""
    tool_calls: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What was found out about a call."""

    role: Role
    links: tuple[Link, ...] = ()
    label: Labelled | None = None
    """To be recorded when the role doesn't follow from links and tokens by itself."""

    @property
    def records(self) -> tuple[Link | Labelled, ...]:
        """To be written to the log, in this order, after the intent."""
        return self.links if self.label is None else (*self.links, self.label)


@dataclass(slots=True)
class _Thread:
    """A line of calls that belong together: the main agent, or one subagent."""

    role: Role
    first: int
    last: int
    agent: str = ""
    system: str = ""
    model: str = ""
    window: str = ""
    parent: _Thread | None = None
    asked_by: int = -1
    returned: bool = False


@dataclass(slots=True)
class _Known:
    thread: _Thread
    role: Role
    done: bool = False
    text: str = ""
    arguments: tuple[str, ...] = ()
    tool_calls: int = 0
    answered: bool = False
    """A later call of the thread builds on its reply."""


@dataclass(slots=True)
class _Guess:
    """A finding in the making."""

    thread: _Thread
    role: Role
    links: list[Link] = field(default_factory=list)
    reason: str = ""


class Lineage:
    """Follows one execution. Keeps a few hundred characters per call."""

    def __init__(self) -> None:
        self._calls: dict[int, _Known] = {}
        self._threads: list[_Thread] = []
        self._by_agent: dict[str, _Thread] = {}
        self._summed_up: set[int] = set()
        """Summaries that a shortened context was made of."""

    # -- what the gateway tells ------------------------------------------------------------------------------

    def begin(self, facts: CallFacts) -> Found:
        """A call begins: what it is and where it comes from."""
        guess = self._guess(facts)
        declared = facts.marks.get("role")
        if declared in ROLES:
            guess.role, guess.reason = declared, "declared"
        self._returns(facts, guess)
        expected = self._expected(facts, guess.links)
        label = None
        if guess.role != expected:
            label = Labelled(call=facts.call, at=facts.at, role=guess.role, reason=guess.reason)
        found = Found(guess.role, tuple(guess.links), label)
        self._summed_up.update(link.source for link in found.links if link.kind == "compacts")
        self._enter(facts, guess.thread, found.role)
        return found

    def restore(self, facts: CallFacts, role: Role, links: Sequence[Link]) -> None:
        """A call of an earlier process: take over what was found then."""
        guess = self._guess(facts)
        for link in links:
            source = self._calls.get(link.source)
            if source is None:
                continue
            if link.kind == "returns":
                source.thread.returned = True
            elif link.kind == "forks" and guess.thread.parent is None and guess.thread.first == facts.call:
                guess.thread.parent, guess.thread.asked_by = source.thread, link.source
        self._summed_up.update(link.source for link in links if link.kind == "compacts")
        guess.thread.role = body_role(role)
        self._enter(facts, guess.thread, role)

    def reply(self, call: int, facts: ReplyFacts) -> None:
        """The call's reply is committed."""
        known = self._calls.get(call)
        if known is None:
            return
        known.done = True
        known.text = needle(facts.text)
        known.arguments = tuple(
            text for argument in facts.arguments if len(text := needle(argument)) >= MIN_PROMPT_CHARS
        )
        known.tool_calls = facts.tool_calls

    def forget(self, call: int) -> None:
        """The call failed: nothing comes from it."""
        known = self._calls.pop(call, None)
        if known is None or any(other.thread is known.thread for other in self._calls.values()):
            return
        self._threads.remove(known.thread)
        self._by_agent = {agent: thread for agent, thread in self._by_agent.items() if thread is not known.thread}

    # -- the rules, strongest first --------------------------------------------------------------------------

    def _guess(self, facts: CallFacts) -> _Guess:
        for rule in (
            self._declared,
            self._retry,
            self._summary,
            self._onward,
            self._auxiliary,
            self._marked_agent,
            self._compacted,
            self._rerendered,
            self._asked_for,
        ):
            guess = rule(facts)
            if guess is not None:
                return guess
        return self._from_nowhere(facts)

    def _declared(self, facts: CallFacts) -> _Guess | None:
        kinds: dict[str, EdgeKind] = {"fork_of": "forks", "compact_of": "compacts", "retry_of": "retries"}
        for mark, kind in kinds.items():
            value = facts.marks.get(mark, "")
            source = self._calls.get(int(value)) if value.isdigit() else None
            if source is None:
                continue
            link = self._link(facts, kind, int(value), "declared")
            if kind == "forks":
                return _Guess(self._fork(facts, source.thread, int(value)), "subagent", [link], "declared")
            role = body_role(source.role) if kind == "compacts" else source.role
            return _Guess(source.thread, role, [link], "declared")
        return None

    def _retry(self, facts: CallFacts) -> _Guess | None:
        same = self._calls.get(facts.same_prompt)
        moved = facts.marks.get("window", "")
        if same is None or (moved and same.thread.window and moved != same.thread.window):
            return None  # two compactions may leave the same words
        links = []
        if same.done:
            links.append(self._link(facts, "retries", facts.same_prompt, "same prompt"))
        return _Guess(same.thread, same.role, links, "same prompt as an earlier call")

    def _summary(self, facts: CallFacts) -> _Guess | None:
        """A call that asks for a summary of a conversation."""
        marked = facts.marks.get("request_kind") == "compaction"
        asked = asks_for_summary(facts.last_user[:16384] + " " + facts.last_user[-16384:])
        system = asks_for_summary(facts.system[:16384])
        if not (marked or asked or system):
            return None
        if facts.extends in self._calls:
            thread = self._calls[facts.extends].thread
        elif facts.rerender_of in self._calls:
            thread = self._calls[facts.rerender_of].thread
        else:
            thread = self._agent_thread(facts) or self._main() or self._new_thread(facts, "main")
        reason = "request kind" if marked else "summary instruction"
        links = []
        if facts.extends < 0:
            # Questions about a summary, from a fresh context: they come from that summary.
            # A summary that work went on from already is just part of what is summed up next.
            source = self._summary_in(facts, thread)
            if source is not None and source not in self._summed_up:
                links.append(self._link(facts, "compacts", source, "summary reappears", inferred=True))
        return _Guess(thread, summary_role(body_role(thread.role)), links, reason)

    def _onward(self, facts: CallFacts) -> _Guess | None:
        """The context goes on."""
        before = self._calls.get(facts.extends)
        if before is None:
            return None
        # What goes on behind a summary, in the same context, is work again.
        role, links = body_role(before.role), []
        moved = facts.marks.get("window", "")
        if moved and before.thread.window and moved != before.thread.window:
            links.append(self._link(facts, "compacts", facts.extends, "window changed"))
        return _Guess(before.thread, role, links, "the context goes on")

    def _auxiliary(self, facts: CallFacts) -> _Guess | None:
        kind = facts.marks.get("request_kind", "")
        tools = facts.marks.get("tools", "")
        if kind in AUXILIARY_KINDS:
            return _Guess(self._new_thread(facts, "auxiliary"), "auxiliary", [], f"request kind {kind}")
        if tools == "0" and facts.marks.get("schema"):
            reason = "a reply by schema, without tools, outside any context"
            return _Guess(self._new_thread(facts, "auxiliary"), "auxiliary", [], reason)
        return None

    def _marked_agent(self, facts: CallFacts) -> _Guess | None:
        """Headers name the thread."""
        thread = self._agent_thread(facts)
        if thread is not None:
            links = []
            compacted = facts.marks.get("window", "") != thread.window
            source = self._summary_in(facts, thread)
            if source is None and compacted and thread.last in self._calls:
                source = thread.last
            if source is not None and self._calls[source].done:
                reason = "window changed" if compacted else "summary reappears"
                links.append(self._link(facts, "compacts", source, reason, inferred=not compacted))
            return _Guess(thread, body_role(thread.role), links, "the thread's id")
        if not (facts.marks.get("subagent") or facts.marks.get("parent_agent")):
            return None
        parent = self._by_agent.get(facts.marks.get("parent_agent", "")) or self._main()
        asked = self._asking(facts, parent)
        source = asked if asked is not None else self._last_done(parent)
        links = [] if source is None else [self._link(facts, "forks", source, "marked by the harness")]
        thread = self._fork(facts, parent, -1 if source is None else source)
        return _Guess(thread, "subagent", links, "marked by the harness")

    def _compacted(self, facts: CallFacts) -> _Guess | None:
        """A new context that begins with what a reply said."""
        for thread in reversed(self._threads):
            source = self._summary_in(facts, thread)
            if source is not None:
                link = self._link(facts, "compacts", source, "summary reappears", inferred=True)
                return _Guess(thread, body_role(thread.role), [link], "goes on from a summary")
        return None

    def _rerendered(self, facts: CallFacts) -> _Guess | None:
        old = self._calls.get(facts.rerender_of)
        return None if old is None else _Guess(old.thread, old.role, [], "re-rendered")

    def _asked_for(self, facts: CallFacts) -> _Guess | None:
        """The prompt stood in a tool call; else somebody waits for a tool while another system prompt turns
        up.
        """
        source = self._asking(facts, None)
        if source is not None:
            parent = self._calls[source].thread
            link = self._link(facts, "forks", source, "the prompt of a tool call reappears", inferred=True)
            return _Guess(self._fork(facts, parent, source), "subagent", [link], link.reason)
        main = self._main()
        other = _system(facts) != (main.system if main else "")
        if main is None or not other or facts.marks.get("tools") == "0":
            return None
        waiting = self._last_done(main)
        if waiting is not None and self._calls[waiting].tool_calls and not self._calls[waiting].answered:
            reason = "another system prompt while a tool call is open"
            link = self._link(facts, "forks", waiting, reason, inferred=True)
            return _Guess(self._fork(facts, main, waiting), "subagent", [link], reason)
        return None

    def _from_nowhere(self, facts: CallFacts) -> _Guess:
        main = self._main()
        if main is None:
            return _Guess(self._new_thread(facts, "main"), "main", [], "the first context")
        same_system = _system(facts) == main.system
        if not same_system and facts.marks.get("tools") == "0":
            reason = "another system prompt, without tools, outside any context"
            return _Guess(self._new_thread(facts, "auxiliary"), "auxiliary", [], reason)
        return _Guess(main, "main", [], "a new context of the main agent")

    def _returns(self, facts: CallFacts, guess: _Guess) -> None:
        """The results of subagents that this call brings back to the thread that asked for them."""
        open_ones = [t for t in self._threads if t.parent is guess.thread and t is not guess.thread and not t.returned]
        if not open_ones:
            return
        told = haystack([*facts.new_results, *facts.new_users])
        for thread in open_ones:
            last = self._last_done(thread)
            if last is None or last >= facts.call:
                continue
            known = self._calls[last]
            # Some subagents answer in the arguments of a tool call that ends them.
            if any(text and text in told for text in (known.text, *known.arguments)):
                guess.links.append(self._link(facts, "returns", last, "result reappears", inferred=True))
                thread.returned = True

    # -- helpers
    # -----------------------------------------------------------------------------------------------

    def _expected(self, facts: CallFacts, links: Sequence[Link]) -> Role:
        """What `roles.role_of_call` will say without a label; mirrors its order."""
        for kind in ("retries", "forks", "compacts"):
            for link in links:
                if link.kind == kind:
                    source = self._calls[link.source].role
                    return "subagent" if kind == "forks" else body_role(source) if kind == "compacts" else source
        if facts.rerender_of in self._calls:
            return self._calls[facts.rerender_of].role
        return self._calls[facts.extends].role if facts.extends in self._calls else "main"

    def _enter(self, facts: CallFacts, thread: _Thread, role: Role) -> None:
        self._calls[facts.call] = _Known(thread, role)
        if facts.extends in self._calls:
            self._calls[facts.extends].answered = True
        if thread not in self._threads:
            self._threads.append(thread)
        thread.last = facts.call
        thread.window = facts.marks.get("window", "") or thread.window
        agent = facts.marks.get("agent", "")
        if agent:
            self._by_agent.setdefault(agent, thread)

    def _link(self, facts: CallFacts, kind: EdgeKind, source: int, reason: str, *, inferred: bool = False) -> Link:
        return Link(kind=kind, source=source, target=facts.call, at=facts.at, reason=reason, inferred=inferred)

    def _new_thread(self, facts: CallFacts, role: Role) -> _Thread:
        return _Thread(
            role=role,
            first=facts.call,
            last=facts.call,
            agent=facts.marks.get("agent", ""),
            system=_system(facts),
            model=facts.marks.get("model", ""),
            window=facts.marks.get("window", ""),
        )

    def _fork(self, facts: CallFacts, parent: _Thread | None, source: int) -> _Thread:
        thread = self._new_thread(facts, "subagent")
        thread.parent, thread.asked_by = parent, source
        return thread

    def _main(self) -> _Thread | None:
        return next((thread for thread in self._threads if thread.role == "main"), None)

    def _agent_thread(self, facts: CallFacts) -> _Thread | None:
        agent = facts.marks.get("agent", "")
        return self._by_agent.get(agent) if agent else None

    def _last_done(self, thread: _Thread | None) -> int | None:
        found = [n for n, known in self._calls.items() if known.done and (thread is None or known.thread is thread)]
        return max(found, default=None)

    def _latest(self) -> list[int]:
        """The latest calls, newest first. Calls are entered in the order of their numbers."""
        return list(itertools.islice(reversed(self._calls), SEARCHED_CALLS))

    def _asking(self, facts: CallFacts, thread: _Thread | None) -> int | None:
        """The latest reply with a tool call whose argument is in the new context's user messages: not always the first
        of them, since some harnesses put the surroundings before the task.
        """
        told = haystack([facts.first_user, *facts.new_users[1:4]])
        for number in self._latest():
            known = self._calls[number]
            if not known.done or (thread is not None and known.thread is not thread):
                continue
            if any(argument in told for argument in known.arguments):
                return number
        return None

    def _summary_in(self, facts: CallFacts, thread: _Thread) -> int | None:
        """The latest reply of the thread whose text stands in a user message of this new context."""
        told = haystack(facts.new_users)
        for number in self._latest():
            known = self._calls[number]
            if known.thread is not thread or not known.done or not known.text:
                continue
            asked_for = known.role != body_role(known.role)
            if known.text in told and (asked_for or len(known.text) >= MIN_SUMMARY_CHARS):
                return number
        return None


def _system(facts: CallFacts) -> str:
    return facts.marks.get("system") or needle(facts.system)
