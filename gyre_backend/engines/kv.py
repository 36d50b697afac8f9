"""Keys and values of sequences, and the cache of finished ones that lets a new prompt skip what it shares.

Shapes: one sequence and layer holds keys and values `[Hkv, capacity, D]`; the first `length` positions are filled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_backend.errors import WeightsError

GROW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one position's keys and values look like in a model with full attention."""

    layers: int
    heads: int
    head_dim: int
    dtype: str
    device: str

    @property
    def bytes_per_token(self) -> int:
        """Of all layers together."""
        import torch

        return 2 * self.layers * self.heads * self.head_dim * int(getattr(torch, self.dtype).itemsize)


def kv_layout(model: Any) -> KVLayout:
    """The layout of a transformers causal model."""
    config = model.config.get_text_config()
    parameter = next(model.parameters())
    return KVLayout(
        layers=int(config.num_hidden_layers),
        heads=int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads),
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(parameter.device),
    )


class SequenceKV:
    """Keys and values of one sequence over all layers. Grows by half, so appending is cheap."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: list[Any] = []
        self._values: list[Any] = []

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return int(self._keys[0].shape[1]) if self._keys else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the filled positions."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.parts())

    def append(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Add `keys, values [Hkv, n, D]` at `layer` behind `length`; returns both `[Hkv, length + n, D]`.

        `length` itself moves only at `advance`, once every layer has been written.
        """
        count = keys.shape[1]
        if layer == len(self._keys):
            shape = (keys.shape[0], max(self.length + count, GROW_TOKENS), keys.shape[2])
            self._keys.append(keys.new_empty(shape))
            self._values.append(values.new_empty((values.shape[0], shape[1], values.shape[2])))
        end = self.length + count
        if end > self._keys[layer].shape[1]:
            self._keys[layer] = _grown(self._keys[layer], self.length, end)
            self._values[layer] = _grown(self._values[layer], self.length, end)
        self._keys[layer][:, self.length : end] = keys
        self._values[layer][:, self.length : end] = values
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def advance(self, count: int) -> None:
        """Every layer holds `count` more positions."""
        self.length += count

    def prefix(self, length: int) -> SequenceKV:
        """A copy of the first `length` positions, with room behind them."""
        copy = SequenceKV()
        copy.length = length
        copy._keys = [_grown(keys, length, length + GROW_TOKENS) for keys in self._keys]
        copy._values = [_grown(values, length, length + GROW_TOKENS) for values in self._values]
        return copy

    def parts(self) -> list[tuple[str, Any]]:
        """(name, tensor [Hkv, length, D]) of every layer's keys and values, in a fixed order."""
        keys = [(f"k{i:04d}", keys[:, : self.length]) for i, keys in enumerate(self._keys)]
        return keys + [(f"v{i:04d}", values[:, : self.length]) for i, values in enumerate(self._values)]

    def to_host(self) -> SequenceKV:
        """A copy in host memory without room behind the filled positions: each part is contiguous."""
        copy = SequenceKV()
        copy.length = self.length
        copy._keys = [keys[:, : self.length].to("cpu", copy=True).contiguous() for keys in self._keys]
        copy._values = [values[:, : self.length].to("cpu", copy=True).contiguous() for values in self._values]
        return copy

    def to_device(self, device: str) -> SequenceKV:
        """This sequence with its tensors there."""
        self._keys = [keys.to(device) for keys in self._keys]
        self._values = [values.to(device) for values in self._values]
        return self

    @classmethod
    def empty(cls, layout: KVLayout, length: int) -> SequenceKV:
        """Host memory for `length` positions, to be filled by a read. The pages are touched: a first touch in a transfer is slow."""
        import torch

        made = cls()
        made.length = length
        shape, dtype = (layout.heads, length, layout.head_dim), getattr(torch, layout.dtype)
        made._keys = [torch.zeros(shape, dtype=dtype) for _ in range(layout.layers)]
        made._values = [torch.zeros(shape, dtype=dtype) for _ in range(layout.layers)]
        return made

    def to_bytes(self) -> bytes:
        """The filled positions of every layer, in safetensors' format."""
        from safetensors.torch import save

        data: bytes = save({name: tensor.contiguous() for name, tensor in self.parts()})
        return data

    @classmethod
    def from_bytes(cls, data: bytes, length: int) -> SequenceKV:
        """The inverse of `to_bytes`. Raises WeightsError for other bytes."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            parts = load(data)
        except SafetensorError as error:
            raise WeightsError(f"not keys and values: {error}") from error
        made = cls()
        made.length = length
        made._keys = [parts[name] for name in sorted(parts) if name.startswith("k")]
        made._values = [parts[name] for name in sorted(parts) if name.startswith("v")]
        return made


def _grown(old: Any, filled: int, needed: int) -> Any:
    new = old.new_empty((old.shape[0], max(needed, filled + filled // 2), old.shape[2]))
    new[:, :filled] = old[:, :filled]
    return new


@dataclass(slots=True)
class _Entry:
    salt: Hashable
    ids: NDArray[np.int32]
    kv: SequenceKV


class PrefixCache:
    """Finished sequences, least recently used first out, bounded in tokens of room held. Entries of different salts never meet."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._next = 0

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.tokens = 0

    def longest(self, salt: Hashable, ids: NDArray[np.int32]) -> tuple[int, SequenceKV | None]:
        """The most leading tokens of `ids` that an entry of the same salt holds, and a copy of their keys and values.

        Never all of `ids`: the last token is computed anew, since its hidden state is what is sampled from.
        """
        best, best_key = 0, -1
        for key, entry in self._entries.items():
            if entry.salt == salt:
                length = min(common_prefix(entry.ids, ids), entry.kv.length, len(ids) - 1)
                if length > best:
                    best, best_key = length, key
        if best_key < 0:
            return 0, None
        self._entries.move_to_end(best_key)
        return best, self._entries[best_key].kv.prefix(best)

    def add(self, salt: Hashable, ids: NDArray[np.int32], kv: SequenceKV) -> None:
        """Keep a sequence whose first `kv.length` tokens are `ids[:kv.length]`. What it extends is dropped."""
        held = ids[: kv.length]
        if not len(held) or kv.capacity > self.max_tokens:
            return
        for key in [k for k, e in self._entries.items() if e.salt == salt and _is_prefix(e, held)]:
            self._drop(key)
        self._entries[self._next] = _Entry(salt, held, kv)
        self._next += 1
        self.tokens += kv.capacity
        self.shrink(self.max_tokens)

    def shrink(self, tokens: int) -> None:
        """Drop the least recently used until at most `tokens` are held."""
        while self.tokens > tokens:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: int) -> None:
        self.tokens -= self._entries.pop(key).kv.capacity


def _is_prefix(entry: _Entry, ids: NDArray[np.int32]) -> bool:
    return len(entry.ids) <= len(ids) and bool(np.array_equal(entry.ids, ids[: len(entry.ids)]))


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading ids agree."""
    count = min(len(a), len(b))
    different = np.flatnonzero(a[:count] != b[:count])
    return int(different[0]) if len(different) else count
