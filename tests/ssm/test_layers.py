"""Dispatchers of the modelling modules: transformers' own functions without a tree."""

import copy
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.bamba import modeling_bamba

from mmspec import UserError, plugins
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.ssm import layers as recurrent
from mmspec.ssm.cache import STATES
from mmspec.ssm.layers import CONVOLVED, RECURRENCES, RecurrentLayers, _check, _dispatching, _place
from mmspec.targets.transformers_target import TransformersTarget
from tests.targets import prefilled
from tests.tiny import random_tree, shared_model
from tests.tiny.configs import HYBRID_CONFIGS

NAMES = ("causal_conv1d_fn", "mamba2_chunk_scan")


MAMBA2, CONVOLUTIONS = RECURRENCES["mamba2"].functions, CONVOLVED["lfm2"]


def module_of(**functions):
    module = ModuleType("modeling_of_another_time")
    vars(module).update({name: getattr(modeling_bamba, name) for name in NAMES} | functions)
    return module


def test_without_a_tree_everything_is_handed_on():
    """Whatever the function behind a name is: transformers' own, or one of an installed kernel package."""
    seen = []

    def kernel(*args, **kwargs):
        seen.append((args, kwargs))
        return "result"

    module = module_of(mamba2_chunk_scan=kernel)
    x = torch.zeros(1)
    with _dispatching(module, MAMBA2):
        assert module.mamba2_chunk_scan(x, 3, D=None, return_final_states=True, seq_idx=x) == "result"
        assert module.mamba2_chunk_scan(x, **{STATES: None}) == "result"
    assert seen == [((x, 3), {"D": None, "return_final_states": True, "seq_idx": x}), ((x,), {})]


def test_a_mixer_without_keyword_arguments_has_the_cache_on_its_inputs():
    """As LFM2's in transformers 5.21."""
    module, x = module_of(), torch.zeros(1, 2, 3)
    setattr(x, STATES, SimpleNamespace(conv=lambda *args, **kwargs: (args, kwargs)))
    with _dispatching(module, CONVOLUTIONS):
        assert module.causal_conv1d_fn(x, 3, seq_idx=None) == ((x, 3), {"seq_idx": None})


def test_a_scan_without_keyword_arguments_has_the_cache_of_its_convolution():
    """As Mamba-1's: not that of other convolutions or threads, nor after the pass."""
    states = SimpleNamespace(conv=lambda x: "convolved", scan=lambda x: "scanned")
    module, x, plain = module_of(mamba2_chunk_scan=lambda x: "plain"), torch.zeros(1), torch.zeros(1)
    module.causal_conv1d_fn = lambda x: "plain"
    setattr(x, STATES, states)
    with _dispatching(module, MAMBA2):
        assert [module.causal_conv1d_fn(x), module.mamba2_chunk_scan(plain)] == ["convolved", "scanned"]
        with ThreadPoolExecutor(1) as other:
            assert other.submit(module.mamba2_chunk_scan, plain).result() == "plain"
        assert [module.causal_conv1d_fn(plain), module.mamba2_chunk_scan(plain)] == ["plain", "plain"]
        module.causal_conv1d_fn(x)
    with _dispatching(module, MAMBA2):
        assert module.mamba2_chunk_scan(plain) == "plain"


def test_functions_are_replaced_during_passes_only():
    """Of several threads the last one to leave restores them, in any order and after an error."""
    before = [getattr(modeling_bamba, name) for name in NAMES]
    first, second = (RecurrentLayers(shared_model("bamba")).applied() for _ in range(2))
    first.__enter__()
    during = [getattr(modeling_bamba, name) for name in NAMES]
    assert [function.__wrapped__ for function in during] == before
    for function, original in zip(during, before, strict=True):
        assert inspect.signature(function) == inspect.signature(original)
    with ExitStack() as passes:
        passes.enter_context(pytest.raises(ZeroDivisionError))
        passes.enter_context(second)
        first.__exit__(None, None, None)
        assert [getattr(modeling_bamba, name) for name in NAMES] == during
        raise ZeroDivisionError
    assert [getattr(modeling_bamba, name) for name in NAMES] == before


@pytest.mark.parametrize("name", [name for name in ("inkling_text", "inkling2_text", "zaya") if name in HYBRID_CONFIGS])
@torch.inference_mode()
def test_modules_are_replaced_during_passes_only(name):
    """Calls without a ``StateCache`` stay as they are, during passes too."""
    model = shared_model(name)
    layers, ids = RecurrentLayers(model), torch.tensor([[5, 6, 7, 8, 9]])
    places = [_place(sys.modules[type(model).__module__], name) for name in layers.functions]
    before, plain = [getattr(*place) for place in places], model(ids).logits
    with layers.applied():
        assert [getattr(*place).__wrapped__ for place in places] == before
        torch.testing.assert_close(model(ids, use_cache=True).logits, plain, atol=1e-4, rtol=1e-4)
    assert [getattr(*place) for place in places] == before


