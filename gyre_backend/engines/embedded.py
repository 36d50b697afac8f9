"""The embedded engine: a transformers model behind SGLang's native HTTP contract, on a CPU or one GPU.

    python -m gyre_backend.engines.embedded --model smollm2 --port 0

As an object it lives in a cell's process and computes with the trainer's own memory; see docs/engines.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre_backend.engines.core import EngineCore, Limits, eos_ids
from gyre_backend.engines.disk import checksum, copy_in_place, load_in_place
from gyre_backend.engines.forward import prepare
from gyre_backend.engines.journal import Journal
from gyre_backend.engines.kv import kv_layout
from gyre_backend.engines.kv_exchange import KVExchange
from gyre_backend.engines.routes import EngineRoutes
from gyre_backend.weights.transport import Transport, make_transport
from gyre_sdk.errors import ConfigError, GyreError, MissingExtraError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

KV_BYTES = 2 << 30
"""Memory for keys and values when `kv_tokens` is not given."""


class EmbeddedEngine:
    """Continuous batching with prefix reuse over `model`, a transformers causal model with full attention.

    The model's parameters may be shared with a trainer: pause with mode `abort` or `retract`, change them in place, call
    `update_weights(None, version)`, continue. `transport`: how other engines read this one's keys and values and it theirs; without
    one, over HTTP. Raises UnsupportedError for a model that it can't serve.
    """

    def __init__(
        self,
        model: Any,
        *,
        version: int | str = 0,
        context_length: int | None = None,
        max_batch: int = 16,
        kv_tokens: int | None = None,
        prefill_tokens: int = 512,
        incremental_streaming: bool = True,
        log: Path | str | None = None,
        transport: Transport | None = None,
        name: str = "embedded",
        model_path: str = "",
    ) -> None:
        prepare(model)
        config = model.config.get_text_config()
        longest = int(getattr(config, "max_position_embeddings", 0) or 4096)
        context = min(context_length or longest, longest)
        layout = kv_layout(model)
        limits = Limits(
            max_batch=max_batch,
            kv_tokens=max(context, kv_tokens or KV_BYTES // layout.bytes_per_token),
            context_length=context,
            prefill_tokens=prefill_tokens,
        )
        self.model = model
        self.name = name
        self.model_path = model_path or str(getattr(config, "_name_or_path", ""))
        self.vocab_size = int(config.vocab_size)
        self.incremental_streaming = incremental_streaming
        self._journal = Journal(Path(log)) if log is not None else None
        eos = eos_ids((config, getattr(model, "generation_config", None)))
        self.kv_layout = layout
        self.exchange = KVExchange(transport)
        self.core = EngineCore(model, limits, str(version), eos, self._journal)

    def app(self) -> ASGIApp:
        """The HTTP contract as an ASGI application."""
        return EngineRoutes(self).app()

    @property
    def version(self) -> str:
        """Weight version of what is sampled now."""
        return self.core.version

    def update_weights(self, state: Mapping[str, Any] | None, version: int | str, *, flush: bool = True) -> None:
        """Serve new weights as `version`: `state` is copied over the parameters; None means they were changed in place.

        Waits until nothing runs unless the engine is paused. Raises WeightsError when `state` does not fit.
        """

        def work() -> None:
            if state is not None:
                copy_in_place(self.model, dict(state), "the state dict")
            self.core.new_version(str(version), flush=flush)

        self.core.ask_when_idle(work).result()

    def load_from_disk(self, folder: str) -> None:
        """Overwrite the parameters from a Hugging Face folder; on the engine's thread."""
        load_in_place(self.model, Path(folder))

    def checksum(self) -> str:
        """Digest of all parameters; on the engine's thread."""
        return checksum(self.model)

    def close(self) -> None:
        """End the engine's thread."""
        self.core.close()
        self.exchange.close()
        if self._journal is not None:
            self._journal.close()


def load_model(path: Path, *, dtype: str = "float32", device: str = "cpu") -> Any:
    """A causal model of a Hugging Face folder. Raises ConfigError, MissingExtraError."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", "backend") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} can't be loaded as a causal language model: {error}") from error
    return model.to(device)


def main(arguments: list[str] | None = None) -> int:
    """Serve until the parent's end of stdin, SIGINT or SIGTERM."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m gyre_backend.engines.embedded", description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face model folder, `smollm2` or `tiny`")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks one; the ready line says which")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, help="tokens of KV, running and cached (default: 2 GiB of them)")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="prompt tokens computed per step")
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--cumulative-streaming", action="store_true", help="stream whole replies, as SGLang does")
    parser.add_argument(
        "--kv-transport",
        default="http",
        choices=["http", "mooncake", "file"],
        help="how keys and values move between engines",
    )
    parser.add_argument("--log", type=Path, help="append every ended call to this file")
    parser.add_argument("--seed", type=int, help="seed of torch, for calls without one")
    chosen = parser.parse_args(arguments)

    from gyre_backend.models import model_dir
    from gyre_backend.processes import serve_until_parent_ends

    try:
        folder = model_dir(chosen.model, say=lambda text: print(text, file=sys.stderr))  # noqa: T201
        model = load_model(folder, dtype=chosen.dtype, device=chosen.device)
        _settings(chosen.threads, chosen.seed)
        engine = EmbeddedEngine(
            model,
            version=chosen.weight_version,
            context_length=chosen.context_length,
            max_batch=chosen.max_batch,
            kv_tokens=chosen.kv_tokens,
            prefill_tokens=chosen.prefill_tokens,
            incremental_streaming=not chosen.cumulative_streaming,
            log=chosen.log,
            transport=_transport(chosen.kv_transport, chosen.host),
            model_path=str(folder),
        )
        try:
            serve_until_parent_ends(engine.app(), chosen.host, chosen.port)
        finally:
            engine.close()
    except GyreError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _transport(kind: str, host: str) -> Transport | None:
    if kind == "http":
        return None
    return make_transport(kind, folder=Path(tempfile.mkdtemp(prefix="gyre-kv-")), host=host)


def _settings(threads: int | None, seed: int | None) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)
    if seed is not None:
        torch.manual_seed(seed)


if __name__ == "__main__":
    sys.exit(main())
