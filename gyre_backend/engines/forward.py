"""One forward pass over the next tokens of many sequences at once: packed, no padding, each attending to its own keys.

The tokens of all sequences are laid one behind the other, `ids [1, T]`; layers that work position by position see them
as one long sequence, and the attention function below cuts them apart again. Prompts and single new tokens mix freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_backend.engines.kv import SequenceKV
from gyre_backend.errors import UnsupportedError

ATTENTION = "gyre_engine"


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `ids` of a sequence whose earlier tokens are in `kv`."""

    ids: NDArray[np.int32]
    kv: SequenceKV


def register() -> None:
    """Make the attention known to transformers under the name `gyre_engine`. Safe to call again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def prepare(model: Any) -> Any:
    """Point a causal model at the engine's attention, in evaluation mode. Raises UnsupportedError for what it can't serve."""
    config = model.config.get_text_config()
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedError("the embedded engine does not serve models with sliding_window; use an SGLang server")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise UnsupportedError("the embedded engine serves full attention only (layer_types); use an SGLang server")
    register()
    model.set_attn_implementation(ATTENTION)
    model.eval()
    return model


def step(model: Any, pieces: Sequence[Piece]) -> Any:
    """Run every piece; returns logits `float[len(pieces), V]` behind each piece's last token, and advances the caches."""
    import torch

    lengths = [len(piece.ids) for piece in pieces]
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.concatenate([piece.ids for piece in pieces]).astype(np.int64)).to(device)[None]
    positions = torch.cat([torch.arange(p.kv.length, p.kv.length + n, device=device) for p, n in zip(pieces, lengths)])[
        None
    ]
    last = torch.tensor(np.cumsum(lengths) - 1, device=device)
    with torch.inference_mode():
        output = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=last,
            engine_pieces=list(zip([piece.kv for piece in pieces], lengths)),
        )
    for piece, length in zip(pieces, lengths):
        piece.kv.advance(length)
    return output.logits[0]


def _attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    engine_pieces: Sequence[tuple[SequenceKV, int]] = (),
    **kwargs: Any,
) -> tuple[Any, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]; each piece against its own keys, causally."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    out = torch.empty_like(query)
    start = 0
    for kv, count in engine_pieces:
        end = start + count
        keys, values = kv.append(module.layer_idx, key[0, :, start:end], value[0, :, start:end])
        groups = query.shape[1] // keys.shape[0]
        if count == 1:
            # The query heads that share a key head stand in the place of queries: no copy of keys per query head.
            rows = query[:, :, start].reshape(1, keys.shape[0], groups, -1)
            mixed = scaled_dot_product_attention(rows, keys[None], values[None], scale=scaling)
            out[:, :, start] = mixed.reshape(1, query.shape[1], -1)
        else:
            past = keys.shape[1] - count
            mask = None
            if past:
                mask = torch.ones(count, past + count, dtype=torch.bool, device=query.device).tril(past)
            out[:, :, start:end] = scaled_dot_product_attention(
                query[:, :, start:end],
                keys[None],
                values[None],
                attn_mask=mask,
                is_causal=not past,
                scale=scaling,
                enable_gqa=groups != 1,
            )
        start = end
    return out.transpose(1, 2), None
