"""The parts of the gateway by themselves: tokenizer, templates and their proof, text tool calls, canonical forms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.capture import hermes
from gyre_sdk.capture.canonical import SKIP, Canon, canonical_arguments, without_nonces
from gyre_sdk.capture.model import Part, Reply, Tool, ToolCall
from gyre_sdk.capture.renderer import load_renderer, verify_template
from gyre_sdk.capture.template_renderer import TemplateRenderer
from gyre_sdk.capture.tokenizer import FolderTokenizer
from gyre_sdk.errors import ConfigError
from gyre_sdk.testing import CHATML, tiny_model_dir

BASH = Tool("bash", "Run.", {"type": "object"})
NO_SYSTEM_TWICE = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system message must be first') }}{% endif %}",
    1,
)
FORGETFUL = CHATML.replace("message['content']", "(message['content'] if loop.revindex < 3 else '...')")
"""A template that rewrites the past: it can't be extended."""
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")


def test_chatml_is_proven_to_extend(tmp_path: Path) -> None:
    report = verify_template(tiny_model_dir(tmp_path))
    assert all(check.exact for check in report.checks)
    assert report.ok


def test_a_template_that_rewrites_the_past_is_never_extended(tmp_path: Path) -> None:
    renderer = load_renderer(tiny_model_dir(tmp_path, template=FORGETFUL))
    assert isinstance(renderer, TemplateRenderer)
    assert renderer.problems
    ids = np.asarray(renderer.encode("x"), np.int32)
    assert renderer.bridge(ids, ids, [Part("user", "next")], ()) is None
    report = verify_template(tmp_path)
    assert report.ok
    assert not any(check.exact for check in report.checks)


def test_a_template_that_trims_still_extends(tmp_path: Path) -> None:
    assert all(check.exact for check in verify_template(tiny_model_dir(tmp_path, template=TRIMMING)).checks)


def test_templates_with_room_for_one_system_message(tmp_path: Path) -> None:
    renderer = load_renderer(tiny_model_dir(tmp_path, template=NO_SYSTEM_TWICE))
    parts = [Part("system", "a"), Part("system", "b"), Part("user", "c"), Part("text", "d"), Part("system", "note")]
    text = renderer.decode(renderer.render(parts, ()))
    assert "system\na\n\nb<|im_end|>" in text
    assert "user\nnote<|im_end|>" in text


@given(text=st.text(max_size=40), said=st.text(max_size=40))
def test_an_extension_is_what_the_template_would_have_written(text: str, said: str) -> None:
    renderer = _chatml()
    before, new = [Part("user", "hello")], [Part("user", text)]
    turn = [Part("text", said)] if said else []
    if not turn:
        return
    prompt, output = renderer.render(before, ()), renderer.reply_ids(Reply(text=said), ())
    delta = renderer.bridge(np.asarray(prompt), np.asarray(output), new, ())
    assert delta is not None
    whole = renderer.decode(renderer.render([*before, *turn, *new], ()))
    assert renderer.decode([*prompt, *output, *delta]) == whole


_cache: list[TemplateRenderer] = []


def _chatml() -> TemplateRenderer:
    if not _cache:
        import tempfile

        renderer = load_renderer(tiny_model_dir(Path(tempfile.mkdtemp())))
        assert isinstance(renderer, TemplateRenderer)
        _cache.append(renderer)
    return _cache[0]


def test_an_extension_of_a_truncated_reply_closes_it() -> None:
    renderer = _chatml()
    output = np.asarray(renderer.encode("cut"), np.int32)
    delta = renderer.bridge(output, output, [Part("user", "on")], ())
    assert delta is not None
    assert renderer.decode(delta).startswith("<|im_end|>\n<|im_start|>user\non")


