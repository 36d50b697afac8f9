"""What every isolating backend must do, each claim by really doing it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from gyre_sdk.environments.sandbox import Limits, Network, Sandbox, journal
from gyre_sdk.environments.sandbox.base import PRIVATE, PrivateMount
from gyre_sdk.environments.sandbox.keeper import processes
from gyre_sdk.errors import SandboxError

from .conftest import SMALL, Maker

pytestmark = pytest.mark.anyio


def _tagged(tag: str) -> list[int]:
    """Live processes of this machine whose command line holds `tag`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if (
                    tag.encode() in (folder / "cmdline").read_bytes()
                    and journal.start_time(int(folder.name)) is not None
                ):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def _gone(sandbox: Sandbox, name: str) -> bool:
    boxes = journal.home() / "boxes" / name
    mounts = Path("/proc/self/mounts").read_text()
    groups = list(Path("/sys/fs/cgroup").glob(f"**/gyre-{name}"))
    return not boxes.exists() and name not in mounts and not groups


async def test_a_command_runs_and_tells_everything(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating, env={"TASK": "given"})
    result = await sandbox.exec('echo "$TASK $ONE"; pwd; echo bad >&2; exit 3', env={"ONE": "more"})
    assert (result.stdout, result.stderr, result.rc) == ("given more\n/app\n", "bad\n", 3)
    pieces: list[str] = []
    await sandbox.exec("printf ä; sleep 0.1; printf b", on_output=pieces.append)
    assert "".join(pieces) == "äb"
    missing = await sandbox.exec("true", cwd="/nowhere")
    assert missing.rc == 127
    assert "/nowhere" in missing.stderr


