"""From logits to tokens, with the logprob that the trainer will divide by.

The logprob is log-softmax of the logits divided by the temperature, before top-k and top-p cut anything off (as SGLang
reports it by default); at temperature 0 the best token is taken and its logprob is at temperature 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """SGLang's `sampling_params`, as far as they change what is sampled. Unknown ones are ignored, as there."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None

    def problem(self) -> str:
        """Why these can't be served; empty when they can."""
        if self.max_new_tokens < 0:
            return f"max_new_tokens must be at least 0, got {self.max_new_tokens}"
        if self.temperature < 0:
            return f"temperature must be non-negative, got {self.temperature}"
        if not 0 < self.top_p <= 1:
            return f"top_p must be in (0, 1], got {self.top_p}"
        if self.top_k < 1 and self.top_k != -1:
            return f"top_k must be -1 (disable) or at least 1, got {self.top_k}"
        return ""


def sample(logits: Any, params: Sequence[SamplingParams], positions: Sequence[int]) -> tuple[list[int], list[float]]:
    """One token per row of `logits float[B, V]`; returns ids and logprobs.

    A row with a seed draws by (seed, position) alone, `positions[i]` being the index that its token will have: the same
    context goes on the same way in any batch, on any engine.
    """
    import torch

    logits = logits.float()
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)
    logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    ids = torch.empty(len(params), dtype=torch.long, device=logits.device)
    plain = []
    for row, p in enumerate(params):
        if p.temperature == 0:
            ids[row] = logprobs[row].argmax()
        elif p.sampling_seed is None and p.top_k == -1 and p.top_p >= 1:
            plain.append(row)
        else:
            generator = None
            if p.sampling_seed is not None:
                generator = torch.Generator(device=logits.device)
                generator.manual_seed(_mix(p.sampling_seed, positions[row]))
            ids[row] = torch.multinomial(_cut(logprobs[row].exp(), p), 1, generator=generator)[0]
    if plain:
        ids[plain] = torch.multinomial(logprobs[plain].exp(), 1)[:, 0]
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    return ids.tolist(), chosen.tolist()


def _mix(seed: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _cut(probabilities: Any, params: SamplingParams) -> Any:
    """Top-k, then top-p, without renormalising: `multinomial` does that."""
    if params.top_k == -1 and params.top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(descending=True)
    if params.top_k != -1:
        ordered[params.top_k :] = 0
    if params.top_p < 1:
        above = ordered.cumsum(0) - ordered > params.top_p * ordered.sum()
        ordered[above] = 0
    return ordered.new_zeros(probabilities.shape).scatter(0, order, ordered)
