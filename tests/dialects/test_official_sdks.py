"""The providers' own Python clients against the gateway, strict about the shape of every event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre_sdk.testing import Fault, Say
from tests.gateway.conftest import CHAT_TOOLS, make_rig

pytestmark = pytest.mark.anyio
openai = pytest.importorskip("openai")

CALL = Say("I look.", calls=(("bash", '{"command":  "ls"}'),), chunk=2)


async def test_openai_chat(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [CALL, Say("Done.")]) as rig:
        async with openai.AsyncOpenAI(base_url=rig.handle.base_url + "/v1", api_key=rig.handle.token) as client:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            async with client.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as stream:
                async for _ in stream:
                    pass
                first = (await stream.get_final_completion()).choices[0].message
            assert first.content == "I look."
            assert first.tool_calls[0].function.arguments == '{"command":  "ls"}'
            result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a.txt"}
            sent = first.model_dump(exclude_none=True, exclude={"parsed"})
            reply = await client.chat.completions.create(
                model="m", messages=[*messages, sent, result], tools=CHAT_TOOLS
            )
            assert reply.choices[0].message.content == "Done."
            assert [model.id async for model in client.models.list()] == ["policy"]
        await rig.check()
        assert rig.graph.calls[1].rerender == ""


async def test_openai_responses(tmp_path: Path) -> None:
    function = {"type": "function", "strict": False, **CHAT_TOOLS[0]["function"]}
    async with make_rig(tmp_path, [CALL, Say("Done.", chunk=1)]) as rig:
        async with openai.AsyncOpenAI(base_url=rig.handle.base_url + "/v1", api_key=rig.handle.token) as client:
            history: list[Any] = [{"role": "user", "content": "go"}]
            async with client.responses.stream(model="m", input=history, tools=[function]) as stream:
                async for _ in stream:
                    pass
                first = await stream.get_final_response()
            assert first.output_text == "I look."
            call = next(item for item in first.output if item.type == "function_call")
            history += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"})
            text = ""
            async for event in await client.responses.create(model="m", input=history, tools=[function], stream=True):
                text += event.delta if event.type == "response.output_text.delta" else ""
            assert text == "Done."
        await rig.check()
        assert rig.graph.calls[1].rerender == ""


async def test_openai_errors(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Fault("overload"), Say("after a retry")], context_length=200) as rig:
        async with openai.AsyncOpenAI(base_url=rig.handle.base_url + "/v1", api_key=rig.handle.token) as client:
            reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
            assert reply.choices[0].message.content == "after a retry"
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 900}])
            assert caught.value.code == "context_length_exceeded"
        async with openai.AsyncOpenAI(base_url=rig.handle.base_url + "/v1", api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_anthropic_messages(tmp_path: Path) -> None:
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "bash", "description": "Run.", "input_schema": CHAT_TOOLS[0]["function"]["parameters"]}
    thoughtful = Say("I look.", reasoning="What is there?", calls=(("bash", '{"command":  "ls"}'),), chunk=2)
    async with make_rig(tmp_path, [thoughtful, Say("Done.")], family="qwen3", context_length=3000) as rig:
        async with anthropic.AsyncAnthropic(base_url=rig.handle.base_url, api_key=rig.handle.token) as client:
            history: list[Any] = [{"role": "user", "content": "go"}]
            asked: dict[str, Any] = {"model": "m", "max_tokens": 500, "tools": [tool]}
            async with client.messages.stream(messages=history, **asked) as stream:
                seen = [event.type async for event in stream]
                first = await stream.get_final_message()
            assert seen[-1] == "message_stop"
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
            assert first.stop_reason == "tool_use"
            assert first.content[0].thinking.strip() == "What is there?"
            assert first.content[2].input == {"command": "ls"}
            result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "a.txt"}
            history += [
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
                {"role": "user", "content": [result]},
            ]
            counted = await client.messages.count_tokens(model="m", messages=history, tools=[tool])
            reply = await client.messages.create(messages=history, **asked)
            assert reply.content[0].text == "Done."
            assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == counted.input_tokens
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(
                    model="m", max_tokens=5, messages=[{"role": "user", "content": "x" * 9000}]
                )
        await rig.check()
        assert rig.graph.calls[1].rerender == ""


async def test_google_genai(tmp_path: Path) -> None:
    genai = pytest.importorskip("google.genai")
    command = {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}}
    function = {"name": "bash", "description": "Run.", "parameters": command}
    config = {"tools": [{"function_declarations": [function]}], "automatic_function_calling": {"disable": True}}
    async with make_rig(tmp_path, [CALL, Say("Done."), Fault("gone", after=4)], context_length=3000) as rig:
        client = genai.Client(api_key=rig.handle.token, http_options={"base_url": rig.handle.base_url})
        contents: list[Any] = [{"role": "user", "parts": [{"text": "go"}]}]
        parts: list[Any] = []
        async for chunk in await client.aio.models.generate_content_stream(model="m", contents=contents, config=config):
            parts += chunk.candidates[0].content.parts if chunk.candidates else []
        (called,) = [part.function_call for part in parts if part.function_call]
        assert "".join(part.text or "" for part in parts) == "I look."
        assert called.args == {"command": "ls"}
        answer = {"function_response": {"name": "bash", "response": {"output": "a.txt"}, "id": called.id}}
        contents += [{"role": "model", "parts": parts}, {"role": "user", "parts": [answer]}]
        reply = await client.aio.models.generate_content(model="m", contents=contents, config=config)
        assert reply.text == "Done."
        await rig.check()
        assert rig.graph.calls[1].rerender == ""
        with pytest.raises(Exception, match=r"503|vanished|payload|peer closed"):
            async for _ in await client.aio.models.generate_content_stream(model="m", contents="again", config=config):
                pass
