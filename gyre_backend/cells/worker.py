"""One cell: an engine and a trainer in one process, with control routes under /cell. Started by a cell
runtime, never by hand.

Reads a `CellSpec` as one JSON line from stdin, prints a `CellReady` line, serves until it is told to end or
its parent is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path

import anyio
import msgspec
import uvicorn

from gyre_backend.cells.control import CellControl
from gyre_backend.cells.engine_side import make_engine_side
from gyre_backend.cells.replica import Replica
from gyre_backend.cells.spec import CellReady, CellSpec
from gyre_backend.config import BackendConfig, parse_config
from gyre_backend.corked import server_config
from gyre_backend.processes import die_with_parent
from gyre_backend.trainers.base import Trainer, TrainerConfig, create
from gyre_backend.weights import make_transport
from gyre_sdk.errors import GyreError


def trainer_config(config: BackendConfig) -> TrainerConfig:
    """The trainer's settings out of `[model]` and `[train]`."""
    train, model = config.train, config.model
    return TrainerConfig(
        trainer=train.trainer,
        dtype=model.dtype,
        autocast=model.autocast,
        device=model.device,
        attention=train.attention,
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        warmup_steps=train.warmup_steps,
        max_grad_norm=train.max_grad_norm,
        gradient_checkpointing=train.gradient_checkpointing,
        temperature=train.temperature,
        logits_chunk=train.logits_chunk,
        bounded_memory=train.bounded_memory,
        ref_model=train.ref_model,
        options=train.options,
    )


async def serve(spec: CellSpec) -> None:
    """Load, serve, clean up."""
    from gyre_backend.algorithms import make

    config = parse_config(spec.config, "cell specification")
    algorithm = make(config.algorithm.name, **config.algorithm.options)
    work_dir = Path(spec.run_dir) / "cells" / spec.name
    trainer: Trainer = await anyio.to_thread.run_sync(create, trainer_config(config), Path(spec.model_dir), algorithm)
    table = config.weights
    host = "127.0.0.1" if table.host == "auto" else table.host
    transport = make_transport(
        table.transport, folder=work_dir / "snapshots", host=host, protocol=table.protocol, device=table.device
    )
    replica = Replica(
        trainer, transport, exact_sum=config.cells.exact_sum, delta=table.delta, deadline_s=table.deadline_s
    )
    if spec.checkpoint:
        await anyio.to_thread.run_sync(replica.load, Path(spec.checkpoint))
    engine = make_engine_side(config, trainer, Path(spec.model_dir), work_dir, transport)
    # Without the protocol, asyncio leaves Nagle's algorithm on: 40 ms a reply.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind((host, 0))
    url = f"http://{host}:{listener.getsockname()[1]}"
    control = CellControl(replica, engine, spec.token)
    server = uvicorn.Server(server_config(control.app(), timeout_graceful_shutdown=2))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    ready = CellReady(
        ready=True,
        url=url,
        engine_url=engine.url or url,
        pid=os.getpid(),
        version=replica.version,
        context=_context(trainer, config),
        estimator=algorithm.estimator,
        weighting=algorithm.weighting,
        whole_replies=algorithm.whole_replies,
    )
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            group.start_soon(_stop_on_signal, server, group.cancel_scope)
            await engine.start()
            ready = msgspec.structs.replace(ready, engine_url=engine.url or url)
            sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
            sys.stdout.flush()
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()
        replica.close()


def _context(trainer: Trainer, config: BackendConfig) -> int:
    if config.model.context:
        return config.model.context
    model_config = getattr(getattr(trainer, "model", None), "config", None)
    return int(getattr(model_config, "max_position_embeddings", 0) or 0)


async def _stop_on_signal(server: uvicorn.Server, scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            server.should_exit = True
            await anyio.sleep(2.5)
            scope.cancel()
            return


def main() -> None:
    """Entry point of the cell process: the last line on stderr says why it could not come up."""
    os.environ.setdefault("GLOG_minloglevel", "1")  # Mooncake's routine messages
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    line = sys.stdin.buffer.readline()
    die_with_parent()
    try:
        spec = msgspec.json.decode(line, type=CellSpec)
        anyio.run(serve, spec)
    except (GyreError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except BaseExceptionGroup as group:
        known = group.subgroup(GyreError)
        first = known.exceptions[0] if known else None
        if first is None:
            raise
        sys.stderr.write(f"error: {first}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
