"""Verify passes over the valid nodes of a batch only, against passes that compute the padding."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from mmspec.core.target import PacksRows, Prompt, output_of
from mmspec.core.tree import TokenTree, build_tree
from mmspec.core.verify import accept_path
from mmspec.ops import cpu
from mmspec.targets.packing import QUANTISED, pack_model
from tests.compiled import needs_kernels
from tests.mmspec.targets.packed import GEMMA3, VOCAB, model_of, target_of

pytestmark = needs_kernels
PROMPTS = (9, 3, 17, 1)
FEATURES = (1, output_of(0), "last")


def random_trees(rng, sizes):
    rows = []
    for size in sizes:
        parents = [rng.randrange(node) for node in range(1, size)]
        rows.append((rng.sample(range(VOCAB), size - 1), parents))
    return build_tree(torch.tensor([rng.randrange(VOCAB) for _ in sizes]), rows)


def longest_path(tree):
    """A verdict that accepts each row's path to its last node."""
    choices = torch.full((tree.batch, tree.nodes), VOCAB)
    for row, drafted in enumerate(tree.drafted):
        node = drafted
        while node > 0:
            parent = int(tree.parents[row, node])
            choices[row, parent] = tree.tokens[row, node]
            node = parent
    return accept_path(tree, choices)


def with_rows(model, packs):
    """A target with a row per prompt."""
    target = target_of(model)
    target.decoder.packs, target.features = packs, FEATURES
    for length in PROMPTS:
        target.prefill(Prompt(torch.arange(length)[None]), max_new_tokens=60)
    target.forward_tree(TokenTree.root(torch.zeros(len(PROMPTS), dtype=torch.long)))
    return target


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("kind", ["bfloat16", *QUANTISED])
def test_valid_nodes_have_the_bits_of_padded_passes(kind, config, monkeypatch):
    model = model_of(config)
    pack_model(model, kind)
    packed, padded = with_rows(model, packs=True), with_rows(model, packs=False)
    assert isinstance(packed, PacksRows)
    assert (packed.packs_rows, padded.packs_rows) == (True, False)
    computed, decode = [], cpu.decode

    def counted(weights, x, *rest, **more):
        computed.append(x.shape[0] * x.shape[1])
        return decode(weights, x, *rest, **more)

    monkeypatch.setattr(cpu, "decode", counted)
    rng = random.Random(0)
    for sizes in ((1, 5, 2, 9), (7, 1, 1, 1), (1, 1, 1, 2), (3, 3, 3, 3), (1, 20, 4, 1)):
        tree = random_trees(rng, sizes)
        computed.clear()
        found, expected = packed.forward_tree(tree), padded.forward_tree(tree)
        assert computed == [sum(sizes), len(sizes) * max(sizes)]
        assert torch.equal(found.logits[tree.alive], expected.logits[tree.alive])
        assert found.logits.shape == expected.logits.shape
        for name in FEATURES:
            assert torch.equal(found.features[name][tree.alive], expected.features[name][tree.alive])
        verdict = longest_path(tree)
        assert max(len(path) for path, _ in verdict.host) > 1
        for target in (packed, padded):
            target.commit(verdict)


def test_a_hook_on_a_layer_takes_effect():
    model = model_of(LlamaConfig)
    pack_model(model, "int8")
    target, tree = with_rows(model, packs=True), random_trees(random.Random(1), (2, 5, 1, 3))
    plain = target.forward_tree(tree).logits[tree.alive]
    with model.get_decoder().layers[1].register_forward_hook(lambda *args: 0.5 * args[2]):
        assert not torch.allclose(target.forward_tree(tree).logits[tree.alive], plain, atol=0.01)
    assert torch.equal(target.forward_tree(tree).logits[tree.alive], plain)


def test_layers_with_windows_compute_padding():
    model = model_of(GEMMA3)
    pack_model(model, "int8")
    assert not target_of(model).packs_rows
