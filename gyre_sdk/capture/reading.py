"""From a request's raw items to digests, parsing only what was not seen before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gyre_sdk.capture.canonical import ROOT, Canon, Digest, chain, digest, without_nonces
from gyre_sdk.capture.contexts import KIND_LETTER
from gyre_sdk.capture.model import Item, ModelRequest, Part, Tool

OFF_LOOP_BYTES = 24_000
"""Work on more text than this is done in a thread, so that the event loop goes on."""


@dataclass(frozen=True, slots=True)
class SeenItem:
    """What is kept of an item: kinds and digests of its parts, and the call ids in it."""

    parts: tuple[tuple[str, Digest], ...]
    call_ids: tuple[str, ...]


@dataclass(slots=True)
class ReadRequest:
    """A request, read: the digests of all its parts, and where each part is to be found."""

    parts: list[tuple[str, Digest]]
    keys: list[Digest]
    """`keys[i]` stands for the tools and the first i parts; `keys[0]` for the tools alone."""
    call_ids: list[str]
    """Ids of calls in assistant turns."""
    starts: list[int]
    """Index of each item's first part; one more entry for the end."""
    tools: tuple[Tool, ...]
    tools_digest: Digest

    @property
    def key(self) -> Digest:
        """Stands for the whole prompt."""
        return self.keys[-1]


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A request read lately: the next one mostly begins with the same bytes, and needs only what is new read."""

    items: int
    prefix: Digest
    read: ReadRequest


@dataclass(slots=True)
class Reader:
    """The memory of items and tools of one execution."""

    canon: Canon
    _seen: dict[Digest, SeenItem] = field(default_factory=dict)
    _tools: dict[Digest, tuple[tuple[Tool, ...], Digest]] = field(default_factory=dict)
    _lately: deque[_Remembered] = field(default_factory=lambda: deque(maxlen=3))

    def is_heavy(self, request: ModelRequest) -> bool:
        """Whether reading it takes so long that it should not happen on the event loop."""
        size = len(request.tools_raw) + sum(len(item.raw) for item in request.items)
        return size > 2**20 or any(len(item.raw) > OFF_LOOP_BYTES for item in request.items[-4:])

    def read(self, request: ModelRequest) -> ReadRequest:
        """Digests of the whole request. Raises RequestError for an item that can't be read."""
        tools, tools_digest = self._read_tools(request)
        known = self._prefix_of(request, tools_digest)
        if known is None:
            read = ReadRequest([], [digest(ROOT + tools_digest)], [], [], tools, tools_digest)
            first = 0
        else:
            old, first = known.read, known.items
            read = ReadRequest(
                old.parts.copy(), old.keys.copy(), old.call_ids.copy(), old.starts[:-1], tools, tools_digest
            )
        key = read.keys[-1]
        for item in request.items[first:]:
            seen = self._item(item)
            read.starts.append(len(read.parts))
            read.parts.extend(seen.parts)
            read.call_ids.extend(seen.call_ids)
            for _, part in seen.parts:
                key = chain(key, part)
                read.keys.append(key)
        read.starts.append(len(read.parts))
        self._lately.append(_Remembered(len(request.items), _prefix(request, len(request.items)), read))
        return read

    def _prefix_of(self, request: ModelRequest, tools_digest: Digest) -> _Remembered | None:
        """The longest of the requests read lately that this one begins with, byte for byte."""
        for known in sorted(self._lately, key=lambda known: -known.items):
            fits = 0 < known.items <= len(request.items) and known.read.tools_digest == tools_digest
            if fits and _prefix(request, known.items) == known.prefix:
                return known
        return None

    def _item(self, item: Item) -> SeenItem:
        key = digest(item.raw)
        seen = self._seen.get(key)
        if seen is None:
            read = item.read(item.raw)
            digests = tuple((KIND_LETTER[part.kind], self.canon.part(part)) for part in read)
            seen = SeenItem(digests, tuple(part.call_id for part in read if part.kind == "call"))
            self._seen[key] = seen
        return seen

    def _read_tools(self, request: ModelRequest) -> tuple[tuple[Tool, ...], Digest]:
        key = digest(request.tools_raw)
        known = self._tools.get(key)
        if known is None:
            tools = request.read_tools(request.tools_raw)
            known = (tools, self.canon.tools(tools))
            self._tools[key] = known
        return known

    def parts_from(self, request: ModelRequest, read: ReadRequest, first: int) -> list[Part]:
        """The parts from number `first` on, parsed (again, if need be)."""
        parts: list[Part] = []
        for number, item in enumerate(request.items):
            start, end = read.starts[number], read.starts[number + 1]
            if end > first:
                parts.extend(item.read(item.raw)[max(0, first - start) :])
        if self.canon.policy == "strict":
            return parts
        return [Part("system", without_nonces(part.text)) if part.kind == "system" else part for part in parts]


def _prefix(request: ModelRequest, items: int) -> Digest:
    return digest(b"\0".join([item.raw for item in request.items[:items]]))