async def test_the_host_is_hidden_and_untouched(isolating: str, started: Maker, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    sandbox = await started(isolating)
    checkout = Path(__file__).parents[2]
    result = await sandbox.exec(
        f"ls -A /root /home /tmp; cat {secret} {checkout}/pyproject.toml; echo x > /etc/gyre-was-here; echo x > /tmp/y"
    )
    assert "host" not in result.stdout
    assert "pyproject" not in result.stdout
    assert not Path("/etc/gyre-was-here").exists()
    listing = (await sandbox.exec("ls -A /root; ls -A /home")).stdout
    assert listing == ""


async def test_root_inside_is_not_root_outside(isolating: str, started: Maker) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    sandbox = await started(isolating)
    for command in (
        "mount -t tmpfs none /mnt",
        "unshare -U true",
        "unshare -m true",
        "mknod /dev/disk b 254 0",
        "echo gyre > /proc/sys/kernel/core_pattern",
        "echo 1 > /proc/sys/kernel/panic",
        "nsenter -t 1 -m true",
        "cat /proc/1/environ | grep PATH",
        "ls /proc/1/root/",
        "chroot /proc/1/root true",
        "cat /proc/kcore | head -c 1 | grep .",
        "date -s 2001-01-01",
        "kill -9 1; sleep 0.2; test ! -d /proc/1",
    ):
        assert (await sandbox.exec(command)).rc != 0, command
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_users_by_name_and_number(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating)
    assert (await sandbox.exec("id -u; id -un", user="nobody")).stdout == "65534\nnobody\n"
    assert (await sandbox.exec("id -u; echo > /app/x", user="4242")).stdout == "4242\n"
    assert (await sandbox.exec("touch /etc/x", user="nobody")).rc != 0
    assert "no user" in (await sandbox.exec("true", user="gandalf")).stderr


async def test_services_live_on_and_what_they_print_blocks_nobody(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating)
    begun = time.monotonic()
    result = await sandbox.exec("(while :; do echo tick; sleep 0.05; done) & echo $! > /app/pid; echo started")
    assert result.stdout.startswith("started") or "started" in result.stdout
    assert time.monotonic() - begun < 10
    await asyncio.sleep(0.3)
    assert (await sandbox.exec("kill -0 $(cat /app/pid)")).rc == 0


async def test_a_timeout_kills_the_tree_and_keeps_the_output(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating)
    tag = f"31{os.getpid()}7"
    result = await sandbox.exec(f"trap '' TERM; echo before; sleep {tag} & sleep {tag}; sleep {tag}", timeout=0.5)
    assert result.timed_out
    assert result.rc == -9
    assert result.stdout == "before\n"
    assert _tagged(tag) == []


HOSTILE = """
trap '' TERM INT HUP
setsid sleep {tag} & nohup sleep {tag} & (setsid sh -c 'trap "" TERM; (sleep {tag} &) ; sleep {tag}' &)
perl -e 'fork and exit; setpgrp; fork and exit; $SIG{{TERM}}="IGNORE"; exec "sleep", "{tag}"' &
disown -a; sleep 0.2; echo ready
"""


async def test_stop_leaves_no_descendant_and_nothing_on_the_machine(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating)
    name = sandbox.name  # type: ignore[attr-defined]
    tag = f"32{os.getpid()}{isolating[0]}".replace("b", "1").replace("u", "2")
    assert "ready" in (await sandbox.exec(HOSTILE.format(tag=tag), timeout=20)).stdout
    assert len(_tagged(tag)) >= 4
    await sandbox.stop()
    assert _tagged(tag) == []
    assert _gone(sandbox, name)
    await sandbox.stop()
    with pytest.raises(SandboxError):
        await sandbox.exec("true")


async def test_kill_all_leaves_the_sandbox_usable(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating)
    tag = f"33{os.getpid()}1"
    await sandbox.exec(HOSTILE.format(tag=tag), timeout=20)
    await sandbox.kill_all()
    assert _tagged(tag) == []
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_kill_all_can_spare_services(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating)
    tag = f"34{os.getpid()}1"
    await sandbox.exec(f"setsid sleep {tag} & setsid python3 -m http.server 8123 >/dev/null 2>&1 & sleep 0.1")
    for _ in range(100):
        if (await sandbox.exec("exec 3<>/dev/tcp/127.0.0.1/8123")).rc == 0:
            break
    assert await sandbox.kill_all(keep_listening=True) == ["python3"]
    assert _tagged(tag) == []
    assert (await sandbox.exec("exec 3<>/dev/tcp/127.0.0.1/8123")).rc == 0


async def test_a_fork_bomb_stays_inside_and_ends(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating, limits=Limits(memory_mb=256, pids=48, disk_mb=64))
    if not sandbox.capabilities.pids_limit:
        pytest.skip("no pids controller can be used here")
    await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 1", timeout=2)
    await sandbox.kill_all()
    assert (await sandbox.exec("ls /proc | grep -c '^[0-9]'")).stdout.strip() in ("3", "4", "5")


async def test_memory_cpu_and_disk_limits(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating, limits=Limits(cpus=0.5, memory_mb=128, pids=64, disk_mb=32))
    able = sandbox.capabilities
    if able.memory_limit:
        assert (await sandbox.exec("exec python3 -c 'x = b\"a\" * (300 << 20)'")).rc == -9
    disk = await sandbox.exec(
        "head -c 30M /dev/zero > /app/a; head -c 30M /dev/zero > /app/b; ls -l /app | awk '{s+=$5} END {print s}'"
    )
    assert int(disk.stdout) < 44 << 20
    assert "No space left" in disk.stderr or "File too large" in disk.stderr
    assert (await sandbox.exec("rm /app/a /app/b; echo ok > /app/c; cat /app/c")).stdout == "ok\n"
    if able.cpu_limit:
        used = await sandbox.exec("timeout 1 bash -c 'while :; do :; done'; cat /proc/self/stat >/dev/null; times")
        assert used.rc == 0


async def test_files_go_in_and_out(isolating: str, started: Maker, tmp_path: Path) -> None:
    sandbox = await started(isolating)
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "deep/a.sh").write_text("#!/bin/sh\necho hi\n")
    (source / "deep/a.sh").chmod(0o755)
    await sandbox.upload(source, "/app/files")
    assert (await sandbox.exec("/app/files/deep/a.sh")).stdout == "hi\n"
    await sandbox.upload(source / "deep/a.sh", "/app/b.sh")
    await sandbox.download("/app", tmp_path / "out")
    assert (tmp_path / "out/files/deep/a.sh").read_text() == "#!/bin/sh\necho hi\n"
    await sandbox.download("/app/b.sh", tmp_path / "one")
    assert (tmp_path / "one").is_file()
    with pytest.raises(SandboxError, match="no such file"):
        await sandbox.download("/app/missing", tmp_path / "missing")
    with pytest.raises(SandboxError, match="no file"):
        await sandbox.upload(tmp_path / "missing", "/app/x")


