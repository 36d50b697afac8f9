"""Fakes that ship with Gyre: a tiny tokenizer, a scripted engine, an HTTP front for it that speaks SGLang's contract.

    model = tiny_model_dir(tmp_path)                      # tokenizer + ChatML template, no weights
    engine = ScriptedEngine(load_renderer(model), script) # a TokenClient; `script(call) -> Say | Fault`

The engine really emits tokens of the renderer's template, so everything in front of it (parsing, matching, streaming,
recording) is exercised as with a model, and `engine.log` holds what it saw and said, token by token.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from gyre_sdk.capture.model import ChatRenderer, Reply, Tool, ToolCall
from gyre_sdk.errors import EngineError, EngineGoneError
from gyre_sdk.sampling import Chunk, Completion, GenerateRequest, ModelInfo, Sampling
from gyre_sdk.wire.records import Finish, Span

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of SmolLM2: ChatML with a default system message."""

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_corpus = (
    "the quick brown fox jumps over the lazy dog. you are a helpful assistant. user system assistant tool_call "
    '{"name": "bash", "arguments": {"command": "ls -la", "path": "/tmp/x.txt"}} the file was created and the tests pass. '
    "def main(): return 1  # import json print the result of this"
)


@functools.cache
def _trained() -> str:
    """The tiny tokenizer without special tokens, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator([_corpus] * 4, trainer)
    return str(tokenizer.to_str())


def tiny_tokenizer(special: Sequence[str] = CHATML_TOKENS, added: Sequence[str] = ()) -> Any:
    """A byte-level BPE tokenizer (about 400 ids) that any text round-trips through."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if added:
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return tokenizer


def tiny_model_dir(
    folder: Path,
    *,
    template: str | None = CHATML,
    special: Sequence[str] = CHATML_TOKENS,
    added: Sequence[str] = (),
    eos: str = "<|im_end|>",
    name: str = "tiny",
) -> Path:
    """Write a model folder that holds a tokenizer and a chat template, but no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(special, added)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": eos, "name_or_path": name, "model_max_length": 1_000_000}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab}))
    return folder


@dataclass(frozen=True, slots=True)
class Say:
    """A reply the scripted model gives."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """(tool name, arguments as the model writes them)."""
    raw: str | None = None
    """Sampled text instead of all of the above; may be anything, well-formed or not."""
    skip: int = 0
    """Tokens left out at its beginning: those that are in the prompt already when a broken reply is resumed."""
    stop: bool = True
    """False: the reply is cut before its stop token (finish `length`)."""
    odd_tokens: bool = False
    """Spell the text character by character: the same text in other tokens than the tokenizer would choose."""
    chunk: int = 4
    """Tokens per chunk."""
    delay: float = 0.0
    """Seconds before each chunk."""
    first_delay: float = 0.0
    """Seconds before the first chunk."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure on demand."""

    kind: str
    """`gone` (connection lost), `error` (the engine refuses), `abort` (partial reply, finish abort), `overload` (429)."""
    after: int = 0
    """Tokens of `say` that are sent before it."""
    say: Say = field(default_factory=lambda: Say("a reply that is never finished"))


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """What the script sees of a request."""

    number: int
    """How many requests the engine had before."""
    prompt: str
    """The prompt, decoded."""
    input_ids: np.ndarray[Any, np.dtype[np.int32]]
    request: GenerateRequest


@dataclass(slots=True)
class LoggedCall:
    """One request as the engine saw it: the truth that graphs are checked against."""

    rid: str
    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""


