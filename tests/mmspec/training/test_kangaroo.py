"""Kangaroo's loss equals a plain loop; what an adapter learns on a toy target."""

from __future__ import annotations

import copy

import pytest
import torch

import mmspec
from mmspec import plugins
from mmspec.core.target import Prompt
from mmspec.drafters.kangaroo import Kangaroo
from mmspec.training.features import Features
from mmspec.training.kangaroo import KangarooObjective
from tests.kangaroo import adapter, logits, plain_chain
from tests.tiny import shared_model
from tests.tiny.models import kangaroo_network, text_inputs


@pytest.fixture(scope="module")
def model():
    made = copy.deepcopy(shared_model("llama"))
    made.get_output_embeddings().weight.data *= 3.0  # the same answers, of which the target is surer
    return made


@pytest.fixture(scope="module")
def said(model):
    """Features of the answers to four prompts."""
    prompts, target = text_inputs(4, 6)["input_ids"].clamp(min=3), plugins.target_class(model.config)(model)
    with torch.no_grad():
        tokens = model.generate(prompts, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
        embeds = target.embed(tokens)
    target.features = ("last", "output 0")
    found = target.prefill(Prompt(tokens), 1).features
    keep = torch.ones_like(tokens, dtype=torch.bool)
    answer = keep & (torch.arange(tokens.shape[1]) >= prompts.shape[1])
    return Features(tokens, found["last"].clone(), embeds, ~keep, answer, keep, found["output 0"].clone())


def plain(network):
    """The network as transformers' layers."""
    ours = network.state_dict()
    tensors = dict(zip(("q", "k", "v"), ours["layers.0.qkv.weight"].split([48, 24, 24]), strict=True))
    tensors = {f"layers.0.self_attn.{part}_proj.weight": tensor for part, tensor in tensors.items()}
    tensors["layers.0.self_attn.o_proj.weight"] = ours["layers.0.out.weight"]
    tensors["layers.0.input_layernorm.weight"] = ours["layers.0.input_norm.weight"]
    return adapter(tensors | {"norm.weight": ours["norm.weight"]})


@pytest.mark.parametrize("ids", [None, torch.arange(0, 101, 3)])
def test_the_loss_is_that_of_a_plain_loop(ids, model, said):
    network, target = kangaroo_network(model), plugins.target_class(model.config)(model)
    output = KangarooObjective()(network, target, said, ids)
    losses, chosen = [], slice(None) if ids is None else ids
    for tokens in said.tokens.tolist():
        with torch.no_grad():
            goal = model(torch.tensor([tokens])).logits[0, 6:-1, chosen].softmax(-1)
        scores = logits(model, 1, plain(network), {"input_ids": torch.tensor([tokens[:7]])}, tokens[7:-1])
        losses.append(-(goal * scores[:, chosen].log_softmax(-1)).sum(-1))
    assert float(output.total.detach()) == pytest.approx(float(torch.cat(losses).mean()), rel=1e-4)
    gradients = torch.autograd.grad(output.total, list(network.parameters()))
    assert all(bool(gradient.any()) for gradient in gradients)


def test_a_batch_without_answers_has_no_loss(model, said):
    silent, target = copy.copy(said), plugins.target_class(model.config)(model)
    silent.answer = torch.zeros_like(said.answer)
    assert float(KangarooObjective()(kangaroo_network(model), target, silent).total) == 0


def accepted(model, said, drafter, nodes):
    """Accepted tokens of every step, for every prompt, whose answers must be those of ``generate``."""
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    lengths = []
    for tokens in said.tokens:
        out = mmspec.generate(model, drafter=drafter, input_ids=tokens[None, :6], nodes=nodes, **options)
        assert out.sequences[0].tolist() == tokens.tolist()
        lengths.append(out.stats[0].accept_lengths)
    return lengths


def test_a_chain_accepts_what_a_plain_loop_accepts_and_a_tree_more(model, said):
    network, target = kangaroo_network(model), plugins.target_class(model.config)(model)
    optimiser = torch.optim.Adam(network.parameters(), 5e-3)
    for _ in range(60):
        optimiser.zero_grad()
        KangarooObjective()(network, target, said).total.backward()
        optimiser.step()
    network.requires_grad_(False)
    reference = plain(network)

    def loops(confidence):
        rows = [row.tolist() for row in said.tokens]
        prompts = [{"input_ids": torch.tensor([row[:6]])} for row in rows]
        return [
            plain_chain(model, 1, reference, prompt, row[6:], 4, confidence)
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    def mean(lengths):
        return sum(map(sum, lengths)) / sum(map(len, lengths))

    chain, tree = Kangaroo(copy.deepcopy(network)), Kangaroo(network)
    chain.draft_chains(4)
    lengths = accepted(model, said, chain, 4)
    assert lengths == loops(0.0)
    assert 1.3 < mean(loops(0.6)) <= mean(lengths) < mean(accepted(model, said, tree, 14)) - 0.1
