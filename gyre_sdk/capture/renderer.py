"""Which renderer serves a model folder, and the proof that it extends turns bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gyre_sdk.capture.family_renderer import FamilyRenderer
from gyre_sdk.capture.model import TAIL, ChatRenderer, Part, Reply, Tool, ToolCall
from gyre_sdk.capture.template_renderer import PROBES, TemplateRenderer, probe_turn
from gyre_sdk.capture.tokenizer import FolderTokenizer
from gyre_sdk.errors import ConfigError, GyreError


def load_renderer(model_dir: Path | str, family: str = "auto", **options: Any) -> ChatRenderer:
    """The renderer for a model folder.

    family: `template` = the folder's own chat template, extended where that is proven exact (ChatML and its like);
    a family name of `renderers` = its hand-written renderer, with `options` as its settings; `auto` = the family that
    `renderers` lists for the exact model name noted in the folder, else `template`.
    Raises ConfigError naming what is missing or does not fit.
    """
    tokenizer = FolderTokenizer(Path(model_dir))
    if family == "auto":
        family = known_family(tokenizer.name_or_path) or "template"
    if family == "template":
        return TemplateRenderer(tokenizer, **options)
    return FamilyRenderer(tokenizer, family, **options)


def known_family(name: str) -> str | None:
    """The family `renderers` lists for this exact model name. Fine-tunes miss on purpose: name their family."""
    if name.count("/") != 1:
        return None
    from renderers.base import MODEL_RENDERER_MAP

    family: str | None = MODEL_RENDERER_MAP.get(name)
    return family


@dataclass(frozen=True, slots=True)
class TurnCheck:
    """One probe: does a turn extend the context bit by bit?"""

    name: str
    exact: bool
    """Prompt and extension have the ids of the full render; what lies between was sampled."""
    bridged: bool
    """The family extends here at all; False means each such turn is rendered anew (a `rerenders` edge)."""
    position: int = -1
    """First differing token, counted from the start of the context; -1 when there is none."""
    expected: tuple[str, ...] = ()
    got: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What `verify_template` found. `ok`: every probe is exact or honestly refused."""

    family: str
    model_dir: str
    checks: tuple[TurnCheck, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        return all(check.exact or not check.bridged for check in self.checks)

    def lines(self) -> list[str]:
        """The report for a terminal, one line a probe."""
        lines = [f"{self.model_dir}: family {self.family}"]
        for check in self.checks:
            if check.exact:
                state = f"exact ({check.note})" if check.note else "exact"
            elif not check.bridged:
                state = f"rendered anew ({check.note})"
            else:
                state = f"DIFFERS at token {check.position}: template {check.expected}, extension {check.got}"
            lines.append(f"  {check.name}: {state}")
        return lines


_tool = Tool("bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})


def verify_template(model_dir: Path | str, family: str = "auto", **options: Any) -> TemplateReport:
    """Prove, for a tokenizer on disk, whether turns extend bit by bit, and show the first differing token where not.

    For each probe the reply is made as the model would say it, then prompt + reply + extension is compared with the
    family's full render of the same conversation.
    """
    renderer = load_renderer(model_dir, family, **options)
    checks = [_check(renderer, what, before, new) for what, before, new in PROBES]
    return TemplateReport(family=renderer.family, model_dir=str(model_dir), checks=tuple(checks))


def _check(renderer: ChatRenderer, what: str, before: Sequence[Part], new: Sequence[Part]) -> TurnCheck:
    tools = [_tool] if any(part.kind == "result" for part in new) else []
    turn = probe_turn(new)
    if isinstance(renderer, FamilyRenderer):
        # Families of reasoning models open every reply with it; a reply without would not be the model's.
        turn = [Part("reasoning", "Hm."), *turn]
    reasoning = "".join(part.text for part in turn if part.kind == "reasoning")
    text = "".join(part.text for part in turn if part.kind == "text")
    calls = tuple(ToolCall(part.call_id, part.name, part.text) for part in turn if part.kind == "call")
    try:
        prompt = renderer.render(before, tools)
        said = renderer.reply_ids(Reply(text=text, reasoning=reasoning, calls=calls), tools)
        whole = renderer.render([*before, *turn, *new], tools)
        tail = np.asarray(prompt[-TAIL:], dtype=np.int32)
        delta = renderer.bridge(tail, np.asarray(said, dtype=np.int32), new, tools)
    except ConfigError:
        raise
    except GyreError as error:
        return TurnCheck(what, exact=False, bridged=False, note=str(error))
    if delta is None:
        problems = getattr(renderer, "problems", None)
        note = problems[0] if problems else "the family re-renders here by its own rule"
        return TurnCheck(what, exact=False, bridged=False, note=note)
    start = len(whole) - len(delta)
    if start >= len(prompt) and whole[: len(prompt)] == prompt and whole[start:] == delta:
        same = whole[len(prompt) : start] == said
        note = "" if same else "the template itself would write the reply differently in a history"
        return TurnCheck(what, exact=True, bridged=True, note=note)
    ids = [*prompt, *said, *delta]
    at = next((i for i, (a, b) in enumerate(zip(ids, whole)) if a != b), min(len(ids), len(whole)))
    return TurnCheck(
        what,
        exact=False,
        bridged=True,
        position=at,
        expected=tuple(renderer.decode([id_]) for id_ in whole[at : at + 3]),
        got=tuple(renderer.decode([id_]) for id_ in ids[at : at + 3]),
    )
