"""Drafts of the target's own first layers, against transformers' early exit and models of these layers alone."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

from mmspec import UserError, plugins
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters.early_exit import EarlyExit
from mmspec.drafters.registry import make_drafter
from mmspec.ops import cpu, cpu_library
from mmspec.targets.decoder import Decoder
from mmspec.targets.packing import pack_model
from mmspec.targets.transformers_target import TransformersTarget
from tests.draft_checks import check_logits
from tests.targets import plain_logits, prefilled, row_of
from tests.tiny import shared_model
from tests.tiny.configs import TINY_SIZES
from tests.tiny.models import text_inputs, vision_inputs


def llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY_SIZES | {"num_hidden_layers": 4, **changes})).eval()


def shortened(model, layers):
    """A copy of a model with its first layers alone."""
    short = copy.deepcopy(model)
    decoder = short.get_decoder()
    del decoder.layers[layers:]
    return short


@pytest.mark.parametrize("layers", [1, 3])
def test_chains_are_the_candidates_of_transformers(layers, monkeypatch):
    model, inputs, asked = llama(), text_inputs(1, 9), []
    candidates = EarlyExitCandidateGenerator.get_candidates

    def noted(self, input_ids, **keywords):
        found = candidates(self, input_ids, **keywords)
        asked.append((input_ids, found[0][0, input_ids.shape[1] :].tolist()))
        return found

    monkeypatch.setattr(EarlyExitCandidateGenerator, "get_candidates", noted)
    model.generation_config.update(num_assistant_tokens=6, num_assistant_tokens_schedule="constant")
    model.generation_config.assistant_confidence_threshold = 0.0
    options = dict(do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=0)
    model.generate(**inputs, **options, assistant_early_exit=layers)
    drafter, target = EarlyExit(layers, top_k=1), TransformersTarget(model)
    drafter.attach(target)
    longest = 0
    for ids, expected in asked:
        output = prefilled(target, Prompt(ids[:, :-1]), 32)
        drafter.begin(Prompt(ids[:, :-1]), output, ids.tolist())
        if expected:
            tree = drafter.propose(ids[:, -1], StepPlan(len(expected), len(expected)))
            assert tree.tokens[0, 1:].tolist() == expected
        longest = max(longest, len(expected))
        target.keep([])
        drafter.select([])
    assert longest > 4


@pytest.mark.parametrize("name", ["gemma2", "llava", "qwen3_vl", "qwen3_5_text"])
def test_nodes_have_the_probabilities_of_the_first_layers(name):
    """After whatever was accepted, in a batch of padded prompts with images."""
    model = shared_model(name)
    inputs = vision_inputs(name, 2) if name in ("llava", "qwen3_vl") else text_inputs(2, 9)
    short, rows = shortened(model, 1), [row_of(inputs, number) for number in range(2)]
    logits = lambda row, tokens: plain_logits(short, rows[row], tokens)  # noqa: E731
    check_logits(model, inputs, EarlyExit(1, top_k=3), logits, nodes=7, depth=3, skip=(2,), new=10)


@pytest.mark.skipif(not cpu_library.available(), reason=f"the C++ kernels do not run: {cpu_library.problem()}")
def test_packed_targets_run_the_first_layers_alone(monkeypatch):
    """All of them in one call of the kernels; the target's passes stay calls of all layers."""
    model = llama(hidden_size=64, num_attention_heads=2, head_dim=32, intermediate_size=64)
    short = shortened(model, 2)
    pack_model(model, "bfloat16")
    target, drafter, counts = TransformersTarget(model), EarlyExit(2, top_k=1), []
    drafter.attach(target)
    prompt, history = Prompt(torch.arange(3, 12)[None]), [*range(3, 12), 7]
    drafter.begin(prompt, prefilled(target, prompt, 32), [history])
    decode = cpu.decode
    monkeypatch.setattr(cpu, "decode", lambda weights, *rest: counts.append(len(weights)) or decode(weights, *rest))
    tree = drafter.propose(torch.tensor([7]), StepPlan(3, 3))
    assert len(counts) >= 3
    assert set(counts) == {2}
    target.verify(tree)
    assert counts[-1] == 4
    path = tree.tokens[0].tolist()
    with torch.no_grad():
        logits = short(torch.tensor([history[:-1] + path])).logits[0, len(history) - 1 :].log_softmax(-1)
    assert tree.path_probs[0][-1] == pytest.approx(float(logits[range(3), path[1:]].sum().exp()), rel=0.2)


def test_weights_are_the_targets():
    model = llama()
    before = sum(1 for _ in model.parameters())
    module = Decoder(model, 2)._module
    own = {id(weight) for weight in model.parameters()}
    assert len(module.layers) == 2
    assert {id(weight) for weight in module.parameters()} < own
    assert len(model.model.layers) == 4
    assert sum(1 for _ in model.parameters()) == before


@pytest.mark.parametrize("layers", ["0", "4", "9"])
def test_numbers_of_layers(layers):
    model = llama()
    with pytest.raises(
        UserError, match=f"^an early exit must be after a layer before the last: .* 1 to 3, got {layers}$"
    ):
        make_drafter(f"early-exit:{layers}").attach(plugins.target_class(model.config)(model))


def test_no_number():
    with pytest.raises(UserError, match=r"^early-exit takes a number of layers, as in early-exit:4: got 'half'$"):
        make_drafter("early-exit:half")
