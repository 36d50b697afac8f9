"""Which numbers of a Hugging Face tensor a Megatron rank holds, and where. Copying between the two is exact.

Every Megatron parameter of a rank is a set of pieces: a region of the parameter and the equal-shaped region
of one Hugging Face tensor. The same pieces serve weights, gradients and optimizer moments, in both
directions.

Legend: G query groups, R queries per group, D head width, d hidden width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gyre_backend.errors import TrainingError
from gyre_backend.trainers.megatron_layout import Shape

View = Callable[[torch.Tensor], torch.Tensor]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """`hf(hf_tensor)` and `local(parameter)` are views of equal shape that hold the same numbers."""

    hf_name: str
    hf: View
    local: View


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter of this rank and its place in the Hugging Face model."""

    name: str
    parameter: torch.nn.Parameter
    pieces: tuple[Piece, ...]
    split: bool
    """True when tensor-parallel ranks hold different parts of it; False when each holds all."""
    partial: bool
    """True when each tensor-parallel rank's gradient is only its own heads' share (query and key norms)."""
    copy: bool
    """True for the last stage's copy of a tied embedding: its gradient is a share of the first stage's."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes of the model and this rank's place among the tensor-parallel ranks."""

    groups: int
    queries: int
    head: int
    hidden: int
    vocab: int
    padded_vocab: int
    tied: bool
    tp_rank: int
    tp: int

    @classmethod
    def of(cls, hf: Shape, *, tp_rank: int, tp: int, padded_vocab: int) -> Geometry:
        groups = int(hf.num_key_value_heads)
        return cls(
            groups=groups,
            queries=int(hf.num_attention_heads) // groups,
            head=hf.head_dim,
            hidden=int(hf.hidden_size),
            vocab=int(hf.vocab_size),
            padded_vocab=padded_vocab,
            tied=bool(hf.tie_word_embeddings),
            tp_rank=tp_rank,
            tp=tp,
        )

    def part(self, size: int) -> slice:
        each = size // self.tp
        return slice(self.tp_rank * each, (self.tp_rank + 1) * each)


def hf_shapes(hf: Shape) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of the checkpoint, in the order of transformers' `named_parameters`.

    A tied `lm_head.weight` is left out, as transformers does. Experts are one tensor each, as checkpoints
    store them.
    """
    head, hidden, ffn = hf.head_dim, int(hf.hidden_size), int(hf.intermediate_size)
    wide, narrow = int(hf.num_attention_heads) * head, int(hf.num_key_value_heads) * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (int(hf.vocab_size), hidden)}
    for i in range(hf.num_hidden_layers):
        at = f"model.layers.{i}"
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if hf.model_type == "qwen2":
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, wide)
        if hf.model_type in ("qwen3", "qwen3_moe"):
            shapes[f"{at}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (head,)
        sparse = hf.sparse(i)
        if sparse:
            shapes[f"{at}.mlp.gate.weight"] = (int(hf.num_experts), hidden)
        width = int(hf.moe_intermediate_size) if sparse else ffn
        for expert in [f".experts.{e}" for e in range(hf.num_experts)] if sparse else [""]:
            shapes[f"{at}.mlp{expert}.gate_proj.weight"] = (width, hidden)
            shapes[f"{at}.mlp{expert}.up_proj.weight"] = (width, hidden)
            shapes[f"{at}.mlp{expert}.down_proj.weight"] = (hidden, width)
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not hf.tie_word_embeddings:
        shapes["lm_head.weight"] = (int(hf.vocab_size), hidden)
    return shapes


def _qkv(at: str, kind: str, g: Geometry) -> tuple[Piece, ...]:
    """linear_qkv's rows are, per query group: R query heads, one key head, one value head."""
    mine = g.part(g.groups)
    tail = (g.hidden,) if kind == "weight" else ()

    def local(first: int, last: int) -> View:
        return lambda t: t.view(-1, g.queries + 2, g.head, *tail)[:, first:last]

    def hf(heads: int) -> View:
        return lambda t: t.view(g.groups, heads, g.head, *tail)[mine]

    return (
        Piece(f"{at}.self_attn.q_proj.{kind}", hf(g.queries), local(0, g.queries)),
        Piece(f"{at}.self_attn.k_proj.{kind}", hf(1), local(g.queries, g.queries + 1)),
        Piece(f"{at}.self_attn.v_proj.{kind}", hf(1), local(g.queries + 1, g.queries + 2)),
    )


def _gate_up(at: str, g: Geometry) -> tuple[Piece, ...]:
    """linear_fc1's rows are the gate's part, then up's part."""
    return tuple(
        Piece(
            f"{at}.{name}.weight",
            lambda t: t[g.part(t.shape[0])],
            lambda t, half=half: t.view(2, -1, g.hidden)[half],  # type: ignore[misc]
        )
        for half, name in enumerate(("gate_proj", "up_proj"))
    )


