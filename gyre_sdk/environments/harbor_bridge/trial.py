"""Run one trial of any Harbor agent on a Harbor task, in our sandbox, with its model calls at our gateway; prints one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gyre_sdk.errors import MissingExtraError

ENVIRONMENT = "gyre_sdk.environments.harbor_bridge.environment:GyreEnvironment"
_BASE_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL")


def agent_env(base_url: str, token: str) -> dict[str, str]:
    """The variables by which installed CLIs are pointed at a gateway (`base_url` without /v1)."""
    found = dict.fromkeys(_BASE_VARIABLES, f"{base_url}/v1")
    found |= {"ANTHROPIC_BASE_URL": base_url, "GOOGLE_GEMINI_BASE_URL": base_url}
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "LLM_API_KEY")
    return found | dict.fromkeys(keys, token)


async def run_trial(
    task: Path,
    agent: str,
    *,
    model: str | None,
    base_url: str | None,
    token: str,
    trials_dir: Path,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One trial; its rewards, how it ended and its folder. `settings` are the agent's own. Raises MissingExtraError without Harbor."""
    os.environ.setdefault("HARBOR_TELEMETRY", "0")
    try:
        from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
        from harbor.trial.trial import Trial
    except ImportError as error:
        raise MissingExtraError("harbor", "harbor") from error
    env = agent_env(base_url, token) if base_url else {}
    if base_url:
        os.environ["GYRE_GATEWAY_PORT"] = str(urlsplit(base_url).port or 80)
    config = TrialConfig(
        task=TaskConfig(path=task),
        agent=AgentConfig(**_named(agent), model_name=model, env=env, kwargs=dict(settings or {})),
        environment=EnvironmentConfig(import_path=ENVIRONMENT),
        trials_dir=trials_dir,
    )
    os.environ.update(env)  # agents that call the model from here, outside the sandbox, read these
    trial = await Trial.create(config)
    result = await trial.run()
    return {
        "rewards": result.verifier_result.rewards if result.verifier_result is not None else None,
        "error": result.exception_info.exception_type if result.exception_info is not None else None,
        "message": result.exception_info.exception_message if result.exception_info is not None else "",
        "folder": str(trials_dir.resolve() / result.trial_name),
    }


def _named(agent: str) -> dict[str, str]:
    """An agent's own name, or `package.module:Class`."""
    return {"import_path": agent} if ":" in agent else {"name": agent}


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--agent", required=True, help="a Harbor agent's name, or package.module:Class")
    parser.add_argument("--model")
    parser.add_argument("--base-url", help="the gateway, without /v1")
    parser.add_argument("--token", default="-")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of the agent; JSON, or text"
    )
    parser.add_argument("--trials-dir", type=Path, default=Path("trials"))
    a = parser.parse_args()
    trial = run_trial(
        a.task,
        a.agent,
        model=a.model,
        base_url=a.base_url,
        token=a.token,
        trials_dir=a.trials_dir,
        settings=dict(_setting(text) for text in a.set),
    )
    found = asyncio.run(trial)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
