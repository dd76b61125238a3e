"""Merged decoder layers compute what a model's own layers compute; other layers stay."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

import mmspec
from mmspec.core.target import Prompt, output_of
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.drafters.ngram import Ngram
from mmspec.targets.merged_layers import MergedLayer, merge_layers
from mmspec.targets.packing import pack_model, weights_kind
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.mmspec.targets.packed import GEMMA3, layer_by_layer, model_of

FAMILIES = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, GEMMA3]


@pytest.mark.parametrize("config_class", FAMILIES)
def test_merged_layers_give_the_models_logits(config_class):
    model = model_of(config_class)
    merged = copy.deepcopy(model)
    merge_layers(merged.get_decoder())
    assert all(type(layer) is MergedLayer for layer in merged.get_decoder().layers)
    ids = torch.randint(120, (2, 9))
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)
    start, then = merged(ids[:, :5]), merged
    after = then(ids[:, 5:], past_key_values=start.past_key_values).logits
    torch.testing.assert_close(after, model(ids).logits[:, 5:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config_class", [Gemma2Config, Olmo2Config])
def test_layers_with_other_parts_stay(config_class):
    model = model_of(config_class)
    kind = type(model.get_decoder().layers[0])
    merge_layers(model.get_decoder())
    assert {type(layer) for layer in model.get_decoder().layers} == {kind}


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config, GEMMA3])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_speculative_decoding_of_a_packed_model_equals_plain_decoding(config_class, kind, kernels, monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    model = model_of(config_class, tie_word_embeddings=True)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)  # logits apart
    pack_model(model, kind)
    assert weights_kind(model).lower().startswith(kind)
    target = TransformersTarget(model)
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    found = mmspec.generate(model, drafter=Ngram(), input_ids=ids, max_new_tokens=24, eos_token_id=None)
    assert found.tolist() == plain.tolist()
    output = target.prefill(Prompt(ids), max_new_tokens=4)
    assert torch.equal(output.logits[:, -1].argmax(-1), plain[:, ids.shape[1]])


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@torch.inference_mode()
def test_a_cache_of_transformers_holds_the_same_keys_and_values(kind, config_class, rows):
    """So ``generate`` attends to what a target attends to, in a prompt and after it."""
    model = model_of(config_class)
    pack_model(model, kind)
    ids, token = torch.randint(120, (rows, 90)), torch.tensor([[7]] * rows)
    target = TransformersTarget(model)
    target.cost = None
    prefilled = target.prefill(Prompt(ids), max_new_tokens=9).logits.bfloat16()
    decoded = target.forward_tree(TokenTree.root(token[:, 0])).logits.bfloat16()  # as the model rounds them
    usual = DynamicCache(config=model.config)
    assert torch.equal(model(ids, past_key_values=usual).logits[:, -1:].bfloat16(), prefilled)
    assert torch.equal(model(token, past_key_values=usual).logits.bfloat16(), decoded)
    for layer, theirs in enumerate(usual.layers):
        for mine, other in zip(target.runner.cache.kv.states(layer), (theirs.keys, theirs.values), strict=True):
            assert mine.dtype == other.dtype == torch.bfloat16
            assert torch.equal(mine[:, :, :91], other)


@needs_kernels
@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
@torch.inference_mode()
def test_a_token_of_a_prompt_has_the_bits_of_a_decoded_one(kind):
    model = model_of(LlamaConfig)
    pack_model(model, kind)
    ids = torch.randint(120, (1, 100))
    whole = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    target = TransformersTarget(model)
    target.cost = None
    target.prefill(Prompt(ids[:, :60]), max_new_tokens=50)
    for place in range(60, 100):
        tree = TokenTree.root(ids[:, place])
        logits = target.forward_tree(tree).logits
        assert torch.equal(logits.to(whole.dtype), whole[:, place : place + 1])
        target.commit(accept_path(tree, logits.argmax(-1)))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("config_class", FAMILIES)
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_logits_of_a_tree_have_the_bits_of_plain_decoding(config_class, kind):
    """A path whose nodes lie among those of other branches, against the same tokens one at a time."""
    model = model_of(config_class)
    pack_model(model, kind)
    assert all(layer.native is not None for layer in model.get_decoder().layers)
    ids = torch.randint(120, (1, 21))
    path = torch.randint(120, (5,)).tolist()
    tokens, parents = [path[0]], [-1]
    kept = [0]
    for token in path[1:]:  # each node of the path has two siblings before it
        tokens += [7, 8, token]
        parents += 3 * [kept[-1]]
        kept.append(len(tokens) - 1)
    target = TransformersTarget(model)
    target.cost = None
    target.prefill(Prompt(ids), max_new_tokens=40)
    found = target.forward_tree(TokenTree(torch.tensor([tokens]), torch.tensor([parents]))).logits[0, kept]
    assert found.dtype == torch.float32
    for token, expected in zip(path, found, strict=True):
        tree = TokenTree.root(torch.tensor([token]))
        output = target.forward_tree(tree)
        assert torch.equal(output.logits[0, 0], expected)
        target.commit(accept_path(tree, output.logits.argmax(-1)))


@needs_kernels
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_compiled_layers_compute_what_their_parts_compute(config_class):
    model = model_of(config_class)
    pack_model(model, "int8")
    apart = copy.deepcopy(model)
    for layer in apart.get_decoder().layers:
        layer.__dict__["native"] = layer.stack = None
    ids = torch.randint(120, (2, 9))
    steps = [TransformersTarget(one) for one in (model, apart)]
    names = (1, 2, output_of(0), output_of(len(model.get_decoder().layers) - 1), "last")
    for target in steps:
        target.cost = None
        target.features = names
    tree = TokenTree(torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[-1, 0, 0]]).expand(2, 3))
    found, expected = [(target.prefill(Prompt(ids), max_new_tokens=9), target.forward_tree(tree)) for target in steps]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits, other.logits, atol=0.03, rtol=0.03)
        for name in names:
            torch.testing.assert_close(one.features[name], other.features[name], atol=0.06, rtol=0.03)


@needs_kernels
def test_hooks_change_what_the_layers_after_them_compute():
    """Layers are computed by one call; a layer that is given something else computes its own output."""
    model = model_of(LlamaConfig)
    pack_model(model, "bfloat16")
    layers = model.get_decoder().layers

    def logits(factor):
        with layers[1].register_forward_hook(lambda *args: factor * args[2]):
            target = TransformersTarget(model)
            target.cost = None
            target.prefill(Prompt(torch.arange(9)[None]), max_new_tokens=4)
            return target.forward_tree(TokenTree(torch.tensor([[3, 4]]), torch.tensor([[-1, 0]]))).logits

    whole, halved = logits(1.0), logits(0.5)
    layer_by_layer(model)
    assert not torch.allclose(whole, halved, atol=0.01)
    assert torch.equal(logits(0.5), halved)
    assert torch.equal(logits(1.0), whole)


def passes_of(model, hook=None):
    """Logits of three verify passes, and how often the decoder's forward ran in them."""
    calls = []
    decoder = model.get_decoder()
    with decoder.register_forward_hook(lambda *args: calls.append(1) or (hook(args[2]) if hook else None)):
        target = TransformersTarget(model)
        target.cost = None
        target.prefill(Prompt(torch.arange(9)[None]), max_new_tokens=9)
        calls.clear()
        tree = TokenTree(torch.tensor([[3, 4, 5]]), torch.tensor([[-1, 0, 1]]))
        found = []
        for _ in range(3):
            found.append(target.forward_tree(tree).logits)
            target.commit(accept_path(tree, torch.tensor([[4, 6, 7]])))
    return torch.cat(found), len(calls)


@needs_kernels
def test_a_decoder_that_does_more_than_its_layers_runs_in_every_pass():
    model = model_of(LlamaConfig)
    pack_model(model, "int8")

    def doubled(out):
        out.last_hidden_state = 2 * out.last_hidden_state
        return out

    plain, _ = passes_of(model)
    found, calls = passes_of(model, doubled)
    assert calls == 1 + 3  # once to compare
    assert not torch.allclose(found, plain, atol=0.1)


@needs_kernels
def test_a_hook_on_a_layer_takes_effect_between_passes():
    model = model_of(LlamaConfig)
    pack_model(model, "int8")
    target = TransformersTarget(model)
    target.cost = None
    target.prefill(Prompt(torch.arange(9)[None]), max_new_tokens=9)
    tree = TokenTree(torch.tensor([[3, 4]]), torch.tensor([[-1, 0]]))
    plain = target.forward_tree(tree).logits
    with model.get_decoder().layers[1].register_forward_hook(lambda *args: 0.5 * args[2]):
        assert not torch.allclose(target.forward_tree(tree).logits, plain, atol=0.01)
    assert torch.equal(target.forward_tree(tree).logits, plain)
