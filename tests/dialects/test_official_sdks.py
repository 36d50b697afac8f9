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
