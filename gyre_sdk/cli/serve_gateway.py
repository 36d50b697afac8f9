"""`gyre gateway`: the gateway alone, for harnesses that are started by other means."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import anyio
from cyclopts import Parameter
from rich.console import Console

from gyre_sdk.capture.config import ExecutionSpec, GatewayConfig, PinnedSampling
from gyre_sdk.cli.assembly import resolve_model
from gyre_sdk.cli.gateway import watched
from gyre_sdk.errors import ConfigError
from gyre_sdk.serving import GatewayProcess, GatewaySettings, Tls

ADMIN_TOKEN = "GYRE_ADMIN_TOKEN"


def gateway(
    *,
    engine_url: str,
    model: Annotated[str, Parameter(alias="-m")],
    run_dir: Path,
    port: int = 8800,
    host: str = "127.0.0.1",
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    executions: Annotated[int, Parameter(alias="-n")] = 0,
    temperature: float = 1.0,
    max_new_tokens: int | None = None,
) -> int:
    """Serve the gateway until Ctrl-C. Started again on the same --run-dir, it goes on with every execution that is not sealed.

    Parameters
    ----------
    engine_url
        A running SGLang server, or anything that speaks its /generate.
    model
        The served model's folder (its tokenizer and chat template), or `smollm2` or `tiny`.
    run_dir
        Where to record.
    port
        Where to listen; 0 takes a free port.
    host
        Another address than loopback needs --tls-cert, --tls-key and the environment variable GYRE_ADMIN_TOKEN.
    tls_cert, tls_key
        PEM files.
    executions
        Open so many executions and print their keys. More are opened by POST /gyre/v1/executions with the admin token.
    temperature, max_new_tokens
        Sampling, pinned whatever the harness asks for.
    """
    console = Console(highlight=False)
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together")
    given = os.environ.get(ADMIN_TOKEN, "")
    settings = GatewaySettings(
        run_dir=str(run_dir),
        model_dir=str(resolve_model(model, console)),
        engine_url=engine_url,
        config=GatewayConfig(sampling=PinnedSampling(temperature=temperature, max_new_tokens=max_new_tokens)),
        admin_token=given or ("" if host not in ("127.0.0.1", "::1", "localhost") else secrets.token_urlsafe(32)),
        host=host,
        tls=None if tls_cert is None else Tls(str(tls_cert), str(tls_key)),
    )

    async def work() -> None:
        async with watched(GatewayProcess(settings, port=port)) as process:
            console.print(f"gateway  {process.base_url}   recorded in {run_dir}", soft_wrap=True, markup=False)
            if not given:
                console.print(f"admin    {process.admin_token}", soft_wrap=True, markup=False)
            for execution in process.recovered:
                console.print(f"goes on  {execution}   with the key it has", soft_wrap=True, markup=False)
            for _ in range(executions):
                opened = await process.open(ExecutionSpec())
                console.print(f"opened   {opened.execution}   key {opened.token}", soft_wrap=True, markup=False)
            await anyio.sleep_forever()

    anyio.run(work)
    return 0
