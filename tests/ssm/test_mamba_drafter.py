"""The mamba drafter says what its network says token by token, whatever was accepted before."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mmspec import SamplingParams, UserError
from mmspec.core.plan import StepPlan
from mmspec.drafters.registry import make_drafter
from mmspec.ssm import mamba as networks
from mmspec.ssm.mamba import Mamba
from mmspec.targets.transformers_target import TransformersTarget
from tests.draft_checks import check_drafts
from tests.targets import prefilled, prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.models import mamba_network, text_inputs, vision_inputs


@torch.no_grad()
def plain_states(network, tokens):
    """Hidden states behind each token of a row, (length, hidden): one token after the other."""
    c, stream = network.config, network.embed.weight[torch.tensor(tokens)]
    for layer in network.layers:
        s = torch.zeros(c.heads, c.head_dim, c.state)
        inputs, outs = [], []
        for u in stream:
            mean, spread = u.mean(), u.var(unbiased=False)
            normed = (u - mean) / (spread + c.norm_eps).sqrt() * layer.norm.weight + layer.norm.bias
            p = layer.in_proj.weight @ normed + layer.in_proj.bias
            z, dt = p[: c.inner], p[-c.heads :]
            inputs.append(p[c.inner : -c.heads])
            past = [inputs[-1 - k] if k < len(inputs) else torch.zeros(c.channels) for k in range(c.window)]
            conv = sum(w * layer.conv[c.window - 1 - k, 0] for k, w in enumerate(past))
            conv = conv / (1 + (-conv).exp())
            x, b, read = conv[: c.inner], conv[c.inner : c.inner + c.state], conv[c.inner + c.state :]
            x = x.view(c.heads, c.head_dim, 1)
            step = (1 + dt.exp()).log()[:, None, None]
            s = (-step * layer.a_log.exp()[:, None, None]).exp() * s + step * x * b
            y = (s @ read + layer.d * x[..., 0]).flatten()
            y = y * z / (1 + (-z).exp())
            y = (y - y.mean()) / (y.var(unbiased=False) + c.norm_eps).sqrt()
            outs.append(u + layer.out_proj.weight @ (y * layer.gated_norm.weight + layer.gated_norm.bias))
        stream = torch.stack(outs)
    return F.layer_norm(stream, (c.hidden_size,), network.norm.weight, network.norm.bias, c.norm_eps)


def plain_next(drafter, tokens):
    """Probabilities of the token behind a row's, from nothing."""
    logits = drafter.network.embed.weight @ plain_states(drafter.network, tokens)[-1]
    if drafter.draft_ids is not None:
        forbidden = torch.ones(VOCAB, dtype=torch.bool)
        forbidden[drafter.draft_ids] = False
        logits[forbidden] = -torch.inf
    return logits.softmax(-1)


def check(model, inputs, drafter, **asked):
    """Decode; every node of every tree must have the probability of the plain loop, every output token be right."""
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]

    def gains(target, b, said, paths):
        ahead, found = {}, {(): 1.0}
        for path in map(tuple, paths):  # a parent's comes before
            *above, token = path
            if path[:-1] not in ahead:
                ahead[path[:-1]] = plain_next(drafter, rows[b] + said + above)
            found[path] = found[path[:-1]] * float(ahead[path[:-1]][token])
        return [found[tuple(path)] for path in paths]

    return check_drafts(model, inputs, drafter, gains, **asked)


# ---------------------------------------------------------------------- network


@pytest.mark.parametrize("length", [1, 5, 12])
def test_a_sequence_read_at_once_equals_the_plain_loop(length, monkeypatch):
    monkeypatch.setattr(networks, "CHUNK", 5)
    network = mamba_network()
    tokens = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
    hidden, _ = network(tokens)
    for row, found in zip(tokens.tolist(), hidden, strict=True):
        torch.testing.assert_close(found, plain_states(network, row), atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 2, 4])
