"""What lineage makes of the traffic of known harnesses: links and roles of every call."""

from __future__ import annotations

from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.edges import CallFacts, Found, Lineage, ReplyFacts
from gyre_sdk.wire import pack_floats, pack_ids
from gyre_sdk.wire.records import Intent, Opened, Result, Role, Span


class Play:
    """Tells a lineage of calls, and records them in a graph as a gateway does."""

    def __init__(self) -> None:
        self.lineage = Lineage()
        self.graph = BranchGraph.replay([Opened(execution="e", at=0.0)])
        self.found: dict[int, Found] = {}
        self.facts: dict[int, CallFacts] = {}
        self.replies: dict[int, ReplyFacts] = {}
        self.next = 0

    def begin(self, *, extends: int = -1, user: str = "", result: str = "", **more: object) -> int:
        call = self.next
        self.next += 1
        marks = {key: str(more.pop(key)) for key in list(more) if key not in CallFacts.__slots__}
        users = [user] if user else []
        facts = CallFacts(
            call=call,
            at=float(call),
            marks=marks,
            extends=extends,
            first_user=user,
            last_user=user,
            new_users=users,
            new_results=[result] if result else [],
            **more,  # type: ignore[arg-type]
        )
        base_len = self.graph.call_length(extends) if extends >= 0 else 0
        self.graph.apply(
            Intent(
                call=call,
                at=float(call),
                dialect="chat",
                base_call=extends,
                base_len=base_len,
                delta=pack_ids([100 + call]),
                rerender="message_edited" if facts.rerender_of >= 0 else "",
                rerender_of=facts.rerender_of,
            )
        )
        self.facts[call] = facts
        found = self.found[call] = self.lineage.begin(facts)
        for record in found.records:
            self.graph.apply(record)
        return call

    def end(self, call: int, text: str = "ok", *arguments: str) -> int:
        reply = self.replies[call] = ReplyFacts(text, arguments, len(arguments))
        self.lineage.reply(call, reply)
        self.graph.apply(
            Result(
                call=call,
                at=call + 0.5,
                ids=pack_ids([call]),
                logprobs=pack_floats([0]),
                versions=(Span(0, 0, 1),),
                finish="stop",
            )
        )
        # What the lineage thinks is what the graph says, with and without labels.
        assert self.graph.role_of_call(call) == self.found[call].role
        return call

    def call(self, text: str = "ok", *arguments: str, **facts: object) -> int:
        return self.end(self.begin(**facts), text, *arguments)  # type: ignore[arg-type]

    def links(self, call: int) -> list[tuple[str, int, bool]]:
        return [(link.kind, link.source, link.inferred) for link in self.found[call].links]

    def roles(self) -> list[Role]:
        return [self.found[call].role for call in sorted(self.found)]


TASK = "Please write the file hello.py and check that it runs."
ASK = "Look through the repository and find all tests that use sockets."
SUMMARY = "1. Primary request: write hello.py. 2. Done so far: the file exists. 3. Next: run it and report."


def test_a_plain_loop() -> None:
    play = Play()
    first = play.call(user=TASK, system="a", tools=3)
    second = play.call(extends=first, result="ok", system="a", tools=3)
    play.call(extends=second, result="done", system="a", tools=3)
    assert play.roles() == ["main"] * 3
    assert not any(play.found[call].records for call in play.found)


def test_a_retry_and_siblings() -> None:
    play = Play()
    first = play.call(user=TASK)
    again = play.call(user=TASK, same_prompt=first)
    assert play.links(again) == [("retries", first, False)]
    one = play.begin(extends=again, result="x")
    # While the first is still unanswered its twin is a sibling, no retry.
    two = play.begin(extends=again, result="x", same_prompt=one)
    play.end(one)
    play.end(two)
    assert play.links(two) == []
    assert play.roles() == ["main"] * 4


def test_claude_code_with_a_title_call_and_a_subagent() -> None:
    play = Play()
    play.call("Title", user=TASK, tools=0, schema=1, system="title")
    main = play.call("I look.", ASK, user=TASK, tools=25, system="claude")
    sub = play.call("", "ls", user=ASK, tools=22, system="short", agent="ag1", subagent="1")
    assert play.links(sub) == [("forks", main, False)]
    end = play.call("There are two: a.py and b.py", extends=sub, result="a.py", agent="ag1", subagent="1")
    back = play.call(extends=main, result="There are two: a.py and b.py\nagentId: ag1", tools=25, system="claude")
    assert play.links(back) == [("returns", end, True)]
    assert play.roles() == ["auxiliary", "main", "subagent", "subagent", "main"]


