"""Hybrids and the mamba drafter in bfloat16, past 256 tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from mmspec.ssm import mamba as networks
from mmspec.ssm.recurrences import _step_sizes
from tests.half import check_decoding
from tests.tiny.configs import MIXER_CONFIGS, VOCAB
from tests.tiny.models import mamba_network


@pytest.mark.parametrize("name", ["bamba", "mamba2", "qwen3_next", "olmo_hybrid", "jamba", "lfm2", *MIXER_CONFIGS])
def test_decoding(name):
    check_decoding(name)


def test_step_sizes_are_computed_in_float32():
    raw, bias = torch.linspace(-9, 9, 500, dtype=torch.bfloat16), torch.linspace(-1, 1, 500, dtype=torch.bfloat16)
    found = _step_sizes(raw, bias, softplus=True)
    torch.testing.assert_close(found.double(), F.softplus(raw.double() + bias.double()), atol=1e-6, rtol=1e-5)
    assert torch.equal(_step_sizes(raw, None, softplus=False), raw.float())


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
    for at in range(0, 300, piece):
        _, state = layer.step(projected[:, at], state) if piece == 1 else layer.read(projected, None, state)
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
