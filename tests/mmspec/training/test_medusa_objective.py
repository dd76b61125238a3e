"""Losses of Medusa and Hydra equal plain loops over published tensors; what they learn on a toy target."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import PreTrainedModel

import mmspec
from mmspec import plugins
from mmspec.core.target import Prompt
from mmspec.drafters.checkpoint import load_network
from mmspec.drafters.medusa import Hydra, Medusa, MedusaNetwork
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training.features import Features
from mmspec.training.medusa import MedusaObjective
from mmspec.training.tasks import head_weight
from tests.medusa import HEADS, LAYERS, MAP, logits, parts, plain_chain, prefix, published
from tests.tiny import shared_model
from tests.tiny.models import medusa_network, text_inputs


def random_batch() -> Features:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 90, (2, 11), generator=g)
    visual, answer, keep = torch.zeros(3, 2, 11, dtype=torch.bool).unbind(0)
    for row, spans in enumerate((((3, 9),), ((2, 5), (6, 9)))):
        for begin, end in spans:
            answer[row, begin:end] = True
    keep[:] = True
    hidden, embeds = torch.randn(2, 2, 11, 48, generator=g).unbind(0)
    return Features(tokens, hidden, embeds.clone(), visual, answer, keep)


@torch.no_grad()
def plain_losses(layout, tensors, target, batch, loss, ids):
    """Losses of each head, at one token after another."""
    found = [[] for _ in range(HEADS)]
    for row, states in enumerate(batch.hidden):
        said = batch.answer[row].nonzero().flatten().tolist()
        if layout == "hydra-prefix":
            states = prefix()(inputs_embeds=states[None]).last_hidden_state[0]
        for root in said:
            for head in range(HEADS):
                if root + head + 1 not in said:
                    break
                embeds = batch.embeds[row, root : root + head + 1]
                scores = logits(layout, tensors, head, states[root - 1], embeds, target.head)
                goal = target.head(batch.hidden[row, root + head])[ids].softmax(-1)
                kl = -(goal * scores.log_softmax(-1)).sum()
                share = math.exp(-3 * float(torch.minimum(goal, scores.softmax(-1)).sum()))
                accepted = torch.minimum(goal, scores.softmax(-1)).sum()
                found[head].append(kl if loss == "kl" else share * kl + (1 - share) * (1 - accepted))
    return [torch.tensor(losses) for losses in found]


@pytest.mark.parametrize(
    ("layout", "loss"),
    [("medusa", "kl"), ("tgi", "lk"), ("vllm-narrow", "kl"), ("hydra", "lk"), ("hydra-prefix", "kl")],
)
def test_heads_equal_those_run_alone(layout, loss, tmp_path):
    config, tensors = published(layout)
    target, batch = TransformersTarget(shared_model("llama")), random_batch()
    shape, ours, ids, _ = (Hydra if layout.startswith("hydra") else Medusa).convert(config, tensors, str(tmp_path))
    network = load_network(MedusaNetwork, shape, ours, tmp_path)
    if layout == "hydra-prefix":
        network.take_shape(Hydra.shape_of(medusa_network(target.model, prefix=True)))
    assert layout != "vllm-narrow" or torch.equal(ids, MAP)
    output = MedusaObjective(decay=0.7, loss=loss)(network, target, batch, ids)
    expected = plain_losses(layout, tensors, target, batch, loss, slice(None) if ids is None else ids)
    total = sum(0.7**head * losses.sum() / len(expected[0]) for head, losses in enumerate(expected))
    assert float(output.total.detach()) == pytest.approx(float(total), rel=1e-4)
    for head, losses in enumerate(expected, start=1):
        assert output.metrics[f"token_{head}"] == pytest.approx(float(losses.mean()), rel=1e-4)
    gradients = torch.autograd.grad(output.total, list(network.parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_a_batch_without_answers_has_no_loss():
    target, batch = TransformersTarget(shared_model("llama")), random_batch()
    batch.answer[:] = False
    assert float(MedusaObjective()(medusa_network(target.model), target, batch).total) == 0


STARTS = [{"head": 101}, {"grounded": True, "layers": 2}, {"grounded": True, "prefix": True}]


@pytest.mark.parametrize("changes", STARTS)
def test_heads_start_as_the_targets_output_layer(changes):
    target = TransformersTarget(shared_model("llama"))
    network = medusa_network(target.model, **changes)
    network.start(head_weight(target, None))
    state, rotation = torch.randn(1, 5, 48), (torch.ones(5, 1, 1), torch.zeros(5, 1, 1))
    assert torch.equal(network(state, rotation, lambda q, k, v: q), state)
    for head, chain in enumerate(network.heads):
        read = torch.cat([state, torch.randn(1, 5, 48 * (head + 1))], dim=-1) if network.config.grounded else state
        torch.testing.assert_close(network.scores(head, [chain(read)], target.head), target.head(state))


# ---------------------------------------------------------------------- trained


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = copy.deepcopy(shared_model("llama"))
    made.get_output_embeddings().weight.data *= 3.0  # the same answers, of which the target is surer
    return made


@pytest.fixture(scope="module")
def said(model: PreTrainedModel) -> Features:
    """Features of the answers to four prompts."""
    prompts, target = text_inputs(4, 6)["input_ids"].clamp(min=3), plugins.target_class(model.config)(model)
    with torch.no_grad():
        tokens = model.generate(prompts, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
        embeds = target.embed(tokens)
    target.features = ("last",)
    hidden = target.prefill(Prompt(tokens), 1).features["last"].clone()
    keep = torch.ones_like(tokens, dtype=torch.bool)
    answer = keep & (torch.arange(tokens.shape[1]) >= prompts.shape[1])
    return Features(tokens, hidden, embeds, ~keep, answer, keep)


def trained(model, said, steps, **changes):
    """A network that has started as the target's output layer and learnt its answers in part."""
    target = plugins.target_class(model.config)(model)
    network = medusa_network(model, **changes)
    network.start(head_weight(target, None))
    optimiser = torch.optim.Adam(network.parameters(), 5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        MedusaObjective()(network, target, said).total.backward()
        optimiser.step()
    return network


def accepted(model, said, drafter, nodes):
    """Accepted tokens of every step, for every prompt, whose answers must be those of ``generate``."""
    lengths = []
    for tokens in said.tokens:
        options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "nodes": nodes}
        out = mmspec.generate(
            model, drafter=drafter, input_ids=tokens[None, :6], return_dict_in_generate=True, **options
        )
        assert out.sequences[0].tolist() == tokens.tolist()
        lengths.append(out.stats[0].accept_lengths)
    return lengths