def test_codex_threads_overlap_and_are_compacted() -> None:
    play = Play()
    first = play.call("spawned", ASK, user=TASK, agent="t0", window="t0:0", tools=9)
    onward = play.begin(extends=first, result="agent id 7", agent="t0", window="t0:0", tools=9)
    sub = play.begin(user=ASK, agent="t1", parent_agent="t0", subagent="collab_spawn", window="t1:0", tools=8)
    assert play.links(sub) == [("forks", first, False)]
    play.end(onward)
    play.end(sub, "socket tests: none")
    waited = play.call(extends=onward, result="socket tests: none", agent="t0", window="t0:0", tools=9)
    assert play.links(waited) == [("returns", sub, True)]
    compact = play.call(
        SUMMARY,
        extends=waited,
        user="You are performing a CONTEXT CHECKPOINT COMPACTION.",
        agent="t0",
        window="t0:0",
        request_kind="compaction",
        tools=0,
    )
    assert play.found[compact].role == "main-summary"
    after = play.call(user=f"{TASK}\n{SUMMARY}", agent="t0", window="t0:1", tools=9)
    assert play.links(after) == [("compacts", compact, False)]
    assert play.found[after].role == "main"
    assert play.found[play.call(extends=after, agent="t0", window="t0:1", tools=9)].role == "main"


def test_claude_code_compacts_by_hand() -> None:
    play = Play()
    first = play.call(user=TASK, system="claude", tools=25)
    second = play.call(extends=first, result="ok", system="claude", tools=25)
    asked = "Your task is to create a detailed summary of the conversation so far, paying close attention to ..."
    compact = play.call(SUMMARY, extends=second, user=asked, system="claude", tools=25)
    after = play.call(user=f"This session is being continued. {SUMMARY} Go on.", system="claude", tools=25)
    assert play.roles() == ["main", "main", "main-summary", "main"]
    assert play.links(after) == [("compacts", compact, True)]
    # A second compaction of the same thread comes from the second summary.
    again = play.call(SUMMARY + " And more.", extends=after, user=asked, system="claude", tools=25)
    last = play.call(user=f"Continued. {SUMMARY} And more.", system="claude", tools=25)
    assert play.links(last) == [("compacts", again, True)]


def test_qwen_and_gemini_subagents_have_no_marks() -> None:
    play = Play()
    main = play.call("", ASK, user=TASK, system="qwen", tools=15)
    sub = play.call("found none", user=f"Context.\n{ASK}", system="other", tools=14)
    assert play.links(sub) == [("forks", main, True)]
    back = play.call(extends=main, result='{"output": "found none"}', system="qwen", tools=15)
    assert play.links(back) == [("returns", sub, True)]
    assert play.roles() == ["main", "subagent", "main"]


def test_a_subagent_whose_prompt_was_changed_is_seen_by_overlap() -> None:
    play = Play()
    main = play.call("", "short", user=TASK, system="sdk", tools=2)
    sub = play.call("42", user="Entirely different words.", system="helper", tools=1)
    assert play.links(sub) == [("forks", main, True)]
    assert play.found[sub].role == "subagent"


def test_qwen_compression_has_another_system_prompt() -> None:
    play = Play()
    main = play.call(user=TASK, system="qwen", tools=15)
    compact = play.call(
        SUMMARY,
        user="<history>...</history>",
        system="You are the component that summarizes internal chat history into a given structure.",
        tools=0,
    )
    assert play.found[compact].role == "main-summary"
    after = play.call(user=SUMMARY, system="qwen", tools=15)
    assert play.links(after) == [("compacts", compact, True)]
    assert play.roles() == ["main", "main-summary", "main"]
    assert main == 0


