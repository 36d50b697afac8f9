"""Linear-attention layers on a tree: the recurrent state and the last conv inputs fork at branch points.

A Gated DeltaNet layer carries two things from token to token: the state S and, in its short convolution, the
last K - 1 inputs. Along a path both are what the path's own tokens made them, so a segment starts from what
its *parent segment* ended with, and siblings start from the same. Everything is plain autograd, so gradients
of all children add up in the parent. Exact: equal to running every path alone.

The rule (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464), for one head, decay g_t <= 0 in
log space, write strength b_t, q scaled by 1/sqrt(D):

    S <- exp(g_t) S;   u_t = b_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = S^T q_t

`install(model)` hooks it into transformers' models that keep to these two function names in their layer's
code (Qwen3-Next, Qwen3.5, Qwen3.5-MoE in 5.19); a model with any other linear-attention layer is refused.

Legend: U packed tokens, C conv channels, K conv width, H heads, D key width, E value width, T tokens of a
run.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from gyre_backend.errors import UnsupportedError
from gyre_backend.tree.plan import TreePlan, token_parents

CHUNK: Final = 64
_CONV: Final = "causal_conv1d_fn"
_RULES: Final = ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule")


def ancestors(plan: TreePlan, steps: int) -> np.ndarray:
    """int64[steps, U]: packed index of each token's 1st, 2nd, ... ancestor, -1 before its path's start."""
    size = plan.num_tokens
    parent = token_parents(plan)
    table = np.empty((steps, size), np.int64)
    current = np.arange(size, dtype=np.int64)
    for step in range(steps):
        current = np.where(current < 0, -1, parent[np.maximum(current, 0)])
        table[step] = current
    return table


def tree_causal_conv(
    x_1CU: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None, plan: TreePlan
) -> torch.Tensor:
    """Depthwise causal convolution along paths: [1, C, U] → [1, C, U]. Inputs before a path's start are 0."""
    width = weight_CK.shape[-1]
    out = x_1CU * weight_CK[:, -1, None]
    if width > 1:
        table = torch.from_numpy(ancestors(plan, width - 1)).to(x_1CU.device)
        padded = torch.cat((x_1CU, x_1CU.new_zeros(*x_1CU.shape[:2], 1)), -1)  # index -1 finds the zero
        size = x_1CU.shape[-1]
        for back in range(1, width):
            index = torch.where(table[back - 1] < 0, size, table[back - 1])
            out = out + padded.index_select(-1, index) * weight_CK[:, width - 1 - back, None]
    return out if bias_C is None else out + bias_C[:, None]


def _chunk_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk in closed form. q, k: [H, T, D]; v: [H, T, E]; g, beta: [H, T]; state: [H, D, E].

    With c = cumsum(g) and W = strictly lower part of (b_i k_i·k_j exp(c_i - c_j)), the writes u solve
    (I + W) u = b (v - exp(c) k S); outputs and the last state follow by matrix products.
    """
    size = q.shape[1]
    c = g.cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = (c[:, :, None] - c[:, None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (k * beta[..., None]) @ k.transpose(-1, -2) * decay
    grown = c.exp()[..., None]
    right = beta[..., None] * (v - (k * grown) @ state)
    writes = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = (q * grown) @ state + (q @ k.transpose(-1, -2) * decay) @ writes
    last = c[:, -1:]
    state = state * last[..., None].exp() + (k * (last - c).exp()[..., None]).transpose(-1, -2) @ writes
    return out, state


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A run of any length, chunk by chunk."""
    pieces = []
    for start in range(0, q.shape[1], CHUNK):
        at = slice(start, start + CHUNK)
        out, state = _chunk_rule(q[:, at], k[:, at], v[:, at], g[:, at], beta[:, at], state)
        pieces.append(out)
    return torch.cat(pieces, 1), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def tree_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    plan: TreePlan,
    *,
    l2norm: bool,
) -> torch.Tensor:
    """The gated delta rule on a tree: q, k [1, U, H, D], v [1, U, H, E], g, beta [1, U, H] → [1, U, H, E].

    Computes in float32 or wider, returns q's dtype. Keeps one state per segment that has children.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x[0].transpose(0, 1).to(wide) for x in (query, key, value))
    decay, strength = (x[0].transpose(0, 1).to(wide) for x in (g, beta))
    if l2norm:
        q, k = _unit(q), _unit(k)
    q = q * q.shape[-1] ** -0.5
    start = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    states: dict[int, torch.Tensor] = {}
    pieces = []
    bounds = zip(plan.seg_start.tolist(), plan.seg_end.tolist(), plan.seg_parent.tolist(), plan.seg_sub_end.tolist())
    for segment, (a, b, parent, sub_end) in enumerate(bounds):
        before = start if parent < 0 else states[parent]
        out, after = _run(q[:, a:b], k[:, a:b], v[:, a:b], decay[:, a:b], strength[:, a:b], before)
        if sub_end > b:
            states[segment] = after
        pieces.append(out)
    return torch.cat(pieces, 1).transpose(0, 1)[None].to(query.dtype)


def _conv_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    def conv(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        plan = kwargs.get("tree_plan")
        if plan is None:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        from transformers.activations import ACT2FN

        out = tree_causal_conv(hidden_states.to(weight.dtype), weight, bias, plan)
        out = out if activation is None else ACT2FN[activation](out)
        return out.to(hidden_states.dtype)

    return conv


def _rule_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        plan = kwargs.get("tree_plan")
        if plan is None:
            return original(query, key, value, g=g, beta=beta, **kwargs)
        l2norm = bool(kwargs.get("use_qk_l2norm_in_kernel"))
        return tree_gated_delta_rule(query, key, value, g, beta, plan, l2norm=l2norm), None

    return rule


def _recurrent(module: torch.nn.Module) -> bool:
    """True for a token mixer that carries a state: it has a depthwise convolution over time of its own."""
    return any(isinstance(child, torch.nn.Conv1d) for child in module.children())


def install(model: torch.nn.Module) -> int:
    """Make every linear-attention layer of a transformers model follow the `tree_plan` it is called with.

    Returns how many layers were hooked (0 for a model of full attention only). The hook is per layer: each
    layer gets its own class's `forward`, with the two functions it calls replaced; without a `tree_plan` it
    acts as before. Raises UnsupportedError, naming the layer, where the code doesn't call those functions.
    """
    hooked = 0
    for name, module in model.named_modules():
        if not _recurrent(module):
            continue
        forward = inspect.unwrap(type(module).forward)
        names = set(forward.__code__.co_names)
        rules = [rule for rule in _RULES if rule in names]
        if _CONV not in names or not rules:
            raise UnsupportedError(
                f"{name} ({type(module).__name__}) is a recurrent layer whose code can't be hooked: "
                "its state would run through sibling branches; use a model with full attention or Gated DeltaNet layers"
            )
        globals_ = dict(forward.__globals__)
        globals_[_CONV] = _conv_hook(globals_[_CONV])
        for rule in rules:
            globals_[rule] = _rule_hook(globals_[rule])
        swapped = types.FunctionType(
            forward.__code__, globals_, forward.__name__, forward.__defaults__, forward.__closure__
        )
        swapped.__kwdefaults__ = forward.__kwdefaults__
        module.forward = types.MethodType(swapped, module)
        hooked += 1
    if getattr(model, "_is_stateful", False) and not hooked:
        raise UnsupportedError(
            f"{type(model).__name__} carries a recurrent state in layers that can't be hooked; "
            "use a model with full attention or Gated DeltaNet layers"
        )
    return hooked