def test_pieces_steps_and_padding_give_the_state_of_the_whole(window, monkeypatch):
    monkeypatch.setattr(networks, "CHUNK", 3)
    network = mamba_network(window=window)
    rows = [[7, 8, 9, 10, 11, 12, 13], [20, 21], [5, 6, 5, 6]]
    whole = [network(torch.tensor([row]))[1] for row in rows]
    padded = torch.tensor([row + [99] * (7 - len(row)) for row in rows])
    keep = torch.arange(7) < torch.tensor([[len(row)] for row in rows])
    at_once = network(padded, keep)[1]
    # The same in two ragged pieces, of which one is empty, and token by token.
    first, second = [3, 0, 1], [4, 2, 3]
    state = None
    for before, count in ((torch.zeros(3, dtype=torch.long), first), (torch.tensor(first), second)):
        places = (before[:, None] + torch.arange(max(count))).clamp(max=6)
        state = network(padded.gather(1, places), torch.arange(max(count)) < torch.tensor(count)[:, None], state)[1]
    for number, row in enumerate(rows):
        stepped = network.initial_state(1)
        stepped = tuple((conv.clone(), s.clone()) for conv, s in stepped)
        for token in row:
            stepped = network.step(torch.tensor([token]), stepped)[1]
        for found in (at_once, state):
            for layer, expected in zip(found, whole[number], strict=True):
                torch.testing.assert_close(layer[0][number], expected[0][0], atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(layer[1][number], expected[1][0], atol=1e-5, rtol=1e-4)
        for layer, expected in zip(stepped, whole[number], strict=True):
            torch.testing.assert_close(layer[0], expected[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(layer[1], expected[1], atol=1e-5, rtol=1e-4)


def test_strong_decay_does_not_overflow():
    network = mamba_network(layers=1)
    network.layers[0].a_log.data.fill_(4.0)
    network.layers[0].in_proj.bias.data[-3:] = 30.0
    hidden, _ = network(torch.randint(0, VOCAB, (1, 70)))
    hidden.square().sum().backward()
    assert bool(hidden.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in network.parameters())


# ---------------------------------------------------------------------- drafting


@pytest.mark.parametrize(
    ("model", "batch", "window", "settings", "asked"),
    [
        ("llama", 1, 4, {"top_k": 3, "depth": 4}, {}),
        ("llama", 3, 4, {"top_k": 3, "depth": 4}, {}),
        ("llama", 2, 4, {"top_k": 10, "depth": 3, "draft_ids": torch.tensor([5, 9, 2, 40, 41, 60])}, {}),
        ("llava", 2, 4, {"top_k": 3, "depth": 3}, {"new": 6}),  # a prompt with images
        ("qwen2-window", 2, 2, {"top_k": 4, "depth": 4}, {"skip": (1, 3, 4, 7), "nodes": 12}),  # steps without drafts
        ("qwen2-window", 2, 4, {"top_k": 2, "depth": 3}, {"params": SamplingParams(temperature=1.0), "new": 8}),
    ],
)
def test_trees_follow_the_network(model, batch, window, settings, asked):
    inputs = vision_inputs(model, batch) if model == "llava" else text_inputs(batch)
    check(shared_model(model), inputs, Mamba(mamba_network(window=window), **settings), **asked)


def test_accepted_tokens_are_cached_once():
    """A network trained for a moment has drafts accepted, rows differing in how many."""
    model, inputs = shared_model("llama"), text_inputs(3)
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    network = mamba_network(layers=1, hidden_size=32)
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    rows = [row[b:] for b, row in enumerate(ids)]
    for step in range(80):
        row = rows[step % 2]  # the third stays unknown
        hidden = network(row[None, :-1])[0][0, 8:]
        optimiser.zero_grad()
        F.cross_entropy(hidden @ network.embed.weight.T, row[9:]).backward()
        optimiser.step()
    lengths = check(model, inputs, Mamba(network, top_k=3, depth=4), nodes=12, new=24)
    assert sum(count for length, count in lengths.items() if length > 2) >= 3


def test_drafting_leaves_the_committed_state_alone():
    model = shared_model("llama")
    target, drafter = TransformersTarget(model), Mamba(mamba_network(), top_k=5, depth=3, total_tokens=9)
    drafter.attach(target)
    prompt = prompt_of(text_inputs(2))
    output = prefilled(target, prompt, 32)
    history = [[*row, 7] for row in prompt.unpadded()]
    drafter.begin(prompt, output, history)
    token = torch.tensor([7, 7])
    first = drafter.propose(token, StepPlan(64))
    before = [part.data.clone() for part in drafter.parts]
    again = drafter.propose(token, StepPlan(64))
    assert torch.equal(first.tokens, again.tokens)
    assert all(torch.equal(a, part.data) for a, part in zip(before, drafter.parts, strict=True))
    assert first.nodes == 10
    assert 1 < first.max_depth <= 3


def test_other_targets_are_named():
    with pytest.raises(UserError, match="share a vocabulary: the drafter has 60 tokens, the target 101"):
        Mamba(mamba_network(60)).attach(TransformersTarget(shared_model("llama")))
    with pytest.raises(UserError, match="mamba needs a checkpoint"):
        make_drafter("mamba")
