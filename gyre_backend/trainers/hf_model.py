"""A transformers causal LM that computes over tree plans: attention through transformers' own interface, no
patch.

Loading refuses every setting under which a tree could not equal its flattened paths, then proves on a small
tree that the loaded model does: code that ignores the attention interface, or lets state run between
branches, is found before training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from gyre_backend.errors import UnsupportedError
from gyre_backend.select.paths import TrainPath
from gyre_backend.tree import linear
from gyre_backend.tree.attend import tree_attention
from gyre_backend.tree.dfs import KVStack, SegmentForward
from gyre_backend.tree.loss import Head
from gyre_backend.tree.plan import TreePlan, build_plan, edge_child, flatten_plan

ATTENTION = "gyre_tree"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_PROOF_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2}


def load_model(folder: Path, *, dtype: str, device: str, attention: str) -> Any:
    """The model in training mode on `device`, hooked for tree plans. Raises UnsupportedError, naming the
    setting."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

    if dtype not in DTYPES:
        raise UnsupportedError(f"trainer.dtype = {dtype!r}: wanted {', '.join(DTYPES)}")
    if not (folder / "config.json").is_file():
        raise UnsupportedError(f"{folder} holds no config.json: wanted a transformers model folder")
    refuse(AutoConfig.from_pretrained(folder, local_files_only=True))
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    extra = {"experts_implementation": "eager"} if dtype == "float64" else {}  # grouped kernels know no float64
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation=ATTENTION, local_files_only=True, **extra
        )
    model.gyre_recurrent_layers = linear.install(model)
    _refuse_dropout_modules(model)
    model.to(device).train()
    model.config.use_cache = False
    model.gyre_attention = attention
    prove(model)
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers' own progress bars off, for as long as it lasts: a cell's output belongs to its
    service."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def refuse(config: Any) -> None:
    """Raise UnsupportedError for the first setting of a transformers config that rules exactness out."""
    config = config.get_text_config()
    values = config.to_dict()
    ignored = {"classifier_dropout", "summary_first_dropout", "head_dropout"}
    for name, value in values.items():
        if ("dropout" in name or name.endswith("pdrop")) and name not in ignored and value not in (None, 0, False):
            raise UnsupportedError(
                f"{name} = {value}: a tree shares one mask among paths; set {name} to 0 in config.json"
            )
        if "capacity" in name and value not in (None, False):
            raise UnsupportedError(f"{name} = {value}: dropping by capacity depends on the other tokens of the batch")
    if values.get("output_router_logits"):
        raise UnsupportedError(
            "output_router_logits = true: the auxiliary loss counts a shared token once; set it to false"
        )
    for name in ("sliding_window", "attention_chunk_size"):
        if values.get(name) and values.get(f"use_{name}", True):
            raise UnsupportedError(f"{name} = {values[name]}: only full attention is supported over a tree")
    for kind in sorted(set(values.get("layer_types") or ())):
        if kind not in ("full_attention", "linear_attention"):
            raise UnsupportedError(f"layer_types has {kind!r}: wanted full_attention or linear_attention")


def _refuse_dropout_modules(model: Any) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            raise UnsupportedError(
                f"{name} is a dropout of {module.p}: a tree shares one mask among paths; set it to 0"
            )


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The plan says who sees whom; no mask is built."""


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_plan: TreePlan | None = None,
    tree_backend: str = "auto",
    tree_stack: KVStack | None = None,
    **modifiers: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function. q: [1, Hq, U, D]; k, v: [1, Hkv, U, D] -> [1, U, Hq, D]."""
    if dropout > 0.0:
        raise UnsupportedError(f"attention dropout = {dropout}: set it to 0 in config.json")
    for name in ("softcap", "s_aux", "sliding_window", "head_mask", "position_bias"):
        if modifiers.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} uses the attention modifier {name!r}, which a tree does not support"
            )
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, rotary positions widen these two
    if tree_stack is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return tree_stack.attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None
    if tree_plan is None:
        raise UnsupportedError(f"{type(module).__name__} does not hand its caller's arguments on to attention")
    out = tree_attention(query, key, value, tree_plan, scale=scaling, backend=tree_backend)
    return out.transpose(1, 2), None


