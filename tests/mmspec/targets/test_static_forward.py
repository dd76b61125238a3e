"""Decoder layers in few launches: recognition, outputs, and the fallback to the decoder's forward."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, SmolLM3Config

from mmspec import TokenTree
from mmspec.core.target import Prompt
from mmspec.ops import kernels
from mmspec.targets import static_forward
from mmspec.targets.packed_forward import MergedLayer, merge_layers
from mmspec.targets.transformers_target import TransformersTarget
from tests.targets import prefilled
from tests.tiny import random_tree, shared_model
from tests.tiny.configs import _shrink

FUSED = ["llama", "mistral-window", "qwen2-window", "qwen3", "gemma3", "llava", "qwen2_vl", "qwen3_vl"]
"""One of each kind: windows, biases, norms of heads and of outputs, positions with several axes."""


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)


@pytest.fixture
def ran(monkeypatch):
    """Passes that ran the layers in few launches."""
    calls, states = [], static_forward.FusedDecoder.states
    monkeypatch.setattr(
        static_forward.FusedDecoder, "states", lambda self, *given: calls.append(self) or states(self, *given)
    )
    return calls


def logits(target, batch=2):
    """Of a prompt of 12 tokens and a tree after it, where the rows have the same tokens."""
    ids = (torch.arange(12) * 7 % 90)[None].expand(batch, -1)
    prefilled(target, Prompt(ids.contiguous()), 20)
    tree = random_tree(torch.Generator().manual_seed(1), 1, 9, 90)
    tree = TokenTree(tree.tokens.expand(batch, -1), tree.parents.expand(batch, -1), check=False)
    found = target.verify(tree).logits
    target.keep([])
    return found


def by_the_decoder(target):
    """The same target, whose layers are not recognised."""
    target.decoder._fused = None
    return target


@pytest.mark.parametrize("name", FUSED)
def test_float32_is_that_of_the_decoder(name, ran):
    model = shared_model(name)
    target = TransformersTarget(model)
    found = logits(target)
    assert target.decoder._direct == {True: True}  # used, as the first pass agrees
    assert ran
    ran.clear()
    torch.testing.assert_close(found, logits(by_the_decoder(TransformersTarget(model))), atol=2e-5, rtol=1e-4)
    assert not ran


@pytest.mark.parametrize("name", FUSED)
def test_bfloat16_is_near_the_decoder(name, ran):
    """Relative error against float32, compared with the decoder's own forward in bfloat16."""
    model = copy.deepcopy(shared_model(name))
    for module in model.modules():
        if "norm" in type(module).__name__.lower() and hasattr(module, "weight"):
            module.weight.data += 0.1 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(0))
    model = model.bfloat16()
    exact = logits(by_the_decoder(TransformersTarget(copy.deepcopy(model).float())))
    target = TransformersTarget(model)
    found, usual = logits(target), logits(by_the_decoder(TransformersTarget(model)))
    assert target.decoder._direct == {True: True}
    ours, theirs = ((x.float() - exact).norm() / exact.norm() for x in (found, usual))
    assert ours < 1.2 * theirs < 0.05


@pytest.mark.parametrize("name", ["gemma2", "doge", "bamba"])
def test_other_layers_run_in_the_decoder(name, ran):
    logits(TransformersTarget(shared_model(name)), 1)
    assert not ran


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_nodes_that_stay_are_attended_to(name, ran):
    """A level after another, of which each has two nodes."""
    found = []
    for change in (lambda target: target, by_the_decoder):
        target = change(TransformersTarget(shared_model(name)))
        prefilled(target, Prompt((torch.arange(12) * 7 % 90)[None]), 20)
        first, depth = torch.tensor([[3, 4]]), torch.zeros(1, 2, dtype=torch.long)
        target.runner.forward_nodes(first, depth, torch.eye(2, dtype=torch.bool)[None])
        target.runner.keep_nodes(depth)
        reach = torch.tensor([[[True, False, True, False], [False, True, False, True]]])
        found.append(target.runner.forward_nodes(torch.tensor([[7, 8]]), depth + 1, reach)["last"])
    assert ran
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)


