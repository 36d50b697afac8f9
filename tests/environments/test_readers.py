"""Reading tasks: every schema version, every mistake named; Dockerfiles replayed or refused with the line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.environments import dockerfile, load_task, load_tasks, pythons, rewards
from gyre_sdk.environments.sandbox import online
from gyre_sdk.environments.sandbox.proxy import host_allowed
from gyre_sdk.errors import SandboxError, TaskError

MINIMAL = '[environment]\nnetwork_mode = "no-network"\n'


def _task(folder: Path, toml: str, *, dockerfile_text: str = "FROM debian:bookworm-slim\nWORKDIR /app\n") -> Path:
    for name, text in (
        ("task.toml", toml),
        ("instruction.md", "do it"),
        ("tests/test.sh", "echo 1 > /logs/verifier/reward.txt"),
        ("environment/Dockerfile", dockerfile_text),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "line", ['version = "1.0"', 'schema_version = "1.4"', "", *(f'schema_version = "1.{n}"' for n in range(5))]
)
def test_every_version_is_read(tmp_path: Path, line: str) -> None:
    task = load_task(_task(tmp_path, f"{line}\n{MINIMAL}"))
    assert (task.instruction, task.workdir, task.network, task.format) == ("do it", "/app", "off", "harbor")


def test_old_and_new_keys_mean_the_same(tmp_path: Path) -> None:
    old = load_task(
        _task(tmp_path / "a", '[environment]\nmemory = "2G"\nstorage = "1.5G"\nallow_internet = false\ncpus = 2\n')
    )
    new = load_task(
        _task(
            tmp_path / "b",
            '[environment]\nmemory_mb = 2048\nstorage_mb = 1536\nnetwork_mode = "no-network"\ncpus = 2\n',
        )
    )
    assert old.environment.limits == new.environment.limits
    assert old.environment.network == new.environment.network
    assert load_task(_task(tmp_path / "c", "")).network == "on", "Harbor's default"


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("[agent]\ntimeout = 3\n", r"agent\.timeout: no such key"),
        ("[agent]\ntimeout_sec = 0\n", r"agent\.timeout_sec: "),
        ('[environment]\nmemory = "lots"\n', r"environment\.memory: 'lots' is no size"),
        ('schema_version = "9.9"\n', "schema_version '9.9' is not one"),
        ("x = = 1", "not valid TOML"),
        ('[environment]\nnetwork_mode = "allowlist"\n', "allowed_hosts: needed"),
        ('[environment.env]\nKEY = "${GYRE_SURELY_NOT_SET}"\n', "GYRE_SURELY_NOT_SET.* is not set"),
        ('[[steps]]\nname = "one"\n', r"steps\.0\.name: there is no folder"),
        ('[verifier.environment]\nworkdir = "/x"\n', r"verifier\.environment: only allowed with"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, toml: str, told: str) -> None:
    with pytest.raises(TaskError, match=told) as caught:
        load_task(_task(tmp_path, toml))
    assert str(tmp_path / "task.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    (_task(tmp_path, MINIMAL) / "tests/test.sh").unlink()
    with pytest.raises(TaskError, match=r"test\.sh: missing"):
        load_task(tmp_path)
    with pytest.raises(TaskError, match="no tasks here"):
        load_tasks(tmp_path / "tests")
    with pytest.raises(TaskError, match="no such folder"):
        load_tasks(tmp_path / "nowhere")


def test_tasks_by_name(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        _task(tmp_path / name, MINIMAL)
    assert [task.name for task in load_tasks(tmp_path)] == ["a", "b", "c"]
    assert [task.name for task in load_tasks(tmp_path, only=["c", "a"])] == ["c", "a"]
    with pytest.raises(TaskError, match="no task 'z'; there are: a, b, c"):
        load_tasks(tmp_path, only=["z"])


def test_a_dockerfile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(
        "# syntax=docker/dockerfile:1\nARG TAG=3.13\nFROM --platform=linux/amd64 docker.io/library/python:${TAG}-slim\n"
        'ARG WHO=world\nENV GREETING="hello ${WHO}" OTHER=x\\ y\nENV OLD style here\nWORKDIR /srv\nWORKDIR app\n'
        'RUN apt-get update && \\\n    # why\n\n    apt-get install -y jq\nRUN ["echo", "a b"]\n'
        'COPY --chown=1000:1000 a b /data/\nADD c ./sub/\nUSER tester:staff\nRUN --mount=type=cache,target=/x true\nCMD ["bash"]\n'
    )
    recipe = dockerfile.read(path)
    assert (recipe.base, recipe.workdir, recipe.user) == ("python:3.13-slim", "/srv/app", "tester")
    assert recipe.env == {"GREETING": "hello world", "OTHER": "x y", "OLD": "style here"}
    runs = [action.command for action in recipe.actions if action.kind == "run"]
    assert runs == ["apt-get update &&     apt-get install -y jq", "echo 'a b'", "true"]
    copies = [(action.sources, action.target, action.chown) for action in recipe.actions if action.kind == "copy"]
    assert copies == [(("a", "b"), "/data/", "1000:1000"), (("c",), "/srv/app/sub/", "")]
    assert dockerfile.workdir(path) == "/srv/app"


@pytest.mark.parametrize(
    "line",
    [
        "FROM rust:1.75",
        "FROM debian AS build\nFROM debian",
        "FROM debian\nCOPY --from=build /a /b",
        'FROM debian\nENTRYPOINT ["x"]',
        "FROM debian\nADD https://example.org/x /x",
        "FROM debian\nADD x.tar.gz /x",
        "FROM debian\nRUN --mount=type=secret,id=x true",
        "FROM debian\nRUN <<EOF\ntrue\nEOF",
        "FROM debian\nVOLUME /x",
        'FROM debian\nSHELL ["zsh"]',
    ],
)
def test_what_cannot_be_replayed_says_so_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(line + "\n")
    with pytest.raises(TaskError, match=r"Dockerfile:\d+: .*needs docker or podman"):
        dockerfile.read(path)


def _rewards(folder: Path, **files: str) -> dict[str, float]:
    for name, text in files.items():
        (folder / f"reward.{name}").write_text(text)
    return rewards.read_rewards(folder)


def test_reward_json_comes_before_reward_txt(tmp_path: Path) -> None:
    assert _rewards(tmp_path, json='{"reward": 0.25, "style": 1}', txt="1") == {"reward": 0.25, "style": 1.0}
    (tmp_path / "reward.json").unlink()
    assert _rewards(tmp_path) == {"reward": 1.0}


@pytest.mark.parametrize(
    "files",
    [
        {}, {"txt": "nan"}, {"txt": "inf"}, {"txt": ""}, {"txt": "one"}, {"json": "{}"}, {"json": '{"reward": NaN}'}, {"json": "[1]"},
        {"json": '{"reward": "1"}'}, {"json": '{"reward": true}'}, {"json": '{"reward": Infinity}'}, {"json": "[" * 100_000},
        {"json": "oops", "txt": "1"}, {"txt": "1" * 2_000_000},
    ],
)  # fmt: skip
def test_a_reward_that_is_no_number_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    with pytest.raises(rewards.RewardMissing):
        _rewards(tmp_path, **files)


def test_a_reward_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "real")
    with pytest.raises(rewards.RewardMissing):
        rewards.read_rewards(tmp_path)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5), st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1
    )
)
def test_the_number_that_trains_is_finite(found: dict[str, float]) -> None:
    assert math.isfinite(rewards.scalar(found))


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("pypi.org", True),
        ("PyPI.org.", True),
        ("files.pypi.org", False),
        ("a.example.com", True),
        ("example.com", False),
        ("evilexample.com", False),
    ],
)
def test_allow_lists(host: str, allowed: bool) -> None:
    assert host_allowed(host, ("pypi.org", "*.example.com")) is allowed


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("python:3.13-slim-bookworm", "3.13"),
        ("python:3.10", "3.10"),
        ("python:3.12.4@sha256:00", "3.12"),
        ("python:slim", ""),
        ("python", ""),
        ("debian:12", None),
        ("ubuntu:24.04", None),
    ],
)
def test_the_python_that_an_image_stands_for(image: str, version: str | None) -> None:
    assert pythons.of_image(image) == version


def test_a_missing_python_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match=r"wants Python 3\.99.*uv python install 3\.99.*GYRE_PYTHON399"):
        pythons.find("3.99")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3.99").touch()
    (tmp_path / "lib/python3.99").mkdir(parents=True)
    (tmp_path / "lib/python3.99/os.py").touch()
    monkeypatch.setenv("GYRE_PYTHON399", str(tmp_path))
    assert pythons.find("3.99") == tmp_path
    assert pythons.version_of(tmp_path) == "3.99"


def test_a_proxy_with_a_password_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@proxy.example.org:3128")
    monkeypatch.setenv("http_proxy", "user:secret@proxy.example.org:3128")
    found = online.settings()
    assert found["HTTPS_PROXY"] == "http://proxy.example.org:3128"
    assert "secret" not in str(found)