class _RefusedError(EngineError):
    def __init__(self, message: str, status: int, retry_after: float | None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


Script = Callable[[ScriptedCall], Say | Fault]


def in_turn(replies: Iterable[Say | Fault | str]) -> Script:
    """A script that gives these replies one after the other, whatever is asked, and repeats the last one."""
    todo = [Say(reply) if isinstance(reply, str) else reply for reply in replies]

    def script(call: ScriptedCall) -> Say | Fault:
        return todo[min(call.number, len(todo) - 1)]

    return script


class ScriptedEngine:
    """A TokenClient without a model. Logprobs are a fixed function of (token, position), so that they can be checked."""

    def __init__(
        self,
        renderer: ChatRenderer,
        script: Script,
        *,
        context_length: int = 1_000_000,
        version: int = 1,
        tools: Sequence[Tool] = (),
        model: str = "scripted",
    ) -> None:
        self.renderer = renderer
        self.script = script
        self.context_length = context_length
        self.version = version
        self.tools = list(tools)
        self.model = model
        self.log: list[LoggedCall] = []
        self.aborted: list[str] = []
        self.decode_prompts = True
        self._abort: dict[str, anyio.Event] = {}

    @staticmethod
    def logprob(token: int, position: int) -> float:
        """The logprob this engine gives `token` at `position` of the whole sequence."""
        return -0.5 - (token * 31 + position * 17) % 1000 / 1000

    def ids_of(self, say: Say) -> list[int]:
        """The tokens that the scripted model samples for a reply."""
        if say.raw is not None:
            ids = [*self.renderer.encode(say.raw), self.renderer.stop_ids[0]]
        else:
            calls = tuple(
                # The id is what Kimi writes into its calls; other families have none in their text.
                ToolCall(id=f"functions.{name}:{index}", name=name, arguments=arguments)
                for index, (name, arguments) in enumerate(say.calls)
            )
            ids = self.renderer.reply_ids(Reply(text=say.text, reasoning=say.reasoning, calls=calls), self.tools)
        if say.odd_tokens:
            body = self.renderer.decode(ids[:-1])
            ids = [id_ for char in body for id_ in self.renderer.encode(char)] + ids[-1:]
        return (ids if say.stop else ids[:-1])[say.skip :]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Completion]:
        prompt = self.renderer.decode(request.input_ids.tolist()) if self.decode_prompts else ""
        call = ScriptedCall(len(self.log), prompt, request.input_ids, request)
        logged = LoggedCall(request.rid, request.input_ids.tolist() if self.decode_prompts else [])
        self.log.append(logged)
        action = self.script(call)
        say = action if isinstance(action, Say) else action.say
        ids = self.ids_of(say)
        limit = request.sampling.max_new_tokens
        finish: Finish = "stop" if say.stop and len(ids) <= limit else "length"
        ids = ids[:limit]
        if isinstance(action, Fault):
            if action.kind == "overload":
                raise _RefusedError("the engine is full", 429, 0.05)
            if action.kind == "error" and action.after == 0:
                raise _RefusedError("the engine failed", 500, None)
            ids, finish = ids[: action.after], "abort"
        async for chunk in self._emit(request, logged, ids, say):
            yield chunk
        if isinstance(action, Fault) and action.kind in ("gone", "error"):
            raise EngineGoneError("the engine vanished in mid-stream")
        if request.rid in self.aborted:
            finish = "abort"
        logged.finish = finish
        yield self._completion(request, logged, finish)

    async def _emit(
        self, request: GenerateRequest, logged: LoggedCall, ids: list[int], say: Say
    ) -> AsyncIterator[Chunk]:
        abort = self._abort.setdefault(request.rid, anyio.Event())
        start = len(request.input_ids)
        try:
            if say.first_delay:
                with anyio.move_on_after(say.first_delay):
                    await abort.wait()
            for at in range(0, len(ids), say.chunk):
                if say.delay:
                    with anyio.move_on_after(say.delay):
                        await abort.wait()
                if abort.is_set():
                    return
                new = ids[at : at + say.chunk]
                logprobs = [self.logprob(id_, start + at + i) for i, id_ in enumerate(new)]
                logged.output_ids += new
                logged.logprobs += logprobs
                yield Chunk(output_ids=np.asarray(new, np.int32), logprobs=np.asarray(logprobs, np.float32))
        finally:
            self._abort.pop(request.rid, None)

    def _completion(self, request: GenerateRequest, logged: LoggedCall, finish: Finish) -> Completion:
        size = len(logged.output_ids)
        return Completion(
            finish=finish,
            output_ids=np.asarray(logged.output_ids, np.int32),
            logprobs=np.asarray(logged.logprobs, np.float32),
            versions=(Span(self.version, 0, size),),
            prompt_tokens=len(request.input_ids),
            cached_tokens=0,
            engine="scripted",
        )

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        event = self._abort.get(rid)
        if event is not None:
            event.set()

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            model=self.model,
            vocab_size=self.renderer.vocab_size,
            context_length=self.context_length,
            weight_version=self.version,
        )


