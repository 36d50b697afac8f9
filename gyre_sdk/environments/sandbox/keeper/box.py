"""One sandbox: its mounts, its namespaces' init, and everything that runs inside. A process of its own, single threaded.

All mounts are made in the box's private mount namespace, so none can outlive it. Code and files of the sandbox are never used
before privileges are dropped: a child enters the namespaces, gives up what it must not have, and only then executes or touches files.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from . import cgroups, channel, inits, kernel, processes
from .child import Namespaces, run_child
from .spawner import Spawner
from .spawner import usable as spawner_usable

Message = dict[str, Any]


class Box:
    """Serves one sandbox's requests. Ends, leaving nothing, on `stop` or when the runner's end of the socket closes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.folder = Path()
        self.groups: list[str] = []
        self.keep_layer: str | None = None
        self.base = "/"
        self.init: inits.Init | None = None
        self.spawner: Spawner | None = None
        self.namespaces: Namespaces | None = None
        self.children: dict[int, int] = {}  # pid -> id of the request
        self.with_private: set[int] = set()  # pids of commands that were shown private folders
        self.stopping = False

    def run(self) -> int:
        """The loop. Returns the exit code."""
        kernel.die_with_parent(signal.SIGTERM)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        try:
            while not self.stopping:
                ready = dict(poll.poll())
                if wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                if self.connection.fileno() in ready and not self._serve_one():
                    break
        finally:
            self._tear_down()
        return 0

    def _on_term(self, *_: object) -> None:
        self.stopping = True

    def _serve_one(self) -> bool:
        received = channel.receive(self.connection)
        if received is None:
            return False
        message, fds = received
        try:
            handler = getattr(self, "do_" + message["op"])
            handler(message, fds)
        except (OSError, ValueError, KeyError) as error:
            self._reply(message["id"], error=f"{message['op']}: {error}")
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        return True

    def _reply(self, request: int, fds: list[int] | None = None, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.send(self.connection, {"id": request, **fields}, fds)

    # Requests -----------------------------------------------------------------------------------------------------

    def do_start(self, message: Message, fds: list[int]) -> None:
        """Make the mounts, the control groups and the namespaces, and start their init."""
        self.folder = Path(message["folder"])
        self.groups = cgroups.create(self.folder.name, **message["limits"])
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
        if spawner_usable():
            self.spawner = Spawner(self.groups, self._child, self._enter)  # joins the groups while we make mounts
        root = inits.mount_root(self.folder, message)
        self.keep_layer = message.get("keep_layer")
        self.base = message["base"]
        self.init = inits.start(message["backend"], root, network=message["network"], spawn=self._spawn)
        opened = Namespaces.of(self.init.pid, own_network=message["network"] == "own")
        if self.spawner is not None:
            self.spawner.enter(opened.descriptors())
        self._enter(opened.descriptors())
        self._reply(message["id"], pid=self.init.pid, keeper=os.getpid(), groups=self.groups)

    def do_run(self, message: Message, fds: list[int]) -> None:
        """exec, put, get or listen in a child; its exit is reported under the same id."""
        if self.namespaces is None or self.init is None or not self.init.alive():
            raise OSError("the sandbox has ended")
        trees = [
            (kernel.clone_tree(source or str(self._private(name))), target, bool(source))
            for name, source, target in message.get("private", ())
        ]
        if message["what"] == "scrub":
            (self.folder / "scratch" / "ballast").unlink(missing_ok=True)
            message = {**message, "upper": str(self.folder / "scratch" / "upper"), "base": self.base}
        for key in ("target", "source"):
            if str(message.get(key, "")).startswith("private:"):
                message = {**message, key: str(self._private(message[key][8:])), "outside": True}
        message = {**message, "trees": [(target, read_only) for _, target, read_only in trees]}
        descriptors = [*fds, *(tree for tree, _, _ in trees)]
        limited = message["what"] in ("exec", "put") and not message.get("outside")
        try:
            pid = self._spawn(message, descriptors) if limited else self._fork(message, descriptors, [])
        finally:
            for tree, _, _ in trees:
                os.close(tree)
        self.children[pid] = message["id"]
        if trees:
            self.with_private.add(pid)
        self._reply(message["id"], started=pid)

    # Children -----------------------------------------------------------------------------------------------------

    def _spawn(self, message: Message, fds: list[int]) -> int:
        """A child in the sandbox's control groups: born there, or, when the spawner can't any more, made to join them."""
        if self.spawner is not None:
            pid = self.spawner.spawn(message, fds)
            if pid is not None:
                return pid
            self.spawner = None
            self._kill_unknown()
        return self._fork(message, fds, self.groups)

    def _fork(self, message: Message, fds: list[int], groups: list[str]) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
            if pid == 0:
                self._child(message, fds, groups)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return pid

    def _child(self, message: Message, fds: list[int], groups: list[str] | None = None) -> None:
        """What a child does. Never returns."""
        if message["what"] == "init":
            cgroups.join(groups or [])
            inits.become(message, fds)
        if self.namespaces is None:
            os._exit(1)
        trees = message["trees"]
        mine = len(fds) - len(trees)
        shown = [(fd, target, read_only) for fd, (target, read_only) in zip(fds[mine:], trees, strict=True)]
        run_child(message, fds[:mine], self.namespaces, groups or [], shown, self.connection)

    def _enter(self, fds: list[int]) -> None:
        """Children belong to the sandbox's process namespace from here on."""
        self.namespaces = Namespaces(*fds)
        kernel.setns(self.namespaces.pid, kernel.CLONE_NEWPID)

    def _kill_unknown(self) -> None:
        """A spawner that failed may have made a child of ours that it did not tell of."""
        known = {*self.children, self.init.waited if self.init is not None else 0}
        for pid in processes.children_of(os.getpid()) - known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _private(self, name: str) -> Path:
        """A folder in memory, of limited size, that nothing inside sees. What a command writes there counts to the memory limit."""
        if not name.isidentifier():
            raise ValueError(f"bad private name {name!r}")
        path = self.folder / "private" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def do_kill(self, message: Message, fds: list[int]) -> None:
        """End one request's process with all that descends from it or shares its session."""
        for pid, request in self.children.items():
            if request == message["target"]:
                processes.kill_tree(pid)
        self._reply(message["id"])

    def do_kill_all(self, message: Message, fds: list[int]) -> None:
        """End everything in the sandbox but its init; with `keep_listening`, services with a listening socket live on."""
        if self.namespaces is None or self.init is None:
            raise OSError("the sandbox was never started")
        kept: list[str] = []
        if message["keep_listening"]:
            kept = processes.kill_all_but_listeners(self.init.pid)
        else:
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(OSError):
                    os.kill(-1, signal.SIGKILL)  # in its process namespace: everything there, at once, but the init
                os._exit(0)
            os.waitpid(pid, 0)
        self._reply(message["id"], kept=kept)

    def do_stop(self, message: Message, fds: list[int]) -> None:
        """End everything, remove everything, reply, and leave."""
        keep = self.keep_layer if message.get("keep") else None
        left = self._tear_down(keep)
        self._reply(message["id"], left=left)
        self.stopping = True

    # Ends ---------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.init is not None and pid == self.init.waited:
                self.init.ended = True
                self._reply(0, dead=True, status=status)
            request = self.children.pop(pid, None)
            if pid in self.with_private and self.init is not None:
                self.with_private.discard(pid)
                processes.kill_private(self.init.pid)  # before anyone reads what the command wrote there
            if request is not None:
                self._reply(request, exit=os.waitstatus_to_exitcode(status))

    def _tear_down(self, keep: str | None = None) -> list[str]:
        """Kill the init, and so the namespace; wait; remove groups and folder. Returns what could not be removed.

        `keep`: where the image with the top layer goes instead of being removed.
        """
        if self.spawner is not None:
            self.spawner.close()
            self.spawner = None
        if self.init is not None:
            self.init.kill(self._reap)
        if self.namespaces is not None:
            self.namespaces.close()
            self.namespaces = None
        left = cgroups.remove(self.groups)
        self.groups = []
        if self.folder.name:
            inits.unmount_root(self.folder)
            if keep is not None:
                os.sync()
                os.replace(self.folder / "disk.img", keep)
            until = time.monotonic() + 5
            while self.folder.exists():
                shutil.rmtree(self.folder, ignore_errors=True)
                if time.monotonic() > until:
                    left.append(str(self.folder))
                    break
        self.folder = Path()
        return left


if sys.platform != "linux":
    raise ImportError("the keeper needs Linux namespaces")
