"""The door to `renderers`: hand-written templates of model families, chosen by name, never by guess."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gyre_sdk.capture.model import (
    SYSTEMS_PROBE,
    Ids,
    ParsedReply,
    Part,
    Reply,
    Tool,
    ToolCall,
    join_messages,
    one_system,
)
from gyre_sdk.capture.tokenizer import FolderTokenizer
from gyre_sdk.errors import ConfigError, RequestError

_DSML = "<｜DSML｜"
"""How a tool call of DeepSeek V4 opens: partly plain text."""


class FamilyRenderer:
    """One family of `renderers` (`qwen3`, `glm-5`, `kimi-k2`, `minimax-m2`, `deepseek-v3`, `llama-3`, `gpt-oss` ...)."""

    def __init__(self, tokenizer: FolderTokenizer, family: str, **options: Any) -> None:
        from renderers import create_renderer
        from renderers.configs import _CONFIG_BY_NAME

        config_class = _CONFIG_BY_NAME.get(family)
        if config_class is None or family in ("auto", "default"):
            known = ", ".join(sorted(set(_CONFIG_BY_NAME) - {"auto", "default"}))
            raise ConfigError(f"unknown renderer family {family!r}; known are: template, {known}")
        try:
            self._renderer = create_renderer(tokenizer, config_class(**options))
        except Exception as error:  # pydantic, assertion and lookup errors alike: the tokenizer does not fit the family
            raise ConfigError(f"{tokenizer.folder} does not fit the renderer family {family!r}: {error}") from error
        self.family = family
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())
        self._one_system = False
        try:
            self.render([*SYSTEMS_PROBE, Part("user", "f")], ())
        except RequestError:
            self._one_system = True

    def render(self, parts: Sequence[Part], tools: Sequence[Tool]) -> list[int]:
        parts = one_system(parts) if self._one_system else parts
        try:
            return list(
                self._renderer.render_ids(join_messages(parts), tools=_openai(tools), add_generation_prompt=True)
            )
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from error

    def bridge(self, prompt_tail: Ids, output: Ids, new: Sequence[Part], tools: Sequence[Tool]) -> list[int] | None:
        tail, said = prompt_tail.tolist(), output.tolist()
        new = one_system(new, start=False) if self._one_system else new
        try:
            bridged = self._renderer.bridge_to_next_turn(tail, said, join_messages(new), tools=_openai(tools))
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from error
        if bridged is None:
            return None
        ids = list(bridged.token_ids)
        known = len(tail) + len(said)
        return ids[known:] if ids[:known] == tail + said else None

    def parse(self, ids: Ids, prompt_tail: Ids, tools: Sequence[Tool], *, final: bool = True) -> ParsedReply:
        listed = ids.tolist()
        parsed = self._renderer.parse_response(listed, tools=_openai(tools), prompt_ids=prompt_tail.tolist())
        calls: list[ToolCall] = []
        text = parsed.content or ""
        names = {tool.name for tool in tools}
        for call in parsed.tool_calls:
            if str(call.status) == "ok" and call.name and (not names or call.name in names):
                arguments = _arguments(call.raw, call.arguments)
                calls.append(ToolCall(id=call.id or "", name=call.name, arguments=arguments, raw=call.raw))
            elif final:
                # A broken call is shown to the harness as the text it is, so that the model can be told.
                text += ("\n" if text else "") + call.raw
        reasoning = parsed.reasoning_content or ""
        if not final:
            # The whole reply's text comes without white space in front; what was streamed must be how it begins.
            reasoning, text = reasoning.lstrip(), _before_call(text.lstrip(), self.family)
        tokens = round(len(listed) * len(reasoning) / max(1, len(self.decode(listed)))) if reasoning else 0
        return ParsedReply(text=text, reasoning=reasoning, calls=tuple(calls), reasoning_tokens=tokens)

    def reply_ids(self, reply: Reply, tools: Sequence[Tool]) -> list[int]:
        parts = [Part("user", "?")]
        try:
            rendered = self._renderer.render(join_messages([*parts, *reply.parts()]), tools=_openai(tools))
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise RequestError(f"the model's chat template refuses this reply: {error}") from error
        ids = list(rendered.token_ids)
        if rendered.sampled_mask:
            sampled = [id_ for id_, mask in zip(ids, rendered.sampled_mask) if mask]
        else:
            sampled = ids[len(self.render(parts, tools)) :]
        while sampled and sampled[-1] not in self.stop_ids and any(id_ in self.stop_ids for id_ in sampled):
            sampled.pop()
        return sampled if sampled and sampled[-1] in self.stop_ids else [*sampled, self.stop_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def _before_call(text: str, family: str) -> str:
    """What of a partial text surely is text. In most families calls open with a token of their own; not in these."""
    if family == "llama-3" and text.startswith("{"):
        return ""
    if family != "deepseek-v4":
        return text
    text = text.partition(_DSML)[0]
    begun = next((size for size in range(len(_DSML) - 1, 0, -1) if text.endswith(_DSML[:size])), 0)
    return text[: len(text) - begun]


def _openai(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    return [tool.as_openai() for tool in tools] if tools else None


def _arguments(raw: str, value: Any) -> str:
    """The arguments as sampled when the block holds them as JSON, else as compact JSON of what was read."""
    if isinstance(value, str):
        return value
    start, end = raw.find("{"), raw.rfind("}")
    if start >= 0 and end > start:
        try:
            block = json.loads(raw[start : end + 1])
        except ValueError:
            block = None
        if block == value:
            return raw[start : end + 1]
        inner = _inner_arguments(raw[start : end + 1], block, value)
        if inner is not None:
            return inner
    return json.dumps(value, ensure_ascii=False)


def _inner_arguments(text: str, block: Any, value: Any) -> str | None:
    """The text of the member `arguments` (or `parameters`) inside a call written as one JSON object."""
    if not isinstance(block, dict):
        return None
    import msgspec

    try:
        members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return None
    for name in ("arguments", "parameters"):
        if name in members and block.get(name) == value:
            return bytes(members[name]).decode()
    return None
