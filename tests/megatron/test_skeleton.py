"""A module over tensors kept elsewhere computes what the model on disk computes, and sees later writes."""

from __future__ import annotations

import pytest
import torch
from tiny_models import config_of, save_model

from gyre_backend.errors import UnsupportedError
from gyre_backend.trainers.skeleton import module_over


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3"])
def test_the_module_is_the_tensors(kind: str, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    save_model(tmp_path, kind, torch.float32)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path)
    tensors = {name: p.detach().clone() for name, p in wanted.named_parameters()}
    model = module_over(wanted.config, torch.float32, tensors)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, wanted(ids).logits, rtol=0, atol=1e-5)
        tensors["model.norm.weight"].mul_(2.0)
        assert not torch.equal(model(ids).logits, wanted(ids).logits)
    assert all(p.data_ptr() == tensors[name].data_ptr() for name, p in model.named_parameters())


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"model\.embed_tokens\.weight"):
        module_over(config_of("llama"), torch.float32, {})