def mean(lengths):
    return sum(map(sum, lengths)) / sum(map(len, lengths))


@pytest.mark.parametrize("layout", ["medusa", "hydra"])
def test_a_chain_accepts_what_a_plain_loop_accepts_and_a_tree_more(layout, model, said):
    kind, grounded = (Hydra, True) if layout == "hydra" else (Medusa, False)
    network = trained(model, said, 25, layers=LAYERS, head=101, grounded=grounded, head_bias=grounded)
    tensors = {}
    for name, value in network.state_dict().items():
        part, head, *rest = name.split(".")
        linear, projection, output = parts(layout, head, int(rest[0]) if part == "heads" else 0)
        theirs = {"linear": linear, "residual": projection}[rest[1]] if part == "heads" else output
        tensors[f"{theirs}.{rest[-1]}"] = value
    target = plugins.target_class(model.config)(model)
    plain = [plain_chain(layout, tensors, target, 4, row[:6].tolist(), row[6:].tolist()) for row in said.tokens]
    chain, tree = kind(copy.deepcopy(network)), kind(network)
    chain.draft_chains(4)
    lengths = accepted(model, said, chain, 4)
    assert lengths == plain
    assert 1.5 < mean(lengths) < mean(accepted(model, said, tree, 14)) - 0.1
