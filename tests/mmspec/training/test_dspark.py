"""What the heads of DSpark learn on a toy target whose next token depends on the last one."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

import mmspec
from mmspec import plugins
from mmspec.core.target import Prompt
from mmspec.drafters.dflash import DFlash
from mmspec.training.dflash import DFlashObjective
from mmspec.training.features import Features
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.models import dflash_network

MARKOV = {"markov_rank": 16, "markov_inputs": VOCAB, "markov_outputs": VOCAB}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = copy.deepcopy(shared_model("llama"))
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.05
        layer.mlp.down_proj.weight.data *= 0.05
    made.get_output_embeddings().weight.data *= 20.0
    return made


@pytest.fixture(scope="module")
def said(model: PreTrainedModel) -> Features:
    """Features of sampled answers."""
    torch.manual_seed(0)
    prompts, target = torch.randint(3, VOCAB, (32, 4)), plugins.target_class(model.config)(model)
    with torch.no_grad():
        tokens = model.generate(prompts, max_new_tokens=48, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
    reads = dflash_network(model, target_layer_ids=[0, 1]).config.features(2)
    target.features = ("last", *reads)
    found = target.prefill(Prompt(tokens), 1).features
    layers = torch.cat([found[name] for name in reads], dim=-1).clone()
    keep = torch.ones_like(tokens, dtype=torch.bool)
    answer = keep & (torch.arange(tokens.shape[1]) >= 4)
    return Features(tokens, found["last"].clone(), layers[..., :0], ~keep, answer, keep, layers)


def accepted(model: PreTrainedModel, said: Features, loss: str = "kl", **heads: object) -> float:
    """Tokens per step of trees of 14 nodes, sampled, of a drafter after the same steps."""
    network = dflash_network(model, window=0, sliding=[], block_size=6, target_layer_ids=[0, 1], **heads)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(torch.ones_like(parameter) if name.endswith("norm.weight") else parameter / 2)
        if heads:
            network.markov_out.weight.zero_()
    target = plugins.target_class(model.config)(model)
    optimiser, generator = torch.optim.Adam(network.parameters(), 5e-3), torch.Generator().manual_seed(0)
    for _ in range(120):
        optimiser.zero_grad()
        DFlashObjective(anchors=16, loss=loss)(network, target, said, generator=generator).total.backward()
        optimiser.step()
    drafter, lengths = DFlash(network), []
    for seed in range(4):
        torch.manual_seed(seed)
        prompts = torch.randint(3, VOCAB, (4, 4), generator=torch.Generator().manual_seed(seed + 100))
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "eos_token_id": None, "nodes": 14}
        out = mmspec.generate(model, drafter=drafter, input_ids=prompts, return_dict_in_generate=True, **options)
        lengths += [length for row in out.stats for length in row.accept_lengths]
    return sum(lengths) / len(lengths)


@pytest.mark.long
def test_a_markov_head_raises_the_acceptance_of_trees(model, said):
    plain = accepted(model, said)
    markov = accepted(model, said, **MARKOV)
    dspark = accepted(model, said, "tv", **MARKOV, confidence="markov", from_anchor=True)
    assert markov > plain + 0.2
    assert dspark > plain + 0.2
