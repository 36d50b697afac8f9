"""Families of `renderers`, with a tiny tokenizer that has their special tokens: sessions through the wire, exact tokens."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from gyre_sdk.capture.dialects.base import Deltas
from gyre_sdk.capture.gateway import ExecutionSpec, Gateway
from gyre_sdk.capture.model import TAIL, Part, Reply, ToolCall, to_ids
from gyre_sdk.capture.renderer import load_renderer, verify_template
from gyre_sdk.errors import ConfigError
from gyre_sdk.testing import Say, ScriptedEngine, in_turn, tiny_model_dir
from tests.dialects.speakers import Chat
from tests.gateway.conftest import BASH, Rig

pytestmark = pytest.mark.anyio

FAMILIES = {
    "qwen3": "<|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>",
    "qwen3.5": (
        "<|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> "
        "</tool_response> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
    ),
    "glm-4.5": (
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> "
        "</tool_call> <arg_key> </arg_key> <arg_value> </arg_value>"
    ),
    "glm-5": (
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> "
        "</tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>"
    ),
    "kimi-k2": (
        "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> "
        "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
        "<|tool_call_argument_begin|> <|tool_call_end|>"
    ),
    "kimi-k2.5": (
        "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> "
        "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
        "<|tool_call_argument_begin|> <|tool_call_end|> <|media_begin|> <|media_content|> <|media_pad|> "
        "<|media_end|> <think> </think>"
    ),
    "minimax-m2": "]~!b[ ]~b] [e~[ <think> </think> <minimax:tool_call> </minimax:tool_call>",
    "deepseek-v3": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
        "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> "
        "<｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
    ),
    "deepseek-v4": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜latest_reminder｜> <｜action｜> "
        "<｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜> <think> </think> ｜DSML｜"
    ),
    "llama-3": ("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|>"),
    "nemotron-3": (
        "<|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
    ),
}
REASONS = {"qwen3", "qwen3.5", "glm-4.5", "glm-5", "kimi-k2.5", "minimax-m2", "nemotron-3"}
"""Families whose replies open with reasoning."""


def family_dir(folder: Path, family: str) -> Path:
    special = ("<|endoftext|>", *FAMILIES[family].split(" "))
    return tiny_model_dir(folder, template=None, special=special, eos="<|endoftext|>")


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_tool_cycle_keeps_the_sampled_tokens(tmp_path: Path, family: str) -> None:
    renderer = load_renderer(family_dir(tmp_path / "model", family), family)
    reasoning = "I should list." if family in REASONS else ""
    # Llama 3 says either text or a call.
    text = "" if family == "llama-3" else "Look."
    call = (("bash", '{"command": "ls"}'),)
    replies = [
        Say(text, reasoning=reasoning, calls=call),
        Say(text, reasoning=reasoning, calls=call),
        Say("Done.", reasoning=reasoning),
    ]
    engine = ScriptedEngine(renderer, in_turn(replies), tools=[BASH])
    gateway = Gateway(engine, renderer, tmp_path / "run")
    async with gateway.serving() as url:
        handle = await gateway.open(ExecutionSpec())
        headers = {"authorization": f"Bearer {handle.token}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
            client = Chat(http)
            heard = await client.say("list files", stream=True)
            for _ in range(2):
                assert [(name, arguments) for _, name, arguments in heard.calls] == [("bash", {"command": "ls"})]
                assert heard.reasoning.strip() == reasoning
                assert heard.text.strip() == text
                client.results(heard, ["a.txt\nb.txt"])
                heard = await client.say()
            assert heard.text.strip() == "Done."
            await Rig(gateway, engine, handle, http, renderer).check()
    assert [call.rerender for call in handle.graph.calls.values()] == ["", "", ""]
    assert len(handle.graph.leaves()) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_extend_exactly_or_say_that_they_do_not(tmp_path: Path, family: str) -> None:
    report = verify_template(family_dir(tmp_path, family), family)
    assert report.ok, report.lines()
    assert any(check.exact for check in report.checks)


async def test_a_family_that_drops_reasoning_at_a_new_question_is_an_explicit_branch(tmp_path: Path) -> None:
    folder = family_dir(tmp_path / "model", "qwen3")
    for retention, reasons in ((None, ["", "reasoning_dropped"]), ("all", ["", ""])):
        renderer = load_renderer(folder, "qwen3", **({"thinking_retention": retention} if retention else {}))
        engine = ScriptedEngine(renderer, in_turn([Say("Hi.", reasoning="greet"), Say("Yes.", reasoning="agree")]))
        gateway = Gateway(engine, renderer, tmp_path / f"run-{retention}")
        async with gateway.serving() as url:
            handle = await gateway.open(ExecutionSpec())
            headers = {"authorization": f"Bearer {handle.token}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
                client = Chat(http, tools=False)
                await client.say("hello")
                await client.say("again?")
                await Rig(gateway, engine, handle, http, renderer).check()
        assert [call.rerender for call in handle.graph.calls.values()] == reasons


def test_an_unknown_family_is_said_so(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path)
    with pytest.raises(ConfigError, match="unknown renderer family 'quen3'"):
        load_renderer(folder, "quen3")
    with pytest.raises(ConfigError, match="does not fit"):
        load_renderer(folder, "qwen3")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_renderer(tmp_path / "nothing")


@pytest.mark.parametrize("family", ["template", *FAMILIES])
@pytest.mark.parametrize("text", ["Look at this:\n  - one\n\n  - two", "", "  an indented start"])
def test_what_is_streamed_token_by_token_is_the_whole_reply(tmp_path: Path, family: str, text: str) -> None:
    """The pieces join to the reply's own text, however the tokens are cut; nothing is lost, doubled or left behind."""
    folder = tiny_model_dir(tmp_path) if family == "template" else family_dir(tmp_path, family)
    renderer = load_renderer(folder, family)
    reasoning = "It has to be done.\n\nSo: do it." if family in REASONS else ""
    for calls in ((), (ToolCall("functions.bash:0", "bash", '{"command": "ls"}'),)):
        if family == "llama-3" and bool(calls) == bool(text):
            continue  # says either text or a call
        said = renderer.reply_ids(Reply(text=text, reasoning=reasoning, calls=calls), [BASH])
        ids = to_ids(said)
        tail = to_ids(renderer.render([Part("user", "go")], [BASH]))[-TAIL:]
        whole = renderer.parse(ids, tail, [BASH])
        assert whole.reasoning.strip() in ("", reasoning)
        deltas = Deltas()
        pieces = [deltas.step(renderer.parse(ids[:end], tail, [BASH], final=False)) for end in range(len(ids) + 1)]
        pieces.append(deltas.rest(Reply(text=whole.text, reasoning=whole.reasoning, calls=whole.calls)))
        assert "".join(piece for piece, _ in pieces).lstrip() == whole.reasoning.lstrip()
        assert "".join(piece for _, piece in pieces).lstrip() == whole.text.lstrip()
        assert sum(bool(piece) for _, piece in pieces) > 1 or not text