def hidden_states(model: Any, plan: TreePlan) -> torch.Tensor:
    """[U, d]: the last hidden state of every packed token."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(plan.ids.astype(np.int64)).to(device)[None]
    positions = torch.from_numpy(plan.pos.astype(np.int64)).to(device)[None]
    out = model.base_model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=None,
        use_cache=False,
        tree_plan=plan,
        tree_backend=model.gyre_attention,
    )
    return out.last_hidden_state[0]


def segment_forward(model: Any) -> SegmentForward:
    """The forward pass of one segment over what its ancestors left on a stack."""

    def forward(ids: np.ndarray, positions: np.ndarray, stack: KVStack) -> torch.Tensor:
        device = next(model.parameters()).device
        out = model.base_model(
            input_ids=torch.from_numpy(ids.astype(np.int64)).to(device)[None],
            position_ids=torch.from_numpy(positions.astype(np.int64)).to(device)[None],
            attention_mask=None,
            use_cache=False,
            tree_stack=stack,
        )
        return out.last_hidden_state[0]

    return forward


def head_of(model: Any, temperature: float = 1.0) -> Head:
    """Hidden states [R, d] -> logits [R, V], with the scaling or soft cap that the model's config names, at
    the sampler's temperature."""
    project = model.get_output_embeddings()
    config = model.config.get_text_config()
    multiply, divide = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None)

    def head(rows: torch.Tensor) -> torch.Tensor:
        logits = project(rows)
        if multiply is not None:
            logits = logits * multiply
        if divide is not None:
            logits = logits / divide
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits if temperature == 1.0 else logits / temperature

    return head


class _Keep64(TorchFunctionMode):
    """float64 stays float64 where a model's code casts to float32 (norms, routers, softmax)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if func is torch.Tensor.float:
                return first
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def precision(model: Any, autocast: str = "") -> Iterator[None]:
    """The arithmetic of forward and backward: as it is written; wholly float64 in a float64 model; or
    autocast."""
    weight = next(model.parameters())
    if weight.dtype == torch.float64:
        with _Keep64():
            yield
    elif autocast:
        with torch.autocast(weight.device.type, DTYPES[autocast]):
            yield
    else:
        yield


def enable_checkpointing(model: Any) -> None:
    """Recompute each layer in the backward pass, in the arithmetic of its forward."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if next(model.parameters()).dtype == torch.float64:  # a backward pass suspends the mode around it
        settings["context_fn"] = lambda: (contextlib.nullcontext(), _Keep64())
    model.gradient_checkpointing_enable(settings)


def prove(model: Any) -> None:
    """Compare a small tree with its flattened paths, and the head with the model's own logits.
    UnsupportedError if they differ."""
    vocabulary = model.get_input_embeddings().num_embeddings
    plan = _proof_plan(vocabulary)
    flat = flatten_plan(plan)
    dtype = next(model.parameters()).dtype
    with torch.no_grad(), precision(model):
        tree_hidden, flat_hidden = hidden_states(model, plan), hidden_states(model, flat)
        differs = _relative(tree_hidden[edge_child(plan)], flat_hidden[edge_child(flat)])
        if not differs <= _PROOF_TOLERANCE[dtype]:
            raise UnsupportedError(
                f"{type(model).__name__} computes a tree differently from its paths "
                f"(relative difference {differs:.1e}): its code does not keep branches apart"
            )
        ids = torch.from_numpy(flat.ids.astype(np.int64))[None].to(tree_hidden.device)
        positions = torch.from_numpy(flat.pos.astype(np.int64))[None].to(tree_hidden.device)
        logits = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            tree_plan=flat,
            tree_backend=model.gyre_attention,
        ).logits[0]
        differs = _relative(head_of(model)(flat_hidden), logits)
    if not differs <= _PROOF_TOLERANCE[dtype]:
        raise UnsupportedError(
            f"{type(model).__name__} does more than a projection to get logits (off by {differs:.1e})"
        )


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def _proof_plan(vocabulary: int) -> TreePlan:
    """A trunk of 5 with two branches, one of which branches again; its first branch would disturb the others
    if it leaked."""
    draw = np.random.default_rng(0).integers(0, vocabulary, 40, dtype=np.int32)
    for place in (1, 2, 3):  # siblings must differ in their first token
        draw[10 * place] = (draw[0] + place) % vocabulary
    branches = [draw[10:17], draw[20:24], np.concatenate([draw[20:24], draw[30:34]])]
    paths = []
    for call, branch in enumerate(branches):
        ids = np.concatenate([draw[:5], branch])
        fresh = np.arange(len(ids)) >= (9 if call == 2 else 5)
        paths.append(
            TrainPath(
                execution="proof",
                group="proof",
                role="main",
                leaf=str(call),
                token_ids=ids,
                call=np.where(fresh, call, -1).astype(np.int32),
                index=np.where(fresh, np.arange(len(ids)), -1).astype(np.int32),
                old_logprobs=np.where(fresh, 0.0, np.nan).astype(np.float32),
                versions=np.where(fresh, 0, -1).astype(np.int32),
            )
        )
    return build_plan(paths, {"proof": 1.0})
