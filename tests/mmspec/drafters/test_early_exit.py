"""Drafts of the target's own first layers, against transformers' early exit and models of these layers alone, and of
Kangaroo adapters as published, against plain loops.
"""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmspec import TokenTree, UserError
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters.early_exit import EarlyExit, Kangaroo
from mmspec.drafters.growth import LevelPasses
from mmspec.drafters.registry import make_drafter
from mmspec.ops import cpu, cpu_library
from mmspec.targets.decoder import Decoder
from mmspec.targets.packing import pack_model
from mmspec.targets.transformers_target import FirstLayers, TransformersTarget
from tests import kangaroo
from tests.draft_checks import check_logits
from tests.mmspec.drafters.test_drafters import target_of
from tests.targets import plain_logits, prefilled, row_of
from tests.tiny import shared_model
from tests.tiny.configs import TINY_SIZES
from tests.tiny.models import kangaroo_network, text_inputs, vision_inputs

needs_library = pytest.mark.skipif(not cpu_library.available(), reason=f"no C++ kernels: {cpu_library.problem()}")
PROMPT = Prompt(torch.arange(3, 12)[None])


def llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY_SIZES | {"num_hidden_layers": 4, **changes})).eval()


def shortened(model, layers):
    short = copy.deepcopy(model)
    del short.get_decoder().layers[layers:]
    return short


def packed():
    """A model of four layers with packed weights, and a copy of its first two layers, not packed."""
    model = llama(hidden_size=64, num_attention_heads=2, head_dim=32, intermediate_size=64)
    short = shortened(model, 2)
    pack_model(model, "bfloat16")
    return model, short


@pytest.mark.parametrize("name", ["gemma2", "llava", "qwen3_vl", "qwen3_5_text"])
def test_nodes_have_the_probabilities_of_the_first_layers(name):
    model = shared_model(name)
    inputs = vision_inputs(name, 2) if name in ("llava", "qwen3_vl") else text_inputs(2, 9)
    short, rows = shortened(model, 1), [row_of(inputs, number) for number in range(2)]
    logits = lambda row, tokens: plain_logits(short, rows[row], tokens)  # noqa: E731
    check_logits(model, inputs, EarlyExit(1, top_k=3), logits, nodes=7, depth=3, skip=(2,), new=10)


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "bamba"])
def test_nodes_of_kangaroo_have_the_probabilities_of_plain_loops(name, tmp_path):
    model, plain = shared_model(name), kangaroo.adapter()
    kangaroo.published(tmp_path, plain)
    inputs = vision_inputs(name, 2) if name == "qwen2_vl" else text_inputs(2, 9)
    rows = [row_of(inputs, number) for number in range(2)]
    drafter = make_drafter(f"kangaroo:{tmp_path}@1")
    drafter.top_k = 3
    scores = lambda row, tokens: kangaroo.logits(model, 1, plain, rows[row], tokens)  # noqa: E731
    check_logits(model, inputs, drafter, scores, nodes=7, depth=3, skip=(2,), new=10)


@needs_library
def test_packed_targets_run_the_first_layers_alone(monkeypatch):
    """All of them in one call of the kernels; the target's passes stay calls of all layers."""
    model, short = packed()
    target, drafter, counts = TransformersTarget(model), EarlyExit(2, top_k=1), []
    drafter.attach(target)
    history = [*range(3, 12), 7]
    drafter.begin(PROMPT, prefilled(target, PROMPT, 32), [history])
    decode = cpu.decode_sublayers

    def counted(weights, *rest, **masks):
        counts.append(len(weights))
        return decode(weights, *rest, **masks)

    monkeypatch.setattr(cpu, "decode_sublayers", counted)
    tree = drafter.propose(torch.tensor([7]), StepPlan(3, 3))
    assert len(counts) >= 3
    assert set(counts[-3:]) == {4}  # attention and MLP of two layers
    target.verify(tree)
    assert counts[-1] == 8
    path = tree.tokens[0].tolist()
    with torch.no_grad():
        logits = short(torch.tensor([history[:-1] + path])).logits[0, len(history) - 1 :].log_softmax(-1)
    assert tree.path_probs[0][-1] == pytest.approx(float(logits[range(3), path[1:]].sum().exp()), rel=0.2)


@needs_library
def test_states_of_packed_targets_are_those_of_their_verify_passes():
    model, _ = packed()
    target, drafter = TransformersTarget(model), Kangaroo(kangaroo_network(model, exit_layer=2))
    drafter.attach(target)
    prefilled(target, PROMPT, 32)
    tokens, first = torch.tensor([[7, 5, 9]]), FirstLayers(target, 2)
    passes = LevelPasses(first.runner, first.recurrent, drafter.features[0])
    target.runner.cache.reserve_nodes(3)
    origin = torch.zeros(1, 1, dtype=torch.long)
    states = [passes(tokens[:, place : place + 1], origin) for place in range(3)]
    passes.end()
    chain = TokenTree(tokens, torch.tensor([[-1, 0, 1]]))
    assert torch.equal(torch.cat(states, dim=1), target.verify(chain, drafter.features).features[drafter.features[0]])


def test_weights_are_the_targets():
    model = llama()
    before = sum(1 for _ in model.parameters())
    module = Decoder(model, 2)._module
    own = {id(weight) for weight in model.parameters()}
    assert len(module.layers) == 2
    assert {id(weight) for weight in module.parameters()} < own
    assert len(model.model.layers) == 4
    assert sum(1 for _ in model.parameters()) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((f"early-exit:{n}", rf"^an early exit .* the last: .* 1 to 3, got {n}$") for n in (0, 4, 9)),
        ("early-exit:half", r"^early-exit takes a number of layers, as in early-exit:4: got 'half'$"),
    ],
)
def test_numbers_of_layers(name, message):
    with pytest.raises(UserError, match=message):
        make_drafter(name).attach(TransformersTarget(llama()))


def test_a_folder_of_kangaroo_is_recognised_and_leaves_the_target_after_two_layers(tmp_path):
    kangaroo.published(tmp_path, kangaroo.adapter())
    drafter = make_drafter(str(tmp_path))
    assert isinstance(drafter, Kangaroo)
    assert drafter.network.config.exit_layer == 2
    with pytest.raises(UserError, match=r"^an early exit must be after a layer before the last: .* 1 to 1, got 2$"):
        drafter.attach(target_of("llama"))
