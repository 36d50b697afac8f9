"""Our own renderer door: any chat template that only ever appends, ChatML first.

A full render is the model's own template, rendered with jinja2. A bridge renders the new messages behind a short made-up
history and takes what comes after it; that this equals the full render is not assumed but *checked* when the renderer is
built (`prove`), on conversations with and without system message, with tool results and odd characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre_sdk.capture import hermes
from gyre_sdk.capture.model import (
    ASSISTANT_KINDS,
    SYSTEMS_PROBE,
    Ids,
    ParsedReply,
    Part,
    Reply,
    Tool,
    join_messages,
    one_system,
)
from gyre_sdk.capture.tokenizer import FolderTokenizer
from gyre_sdk.errors import ConfigError, RequestError

_USER, _SAID = "\u2042question\u2042", "\u2042answer\u2042"
_probe_tool = Tool("gyre_probe", "A probe.", {"type": "object", "properties": {"x": {"type": "string"}}})


class TemplateRenderer:
    """A model folder's own chat template, extended token by token where that is provably the same."""

    def __init__(self, tokenizer: FolderTokenizer, family: str = "template", **variables: Any) -> None:
        self.family = family
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.stop_ids = tokenizer.stop_ids()
        if not self.stop_ids:
            raise ConfigError(f"{tokenizer.folder}: no eos token, so no way to tell where a reply ends")
        self._variables = variables
        self._stops = frozenset(self.stop_ids)
        self._native_tools = self._knows_tools()
        self._one_system = False
        try:
            self._text([*SYSTEMS_PROBE, Part("user", "f")], ())
        except RequestError:
            self._one_system = True
        self.problems = prove(self)
        """Why this template can't be extended exactly; empty when it can."""

    # -- what the template can do ------------------------------------------------------------------------------

    def _knows_tools(self) -> bool:
        try:
            text = self.tokenizer.template_text(
                [{"role": "user", "content": "x"}],
                tools=[_probe_tool.as_openai()],
                add_generation_prompt=True,
                **self._variables,
            )
        except Exception:  # a template may raise anything; then it does not know tools
            return False
        return _probe_tool.name in text

    # -- text --------------------------------------------------------------------------------------------------

    def messages(self, parts: Sequence[Part], tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """Messages as this template takes them: tools, calls and results in text where it knows none."""
        messages = join_messages(one_system(parts) if self._one_system else parts)
        if self._native_tools:
            return messages
        result: list[dict[str, Any]] = []
        if tools:
            head = messages[0]["content"] + "\n\n" if messages and messages[0]["role"] == "system" else ""
            result.append({"role": "system", "content": head + hermes.tools_text(tools)})
            messages = messages[1:] if head else messages
        raw_calls = {part.call_id: part for part in parts if part.kind == "call"}
        for message in messages:
            if message["role"] == "tool":
                _append_result(result, message)
            elif message["role"] == "assistant":
                result.append(_assistant(message, raw_calls))
            else:
                result.append(message)
        return result

    def _text(self, parts: Sequence[Part], tools: Sequence[Tool], *, generation: bool = True) -> str:
        given = [tool.as_openai() for tool in tools] if tools and self._native_tools else None
        try:
            return self.tokenizer.template_text(
                self.messages(parts, tools), tools=given, add_generation_prompt=generation, **self._variables
            )
        except ConfigError:
            raise
        except Exception as error:  # templates raise for roles and orders they don't know
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from error

    # -- ChatRenderer ------------------------------------------------------------------------------------------

    def render(self, parts: Sequence[Part], tools: Sequence[Tool]) -> list[int]:
        return self.encode(self._text(parts, tools))

    def bridge(self, prompt_tail: Ids, output: Ids, new: Sequence[Part], tools: Sequence[Tool]) -> list[int] | None:
        if self.problems or not new or new[0].kind in ASSISTANT_KINDS:
            return None
        delta = self.delta_text(new, tools)
        if delta is None:
            return None
        if len(output) and int(output[-1]) in self._stops:
            # The close begins with the stop token, which was sampled.
            stop = self.tokenizer.decode([int(output[-1])])
            if not delta.startswith(stop):
                return None
            delta = delta[len(stop) :]
        return self.encode(delta)

    def delta_text(self, new: Sequence[Part], tools: Sequence[Tool]) -> str | None:
        """What the template writes after an assistant's words, up to where the next reply begins."""
        history = [Part("user", _USER), Part("text", _SAID)]
        if new[0].kind == "result":
            history.append(Part("call", "{}", name=new[0].name or "tool", call_id=new[0].call_id))
        text = self._text([*history, *new], tools if self._native_tools else ())
        marker = _SAID if new[0].kind != "result" else self._after_call(text)
        _, found, delta = text.partition(marker)
        return delta if found else None

    def _after_call(self, text: str) -> str:
        """The text of the made-up assistant turn up to its close, when it held a call."""
        start = text.index(_SAID)
        stop = self.tokenizer.decode([self.stop_ids[0]])
        end = text.find(stop, start)
        return text[start:end] if end > 0 else _SAID

    def parse(self, ids: Ids, prompt_tail: Ids, tools: Sequence[Tool], *, final: bool = True) -> ParsedReply:
        listed = ids.tolist()
        while listed and listed[-1] in self._stops:
            listed.pop()
        thinking = len(prompt_tail) > 0 and self.decode(prompt_tail[-8:].tolist()).rstrip().endswith(hermes.THINK)
        parsed = hermes.parse(self.decode(listed), tools, thinking=thinking, final=final)
        if not parsed.reasoning:
            return parsed
        # Tokens are shared out by text length: exact counts of a text boundary inside a token don't exist.
        share = len(parsed.reasoning) / max(1, len(self.decode(listed)))
        return ParsedReply(parsed.text, parsed.reasoning, parsed.calls, reasoning_tokens=round(share * len(listed)))

    def reply_ids(self, reply: Reply, tools: Sequence[Tool]) -> list[int]:
        blocks = [f"{hermes.THINK}\n{reply.reasoning}\n{hermes.THINK_END}\n\n"] if reply.reasoning else []
        said = [reply.text] if reply.text else []
        said += [call.raw or hermes.call_text(call.name, call.arguments) for call in reply.calls]
        return [*self.encode("".join(blocks) + "\n".join(said)), self.stop_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def _append_result(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    block = f"<tool_response>\n{message['content']}\n</tool_response>"
    if messages and messages[-1].get("results"):
        messages[-1]["content"] += "\n" + block
    else:
        messages.append({"role": "user", "content": block, "results": True})


def _assistant(message: dict[str, Any], raw_calls: dict[str, Part]) -> dict[str, Any]:
    content = message["content"]
    if message.get("reasoning_content"):
        content = f"{hermes.THINK}\n{message['reasoning_content']}\n{hermes.THINK_END}\n\n{content}"
    for call in message.get("tool_calls", ()):
        part = raw_calls[call["id"]]
        content += ("\n" if content else "") + hermes.call_text(part.name, part.text)
    return {"role": "assistant", "content": content}


PROBES: tuple[tuple[str, tuple[Part, ...], tuple[Part, ...]], ...] = (
    ("a second question", (Part("user", "What is 2 + 2?"),), (Part("user", "And 3 + 3?"),)),
    ("a system message", (Part("system", "Be brief."), Part("user", "Hi\n")), (Part("user", "  spaced \n\n"),)),
    ("odd characters", (Part("user", "caf\u00e9 \U0001f600"),), (Part("user", "\u4f60\u597d\n<b>&amp;"),)),
    ("a tool result", (Part("user", "List."),), (Part("result", "a.txt\nb.txt", name="bash", call_id="c0"),)),
    (
        "two tool results and a question",
        (Part("system", "S"), Part("user", "List.")),
        (
            Part("result", "1", name="bash", call_id="c0"),
            Part("result", "2", name="bash", call_id="c1"),
            Part("user", "so?"),
        ),
    ),
)
"""(what, history before the reply, what follows the reply)."""

_bash = Tool("bash", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}})


def probe_turn(new: Sequence[Part]) -> list[Part]:
    """The assistant's turn between a probe's history and what follows."""
    calls = [
        Part("call", '{"command": "ls"}', name="bash", call_id=part.call_id) for part in new if part.kind == "result"
    ]
    return [Part("text", "Four."), *calls]


def prove(renderer: TemplateRenderer) -> list[str]:
    """Check on probes that history + reply + delta is, character by character and id by id, the full render.

    Returns one line per probe that failed; a template with failures is never extended, always rendered whole.
    """
    problems: list[str] = []
    for what, before, new in PROBES:
        tools = (_bash,) if any(part.kind == "result" for part in new) else ()
        try:
            problem = _prove_one(renderer, before, new, tools)
        except (RequestError, ValueError) as error:
            problem = str(error)
        if problem:
            problems.append(f"{what}: {problem}")
    return problems


def _prove_one(renderer: TemplateRenderer, before: Sequence[Part], new: Sequence[Part], tools: Sequence[Tool]) -> str:
    turn = probe_turn(new)
    prompt = renderer.render(before, tools)
    with_turn = renderer._text([*before, *turn, *new], tools)
    head = renderer._text(before, tools)
    if not with_turn.startswith(head):
        return "the prompt changes when a reply follows it"
    delta = renderer.delta_text(new, tools)
    if delta is None or not with_turn.endswith(delta):
        return "what follows a reply depends on what came before it"
    said = with_turn[len(head) : len(with_turn) - len(delta)]
    ids = [*prompt, *renderer.encode(said), *renderer.encode(delta)]
    whole = renderer.encode(with_turn)
    if ids != whole:
        first = next((i for i, (a, b) in enumerate(zip(ids, whole)) if a != b), min(len(ids), len(whole)))
        return f"ids differ at {first}: {ids[first : first + 3]} against {whole[first : first + 3]}"
    return ""
