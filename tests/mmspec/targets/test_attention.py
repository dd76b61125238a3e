"""The attention under trees against its formula, head by head."""

import math

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmspec import UserError, ops
from mmspec.cache.tree_cache import SlotBounds
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.targets.attention import NAME, PASS, TreePass, tree_attention
from mmspec.targets.transformers_target import TransformersTarget
from tests.targets import prefilled
from tests.tiny import shared_model


def by_the_formula(q, k, v, allowed, scale):
    heads, per = q.shape[1], q.shape[1] // k.shape[1]
    read = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head // per].transpose(1, 2) * scale
        read.append(scores.masked_fill(~allowed[:, 0], -math.inf).softmax(-1) @ v[:, head // per])
    return torch.stack(read, dim=2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1), (15, 5)])
@pytest.mark.parametrize(("nodes", "slots"), [(1, 1), (1, 9), (7, 7), (5, 64), (63, 100)])
@pytest.mark.parametrize("additive", [False, True])
def test_groups_and_masks(heads, kv_heads, nodes, slots, additive):
    g = torch.Generator().manual_seed(nodes)
    q, k, v = (torch.randn(2, n, length, 12, generator=g) for n, length in ((heads, nodes), *[(kv_heads, slots)] * 2))
    allowed = torch.rand(2, 1, nodes, slots, generator=g) < 0.7
    allowed[..., 0] = True
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min) if additive else allowed
    layer = nn.Module()
    layer.num_key_value_groups = heads // kv_heads
    read, weights = tree_attention(layer, q, k, v, mask, scaling=0.3)
    assert weights is None
    torch.testing.assert_close(read, by_the_formula(q, k, v, allowed, 0.3), rtol=1e-5, atol=1e-5)


def test_with_static_shapes_keys_and_values_are_not_copied(monkeypatch):
    """Latent attention has keys that are wider than its values."""
    q, k, v = torch.randn(1, 4, 3, 24), torch.randn(1, 4, 12, 24), torch.randn(1, 4, 12, 10)
    bounds, layer, run = SlotBounds(torch.tensor([5]), torch.tensor([7])), nn.Module(), []
    layer.layer_idx, tail = 0, torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    original = ops.tree_attention
    monkeypatch.setattr(
        ops, "tree_attention", lambda *given, **options: run.append(given) or original(*given, **options)
    )
    passed = TreePass(shared_model("llama").config, bounds, torch.arange(3)[None])
    read, _ = tree_attention(layer, q, k, v, tail, **{PASS: passed})
    assert all(ours is theirs for ours, theirs in zip(run[0], (q, k, v), strict=False))
    allowed = torch.zeros(1, 1, 3, 12, dtype=torch.bool)
    allowed[..., :5], allowed[..., 7:10] = True, tail
    torch.testing.assert_close(read, by_the_formula(q, k, v, allowed, 24**-0.5), rtol=1e-5, atol=1e-5)
    for name in ("position_bias", "s_aux"):
        with pytest.raises(UserError, match=f"^attention must be a softmax of scaled scores: Module has {name}$"):
            tree_attention(layer, q, k, v, tail, **{PASS: passed, name: torch.zeros(1)})


def attention_of(model):
    return {
        name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")
    }


@pytest.mark.parametrize("name", ["qwen2", "llava"])
def test_passes_run_it_and_the_model_keeps_its_own(name, monkeypatch):
    model, run = shared_model(name), []
    before = attention_of(model)
    assert set(before.values()) == {"sdpa"}
    target = TransformersTarget(model)
    assert target.decoder.attention.name == NAME
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        NAME,
        lambda *args, **kw: run.append(NAME) or tree_attention(*args, **kw),
    )
    prefilled(target, Prompt(torch.tensor([[5, 6, 7]])), 8)
    layers = model.config.get_text_config().num_hidden_layers
    assert len(run) == layers
    target.verify(TokenTree.root(torch.tensor([5])))
    assert len(run) == 2 * layers
    assert attention_of(model) == before


def test_a_pass_that_fails_leaves_the_model_as_it_was(monkeypatch):
    model = shared_model("qwen2")
    before, target = attention_of(model), TransformersTarget(model)

    def fails(*_, **__):
        assert model.config._attn_implementation == NAME
        raise RuntimeError("in a pass")

    prompt = Prompt(torch.tensor([[5, 6, 7]]))
    monkeypatch.setattr(model.get_decoder(), "forward", fails)
    with pytest.raises(RuntimeError, match="in a pass"):
        prefilled(target, prompt, 8)
    assert attention_of(model) == before
    assert not model.get_decoder()._forward_hooks