def _columns(name: str, g: Geometry) -> tuple[Piece, ...]:
    return (Piece(name, lambda t: t[:, g.part(t.shape[1])], _whole),)


def _vocab(name: str, g: Geometry) -> tuple[Piece, ...]:
    rows = g.part(g.padded_vocab)
    last = min(rows.stop, g.vocab)
    return (Piece(name, lambda t: t[rows.start : last], lambda t: t[: last - rows.start]),)


def _layer_pieces(rest: str, at: str, g: Geometry) -> tuple[Piece, ...] | None:
    replicated = {
        "input_layernorm.weight": f"{at}.input_layernorm.weight",
        "pre_mlp_layernorm.weight": f"{at}.post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": f"{at}.self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": f"{at}.self_attn.k_norm.weight",
        "mlp.router.weight": f"{at}.mlp.gate.weight",
    }
    if rest in replicated:
        return (Piece(replicated[rest], _whole, _whole),)
    if match := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", rest):
        return _qkv(at, match[1], g)
    if rest == "self_attention.linear_proj.weight":
        return _columns(f"{at}.self_attn.o_proj.weight", g)
    if match := re.fullmatch(r"mlp(?:\.experts\.local_experts\.(\d+))?\.linear_fc([12])\.weight", rest):
        mlp = f"{at}.mlp" if match[1] is None else f"{at}.mlp.experts.{match[1]}"
        return _gate_up(mlp, g) if match[2] == "1" else _columns(f"{mlp}.down_proj.weight", g)
    return None


def _pieces(name: str, first_layer: int, g: Geometry) -> tuple[Piece, ...]:
    if name == "embedding.word_embeddings.weight":
        return _vocab("model.embed_tokens.weight", g)
    if name == "output_layer.weight":
        return _vocab("model.embed_tokens.weight" if g.tied else "lm_head.weight", g)
    if name == "decoder.final_layernorm.weight":
        return (Piece("model.norm.weight", _whole, _whole),)
    if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
        found = _layer_pieces(match[2], f"model.layers.{int(match[1]) + first_layer}", g)
        if found is not None:
            return found
    raise TrainingError(f"the Megatron parameter {name} has no known place in the Hugging Face model")


def held(model: Any, g: Geometry) -> list[Held]:
    """Every parameter of this rank's GPTModel with its pieces, in the model's own order."""
    layers = model.decoder.layers
    first_layer = layers[0].layer_number - 1 if len(layers) else 0
    result = []
    for name, parameter in model.named_parameters():
        norm = "q_layernorm" in name or "k_layernorm" in name
        result.append(
            Held(
                name=name,
                parameter=parameter,
                pieces=_pieces(name, first_layer, g),
                split="layernorm" not in name and "router" not in name and g.tp > 1,
                partial=norm and g.tp > 1,
                copy=name == "output_layer.weight" and g.tied,
            )
        )
    return result


def pull(parameters: list[Held], hf: Mapping[str, torch.Tensor]) -> None:
    """Hugging Face tensors → parameters. The vocabulary's padding rows become 0."""
    with torch.no_grad():
        for item in parameters:
            if "embed" in item.pieces[0].hf_name or "lm_head" in item.pieces[0].hf_name:
                item.parameter.zero_()
            for piece in item.pieces:
                piece.local(item.parameter.data).copy_(piece.hf(hf[piece.hf_name]))


def push(parameters: list[Held], hf: Mapping[str, torch.Tensor], *, tp_rank: int) -> None:
    """Parameters → Hugging Face tensors, each number written by one rank of a replica."""
    with torch.no_grad():
        for item in parameters:
            if item.copy or (tp_rank > 0 and not item.split):
                continue
            for piece in item.pieces:
                piece.hf(hf[piece.hf_name]).copy_(piece.local(item.parameter.data))


def add_grads(parameters: list[Held], hf: Mapping[str, torch.Tensor], *, tp_rank: int) -> None:
    """Add this rank's share of the gradient to Hugging Face tensors, and zero its own. One rank at a time."""
    for item in parameters:
        grad = item.parameter.main_grad
        if item.split or item.partial or tp_rank == 0:
            for piece in item.pieces:
                target = piece.hf(hf[piece.hf_name])
                target.add_(piece.local(grad))
        grad.zero_()


def take_grads(parameters: list[Held], hf: Mapping[str, torch.Tensor], *, tp_rank: int, dp_rank: int) -> None:
    """Add the Hugging Face tensors' numbers to this rank's gradient where megatron-core then expects them.

    The reduction over replicas sums, so only the first replica takes; so do the reductions of query and key
    norms over tensor-parallel ranks, and of a tied embedding over its two stages.
    """
    if dp_rank > 0:
        return
    for item in parameters:
        if item.copy or (item.partial and tp_rank > 0):
            continue
        for piece in item.pieces:
            piece.local(item.parameter.main_grad).add_(piece.hf(hf[piece.hf_name]))
