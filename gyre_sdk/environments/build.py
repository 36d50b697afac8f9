"""Turning a task's Dockerfile into a prepared layer: replayed once in a sandbox, kept as an image, shared by every execution."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gyre_sdk.environments import dockerfile, pythons
from gyre_sdk.environments.sandbox import disk, journal
from gyre_sdk.environments.sandbox.base import Limits, Network, Sandbox, SandboxSpec
from gyre_sdk.environments.sandbox.namespaced import NamespaceSandbox
from gyre_sdk.environments.task import Environment
from gyre_sdk.errors import SandboxError, TaskError

_SHOWN = 400
_PYTHON_S = 300.0
_APT_AS_ROOT = "printf 'APT::Sandbox::User \"root\";\\n' > /etc/apt/apt.conf.d/99gyre 2>/dev/null || true"
_build_locks: dict[str, asyncio.Lock] = {}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a task's environment adds to a sandbox's spec."""

    layers: tuple[Path, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    workdir: str | None = None
    user: str | None = None
    image: str | None = None
    """Image to start, with a container engine."""
    replay: dockerfile.Recipe | None = None
    """To be replayed in every sandbox, where layers can't be kept."""
    python: Path | None = None
    """To be installed in every sandbox before that, for the same reason."""


async def prepare(environment: Environment, backend: str, rootfs: Path | None) -> Prepared:
    """Read and, where it does anything, build. Raises TaskError (can't be replayed) or SandboxError (a command failed)."""
    if backend in ("podman", "docker"):
        return await _prepare_image(environment, backend)
    if environment.needs:
        raise TaskError(f"{environment.folder or 'task'}: {environment.needs[0]} needs docker or podman")
    if environment.folder is None:
        if environment.image is not None:
            raise TaskError(f"image {environment.image} needs docker or podman (the task has no Dockerfile to replay)")
        return Prepared()
    recipe = dockerfile.read(environment.folder / "Dockerfile")
    prepared = Prepared(
        env=tuple(recipe.env.items()), workdir=recipe.workdir if recipe.workdir != "/" else None, user=recipe.user
    )
    version = pythons.of_image(recipe.base)
    python = await asyncio.to_thread(pythons.find, version) if version is not None and backend != "process" else None
    if backend not in ("bwrap", "unshare") or not await asyncio.to_thread(disk.loop_works):
        return replace(prepared, python=python, replay=recipe if _does_anything(recipe) else None)
    below = () if python is None else (await _python_layer(python, backend, rootfs),)
    if _does_anything(recipe):
        below = (await _layer(recipe, environment, backend, rootfs, below), *below)
    return replace(prepared, layers=below)


async def _prepare_image(environment: Environment, engine: str) -> Prepared:
    """With a container engine: the prebuilt image when the task names one, else the Dockerfile built as it is."""
    compose = [name for name in environment.needs if name.startswith("docker-compose")]
    if compose or "gpus" in environment.needs:
        raise TaskError(f"{environment.folder or 'task'}: {environment.needs[0]} is not supported")
    if environment.image is not None or environment.folder is None:
        return Prepared(image=environment.image)
    sha = hashlib.sha256()
    for path in sorted(environment.folder.rglob("*")):
        if path.is_file():
            sha.update(f"{path.relative_to(environment.folder)}\n".encode() + path.read_bytes())
    tag = f"gyre-task:{sha.hexdigest()[:20]}"
    async with _build_locks.setdefault(tag, asyncio.Lock()):
        process = await asyncio.create_subprocess_exec(
            engine, "build", "-t", tag, str(environment.folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(), environment.build_timeout_s)
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise SandboxError(
                f"{environment.folder}: build took longer than {environment.build_timeout_s:g} s"
            ) from error
    if process.returncode != 0:
        raise SandboxError(
            f"{environment.folder / 'Dockerfile'}: {engine} build: {out.decode(errors='replace').strip()[-_SHOWN:]}"
        )
    return Prepared(image=tag)


def _does_anything(recipe: dockerfile.Recipe) -> bool:
    """Whether more than the working directory must be made."""
    return any(action.kind != "mkdir" for action in recipe.actions)


async def _layer(
    recipe: dockerfile.Recipe, environment: Environment, backend: str, rootfs: Path | None, below: tuple[Path, ...]
) -> Path:
    """The image of what a Dockerfile makes, on top of `below`."""
    context = environment.folder
    assert context is not None
    key = await asyncio.to_thread(recipe.digest, context)
    key += "".join(f"-{layer.stem}" for layer in below)
    room = max(2048, environment.limits.disk_mb or 0)
    return await _kept(
        key,
        backend,
        rootfs,
        below,
        room,
        environment.build_timeout_s,
        lambda box: replay(box, recipe, context),
        str(context),
    )


async def _python_layer(home: Path, backend: str, rootfs: Path | None) -> Path:
    """The image of an interpreter in /usr/local, as in the images called `python`."""
    key = f"python-{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"
    return await _kept(key, backend, rootfs, (), 2048, _PYTHON_S, lambda box: install_python(box, home), str(home))


async def _kept(
    key: str,
    backend: str,
    rootfs: Path | None,
    below: tuple[Path, ...],
    room_mb: int,
    timeout_s: float,
    fill: Callable[[Sandbox], Awaitable[None]],
    what: str,
) -> Path:
    """The layer called `key`, made once: `fill` changes a sandbox over `below`, and its top layer is kept."""
    layers = journal.home() / "layers"
    layers.mkdir(mode=0o700, exist_ok=True)
    final = layers / f"{key}{'-' + rootfs.name if rootfs else ''}.img"
    async with _build_locks.setdefault(str(final), asyncio.Lock()):
        if final.exists():
            return final
        spec = SandboxSpec(
            name="build",
            rootfs=rootfs,
            layers=below,
            limits=Limits(memory_mb=None, disk_mb=room_mb),
            network=Network("on"),
            workdir="/",
            keep_layer=final,
        )
        sandbox = NamespaceSandbox(spec, backend)
        await sandbox.start()
        try:
            async with asyncio.timeout(timeout_s):
                await fill(sandbox)
            await sandbox.kill_all()
            await sandbox.stop(keep=True)
        except TimeoutError as error:
            raise SandboxError(f"{what}: build took longer than {timeout_s:g} s") from error
        finally:
            await sandbox.stop()
    return final


async def install_python(sandbox: Sandbox, home: Path) -> None:
    """Put a CPython of this machine into /usr/local, with pip and without its packages. Raises SandboxError."""
    version = pythons.version_of(home)
    if home != Path("/usr"):
        with tempfile.TemporaryDirectory(prefix="gyre-python-") as folder:
            await asyncio.to_thread(_pick_python, home, version, Path(folder))
            await sandbox.upload(Path(folder), "/usr/local")
    name = f"python{version}"
    linked = " && ".join(f"ln -sf $(command -v {name}) /usr/local/bin/{short}" for short in ("python3", "python"))
    done = await sandbox.exec(f"ldconfig; {linked} && {name} -m ensurepip --default-pip", cwd="/", timeout=_PYTHON_S)
    if done.rc != 0:
        raise SandboxError(
            f"Python {version} of {home} could not be put into the sandbox: {done.stderr.strip()[-_SHOWN:]}"
        )


def _pick_python(home: Path, version: str, folder: Path) -> None:
    """The interpreter, its libraries and headers; no packages, tests or static libraries."""
    name = f"python{version}"
    (folder / "bin").mkdir()
    (folder / "lib").mkdir()
    shutil.copy2(home / "bin" / name, folder / "bin" / name)
    for path in (home / "lib").glob("libpython*.so*"):
        shutil.copy2(path, folder / "lib" / path.name, follow_symlinks=False)
    left = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "idlelib", "turtledemo", "*.a")
    shutil.copytree(home / "lib" / name, folder / "lib" / name, ignore=left, symlinks=True)
    (folder / "lib" / name / "site-packages").mkdir()
    if (home / "include" / name).is_dir():
        shutil.copytree(home / "include" / name, folder / "include" / name)


async def replay(sandbox: Sandbox, recipe: dockerfile.Recipe, context: Path) -> None:
    """Do a recipe's actions in a sandbox. Raises SandboxError with the command that failed and the end of its output."""
    if sandbox.capabilities.rootfs:
        await sandbox.exec(_APT_AS_ROOT, cwd="/", user="root")
    elif any(action.kind == "run" for action in recipe.actions):
        raise SandboxError(
            f"{context / 'Dockerfile'}: RUN would change this machine itself under the {sandbox.backend} backend"
        )
    for action in recipe.actions:
        if action.kind == "copy":
            await _copy(sandbox, action, context)
        elif action.kind == "mkdir":
            await sandbox.exec(f"mkdir -p {_seen(sandbox, action.target)}", cwd="/", user="root")
        else:
            await _run(sandbox, action, context)


async def _run(sandbox: Sandbox, action: dockerfile.Action, context: Path) -> None:
    env = {"DEBIAN_FRONTEND": "noninteractive", **action.env}
    result = await sandbox.exec(action.command, cwd=action.workdir, env=env, user=action.user or "root")
    if result.rc != 0:
        told = (result.stdout + result.stderr).strip()[-_SHOWN:]
        raise SandboxError(f"{context / 'Dockerfile'}: RUN {action.command[:120]} ended with {result.rc}: {told}")


def _seen(sandbox: Sandbox, path: str) -> str:
    """A path for a command: without a root of its own a sandbox's files lie below $GYRE_ROOT."""
    return shlex.quote(path) if sandbox.capabilities.rootfs else f'"$GYRE_ROOT"{shlex.quote(path)}'


async def _copy(sandbox: Sandbox, action: dockerfile.Action, context: Path) -> None:
    sources = [path for pattern in action.sources for path in _matches(context, pattern)]
    is_folder = action.target.endswith("/") or len(sources) > 1
    if not is_folder:
        found = await sandbox.exec(f"test -d {_seen(sandbox, action.target)}", cwd="/", user="root")
        is_folder = found.rc == 0
    for source in sources:
        if source.is_dir():
            await sandbox.upload(source, action.target)
        else:
            await sandbox.upload(source, f"{action.target.rstrip('/')}/{source.name}" if is_folder else action.target)
    for option, tool in ((action.chmod, "chmod"), (action.chown, "chown")):
        if option:
            command = f"{tool} -R {shlex.quote(option)} {_seen(sandbox, action.target)}"
            await sandbox.exec(command, cwd="/", user="root")


def _matches(context: Path, pattern: str) -> list[Path]:
    """Files of the context for one COPY source. Raises TaskError when there are none, or outside the context."""
    if any(mark in pattern for mark in "*?["):
        names = sorted(context.glob(pattern))
        found = [path for path in names if fnmatch.fnmatch(str(path.relative_to(context)), pattern)]
    else:
        path = context / pattern
        found = [path] if path.exists() else []
    if not found:
        raise TaskError(f"{context / 'Dockerfile'}: COPY {pattern}: no such file in the build context")
    for path in found:
        if not path.resolve().is_relative_to(context.resolve()):
            raise TaskError(f"{context / 'Dockerfile'}: COPY {pattern} leaves the build context")
    return found
