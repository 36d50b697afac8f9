"""One run of one verifier: the agent's processes end, the tests arrive where nothing else sees them, the reward is read."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.environments import rewards, toolkit
from gyre_sdk.environments.prepare import make_verifier_sandbox
from gyre_sdk.environments.sandbox.base import DEFAULT_PATH, PRIVATE, ExecResult, PrivateMount, Sandbox
from gyre_sdk.environments.task import Step, Task
from gyre_sdk.errors import SandboxError

TESTS, LOGS, ARTIFACTS = "/tests", "/logs/verifier", "/logs/artifacts"
_OUTPUT = "test-stdout.txt"
_LIMIT_MB = 256
_COLLECT_S = 120.0
_USABLE = 'f=$(mktemp) && echo x > "$f" && grep -q x "$f" && cat "$f" > /dev/null && rm -f "$f" && ls / > /dev/null'


class VerifierFailed(Exception):
    """This run gave no reward; not the policy's doing."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What a run said, with side metrics."""

    rewards: dict[str, float]
    metrics: dict[str, float]
    message: str = ""


async def verify(task: Task, step: Step, sandbox: Sandbox, kept: Path, timeout_s: float) -> Verified:
    """Run the step's verifier once; its files go to `kept`. Raises VerifierFailed or SandboxError."""
    if step.verifier.separate is not None:
        return await _verify_apart(task, step, sandbox, kept, timeout_s)
    hidden = sandbox.capabilities.private_mounts
    services = await sandbox.kill_all(keep_listening=hidden)
    planted = await sandbox.scrub()
    broken = await _broken(sandbox)
    if broken:
        return Verified({"reward": 0.0}, {"sandbox_broken": 1.0}, broken)
    verified = await _run(step, sandbox, kept, timeout_s)
    if services:
        verified.metrics["services"] = float(len(services))
    if planted:
        verified.metrics["scrubbed"] = float(len(planted))
        (kept / "scrubbed.txt").write_text("\n".join(planted) + "\n")
    return verified


async def _broken(sandbox: Sandbox) -> str:
    """Why no verifier could run here any more, after the agent; empty when one can. It started well, so it is the agent's doing."""
    result = await sandbox.exec(_USABLE, cwd="/", timeout=_COLLECT_S, user="root", env={"PATH": DEFAULT_PATH})
    if result.rc == 0:
        return ""
    return f"the agent broke its sandbox: {(result.stderr or result.stdout).strip()[-200:] or 'the simplest command fails in it'}"


async def _verify_apart(task: Task, step: Step, sandbox: Sandbox, kept: Path, timeout_s: float) -> Verified:
    """A fresh sandbox gets the artifacts and the tests; the agent's processes and files never meet them."""
    environment = step.verifier.separate
    assert environment is not None
    for command in step.verifier.collect:
        await sandbox.exec(command, timeout=_COLLECT_S, user="root")
    await sandbox.kill_all()
    fresh = make_verifier_sandbox(
        task, environment, backend=sandbox.backend, network=step.verifier.phase.network or environment.network
    )
    try:
        await fresh.start()
        with tempfile.TemporaryDirectory(prefix="gyre-artifacts-") as folder:
            for number, path in enumerate(dict.fromkeys((*task.artifacts, *step.artifacts, ARTIFACTS))):
                await carry(sandbox, path, fresh, Path(folder) / str(number))
        return await _run(step, fresh, kept, timeout_s)
    finally:
        await fresh.stop()


async def carry(source: Sandbox, path: str, target: Sandbox, by: Path) -> bool:
    """Copy a file or folder from one sandbox to the same place in another. False when it isn't there."""
    try:
        await source.download(path, by, limit_mb=_LIMIT_MB)
    except SandboxError as error:
        if "no such file" in str(error):
            return False
        raise
    await target.upload(by, path)
    return True


async def keep_artifacts(task: Task, step: Step, sandbox: Sandbox, folder: Path) -> list[str]:
    """Copy the declared artifacts out, for people. Returns the paths that were there."""
    there = []
    for path in dict.fromkeys((*task.artifacts, *step.artifacts)):
        try:
            await sandbox.download(path, folder / path.strip("/").replace("/", "__"), limit_mb=_LIMIT_MB)
        except SandboxError:
            continue  # it was not made, or is too large: nothing to keep
        there.append(path)
    return there


async def _run(step: Step, sandbox: Sandbox, kept: Path, timeout_s: float) -> Verified:
    if sandbox.capabilities.private_mounts:
        result = await _run_hidden(step, sandbox, timeout_s)
        logs = PRIVATE + "verifier"
    else:
        result = await _run_plain(step, sandbox, timeout_s)
        logs = LOGS
    await sandbox.download(logs, kept, limit_mb=_LIMIT_MB)
    (kept / _OUTPUT).unlink(missing_ok=True)
    (kept / _OUTPUT).write_text(result.stdout + result.stderr)
    if result.timed_out:
        raise VerifierFailed(f"it ran into its timeout of {timeout_s:g} s")
    try:
        found = rewards.read_rewards(kept)
    except rewards.RewardMissing as error:
        last = (result.stderr or result.stdout).strip().splitlines()[-1:]
        raise VerifierFailed(f"{error}{'; it said: ' + last[0][-200:] if last else ''}") from error
    return Verified(found, rewards.read_ctrf(kept))


async def _run_hidden(step: Step, sandbox: Sandbox, timeout_s: float) -> ExecResult:
    """Tests and logs in private folders, tools from this machine; out of sight and reach of what still runs in the sandbox."""
    await sandbox.upload(step.verifier.tests, PRIVATE + "tests", fresh=True)
    with tempfile.TemporaryDirectory(prefix="gyre-empty-") as empty:
        await sandbox.upload(Path(empty), PRIVATE + "verifier", fresh=True)
    private = [PrivateMount(TESTS, name="tests"), PrivateMount(LOGS, name="verifier")]
    env: dict[str, str] = {}
    if toolkit.wanted_by(step.verifier.tests):
        kit = await toolkit.toolkit()
        await kit.warm(sandbox)
        private += kit.mounts("/root")
        env = kit.env(sandbox.spec.env.get("PATH", DEFAULT_PATH), offline=await _is_offline(step, sandbox))
    return await sandbox.exec(
        f"chmod +x {TESTS}/test.sh; exec bash {TESTS}/test.sh",
        env={**env, **step.verifier.phase.env},
        timeout=timeout_s,
        user=step.verifier.phase.user,
        private=private,
        trusted=True,
    )


async def _is_offline(step: Step, sandbox: Sandbox) -> bool:
    """Whether the verifier gets along with what is there: its network is off, or the package index does not answer this machine."""
    network = step.verifier.phase.network or sandbox.spec.network
    return network.mode == "off" or not await toolkit.index_answers()


async def _run_plain(step: Step, sandbox: Sandbox, timeout_s: float) -> ExecResult:
    """Everything that was there is removed first; every process of the agent is dead."""
    root = "" if sandbox.capabilities.rootfs else '"$GYRE_ROOT"'
    await sandbox.exec(f"rm -rf {root}{TESTS} {root}{LOGS}", cwd="/", timeout=60, user="root")
    await sandbox.upload(step.verifier.tests, TESTS, fresh=True)
    await sandbox.exec(f"mkdir -p {root}{LOGS}; chmod +x {root}{TESTS}/test.sh", cwd="/", timeout=60, user="root")
    return await sandbox.exec(
        f"exec bash {root}{shlex.quote(TESTS)}/test.sh",
        env=dict(step.verifier.phase.env),
        timeout=timeout_s,
        user=step.verifier.phase.user,
        trusted=True,
    )
