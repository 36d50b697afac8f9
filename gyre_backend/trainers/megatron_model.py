"""A megatron-core GPTModel that computes tree plans: Llama, Qwen2, Qwen3 and Qwen3-MoE.

Three things differ from the stock model. Its core attention is tree attention; its rotary embedding takes the
path position of every packed token (the stock one counts packed tokens, which is wrong in a tree); and the
vocabulary projection runs for loss edges only, returning their log-probabilities.

Legend: U packed tokens, E loss edges, H heads, D head width, d hidden width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from gyre_backend.errors import UnsupportedError
from gyre_backend.trainers.megatron_layout import Shape, padded_vocab
from gyre_backend.trainers.megatron_loss import vocab_parallel_logprobs
from gyre_backend.tree.attend import tree_attention
from gyre_backend.tree.plan import TreePlan


@dataclass
class TreePacked(PackedSeqParams):
    """A tree plan on its way to every layer. Captured by closure: safe with recompute and 1F1B micro-batches.

    `qkv_format` must stay "sbhd": with "thd" megatron-core squeezes the batch axis and restarts rotary
    positions.
    """

    plan: TreePlan | None = None
    backend: str = "auto"
    positions: torch.Tensor | None = None
    """int64[U], path position of each packed token."""
    src: torch.Tensor | None = None
    """int64[E], packed index whose hidden state predicts the edge's token."""
    tgt: torch.Tensor | None = None
    """int64[E], token id."""
    chunk: int = 1024
    """Edges whose logits exist at one time."""
    temperature: float = 1.0
    entropy: list[torch.Tensor] = field(default_factory=list)
    """Filled by the last pipeline stage: float[E]."""


class TreeCoreAttention(MegatronModule):
    """Stands for DotProductAttention. q: [U, 1, H, D]; k, v: [U, 1, Hkv, D] -> [U, 1, H * D]."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any
    ) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: TreePacked | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None or packed_seq_params.plan is None:
            raise UnsupportedError("the Megatron model computes tree plans only; it was called without one")
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        scale = query.shape[-1] ** -0.5
        out = tree_attention(q, k, v, packed_seq_params.plan, scale=scale, backend=packed_seq_params.backend)
        return out.permute(2, 0, 1, 3).flatten(2)


class TreeRotary(torch.nn.Module):
    """Rotary angles at path positions. Frequencies are the Hugging Face model's own, so both models agree."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq
        self._positions = torch.empty(0)

    def get_rotary_seq_len(self, *args: Any) -> int:
        packed: TreePacked = args[-1]
        assert packed.positions is not None
        self._positions = packed.positions
        return len(self._positions)

    def forward(self, length: int, **_: Any) -> torch.Tensor:
        """float32[U, 1, 1, D]: each angle twice, as for a rotation of two halves."""
        inv_freq = self.inv_freq.to(self._positions.device)
        angle = torch.outer(self._positions.to(inv_freq.dtype), inv_freq)
        return torch.cat((angle, angle), -1)[:, None, None]


class TreeGPTModel(GPTModel):
    """GPTModel whose last stage returns log p of each edge's token, [E], not logits of every packed token."""

    real_vocab_size: int = 0

    def _postprocess(self, hidden_states: torch.Tensor, **context: Any) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        packed: TreePacked = context["packed_seq_params"]
        assert packed.src is not None
        assert packed.tgt is not None
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        rows = hidden_states.index_select(0, packed.src)
        head = functools.partial(self._edges, weight=weight, temperature=packed.temperature)
        pieces = []
        for start in range(0, len(packed.tgt), packed.chunk):
            piece = slice(start, start + packed.chunk)
            # Recomputing the logits of a chunk in backward keeps [chunk, V] the largest tensor of the head.
            logprobs, entropy = torch.utils.checkpoint.checkpoint(
                head, rows[piece], packed.tgt[piece], use_reentrant=False, preserve_rng_state=False
            )
            pieces.append(logprobs)
            packed.entropy.append(entropy.detach())
        return torch.cat(pieces)

    def _edges(
        self,
        rows_C1d: torch.Tensor,
        target_C: torch.Tensor,
        *,
        weight: torch.Tensor | None,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, _ = self.output_layer(rows_C1d, weight=weight)
        logits = logits[:, 0]
        if temperature != 1.0:
            logits = logits / temperature
        return vocab_parallel_logprobs(
            logits,
            target_C,
            vocab_size=self.real_vocab_size,
            rank=parallel_state.get_tensor_model_parallel_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
        )


def _experts(hf: Shape, device: str) -> dict[str, Any]:
    return {
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": [int(hf.sparse(i)) for i in range(hf.num_hidden_layers)],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_expert_capacity_factor": None,
        "moe_token_dispatcher_type": "allgather" if device == "cpu" else "alltoall",
        # softmax over the top k = softmax over all, renormalised over the top k (norm_topk_prob)
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_grouped_gemm": False,
    }


def transformer_config(
    hf: Shape, *, tp: int, pp: int, dtype: torch.dtype, recompute: str, device: str
) -> TransformerConfig:
    """megatron-core's config of the model. Fusions stay off."""
    granularity: dict[str, Any] = {}
    if recompute == "selective":
        granularity = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif recompute == "full":
        granularity = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif recompute != "none":
        raise UnsupportedError(f"recompute = {recompute!r}: expected none, selective or full")
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        calculate_per_token_loss=True,  # sums stay sums: neither DDP nor the schedule divides
        use_cpu_initialization=device == "cpu",
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **granularity,
        **(_experts(hf, device) if hf.model_type == "qwen3_moe" else {}),
    )
    # Plans differ in length, so stages tell each other shapes. Set late: the config refuses it beside the
    # "allgather" dispatcher, whose reason (experts on several ranks) doesn't arise here.
    config.variable_seq_lengths = pp > 1
    return config


def build_model(
    hf: Shape, *, dtype: torch.dtype, recompute: str = "none", device: str = "cpu"
) -> tuple[TreeGPTModel, TransformerConfig]:
    """This rank's part of the model, with uninitialised weights. `parallel_state` must be initialised."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    config = transformer_config(hf, tp=tp, pp=pp, dtype=dtype, recompute=recompute, device=device)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention
        attention.submodules.core_attention = TreeCoreAttention
        attention.params["attn_mask_type"] = AttnMaskType.arbitrary
    model = TreeGPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab(hf, tp),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
    )
    model.real_vocab_size = int(hf.vocab_size)
    model.rotary_pos_emb = TreeRotary(hf.inv_freq)
    model.train()
    return model.to(device=device, dtype=dtype), config