def wrapped(layer):
    forward = layer.forward
    layer.forward = lambda *args, **given: 2 * forward(*args, **given)


def replaced(layer):
    layer.self_attn.v_proj = copy.deepcopy(layer.self_attn.v_proj)
    written(layer)


def written(layer):
    layer.self_attn.v_proj.weight.data.mul_(2)


def moved(layer):
    layer.mlp.up_proj.weight.data = 2 * layer.mlp.up_proj.weight.data
    layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.clone()


CHANGES = {
    "hooked": (lambda model: model.model.layers[1].mlp.register_forward_hook(lambda _, args, out: 2 * out), False),
    "wrapped": (lambda model: wrapped(model.model.layers[0]), False),
    "replaced": (lambda model: replaced(model.model.layers[1]), False),
    "written": (lambda model: written(model.model.layers[1]), True),
    "moved": (lambda model: [moved(layer) for layer in model.model.layers], True),
    "scaled": (lambda model: model.model.norm.weight.data.mul_(3), True),
}
"""A change, and whether the layers still run in few launches."""


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_passes_take_effect(name, ran):
    """Of a module, whether it is called or only read, and of weights, wherever they are kept."""
    (change, fused), model = CHANGES[name], copy.deepcopy(shared_model("llama"))
    target = TransformersTarget(model)
    before = logits(target)
    if name == "written":
        model(torch.arange(4)[None], output_hidden_states=True)  # transformers' own hooks stay, and do nothing later on
    change(model)
    ran.clear()
    found = logits(target)
    assert bool(ran) == fused
    assert not torch.allclose(found, before, atol=1e-3)
    torch.testing.assert_close(found, logits(by_the_decoder(TransformersTarget(model))), atol=2e-5, rtol=1e-4)


def test_a_decoder_that_does_more_is_noticed_once(ran):
    model = copy.deepcopy(shared_model("llama"))
    forward = model.model.forward

    def doubled(*args, **given):
        out = forward(*args, **given)
        out.last_hidden_state = 2 * out.last_hidden_state
        return out

    target, other = TransformersTarget(model), by_the_decoder(TransformersTarget(model))
    model.model.forward = doubled
    found = logits(target)
    assert len(ran) == 1
    torch.testing.assert_close(logits(target), found)
    assert len(ran) == 1
    torch.testing.assert_close(found, logits(other))


def test_joined_weights_stay_those_of_the_model():
    model = copy.deepcopy(shared_model("qwen2"))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters = list(model.parameters())
    logits(TransformersTarget(model))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    after = model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    attention = model.model.layers[0].self_attn
    places = {
        part.weight.untyped_storage().data_ptr() for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert len(places) == 1
    logits(TransformersTarget(model))
    assert {attention.q_proj.weight.untyped_storage().data_ptr()} == places  # joined once
    model(torch.arange(9)[None]).logits.sum().backward()
    assert attention.k_proj.weight.grad.any()


def test_a_model_that_was_made_in_inference_mode(ran):
    with torch.inference_mode():
        model = copy.deepcopy(shared_model("qwen2"))
        for weight in model.parameters():
            weight.data = weight.data.clone()
    target = TransformersTarget(model)
    found = logits(target)
    torch.testing.assert_close(logits(target), found)
    assert ran
    torch.testing.assert_close(found, logits(TransformersTarget(shared_model("qwen2"))))


def test_layers_that_do_not_turn_are_not_merged():
    """One in four of SmolLM3 has no rotary positions."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64}
    model = AutoModelForCausalLM.from_config(_shrink(SmolLM3Config, **sizes)).eval()
    ids, kinds = torch.randint(90, (1, 30)), {layer.self_attn.use_rope for layer in model.model.layers}
    expected = model(ids).logits
    merge_layers(model.model)
    assert len(kinds) == 2
    assert not any(isinstance(layer, MergedLayer) for layer in model.model.layers)
    assert torch.equal(model(ids).logits, expected)
    torch.testing.assert_close(logits(TransformersTarget(model)), logits(by_the_decoder(TransformersTarget(model))))