@pytest.mark.parametrize("name", [name for name in ("inkling2_text", "zaya") if name in HYBRID_CONFIGS])
@torch.inference_mode()
def test_padding_of_a_short_prompt_is_in_no_window(name):
    ids, mask = torch.tensor([[7, 8, 9, 5], [5, 6, 8, 9]]), torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]])
    tree, found = random_tree(torch.Generator().manual_seed(0), 1, 4, 90, ragged=False), []
    for prompt in (Prompt(ids, mask), Prompt(ids[:1, 3:])):
        target, rows = TransformersTarget(shared_model(name)), len(prompt.input_ids)
        prefilled(target, prompt, 16)
        found.append(target.verify(TokenTree(tree.tokens.expand(rows, -1), tree.parents.expand(rows, -1))).logits[0])
    torch.testing.assert_close(*found, atol=2e-4, rtol=2e-4)


def test_biased_projections_are_refused():
    config = copy.deepcopy(shared_model("zaya").config)
    config.attention_bias = True
    with pytest.raises(UserError, match=r"^ZAYA's projections must have no bias"):
        TransformersTarget(AutoModelForCausalLM.from_config(config))


def test_a_version_that_lacks_what_is_built_upon_is_named(monkeypatch):
    def older(hidden_states, dt, A, B, C, chunk_size): ...  # noqa: N803

    _check(module_of(), MAMBA2, "Mamba-2")
    with pytest.raises(
        UserError, match=r"^tree verification .* requires mamba2_chunk_scan\(D, dt_bias, dt_softplus\) in .*: not found"
    ):
        _check(module_of(mamba2_chunk_scan=older), MAMBA2, "Mamba-2")
    with pytest.raises(
        UserError, match=r"requires causal_conv1d_fn\(hidden_states, weight, bias, activation\) in modeling_"
    ):
        _check(module_of(causal_conv1d_fn=None), MAMBA2, "Mamba-2")
    with pytest.raises(UserError, match=r"requires ZayaCCAProjection\.forward\(hidden_states, .*\) in modeling_"):
        _check(module_of(), CONVOLVED["zaya"], "convolution")
    monkeypatch.setattr("mmspec.ssm.layers._CACHE_METHODS", ("update_conv_state", "rewind"))
    with pytest.raises(UserError, match=r"requires Cache\.rewind in modeling_of_another_time: not found in"):
        _check(module_of(), MAMBA2, "Mamba-2")


@pytest.mark.parametrize(
    ("name", "function", "expected", "received"),
    [
        ("bamba", 0, 6, 3),
        ("bamba", 1, 6, 3),
        ("olmo_hybrid", 0, 6, 3),
        ("olmo_hybrid", 1, 6, 3),
        ("kimi_linear", 1, 6, 3),
        ("jamba", 1, 6, 3),
        ("zamba", 1, 12, 4),
        ("lfm2", 0, 2, 0),
        ("inkling_text", 0, 16, 0),
        *[("inkling2_text", *numbers) for numbers in ((0, 16, 4), (1, 16, 12)) if "inkling2_text" in HYBRID_CONFIGS],
    ],
)
@torch.inference_mode()
def test_mixers_that_go_another_way_are_noticed(name, function, expected, received, monkeypatch):
    def without_one(model_type, module):
        functions = functions_of(model_type, module)
        return {name: functions[name] for place, name in enumerate(functions) if place != function}

    functions_of = recurrent.functions_of
    monkeypatch.setattr(recurrent, "functions_of", without_one)
    target = TransformersTarget(shared_model(name))
    prefilled(target, Prompt(torch.tensor([[5, 6, 7]])), 8)
    target.verify(random_tree(torch.Generator().manual_seed(0), 1, 4, 90, ragged=False))
    with pytest.raises(RuntimeError, match=f"once per verify pass: expected {expected} calls, received {received}$"):
        target.runner.commit_nodes(torch.tensor([[0]]), lambda: [[0]])


@pytest.mark.parametrize("family", [family for family in (*RECURRENCES, *CONVOLVED) if family in HYBRID_CONFIGS])
def test_families(family):
    model = shared_model(family)
    layers = plugins.layer_class(model.config)(model)
    assert isinstance(layers, RecurrentLayers)
    assert layers.static_shapes == (not family.startswith("inkling"))
    assert layers.attends == (family not in ("mamba", "falcon_mamba", "mamba2"))
    assert not RecurrentLayers.supports(shared_model("llama").config)