TEXT_ARGUMENTS = '<tool_call>{"name": "bash", "arguments": "text"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('a<tool_call>\n{"name": "bash", "arguments": {"x":  1}}\n</tool_call>', "a", ['{"x":  1}']),
        (
            '<tool_call>{"name": "bash", "arguments": {}}</tool_call><tool_call>{"name": "bash"}</tool_call>',
            "",
            ["{}", "{}"],
        ),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        (
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            [],
        ),
        ('x <tool_call>{"name": "bash"', 'x <tool_call>{"name": "bash"', []),
        (TEXT_ARGUMENTS, TEXT_ARGUMENTS, []),
    ],
)
def test_text_tool_calls(text: str, said: str, calls: list[str]) -> None:
    parsed = hermes.parse(text, [BASH], thinking=False)
    assert (parsed.text, [call.arguments for call in parsed.calls]) == (said, calls)
    assert hermes.parse(text, [], thinking=False).text == text


@pytest.mark.parametrize("thinking", [False, True])
def test_text_reasoning(thinking: bool) -> None:
    text = ("" if thinking else "<think>\n") + "hm\n</think>\n\nso"
    parsed = hermes.parse(text, [], thinking=thinking)
    assert (parsed.reasoning, parsed.text) == ("hm", "so")


PIECES = [
    "a",
    " b\n",
    "<",
    "<tool",
    "<tool_call>",
    '{"name": "bash"}',
    "</tool_call>",
    "<think>",
    "</think>",
    "caf\u00e9",
]


@given(st.data())
def test_a_growing_reply_never_takes_back_what_it_showed(data: st.DataObject) -> None:
    pieces = st.sampled_from(PIECES)
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    final = hermes.parse(text, [BASH], thinking=False)
    for end in range(len(text)):
        partial = hermes.parse(text[:end], [BASH], thinking=False, final=False)
        assert final.text.startswith(partial.text.rstrip())
        assert final.reasoning.startswith(partial.reasoning.rstrip())


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.booleans(), st.text(max_size=5)), max_size=5))
def test_argument_spelling_does_not_matter(value: dict[str, object]) -> None:
    compact = json.dumps(value, separators=(",", ":"))
    spread = json.dumps(dict(reversed(value.items())), indent=3, ensure_ascii=False)
    assert canonical_arguments(compact) == canonical_arguments(spread)
    default, strict = Canon("default"), Canon("strict")
    one, other = Part("call", compact, name="f", call_id="1"), Part("call", spread, name="f", call_id="2")
    assert default.part(one) == default.part(other)
    assert (strict.part(one) == strict.part(other)) == (compact == spread)


def test_policies() -> None:
    reasoning, text = Part("reasoning", "hm"), Part("text", " hi\n")
    assert Canon("role-and-content").part(reasoning) == SKIP
    assert Canon("default").part(reasoning) != SKIP
    assert Canon("default").part(text) == Canon("default").part(Part("text", "hi"))
    assert Canon("strict").part(text) != Canon("strict").part(Part("text", "hi"))
    assert Canon("default").part(Part("user", " hi")) != Canon("default").part(Part("user", "hi"))


def test_nonces_leave_the_rest_alone() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.{}; cch=36ee5;\n"
    assert (
        without_nonces(line.format("a1") + "You are.") == without_nonces(line.format("b2") + "You are.") == "You are."
    )
    assert without_nonces("keep cch=this and that") == "keep cch=this and that"


def test_bad_folders_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        FolderTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read as a tokenizer"):
        FolderTokenizer(tmp_path)
    folder = tiny_model_dir(tmp_path / "m", template=None)
    with pytest.raises(ConfigError, match="no chat template"):
        load_renderer(folder)


def test_tokens_and_calls_round_trip() -> None:
    renderer = _chatml()
    reply = Reply(text="Look.", reasoning="hm", calls=(ToolCall("", "bash", '{"a":  1}'),))
    parsed = renderer.parse(np.asarray(renderer.reply_ids(reply, [BASH])), np.empty(0, np.int32), [BASH])
    assert (parsed.text, parsed.reasoning, parsed.calls[0].arguments) == ("Look.", "hm", '{"a":  1}')
