"""Terminus-2 on a Harbor task: Harbor runs it in our sandbox, our gateway records it, Harbor's reward ends the execution.

python harness_examples/terminus-2/record.py TASK --engine http://127.0.0.1:30000 --model models/qwen3-4b
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import gyre_sdk
from gyre_sdk.capture.config import GatewayConfig

ROOT = Path(__file__).parents[2]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path, help="folder of a Harbor task")
    parser.add_argument("--engine", required=True, help="URL that speaks SGLang's /generate")
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's tokenizer")
    parser.add_argument("--python", default=str(ROOT / ".venv-harbor/bin/python"), help="a Python 3.12 with Harbor")
    a = parser.parse_args()
    run_dir = Path("runs/terminus-2")
    # It drops reasoning from what it sends back; what was sampled stays.
    config = GatewayConfig(matcher="role-and-content")
    async with gyre_sdk.session(
        engine=a.engine, model=a.model, run_dir=run_dir, harness="terminus-2", task=a.task.name, config=config
    ) as session:
        argv = ["-m", "gyre_sdk.environments.harbor_bridge.trial", "--task", str(a.task), "--agent", "terminus-2"]
        argv += ["--model", "openai/policy", "--base-url", session.base_url, "--token", session.api_key]
        argv += ["--set", "record_terminal_session=false", "--trials-dir", str(run_dir / "trials")]
        env = os.environ | {"PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        trial = await asyncio.create_subprocess_exec(a.python, *argv, env=env, stdout=asyncio.subprocess.PIPE)
        out, _ = await trial.communicate()
        if trial.returncode:
            sys.exit(f"the trial ended with exit code {trial.returncode}")
        found = json.loads(out.splitlines()[-1])
        rewards = found["rewards"] or {}
        session.finish(reward=rewards.get("reward"), message=found["message"])
    print(f"rewards {rewards}; recorded: gyre graph {session.execution}")


if __name__ == "__main__":
    asyncio.run(main())
