"""Hybrids and the mamba drafter in bfloat16, past 256 tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from mmspec import plugins
from mmspec.core.tree import TokenTree
from mmspec.ssm.cache import StateCache
from mmspec.ssm.drafters import mamba as networks
from tests.half import check_decoding, half_model, long_inputs
from tests.targets import prefilled, prompt_of
from tests.tiny import random_tree
from tests.tiny.configs import MIXER_CONFIGS, VOCAB
from tests.tiny.models import mamba_network


@pytest.mark.parametrize("name", ["bamba", "mamba2", "qwen3_next", "olmo_hybrid", "jamba", "lfm2", *MIXER_CONFIGS])
def test_decoding(name):
    check_decoding(name)


@pytest.mark.parametrize("name", ["bamba", "mamba2", "falcon_h1"])
@pytest.mark.parametrize("nodes", [1, 6])
def test_step_sizes_are_computed_in_float32(name, nodes, monkeypatch):
    """Step sizes as the scan and the commit receive them."""
    model, given = half_model(name), []
    scan = StateCache.scan

    def noted(cache, hidden_states, dt, *args, dt_bias, dt_softplus, **options):
        result = scan(cache, hidden_states, dt, *args, dt_bias=dt_bias, dt_softplus=dt_softplus, **options)
        gates = cache._scans._gates[cache._place[cache._current[0]], :, : dt.shape[1]]
        given.append((dt.double() + dt_bias.double(), gates.clone()))
        assert dt_softplus
        assert cache._scans.state.data.dtype == torch.float32
        return result

    monkeypatch.setattr(StateCache, "scan", noted)
    target = plugins.target_class(model.config)(model)
    prefilled(target, prompt_of(long_inputs(name, 3)), 8)
    tree = random_tree(torch.Generator().manual_seed(0), 1, nodes, 90, ragged=False)
    target.verify(TokenTree(tree.tokens, tree.parents))
    assert len(given) == target.runner.cache._scans.state.data.shape[1]
    for raw, kept in given:
        assert raw.abs().max() > 0.5
        torch.testing.assert_close(kept.double(), F.softplus(raw), atol=1e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("piece", [1, 300])
def test_a_drafters_state_decays_as_in_float32(piece):
    """300 steps of one size, by which a state decays to a twentieth: rounded sizes would add up."""
    layer = mamba_network().to(torch.bfloat16).layers[0]
    c = layer.config
    dt = torch.tensor([-3.7, -2.3, -1.1], dtype=torch.bfloat16)
    steps = F.softplus(dt.double())
    layer.a_log.data = (3 / (300 * steps)).log().to(torch.bfloat16)
    projected = torch.zeros(1, 300, c.inner + c.channels + c.heads, dtype=torch.bfloat16)
    projected[..., -c.heads :] = dt
    window = torch.zeros(1, c.window - 1, c.channels, dtype=torch.bfloat16)
    state = window, torch.ones(1, c.state, c.heads, c.head_dim)
    if piece == 1:
        for at in range(300):
            _, state = layer.step(projected[:, at], state)
    else:
        _, state = layer.read(projected, None, state)
    left = (-300 * steps * layer.a_log.double().exp()).exp()
    torch.testing.assert_close(state[1].double(), left[:, None].expand_as(state[1]), rtol=1e-4, atol=0)


@torch.no_grad()
def test_drafting():
    """What follows 300 tokens, read at once and step by step, is about what it is in float32."""
    low = mamba_network(hidden_size=48).to(torch.bfloat16)
    exact = copy.deepcopy(low).float()
    tokens = torch.randint(0, VOCAB, (2, 300), generator=torch.Generator().manual_seed(0))
    said = []
    for network in (low, exact):
        network.freeze()
        hidden, state = network(tokens[:, :270])
        assert networks.CHUNK < 270
        for at in range(270, 300):
            hidden, state = network.step(tokens[:, at], state)
        said.append((hidden @ network.embed.weight.T).float().softmax(-1))
    torch.testing.assert_close(said[0], said[1], atol=0.05, rtol=0.1)
