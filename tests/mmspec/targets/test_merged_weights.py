"""Gains of norms, by what the norm computes."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mmspec.targets.merged_layers import norm_of


@pytest.mark.parametrize(("kind", "more"), [(LlamaRMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_that_bfloat16_does_not_tell_from_one_more(kind, more, dtype):
    """From 256 on, bfloat16 has no neighbouring whole numbers."""
    weights = torch.tensor([0.5, 3.0, 700.0, 788.0], dtype=dtype)
    norm = kind(4).to(dtype)
    norm.weight.data = weights
    found = norm_of(norm)
    assert torch.equal(found.weight, weights.float() + more)
    assert norm.weight.dtype == dtype
