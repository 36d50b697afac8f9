"""Log-probabilities at edges: logits are computed only where the loss reads them.

Legend: U unique tokens, E edges, R unique sources in a chunk, V vocabulary, d width.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from gyre_backend.tree.plan import TreePlan

Head = Callable[[torch.Tensor], torch.Tensor]
"""[R, d] -> logits [R, V]"""


def edge_logprobs(
    hidden: torch.Tensor, head: Head, plan: TreePlan, *, chunk: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each edge's target, and the entropy at its source (without gradient): [E], [E].

    `hidden: [U, d]`, the last hidden states in packed order. See `logprobs_at`.
    """
    return logprobs_at(hidden, plan.edge_src, plan.edge_tgt, head, chunk=chunk)


def logprobs_at(
    hidden: torch.Tensor, rows: np.ndarray, targets: np.ndarray, head: Head, *, chunk: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for edges given as rows of `hidden` and target ids: int[E], int[E].

    At most `chunk` rows of logits are held at once: with more edges than that, each chunk's logits are
    computed again in the backward pass. A row with k targets is projected once. Results are float32, or
    float64 if the logits are.
    """
    parts = [slice(start, start + chunk) for start in range(0, len(rows), chunk)]
    if not parts:
        nothing = (hidden.sum() * 0.0).expand(0)
        return nothing, nothing.detach()
    logps, entropies = [], []
    for part in parts:
        sources, row = np.unique(rows[part], return_inverse=True)
        picked = hidden[torch.from_numpy(sources.astype(np.int64)).to(hidden.device)]
        row_E = torch.from_numpy(row.reshape(-1)).to(hidden.device)
        target_E = torch.from_numpy(targets[part].astype(np.int64)).to(hidden.device)
        if len(parts) > 1 and torch.is_grad_enabled():
            pair = checkpoint(_logprobs, picked, row_E, target_E, head, use_reentrant=False)
        else:
            pair = _logprobs(picked, row_E, target_E, head)
        logps.append(pair[0])
        entropies.append(pair[1])
    return torch.cat(logps), torch.cat(entropies)


def _logprobs(
    rows_Rd: torch.Tensor, row_E: torch.Tensor, target_E: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_RV = head(rows_Rd)
    if logits_RV.dtype != torch.float64:
        logits_RV = logits_RV.float()
    lse_R = logits_RV.logsumexp(-1)
    with torch.no_grad():
        shifted_RV = logits_RV - lse_R[:, None]
        entropy_R = -(shifted_RV.exp() * shifted_RV).sum(-1)
    return logits_RV[row_E, target_E] - lse_R[row_E], entropy_R[row_E]
