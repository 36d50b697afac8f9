"""The container backend against each engine that answers here, with an image made of this machine's own programs: nothing is pulled."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gyre_sdk.environments.sandbox import Limits, Sandbox, SandboxSpec, choose, sweep
from gyre_sdk.environments.sandbox.container import engine_problem
from gyre_sdk.errors import SandboxError

pytestmark = [pytest.mark.anyio, pytest.mark.environments, pytest.mark.timeout(300)]
IMAGE = "localhost/gyre-test-tools"
TOOLS = (
    "bash", "sh", "ls", "cat", "mkdir", "rm", "touch", "tr", "grep", "sleep", "setsid", "chmod", "id", "head", "test", "env", "nohup",
    "kill", "ps", "tail", "true", "chown",
)  # fmt: skip


def _tools(folder: Path) -> Path:
    """A root file system with these programs and the libraries they name, as a tar."""
    for name in ("bin", "tmp", "etc", "app", "proc", "dev", "sys"):
        (folder / name).mkdir()
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n")
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        shutil.copy(found, folder / "bin" / tool)
        linked = subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+) \(0x", linked):
            place = folder / library.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, place)
    tar = folder.with_suffix(".tar")
    with tarfile.open(tar, "w") as archive:
        archive.add(folder, arcname=".")
    return tar


@pytest.fixture(scope="session", params=["podman", "docker"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    problem = engine_problem(name)
    if problem:
        pytest.skip(problem)
    with tempfile.TemporaryDirectory(prefix="gyre-image-") as folder:
        (Path(folder) / "root").mkdir()
        tar = _tools(Path(folder) / "root")
        subprocess.run([name, "import", str(tar), IMAGE], check=True, capture_output=True)
    yield name
    subprocess.run([name, "rmi", "-f", IMAGE], check=False, capture_output=True)


@pytest.fixture
async def sandbox(engine: str) -> AsyncIterator[Sandbox]:
    made = choose.create(SandboxSpec(image=IMAGE, limits=Limits(memory_mb=128, pids=64)), engine)
    await made.start()
    yield made
    await made.stop()


async def test_commands_files_and_users(sandbox: Sandbox, tmp_path: Path) -> None:
    result = await sandbox.exec("echo out; echo err >&2; pwd; exit 3", env={"A": "b"})
    assert (result.stdout, result.stderr, result.rc) == ("out\n/app\n", "err\n", 3)
    assert (await sandbox.exec('echo "$A"', env={"A": "b c"})).stdout == "b c\n"
    assert (await sandbox.exec("id -u", user="nobody")).stdout == "65534\n"
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/a").write_text("text")
    await sandbox.upload(tmp_path / "in", "/app/files")
    await sandbox.upload(tmp_path / "in/deep/a", "/app/b")
    assert (await sandbox.exec("cat /app/files/deep/a /app/b")).stdout == "texttext"
    await sandbox.download("/app", tmp_path / "out")
    assert (tmp_path / "out/files/deep/a").read_text() == "text"
    await sandbox.download("/app/b", tmp_path / "one")
    assert (tmp_path / "one").read_text() == "text"
    with pytest.raises(SandboxError, match="no such file"):
        await sandbox.download("/app/none", tmp_path / "none")


async def test_a_timeout_kills_the_tree_and_services_live_on(sandbox: Sandbox) -> None:
    await sandbox.exec("nohup sleep 7654 > /dev/null 2>&1 &")
    late = await sandbox.exec("trap '' TERM; echo before; setsid sleep 7655 & sleep 7656", timeout=1)
    assert (late.timed_out, late.stdout) == (True, "before\n")
    listed = (await sandbox.exec("ps ax")).stdout
    assert "7654" in listed
    assert "7655" not in listed
    assert "7656" not in listed
    await sandbox.kill_all()
    assert "7654" not in (await sandbox.exec("ps ax")).stdout


async def test_limits_and_no_network(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("x=$(head -c 300M /dev/zero | tr '\\0' x); echo ${#x}")).rc in (-9, 137)
    assert (await sandbox.exec("exec 3<>/dev/tcp/192.0.2.1/80", timeout=10)).rc != 0
    forked = await sandbox.exec("for i in {1..200}; do sleep 5 & done", timeout=20)
    assert "Resource temporarily unavailable" in forked.stderr


async def test_an_exposed_port_answers(sandbox: Sandbox) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard " + await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = await sandbox.expose(server.sockets[0].getsockname()[1])
        talk = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo hello >&3; cat <&3"
        assert (await sandbox.exec(talk, timeout=20)).stdout == "heard hello\n"


async def test_spawn_streams_and_is_killed(sandbox: Sandbox, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = await sandbox.spawn(["bash", "-c", "echo one; exit 5"], stdout=log, stderr=log)
        assert await process.wait() == 5
    assert (tmp_path / "log").read_text() == "one\n"
    long = await sandbox.spawn(["sleep", "7657"])
    await long.kill()
    assert "7657" not in (await sandbox.exec("ps ax")).stdout


async def test_stop_leaves_no_container(engine: str) -> None:
    made = choose.create(SandboxSpec(image=IMAGE), engine)
    await made.start()
    name = made.name  # type: ignore[attr-defined]
    assert name in _containers(engine)
    await made.stop()
    assert name not in _containers(engine)


def _containers(engine: str) -> str:
    return subprocess.run(
        [engine, "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True, check=True
    ).stdout


RUNNER = """
import asyncio, sys
from gyre_sdk.environments.sandbox import SandboxSpec, create

async def main():
    sandbox = create(SandboxSpec(image=sys.argv[2]), sys.argv[1])
    await sandbox.start()
    print(sandbox.name, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_killed_runners_container_is_swept(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_SANDBOXES", str(tmp_path / "sandboxes"))
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, engine, IMAGE], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert runner.stdout is not None
    with runner.stdout:
        name = runner.stdout.readline().strip()
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert name in _containers(engine)
    assert name in sweep().boxes
    assert name not in _containers(engine)
