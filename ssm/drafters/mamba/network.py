"""Small Mamba-2 language model (arXiv 2405.21060) for drafting.

Each layer, with u its normalised input: ``z, x, B, C, dt = in_proj(u)``; x, B and C pass a short causal convolution;
in each head, ``S_t = exp(dt_t A) S_{t-1} + B_t (x) dt_t x_t`` and ``y_t = C_t S_t + D x_t``; ``out_proj(norm(y *
silu(z)))`` is added to the residual stream. Differences from the paper: all heads share B and C; a bias of ``in_proj``
replaces those of dt and the convolution; and layer norms replace RMS norms, one kernel instead of four.

Sequences are processed in chunks, each computed as attention with decays (section 6 of the paper); drafting advances
one token per node.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.ssm.drafters.mamba import MambaConfig

CHUNK = 64
"""Chunk length of the scan, in tokens."""

_MAX_TABLE = 2**23  # elements of the first layer's look-up table

State = tuple[tuple[Tensor, Tensor], ...]
"""Per layer: the convolution's latest inputs, (rows, window - 1, channels); S, (rows, state, heads, head_dim), always
float32."""


class MambaLayer(nn.Module):
    """Mamba-2 layer; see the module."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = c = config
        self.norm = nn.LayerNorm(c.hidden_size, c.norm_eps)
        self.in_proj = nn.Linear(c.hidden_size, c.inner + c.channels + c.heads)
        self.conv = nn.Parameter(torch.empty(c.window, 1, c.channels).uniform_(-1, 1) / math.sqrt(c.window))
        self.a_log = nn.Parameter(torch.empty(c.heads).uniform_(1, 16).log())
        self.d = nn.Parameter(torch.ones(c.heads, 1))
        self.gated_norm = nn.LayerNorm(c.inner, c.norm_eps)
        self.out_proj = nn.Linear(c.inner, c.hidden_size, bias=False)
        self.a: Tensor | None = None  # set by ``freeze``
        with torch.no_grad():
            self.in_proj.bias.zero_()
            # dt of 0.001 to 0.1 after softplus, as in the paper's code.
            steps = torch.exp(torch.empty(c.heads).uniform_(math.log(1e-3), math.log(1e-1)))
            self.in_proj.bias[-c.heads :] = steps + torch.log(-torch.expm1(-steps))

    def project(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., inner + channels + heads): z, the convolution's input, dt before its softplus."""
        return self.in_proj(self.norm(x))

    def read(
        self, projected: Tensor, keep: Tensor | None, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Process a sequence.

        Args:
            projected: (batch, length, ...), see ``project``.
            keep: (batch, length) bool, False at right padding; None for no padding.
            state: initial state, see ``State``.

        Returns:
            Residual update, (batch, length, hidden), and final state.
        """
        c, (window, s) = self.config, state
        z, inputs, dt = projected.split([c.inner, c.channels, c.heads], dim=-1)
        seen = torch.cat([window, inputs], dim=1)
        length = inputs.shape[1]
        convolved = torch.stack([seen[:, k : k + length] * self.conv[k] for k in range(c.window)]).sum(0)
        x, b, read = F.silu(convolved).split([c.inner, c.state, c.state], dim=-1)
        x = x.unflatten(-1, (c.heads, c.head_dim))
        dt = F.softplus(dt.float())
        if keep is not None:
            dt = dt * keep[..., None]  # dt = 0 leaves the state unchanged
        parts = []
        for at in range(0, length, CHUNK):
            piece = slice(at, at + CHUNK)
            y, s = self._chunk(x[:, piece].float(), b[:, piece].float(), read[:, piece].float(), dt[:, piece], s)
            parts.append(y)
        y = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(z.dtype) + self.d * x
        return self._out(y.flatten(2), z), (_tails(seen, keep, c.window - 1), s)

    def step(self, projected: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Advance every row by one token.

        Args:
            projected: (rows, ...), see ``project``.
            state: see ``State``; S is overwritten.

        Returns:
            Residual update, (rows, hidden), and new state.
        """
        c, (window, s) = self.config, state
        z, inputs, dt = projected.split([c.inner, c.channels, c.heads], dim=-1)
        seen = torch.cat([window, inputs[:, None]], dim=1)
        convolved = F.silu((seen * self.conv[:, 0]).sum(1)).float()
        x, b, read = convolved.split([c.inner, c.state, c.state], dim=-1)
        x, dt = x.unflatten(-1, (c.heads, c.head_dim)), F.softplus(dt.float())[..., None]
        s.mul_(torch.exp(dt * self._a)[:, None]).addcmul_(b[:, :, None, None], (dt * x)[:, None])
        y = torch.bmm(read[:, None], s.flatten(2))[:, 0].view_as(x)
        return self._out(torch.addcmul(y, x, self.d).flatten(1).to(z.dtype), z), (seen[:, 1:], s)

    @property
    def _a(self) -> Tensor:
        return -self.a_log.float().exp()[:, None] if self.a is None else self.a

    def _out(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(self.gated_norm(y * F.silu(z)))

    def _chunk(self, x: Tensor, b: Tensor, read: Tensor, dt: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Scan of a chunk: y without D x, (batch, length, heads, head_dim), and final S."""
        length = x.shape[1]
        decay = (dt * self._a[:, 0]).cumsum(1).transpose(1, 2)  # (batch, heads, length)
        between = decay[..., :, None] - decay[..., None, :]
        ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = between.masked_fill(ahead, -torch.inf).exp() * (read @ b.transpose(1, 2))[:, None]
        fed = (dt[..., None] * x).transpose(1, 2)  # (batch, heads, length, head_dim)
        before = (read @ s.flatten(2)).unflatten(-1, s.shape[2:]).transpose(1, 2)
        y = weights @ fed + decay.exp()[..., None] * before
        left = (decay[..., -1:] - decay).exp()[..., None] * fed
        added = b.transpose(1, 2) @ left.transpose(1, 2).flatten(2)
        s = decay[..., -1].exp()[:, None, :, None] * s + added.view_as(s)
        return y.transpose(1, 2), s


class MambaNetwork(nn.Module):
    """Mamba-2 language model with tied embeddings."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed.weight, std=config.hidden_size**-0.5)
        self.layers: Any = nn.ModuleList(MambaLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self._table: Tensor | None = None

    @torch.no_grad()
    def freeze(self) -> None:
        """Freeze the weights for drafting, and tabulate the first layer's projection of small vocabularies."""
        self.eval().requires_grad_(False)
        for layer in self.layers:
            layer.a = None
            layer.a = layer._a
        embeds, projected = self.embed.weight, self.layers[0].in_proj.out_features
        if embeds.shape[0] * (embeds.shape[1] + projected) <= _MAX_TABLE:
            self._table = torch.cat([embeds, self.layers[0].project(embeds)], dim=1)

    def initial_state(self, rows: int) -> State:
        c, weight = self.config, self.embed.weight
        window = weight.new_zeros(rows, c.window - 1, c.channels)
        s = torch.zeros(rows, c.state, c.heads, c.head_dim, device=weight.device)
        return tuple((window, s) for _ in range(c.layers))

    def forward(self, tokens: Tensor, keep: Tensor | None = None, state: State | None = None) -> tuple[Tensor, State]:
        """Process sequences.

        Args:
            tokens: (batch, length) int64.
            keep: (batch, length) bool, False at right padding; None for no padding.
            state: state to continue from; None is the initial state.

        Returns:
            Hidden states for the head, (batch, length, hidden), undefined at padding, and final states.
        """
        state = self.initial_state(len(tokens)) if state is None else state
        x, projected = self._embedded(tokens)
        after: list[tuple[Tensor, Tensor]] = []
        for layer, before in zip(self.layers, state, strict=True):
            added, new = layer.read(layer.project(x) if after else projected, keep, before)
            x = x + added
            after.append(new)
        return self.norm(x), tuple(after)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Advance every row by one token.

        Args:
            tokens: (rows,) int64.
            state: see ``State``; S is overwritten.

        Returns:
            Hidden states for the head, (rows, hidden), and new state.
        """
        x, projected = self._embedded(tokens)
        after: list[tuple[Tensor, Tensor]] = []
        for layer, before in zip(self.layers, state, strict=True):
            added, new = layer.step(layer.project(x) if after else projected, before)
            x = x + added
            after.append(new)
        return self.norm(x), tuple(after)

    def _embedded(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings, (..., hidden), and the first layer's ``project`` of them."""
        if self._table is None:
            x = self.embed(tokens)
            return x, self.layers[0].project(x)
        both = F.embedding(tokens, self._table)
        return both[..., : self.config.hidden_size], both[..., self.config.hidden_size :]

    def head_rows(self, ids: Tensor | None) -> Tensor:
        """Head weight of some tokens, (n,) int64, or of all: (n, hidden)."""
        return self.embed.weight if ids is None else self.embed.weight[ids]


def _tails(seen: Tensor, keep: Tensor | None, count: int) -> Tensor:
    """Last ``count`` entries of each row without padding; ``seen`` starts with the ``count`` previous ones."""
    if keep is None:
        return seen[:, seen.shape[1] - count :]
    at = keep.sum(1)[:, None] + torch.arange(count, device=seen.device)
    return seen.gather(1, at[..., None].expand(-1, -1, seen.shape[2]))