async def test_links_never_lead_out(isolating: str, started: Maker, tmp_path: Path) -> None:
    """Neither reading nor writing through links that the sandbox planted reaches the host."""
    sandbox = await started(isolating)
    target = tmp_path / "victim"
    target.write_text("untouched")
    (tmp_path / "evil").write_text("evil")
    await sandbox.exec(
        f"ln -s /etc/shadow /app/s; ln -s {tmp_path} /app/d; ln -s {target} /app/victim; ln -s /app/d/x /app/y"
    )
    await sandbox.upload(tmp_path / "evil", "/app/victim")
    await sandbox.upload(tmp_path / "evil", "/app/d/new")
    assert target.read_text() == "untouched"
    assert not (tmp_path / "new").exists()
    await sandbox.download("/app", tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        if path.is_symlink():
            assert path.resolve().is_relative_to((tmp_path / "out").resolve()), path
    assert "root:" not in "".join(p.read_text() for p in (tmp_path / "out").rglob("*") if p.is_file())


async def test_a_download_is_bounded(isolating: str, started: Maker, tmp_path: Path) -> None:
    sandbox = await started(isolating)
    await sandbox.exec("truncate -s 20M /app/big; mkfifo /app/pipe")
    with pytest.raises(SandboxError, match="larger than 1 MiB"):
        await sandbox.download("/app", tmp_path / "out", limit_mb=1)
    assert (await sandbox.exec("echo ok")).stdout == "ok\n"


async def test_private_folders_are_seen_by_one_command_alone(isolating: str, started: Maker, tmp_path: Path) -> None:
    sandbox = await started(isolating)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/test").write_text("hidden")
    await sandbox.exec("ln -s /app /tests")
    watcher = "while :; do cat /tests/test /proc/[0-9]*/root/tests/test >> /app/stolen 2>/dev/null; sleep 0.01; done"
    await sandbox.exec(f"setsid bash -c '{watcher}' >/dev/null 2>&1 & sleep 0.1")
    await sandbox.upload(tmp_path / "in", PRIVATE + "tests", fresh=True)
    mounts = [PrivateMount("/tests", name="tests"), PrivateMount("/logs/verifier", name="out")]
    result = await sandbox.exec(
        "cat /tests/test; echo 1 > /logs/verifier/r; sleep 0.3; cat /tests/test", private=mounts, trusted=True
    )
    assert result.stdout == "hiddenhidden"
    await sandbox.download(PRIVATE + "out", tmp_path / "out")
    assert (tmp_path / "out/r").read_text() == "1\n"
    assert (await sandbox.exec("cat /app/stolen; ls /logs/verifier")).stdout == ""


async def test_the_network_is_off_but_an_exposed_port_answers(isolating: str, started: Maker) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard " + await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        sandbox = await started(isolating)
        assert (await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}")).rc != 0
        assert (await sandbox.exec("exec 3<>/dev/tcp/192.0.2.1/80", timeout=5)).rc != 0
        inside = await sandbox.expose(port)
        talk = f"exec 3<>/dev/tcp/127.0.0.1/{inside}; echo hello >&3; cat <&3"
        assert (await sandbox.exec(talk, timeout=20)).stdout == "heard hello\n"
        several = await asyncio.gather(*(sandbox.exec(talk, timeout=20) for _ in range(8)))
        assert [each.stdout for each in several] == ["heard hello\n"] * 8
        await sandbox.stop()


async def test_read_only_mounts_show_under_hidden_folders(isolating: str, started: Maker, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "tool").chmod(0o755)
    sandbox = await started(isolating, read_only_mounts={tmp_path: str(tmp_path)})
    assert (await sandbox.exec(f"{tmp_path}/tool")).stdout == "tool\n"
    assert (await sandbox.exec(f"touch {tmp_path}/x; rm -f {tmp_path}/tool")).rc != 0
    assert (await sandbox.exec(f"mount -o remount,rw {tmp_path}")).rc != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tool"]


async def test_spawn_streams_and_is_killed(isolating: str, started: Maker, tmp_path: Path) -> None:
    sandbox = await started(isolating)
    tag = f"35{os.getpid()}1"
    with (tmp_path / "log").open("wb") as log:
        process = await sandbox.spawn(
            ["bash", "-c", f"echo one; sleep 0.1; echo two >&2; sleep {tag} & exit 5"], stdout=log, stderr=log
        )
        assert process.returncode is None
        assert await process.wait() == 5
        assert (tmp_path / "log").read_text() == "one\ntwo\n"
        await process.kill()
        long = await sandbox.spawn(["sleep", tag])
        await long.kill()
        assert await long.wait() == -9
        assert long.returncode == -9
    unknown = await sandbox.spawn(["/no/such/program"])
    assert await unknown.wait() == 127


async def test_cancelling_a_command_kills_it(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating)
    tag = f"36{os.getpid()}1"
    task = asyncio.create_task(sandbox.exec(f"sleep {tag}"))
    for _ in range(500):
        await asyncio.sleep(0.01)
        if _tagged(tag):
            break
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _tagged(tag) == []


async def test_a_bad_start_leaves_nothing(
    isolating: str, started: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_SANDBOXES", str(tmp_path / "sandboxes"))  # other tests run at the same time
    with pytest.raises(SandboxError):
        await started(isolating, layers=(tmp_path / "no-such-layer.img",))
    with pytest.raises(SandboxError):
        await started(isolating, rootfs=tmp_path / "no-such-root")
    assert list((journal.home() / "boxes").glob("*")) == []


async def test_an_allow_list_lets_only_named_hosts_through(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating, network=Network("allow-list", ("allowed.invalid", "localhost")))
    ask = "exec 3<>/dev/tcp/127.0.0.1/${{http_proxy##*:}}; printf 'CONNECT {} HTTP/1.1\\r\\n\\r\\n' >&3; head -n 1 <&3"
    refused = await sandbox.exec(ask.format("example.org:443"), timeout=20)
    assert "403" in refused.stdout
    tried = await sandbox.exec(ask.format("allowed.invalid:443"), timeout=40)
    assert "502" in tried.stdout, "an allowed name is looked up (and this one does not exist)"
    inward = await sandbox.exec(ask.format("localhost:443"), timeout=20)
    assert "502" in inward.stdout, "an allowed name that leads back to this machine is refused"
    assert (await sandbox.exec("exec 3<>/dev/tcp/1.1.1.1/443", timeout=5)).rc != 0


async def test_output_is_bounded(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating, limits=SMALL)
    result = await sandbox.exec("head -c 40M /dev/zero | tr '\\0' x", timeout=60)
    assert result.rc == 0
    assert result.truncated
    assert len(result.stdout) == 16 << 20


async def test_localhost_has_a_name(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating)
    assert (await sandbox.exec("getent hosts localhost")).rc == 0


async def test_without_its_spawner_a_sandbox_goes_on_and_its_limits_hold(isolating: str, started: Maker) -> None:
    """The process that forks commands inside the control groups may be killed for memory with the rest."""
    sandbox = await started(isolating, limits=Limits(memory_mb=128, pids=64, disk_mb=32))
    entry = json.loads((sandbox.folder / "journal.json").read_text())  # type: ignore[attr-defined]
    init, box = (int(pid) for pid in entry["pids"] if int(pid) != entry["owner"])
    helpers = [pid for pid in processes.children_of(box) if pid != init and not processes.children_of(pid)]
    assert len(helpers) == 1
    os.kill(helpers[0], signal.SIGKILL)
    assert (await sandbox.exec("echo on")).stdout == "on\n"
    if sandbox.capabilities.memory_limit:
        assert (await sandbox.exec("exec python3 -c 'x = b\"a\" * (300 << 20)'")).rc == -9
    assert (await sandbox.exec("echo still")).stdout == "still\n"


async def test_a_command_runs_where_no_process_can_be_made(isolating: str, started: Maker) -> None:
    sandbox = await started(isolating, limits=Limits(memory_mb=256, pids=24, disk_mb=64))
    if not sandbox.capabilities.pids_limit:
        pytest.skip("no pids controller can be used here")
    await sandbox.exec("for i in $(seq 40); do setsid sleep 300 & done 2>/dev/null; sleep 0.2", timeout=5)
    assert (await sandbox.exec("echo there")).stdout == "there\n"
    await sandbox.kill_all()
    assert (await sandbox.exec("echo $(echo free)")).stdout == "free\n"