class ScriptedServer:
    """A scripted engine behind SGLang's HTTP contract, on loopback.

    `/generate` (streamed or not), `/abort_request`, `/model_info`, `/server_info`, `/health`, `/ready`. Faults of the
    script show as they would on the wire: status 429 or 500, a stream that is cut, a reply aborted half-way.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    def app(self) -> Any:
        """The Starlette app."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/model_info", self._model_info),
                Route("/server_info", self._model_info),
                Route("/health", self._alive),
                Route("/ready", self._alive),
            ]
        )

    async def _alive(self, request: Any) -> Any:
        from starlette.responses import Response

        return Response(status_code=200)

    async def _model_info(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        info = await self.engine.model_info()
        return JSONResponse(
            {
                "model_path": info.model,
                "vocab_size": info.vocab_size,
                "context_length": info.context_length,
                "weight_version": str(info.weight_version),
            }
        )

    async def _abort(self, request: Any) -> Any:
        from starlette.responses import Response

        await self.engine.abort((await request.json())["rid"])
        return Response(status_code=200)

    async def _generate(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        body = await request.json()
        params = body["sampling_params"]
        asked = GenerateRequest(
            rid=body["rid"],
            input_ids=np.asarray(body["input_ids"], np.int32),
            sampling=Sampling(max_new_tokens=params["max_new_tokens"], temperature=params.get("temperature", 1.0)),
            session=body.get("session_id", ""),
        )
        events = self.engine.generate(asked)
        try:
            first = await anext(events)
        except EngineError as error:
            message = {"error": {"message": str(error), "code": error.status or 500}}
            return JSONResponse(message, status_code=error.status or 500)
        stream = self._events(first, events, asked, streamed=bool(body.get("stream")))
        if body.get("stream"):
            return StreamingResponse(stream, media_type="text/event-stream")
        replies = [json.loads(event[6:]) async for event in stream if not event.startswith("data: [DONE]")]
        return JSONResponse(replies[-1])

    async def _events(
        self,
        first: Chunk | Completion,
        rest: AsyncIterator[Chunk | Completion],
        asked: GenerateRequest,
        *,
        streamed: bool,
    ) -> AsyncIterator[str]:
        """SSE lines with cumulative ids, as SGLang sends them."""
        ids: list[int] = []
        logprobs: list[list[Any]] = []
        event: Chunk | Completion | None = first
        while event is not None:
            meta: dict[str, Any] = {"id": asked.rid, "prompt_tokens": len(asked.input_ids), "cached_tokens": 0}
            if isinstance(event, Chunk):
                ids += event.output_ids.tolist()
                new = zip(event.logprobs.tolist(), event.output_ids.tolist(), strict=True)
                logprobs += [[logprob, id_, None] for logprob, id_ in new]
                meta["finish_reason"] = None
            else:
                meta["finish_reason"] = {"type": event.finish}
                meta["weight_versions"] = [
                    {"version": str(span.version), "start": span.start, "end": span.end} for span in event.versions
                ]
            meta |= {
                "completion_tokens": len(ids),
                "weight_version": str(self.engine.version),
                "output_token_logprobs": list(logprobs),
            }
            if streamed or isinstance(event, Completion):
                yield f"data: {json.dumps({'output_ids': list(ids), 'meta_info': meta})}\n\n"
            event = await anext(rest, None)
        yield "data: [DONE]\n\n"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on a free loopback port; yields the URL."""
        from gyre_sdk.capture.serving import serve_app

        async with serve_app(self.app(), "127.0.0.1", 0) as url:
            yield url
