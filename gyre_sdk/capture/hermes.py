"""Tool calls as text, for models whose template knows no tools or knows them in this form.

    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>

and reasoning between `<think>` and `</think>` at the start of a reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from gyre_sdk.capture.model import ParsedReply, Tool, ToolCall, json_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
_block = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

HEADER = "# Tools\n\nYou may call one or more functions. Their signatures are given as JSON within <tools></tools>:\n<tools>\n"
FOOTER = (
    "\n</tools>\n\nTo call a function, answer with a JSON object of its name and arguments within"
    ' <tool_call></tool_call>:\n<tool_call>\n{"name": "<function-name>", "arguments": {<arguments>}}\n</tool_call>'
)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def tools_text(tools: Sequence[Tool]) -> str:
    """The section that tells a model of its tools, for templates that have none."""
    lines = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
    return HEADER + lines + FOOTER


def call_text(name: str, arguments: str) -> str:
    """A call as a model of this form writes it. `arguments` is kept as it is when it is a JSON object."""
    if not isinstance(json_object(arguments), dict):
        arguments = json.dumps({"input": arguments}, ensure_ascii=False)
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{CLOSE}'


def parse(text: str, tools: Sequence[Tool], *, thinking: bool, final: bool = True) -> ParsedReply:
    """Read a reply's text (stop token removed). A block that is no call of a known form stays text.

    thinking: the prompt opened the reasoning block already.
    final: False while the reply still grows; then text that may turn out to be a marker is held back.
    """
    reasoning, text = _split_reasoning(text, thinking)
    if not final:
        reasoning, text = _hold_back(reasoning, THINK_END), _settled(text, bool(tools))
    if not tools or OPEN not in text:
        return ParsedReply(text=text, reasoning=reasoning)
    known = {tool.name for tool in tools}
    calls: list[ToolCall] = []
    kept: list[str] = []
    at = 0
    for match in _block.finditer(text):
        call = _read_call(match, known)
        if call is None:
            continue
        kept.append(text[at : match.start()])
        calls.append(call)
        at = match.end()
    kept.append(text[at:])
    if not calls:
        return ParsedReply(text=text, reasoning=reasoning)
    return ParsedReply(text="".join(kept).rstrip(), reasoning=reasoning, calls=tuple(calls))


def _settled(text: str, tools: bool) -> str:
    """The start of an unfinished text that later tokens can't turn into something else."""
    start = text.lstrip()
    if len(start) < len(THINK) and THINK.startswith(start):
        return ""
    if not tools:
        return text
    open_at = text.rfind(OPEN)
    if open_at > text.rfind(CLOSE):
        text = text[:open_at]
    return _hold_back(text, OPEN)


def _hold_back(text: str, marker: str) -> str:
    """The text without an end that may be the beginning of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return text[:-size]
    return text


def _split_reasoning(text: str, thinking: bool) -> tuple[str, str]:
    body = text
    if not thinking:
        stripped = text.lstrip()
        if not stripped.startswith(THINK):
            return "", text
        body = stripped[len(THINK) :]
    reasoning, closed, rest = body.partition(THINK_END)
    return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""


def _read_call(match: re.Match[str], known: set[str]) -> ToolCall | None:
    try:
        call = msgspec.json.decode(match.group(1), type=_Call)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    arguments = bytes(call.arguments).decode()
    if call.name not in known or not arguments.lstrip().startswith("{"):
        return None
    return ToolCall(id="", name=call.name, arguments=arguments, raw=match.group(0))
