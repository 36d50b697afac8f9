"""From a request and its match to prompt ids: extend exact ids where possible, render anew where not, and say why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio.to_thread
import numpy as np

from gyre_sdk.capture.contexts import Contexts, Match, Point
from gyre_sdk.capture.model import TAIL, ChatRenderer, Ids, ModelRequest, Part, to_ids
from gyre_sdk.capture.reading import OFF_LOOP_BYTES, Reader, ReadRequest
from gyre_sdk.errors import ContextOverflowError, RequestError


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine will be sent."""

    ids: Ids
    """int32[n], checked against the vocabulary."""
    base_call: int
    """Call whose context the ids begin with; -1 when they were rendered from nothing."""
    base_len: int
    from_reply: bool
    """The base is the call's prompt + output; else its prompt alone."""
    kept: int
    """Parts of the request that the base holds."""
    rerender: str
    rerender_of: int
    new: Sequence[Part]
    """The request's parts behind `kept`."""
    start: Point
    """Where the conversation stands before `new`."""


def check_length(tokens: int, limit: int) -> None:
    """Raises ContextOverflowError when a prompt leaves no room in a context of `limit` tokens; 0 = unknown."""
    if limit and tokens >= limit:
        raise ContextOverflowError(
            f"the prompt has {tokens} tokens; the model's context holds {limit}", prompt_tokens=tokens, limit=limit
        )


@dataclass(slots=True)
class Prompter:
    """Makes prompts for one execution. `context_of(call, with_output)` gives a known call's exact ids."""

    renderer: ChatRenderer
    contexts: Contexts
    reader: Reader
    context_of: Callable[[int, bool], Ids]
    output_of: Callable[[int], Ids]

    async def make(self, request: ModelRequest, read: ReadRequest, match: Match) -> Prompt:
        """Raises RequestError when the conversation can't be rendered, or holds ids outside the vocabulary."""
        if match.same_prompt >= 0:
            ids = self.context_of(match.same_prompt, False)
            return Prompt(
                ids,
                match.same_prompt,
                len(ids),
                False,
                len(read.parts),
                "",
                -1,
                (),
                self.contexts.calls[match.same_prompt].prompt,
            )
        if match.call < 0:
            return await self._whole(request, read, match.rerender, match.rerender_of)
        known = self.contexts.calls[match.call]
        if known.truncated:
            return await self._whole(request, read, "truncated_output", match.call)
        context = self.context_of(match.call, True)
        output = self.output_of(match.call)
        heavy = self.reader.is_heavy(request)
        if heavy:
            new = await anyio.to_thread.run_sync(self.reader.parts_from, request, read, match.kept)
        else:
            new = self.reader.parts_from(request, read, match.kept)
        named = self._named(new, match.call)
        tail = context[max(0, len(context) - len(output) - TAIL) : len(context) - len(output)]

        def bridge() -> Ids | None:
            delta = self.renderer.bridge(tail, output, named, read.tools)
            return None if delta is None else self._checked(delta)

        delta = await anyio.to_thread.run_sync(bridge) if heavy else bridge()
        if delta is None:
            reason = match.rerender or self._own_reason(match.call, new)
            return await self._whole(request, read, reason, match.call)
        ids = np.concatenate([context, delta])
        return Prompt(
            ids,
            match.call,
            len(context),
            True,
            match.kept,
            match.rerender,
            match.rerender_of,
            new,
            known.after or known.prompt,
        )

    def _own_reason(self, call: int, new: Sequence[Part]) -> str:
        """Why the messages go on but the tokens can't: the template drops reasoning, or is unstable in itself.

        A hand-written renderer refuses a new question for the sake of earlier reasoning; an empty block of it counts.
        """
        question = self.renderer.family != "template" and any(part.kind == "user" for part in new)
        return "reasoning_dropped" if question or "r" in self.contexts.calls[call].reply_kinds else "template_unstable"

    async def _whole(self, request: ModelRequest, read: ReadRequest, reason: str, of: int) -> Prompt:
        def render() -> tuple[list[Part], Ids]:
            parts = self.reader.parts_from(request, read, 0)
            return parts, self._checked(self.renderer.render(self._restored(parts), read.tools))

        heavy = sum(len(item.raw) for item in request.items) + len(request.tools_raw) > OFF_LOOP_BYTES
        parts, ids = await anyio.to_thread.run_sync(render) if heavy else render()
        return Prompt(ids, -1, 0, False, 0, reason, of, parts, self.contexts.root(read.tools_digest))

    def _named(self, new: Sequence[Part], call: int) -> list[Part]:
        """Tool results with the names of their tools, by id, else by order: some templates print them."""
        known = self.contexts.calls[call]
        names = dict(zip(known.call_ids, known.call_names))
        named: list[Part] = []
        results = 0
        for part in new:
            if part.kind == "result":
                by_order = known.call_names[results] if results < len(known.call_names) else ""
                results += 1
                if not part.name:
                    part = Part("result", part.text, names.get(part.call_id) or by_order, part.call_id)
            named.append(part)
        return named

    def _restored(self, parts: Sequence[Part]) -> list[Part]:
        """Tool calls with the arguments as they were sampled, where a call id tells which they were."""
        restored: list[Part] = []
        names: dict[str, str] = {}
        for part in parts:
            if part.kind == "call":
                names[part.call_id] = part.name
                sampled = self._sampled_arguments(part)
                if sampled is not None:
                    part = Part("call", sampled, part.name, part.call_id)
            elif part.kind == "result" and not part.name:
                part = Part("result", part.text, names.get(part.call_id, ""), part.call_id)
            restored.append(part)
        return restored

    def _sampled_arguments(self, part: Part) -> str | None:
        known = self.contexts.call_of(part.call_id)
        if known is None or part.call_id not in known.call_ids:
            return None
        output = self.output_of(known.number)
        tail = self.context_of(known.number, False)[-TAIL:]
        index = known.call_ids.index(part.call_id)
        calls = self.renderer.parse(output, tail, known.seen_tools).calls
        if index >= len(calls):
            return None
        sampled = calls[index].arguments
        same = self.contexts.canon.part(Part("call", sampled, part.name)) == self.contexts.canon.part(
            Part("call", part.text, part.name)
        )
        return sampled if same else None

    def _checked(self, ids: Sequence[int]) -> Ids:
        array = to_ids(ids)
        if len(array) and (int(array.min()) < 0 or int(array.max()) >= self.renderer.vocab_size):
            bad = int(array.max()) if int(array.max()) >= self.renderer.vocab_size else int(array.min())
            raise RequestError(
                f"token id {bad} is outside the model's vocabulary of {self.renderer.vocab_size}", code="invalid_token"
            )
        return array
