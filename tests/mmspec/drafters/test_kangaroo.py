"""Kangaroo adapters as published: every node against transformers' layers, whatever was accepted before."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmspec import TokenTree, UserError
from mmspec.core.target import Prompt
from mmspec.drafters.early_exit import Kangaroo, first_layers
from mmspec.drafters.growth import LevelPasses
from mmspec.drafters.registry import make_drafter
from mmspec.ops import cpu_library
from mmspec.targets.packing import pack_model
from mmspec.targets.transformers_target import TransformersTarget
from tests.draft_checks import check_logits
from tests.kangaroo import adapter, logits, published
from tests.targets import prefilled, row_of
from tests.tiny import shared_model
from tests.tiny.configs import TINY_SIZES
from tests.tiny.models import kangaroo_network, text_inputs, vision_inputs


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "bamba"])
def test_nodes_have_the_probabilities_of_plain_loops(name, tmp_path):
    """In a batch of padded prompts with images."""
    model, plain = shared_model(name), adapter()
    published(tmp_path, plain)
    inputs = vision_inputs(name, 2) if name == "qwen2_vl" else text_inputs(2, 9)
    rows = [row_of(inputs, number) for number in range(2)]
    drafter = make_drafter(f"kangaroo:{tmp_path}@1")
    drafter.top_k = 3
    scores = lambda row, tokens: logits(model, 1, plain, rows[row], tokens)  # noqa: E731
    check_logits(model, inputs, drafter, scores, nodes=7, depth=3, skip=(2,), new=10)


def test_a_folder_is_recognised_and_leaves_the_target_after_two_layers(tmp_path):
    published(tmp_path, adapter())
    drafter = make_drafter(str(tmp_path))
    assert isinstance(drafter, Kangaroo)
    assert drafter.network.config.exit_layer == 2
    with pytest.raises(UserError, match=r"^an early exit must be after a layer before the last: .* 1 to 1, got 2$"):
        drafter.attach(TransformersTarget(shared_model("llama")))


@pytest.mark.skipif(not cpu_library.available(), reason=f"the C++ kernels do not run: {cpu_library.problem()}")
def test_states_of_packed_targets_are_those_of_their_verify_passes():
    """Passes of the first layers in the kernels give the bits that a pass of all layers gives there."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "intermediate_size": 64}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY_SIZES | sizes | {"num_hidden_layers": 4})).eval()
    pack_model(model, "bfloat16")
    target, drafter = TransformersTarget(model), Kangaroo(kangaroo_network(model, exit_layer=2))
    drafter.attach(target)
    prefilled(target, Prompt(torch.arange(3, 12)[None]), 32)
    tokens, first = torch.tensor([[7, 5, 9]]), first_layers(target, 2)
    passes = LevelPasses(first.runner, first.recurrent, drafter.features[0])
    target.runner.cache.reserve_nodes(3)
    origin = torch.zeros(1, 1, dtype=torch.long)
    states = [passes(tokens[:, place : place + 1], origin) for place in range(3)]
    passes.end()
    chain = TokenTree(tokens, torch.tensor([[-1, 0, 1]]))
    assert torch.equal(torch.cat(states, dim=1), target.verify(chain, drafter.features).features[drafter.features[0]])
