"""Deltas: re-applied exactly, never outside, never half."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.errors import WeightsError
from gyre_backend.weights import delta, region_of_array
from gyre_backend.weights.manifest import chunk_digests


@given(
    data=st.data(),
    dtype=st.sampled_from(["float16", "float32", "float64", "uint8"]),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_apply_undoes_encode(data: st.DataObject, dtype: str, sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = [rng.integers(0, 255, n).astype(dtype) for n in sizes]
    new = [a.copy() for a in old]
    for array in new:
        if array.size:
            where = data.draw(st.lists(st.integers(0, array.size - 1), max_size=20))
            array[where] += 1
    regions = [region_of_array(str(i), a) for i, a in enumerate(new)]
    made = delta.encode([a.view(np.uint8) for a in old], regions, limit_bytes=1 << 30)
    assert made is not None
    targets = [region_of_array(str(i), a) for i, a in enumerate(old)]
    delta.apply(made, targets)
    for target, region in zip(targets, regions, strict=True):
        assert chunk_digests(target.view) == chunk_digests(region.view)


def test_too_long_a_delta_is_not_made() -> None:
    old, new = np.zeros(1000, dtype=np.float32), np.ones(1000, dtype=np.float32)
    assert delta.encode([old.view(np.uint8)], [region_of_array("x", new)], limit_bytes=4000) is None


def test_malformed_deltas_change_nothing() -> None:
    array = np.zeros(10, dtype=np.float32)
    region = region_of_array("x", array)
    made = delta.encode(
        [np.zeros(40, np.uint8)], [region_of_array("x", np.arange(10, dtype=np.float32))], limit_bytes=999
    )
    assert made is not None
    outside = made.copy()
    outside[8:12] = np.frombuffer((99).to_bytes(4, "little"), dtype=np.uint8)
    many = made.copy()
    many[:8] = 255
    for wrong in (made[:4], made[:-1], np.concatenate([made, made[:3]]), outside, many):
        with pytest.raises(WeightsError):
            delta.apply(wrong, [region])
        assert not array.any()
