"""The client against servers that stream whole replies, pieces, errors, or stop in the middle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gyre_sdk.errors import ContextOverflowError, EngineError, EngineGoneError
from gyre_sdk.sampling import Chunk, Completion, GenerateRequest, Sampling, SGLangClient
from gyre_sdk.wire.records import Span
from tests.router.conftest import serve
from tests.router.scripted import Scripted, expected

pytestmark = pytest.mark.anyio
PROMPT = list(range(9))


def request(count: int = 6) -> GenerateRequest:
    return GenerateRequest(
        rid="e1.c1.", input_ids=np.asarray(PROMPT, np.int32), sampling=Sampling(max_new_tokens=count), session="s"
    )


async def ask(app: Any, count: int = 6) -> list[Chunk | Completion]:
    async with serve(app) as url:
        client = SGLangClient(url)
        try:
            return [part async for part in client.generate(request(count))]
        finally:
            await client.aclose()


@pytest.mark.parametrize("cumulative", [False, True])
async def test_pieces_and_whole_replies_read_the_same(cumulative: bool) -> None:
    *chunks, done = await ask(Scripted("e", version="4", cumulative=cumulative).app())
    assert isinstance(done, Completion)
    assert done.output_ids.tolist() == expected(PROMPT, 6)
    assert np.concatenate([chunk.output_ids for chunk in chunks]).tolist() == done.output_ids.tolist()
    assert np.concatenate([chunk.logprobs for chunk in chunks]).tolist() == done.logprobs.tolist()
    assert done.versions == (Span(4, 0, 6),)
    assert (done.finish, done.prompt_tokens) == ("length", 9)


async def test_what_is_asked_for() -> None:
    engine = Scripted("e")
    await ask(engine.app())
    body = engine.seen[0]
    assert body["input_ids"] == PROMPT
    assert body["return_logprob"] is True
    assert body["session_id"] == "s"
    assert body["sampling_params"] == {"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1}


async def test_a_stream_that_breaks_is_an_engine_that_is_gone() -> None:
    engine = Scripted("e")
    engine.die_at = [3]
    with pytest.raises(EngineGoneError):
        await ask(engine.app())


def answering(make: Any) -> Starlette:
    async def generate(incoming: Request) -> Response:
        answer: Response = make()
        return answer

    return Starlette(routes=[Route("/generate", generate, methods=["POST"])])


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "The input (9 tokens) is longer than the model's context length (4 tokens).", ContextOverflowError),
        (400, "token id 9 is outside the vocabulary", EngineError),
        (503, "no engine", EngineGoneError),
        (429, "waiting", EngineError),
    ],
)
async def test_refusals(status: int, message: str, kind: type[EngineError]) -> None:
    with pytest.raises(kind, match=message[:12].replace("(", ".")) as caught:
        await ask(answering(lambda: JSONResponse({"error": {"message": message}}, status)))
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "lines",
    [
        'data: {"output_ids": [1, 2], "meta_info": {"completion_tokens": 3, "output_token_logprobs": []}}\n\n',
        'data: {"error": {"message": "the step failed", "code": 500}}\n\n',
        'data: {"output_ids": [], "meta_info": {"completion_tokens": 0}}\n\ndata: [DONE]\n\n',
        "",
    ],
    ids=["does not add up", "error event", "no finish", "nothing"],
)
async def test_streams_that_say_nonsense(lines: str) -> None:
    with pytest.raises(EngineError):
        await ask(answering(lambda: StreamingResponse(iter([lines]), media_type="text/event-stream")))


async def test_nobody_there() -> None:
    client = SGLangClient("http://127.0.0.1:9")
    with pytest.raises(EngineGoneError):
        await client.model_info()
    with pytest.raises(EngineGoneError):
        [part async for part in client.generate(request())]
    await client.abort("e1.c1.")
    await client.aclose()