def test_terminus_hands_over_to_itself() -> None:
    play = Play()
    work = play.call(user=TASK)
    summary = play.call(
        SUMMARY, extends=work, user="You are about to hand off your work to another AI agent. Please summarise."
    )
    questions = play.call(
        "1. Where is the file? 2. Which interpreter? 3. What is left to do? 4. Why? 5. When?",
        user=f"You are picking up work from a previous AI agent. {SUMMARY} Ask questions.",
    )
    assert play.links(questions) == [("compacts", summary, True)]
    answers = play.call(
        "It is in /tmp/hello.py, and python3 runs it; nothing is left but to report the result.",
        extends=summary,
        user="The next agent has a few questions for you, please answer each of them.",
    )
    assert play.found[answers].role == "main-summary"
    rebuilt = play.call(
        user="Answers: It is in /tmp/hello.py, and python3 runs it; nothing is left but to report the result."
    )
    assert play.links(rebuilt) == [("compacts", answers, True)]
    assert play.roles() == ["main", "main-summary", "main-summary", "main-summary", "main"]


def test_a_summary_inside_a_subagent() -> None:
    play = Play()
    play.call("", ASK, user=TASK, system="m", tools=3)
    sub = play.call(user=ASK, system="s", tools=2)
    compact = play.call(SUMMARY, extends=sub, user="create a detailed summary of the conversation so far", tools=2)
    after = play.call(user=SUMMARY, system="s", tools=2)
    assert play.roles() == ["main", "subagent", "subagent-summary", "subagent"]
    assert play.links(after) == [("compacts", compact, True)]


def test_a_rerender_keeps_its_role() -> None:
    play = Play()
    play.call("", ASK, user=TASK, system="m", tools=3)
    sub = play.call(user=ASK, system="s", tools=2)
    edited = play.call(user=ASK, system="s", tools=2, rerender_of=sub)
    assert play.found[edited].role == "subagent"


def test_declared_scopes_win() -> None:
    play = Play()
    main = play.call(user=TASK, tools=1)
    fork = play.call(user="anything", fork_of=main, tools=1)
    assert play.links(fork) == [("forks", main, False)]
    retry = play.call(user="anything", retry_of=fork, tools=1)
    assert play.found[retry].role == "subagent"
    shorter = play.call(user="short", compact_of=main, tools=1)
    assert play.links(shorter) == [("compacts", main, False)]
    probe = play.call(user="x", role="auxiliary")
    assert play.found[probe].role == "auxiliary"
    nonsense = play.call(user="y", fork_of="x", role="king")
    assert play.found[nonsense].role == "main"


def test_a_failed_call_leaves_nothing() -> None:
    play = Play()
    first = play.begin(user=TASK, system="m", agent="t0", tools=0, schema=1)
    play.lineage.forget(first)
    again = play.call(user=TASK, system="m", tools=3)
    assert play.found[again].role == "main"
    lost = play.begin(extends=again, result="x")
    play.lineage.forget(lost)
    assert play.found[play.call(extends=again, result="x", same_prompt=lost)].links == ()


def test_a_probe_without_tools_is_no_part_of_the_work() -> None:
    play = Play()
    play.call(user=TASK, system="m", tools=3)
    assert play.found[play.call(user="ping", system="other", tools=0)].role == "auxiliary"
    # The main agent may begin anew, though.
    assert play.found[play.call(user="Another task", system="m", tools=3)].role == "main"


def test_white_space_and_length_do_not_hide_a_text() -> None:
    play = Play()
    long = "word " * 40000
    main = play.call("", f"{ASK}\n\n  twice", user=TASK, system="m", tools=3)
    sub = play.call(f"  {SUMMARY}\n", user=f"{ASK} twice", system="s", tools=2)
    back = play.call(extends=main, result=f"{long}\n{SUMMARY}", system="m", tools=3)
    assert play.links(back) == [("returns", sub, True)]


def test_a_restarted_gateway_knows_the_threads_again() -> None:
    play = Play()
    main = play.call("", ASK, user=TASK, system="m", tools=3)
    sub = play.call("found none", user=ASK, system="s", tools=2)
    again = Lineage()
    for call, found in play.found.items():
        again.restore(play.facts[call], found.role, found.links)
        again.reply(call, play.replies[call])
    play.lineage = again
    back = play.call(extends=main, result="found none", system="m", tools=3)
    assert play.links(back) == [("returns", sub, True)]
    onward = play.call(extends=sub, result="x", system="s", tools=2)
    assert play.found[onward].role == "subagent"
