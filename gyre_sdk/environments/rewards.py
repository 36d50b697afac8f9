"""Reading what a verifier left: reward.json before reward.txt, CTRF as metrics. Everything read is untrusted."""

from __future__ import annotations

import json
import math
from pathlib import Path

from gyre_sdk.environments.sandbox.archive import read_regular

MOST = 1e6
"""The largest reward, either sign, that is taken for one: a group's mean and deviation must stay numbers."""


class RewardMissing(Exception):
    """The verifier left no usable reward; the message says what was wrong. Not the policy's doing."""


def read_rewards(folder: Path) -> dict[str, float]:
    """Name -> finite number. Raises RewardMissing."""
    for name, parse in (("reward.json", _from_json), ("reward.txt", _from_text)):
        if (folder / name).is_symlink() or (folder / name).exists():
            data = read_regular(folder / name)
            if data is None:
                raise RewardMissing(f"{name} is not a small regular file")
            return parse(data, name)
    raise RewardMissing("the verifier left neither reward.json nor reward.txt")


def _from_json(data: bytes, name: str) -> dict[str, float]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RewardMissing(f"{name} is not JSON") from error
    if isinstance(found, int | float) and not isinstance(found, bool):
        found = {"reward": found}
    if not isinstance(found, dict) or not found:
        raise RewardMissing(f"{name} is not a table of numbers")
    return {str(key): _finite(value, f"{name}: {key}") for key, value in found.items()}


def _from_text(data: bytes, name: str) -> dict[str, float]:
    try:
        value = float(data.decode("ascii").strip())
    except (UnicodeDecodeError, ValueError) as error:
        raise RewardMissing(f"{name} holds no number") from error
    return {"reward": _finite(value, name)}


def _finite(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardMissing(f"{where} is not a number")
    if not abs(value) <= MOST:
        raise RewardMissing(f"{where} is not a number between -{MOST:g} and {MOST:g}")
    return float(value)


def scalar(rewards: dict[str, float]) -> float:
    """The one number that trains: `reward` if it is there, else the mean of all."""
    return rewards["reward"] if "reward" in rewards else sum(rewards.values()) / len(rewards)


def read_ctrf(folder: Path) -> dict[str, float]:
    """Counts of a CTRF report (`tests`, `passed`, `failed`, `skipped`), if there is one that can be read."""
    data = read_regular(folder / "ctrf.json", limit=8 << 20)
    if data is None:
        return {}
    try:
        summary = json.loads(data)["results"]["summary"]
        return {
            f"ctrf_{key}": float(summary[key])
            for key in ("tests", "passed", "failed", "skipped")
            if isinstance(summary.get(key), int | float) and math.isfinite(summary[key])
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
