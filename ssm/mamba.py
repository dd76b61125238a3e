"""Mamba-2 drafter: a small language model with the target's vocabulary and constant-size state.

A step advances the state by the emitted tokens, then grows a tree (``grow_tree``) in which every beam node has its own
state, computed from its parent's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import TrainedDrafter, write_last
from mmspec.drafters.growth import grow_tree
from mmspec.drafters.spec import DrafterSpec, TreeShape
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device
from mmspec.targets.support import lay_out_for_few_rows
from mmspec.validation import option, options


@options
class MambaConfig:
    """Configuration of a ``MambaNetwork``."""

    vocab_size: int = option(..., ge=1, le=2**24)
    hidden_size: int = option(128, "Width.", ge=1, le=2**16)
    layers: int = option(1, "Mamba-2 layers.", ge=1, le=2**8)
    heads: int = option(8, "Heads per layer.", ge=1, le=2**10)
    head_dim: int = option(32, "Channels per head.", ge=1, le=2**12)
    state: int = option(32, "State size per channel.", ge=1, le=2**12)
    window: int = option(4, "Width of its convolution.", ge=1, le=2**8)
    norm_eps: float = option(1e-5, ge=1e-12, le=1)

    @property
    def inner(self) -> int:
        """Number of channels of the scan."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: x, B and C."""
        return self.inner + 2 * self.state


CHUNK = 64
"""Chunk length of the scan, in tokens."""

_MAX_TABLE = 2**23  # maximum elements of the first layer's lookup table

State = tuple[tuple[Tensor, Tensor], ...]
"""Per layer: the convolution's latest inputs, (rows, window - 1, channels); S, (rows, state, heads, head_dim), always
float32."""


class MambaLayer(nn.Module):
    """Mamba-2 layer, see ``MambaNetwork``."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = c = config
        self.norm = nn.LayerNorm(c.hidden_size, c.norm_eps)
        self.in_proj = nn.Linear(c.hidden_size, c.inner + c.channels + c.heads)
        taps = torch.empty(c.window, 1, c.channels, dtype=torch.float32).uniform_(-1, 1)
        self.conv = nn.Parameter(taps / math.sqrt(c.window))
        self.a_log = nn.Parameter(torch.empty(c.heads, dtype=torch.float32).uniform_(1, 16).log())
        self.d = nn.Parameter(torch.ones(c.heads, 1, dtype=torch.float32))
        self.gated_norm = nn.LayerNorm(c.inner, c.norm_eps)
        self.out_proj = nn.Linear(c.inner, c.hidden_size, bias=False)
        self.a: Tensor | None = None  # set by ``freeze``
        with torch.no_grad():
            self.in_proj.bias.zero_()
            # dt of 0.001 to 0.1 after softplus, as in the paper's code.
            steps = torch.exp(torch.empty(c.heads, dtype=torch.float32).uniform_(math.log(1e-3), math.log(1e-1)))
            self.in_proj.bias[-c.heads :] = steps + torch.log(-torch.expm1(-steps))

    def project(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., inner + channels + heads): z, the convolution's input, dt before its softplus."""
        return self.in_proj(self.norm(x))

    def read(
        self, projected: Tensor, keep: Tensor | None, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Residual update of a sequence, (batch, length, hidden), and final state; ``keep`` as for ``MambaNetwork``."""
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
        """Residual update of one token per row, (rows, hidden), and new state."""
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
    """Mamba-2 language model (arXiv 2405.21060) with tied embeddings.

    Each layer, with u its normalised input: ``z, x, B, C, dt = in_proj(u)``; x, B and C pass a short causal
    convolution; in each head, ``S_t = exp(dt_t A) S_{t-1} + B_t (x) dt_t x_t`` and ``y_t = C_t S_t + D x_t``;
    ``out_proj(norm(y * silu(z)))`` is added to the residual stream. Differences from the paper: all heads share B and
    C; a bias of ``in_proj`` replaces the biases of dt and the convolution; and layer norms replace RMS norms (one
    kernel instead of four).

    Sequences are processed in chunks, each computed as attention with decays (section 6 of the paper); drafting
    advances one token per node.
    """

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
        s = torch.zeros(rows, c.state, c.heads, c.head_dim, dtype=torch.float32, device=weight.device)
        return tuple((window, s) for _ in range(c.layers))

    def forward(self, tokens: Tensor, keep: Tensor | None = None, state: State | None = None) -> tuple[Tensor, State]:
        """Hidden states of sequences for the head, (batch, length, hidden), undefined at padding, and final states.
        ``keep``: (batch, length) bool, False at right padding; None for no padding."""
        state = self.initial_state(len(tokens)) if state is None else state
        return self._advanced(tokens, state, lambda layer, x, before: layer.read(x, keep, before))

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Hidden states of one token per row for the head, (rows, hidden), and new state."""
        return self._advanced(tokens, state, lambda layer, x, before: layer.step(x, before))

    def _advanced(self, tokens: Tensor, state: State, advance: Callable[..., Any]) -> tuple[Tensor, State]:
        """Hidden states and new state, by the ``advance`` of each layer, its projected input and its state."""
        x, projected = self._embedded(tokens)
        after: list[tuple[Tensor, Tensor]] = []
        for layer, before in zip(self.layers, state, strict=True):
            added, new = advance(layer, layer.project(x) if after else projected, before)
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
        """Head weight, (n, hidden), of some tokens, (n,) int64, or of all tokens if None."""
        return self.embed.weight if ids is None else self.embed.weight[ids]


def _tails(seen: Tensor, keep: Tensor | None, count: int) -> Tensor:
    """Last ``count`` entries of each row without padding; ``seen`` starts with the ``count`` previous entries."""
    if keep is None:
        return seen[:, seen.shape[1] - count :]
    at = keep.sum(1)[:, None] + torch.arange(count, device=seen.device)
    return seen.gather(1, at[..., None].expand(-1, -1, seen.shape[2]))


class Mamba(TrainedDrafter):
    """Mamba-2 drafter for targets with the same vocabulary; image placeholders are tokens. The network is in the
    target's dtype on a GPU, which is bound by weight reads, else in float32."""

    name: ClassVar[str] = "mamba"  # as registered

    config_class = MambaConfig
    network_class = MambaNetwork
    usual_tree = TreeShape(top_k=8, depth=6, total_tokens=40)

    def __init__(self, network: MambaNetwork, draft_ids: Tensor | None = None, **settings: Any) -> None:
        self._head = torch.empty(0, dtype=torch.float32)  # (draft tokens, hidden)
        super().__init__(network, draft_ids, **settings)

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        self._output = RowTensor(static_shapes)  # (rows, hidden), output at each row's last token
        self._state = [(RowTensor(static_shapes), RowTensor(static_shapes)) for _ in range(self.network.config.layers)]
        self._buffers: list[list[Tensor]] = []  # states of even and odd tree levels

    def place(self, target: Target, probe: Tensor) -> None:
        config: Any = getattr(target, "config", None)
        size, target_size = self.network.config.vocab_size, getattr(config, "vocab_size", None)
        if target_size is not None and size != target_size:
            raise UserError(
                f"drafter and target must share a vocabulary: the drafter has {size} tokens, the target {target_size}"
            )
        self.network.to(probe.device, torch.float32 if probe.device.type == "cpu" else probe.dtype)
        lay_out_for_few_rows(self.network)
        self.network.freeze()
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(target.device)
        self._head = self.network.head_rows(self.draft_ids)

    @property
    def parts(self) -> tuple[RowTensor, ...]:
        return self._output, *(part for layer in self._state for part in layer)

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        device = self._head.device
        self.join(len(history), kernels.static_shapes(device))
        rows = [[*row, tokens[-1]] for row, tokens in zip(prompt.unpadded(), history, strict=True)]
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        tokens = on_device([row + [0] * (longest - len(row)) for row in rows], device)
        length = on_device(lengths, device)
        keep = None if min(lengths) == longest else torch.arange(longest, device=device) < length[:, None]
        hidden, state = self.network(tokens, keep)
        self._output.append(hidden[torch.arange(len(rows), device=device), length - 1])
        for part, value in zip(self.parts[1:], chain.from_iterable(state), strict=True):
            part.append(value)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the accepted tokens."""
        self.queue((verdict.tokens,), verdict)

    def update(self, tokens: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Advance the state by accepted tokens, (batch, width)."""
        batch, width = tokens.shape
        keep = torch.arange(width, device=tokens.device) < length[:, None]
        hidden, state = self.network(tokens, keep, self._first(batch))
        for part, value in zip(self.parts[1:], chain.from_iterable(state), strict=True):
            part.write(value)
        write_last(self._output, hidden, length)

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        rows, width, levels = len(token), 1, 0
        state = self._first(rows)
        if not self.static_shapes and (not self._buffers or len(self._buffers[0][0]) < rows * self.top_k):
            # On a CPU, allocating states costs more than computing them.
            self._buffers = [[s.new_empty(rows * self.top_k, *s.shape[1:]) for _, s in state] for _ in range(2)]

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal state, width, levels
            above = origin
            if rows > 1:
                above = origin + width * torch.arange(rows, device=beam.device)[:, None]
            above = above.flatten()
            buffers = [b[: len(above)] for b in self._buffers[levels % 2]] if self._buffers else [None] * len(state)
            taken = tuple(
                (window.index_select(0, above), torch.index_select(s, 0, above, out=buffer))
                for (window, s), buffer in zip(state, buffers, strict=True)
            )
            hidden, state = self.network.step(beam.flatten(), taken)
            width, levels = beam.shape[1], levels + 1
            tokens, scores = self._children(hidden)
            return tokens.view(*beam.shape, -1), scores.view(*beam.shape, -1)

        first = self._children(self._output.data[:rows])
        return grow_tree(token, first, extend, plan, self.top_k, depth=self.depth, nodes=self.total_tokens)

    def _first(self, rows: int) -> State:
        return tuple((window.data[:rows], s.data[:rows]) for window, s in self._state)

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k next tokens and log probabilities, (rows, top_k) each, from hidden states, (rows, hidden)."""
        tokens, best = ops.top_log_probs(torch.nn.functional.linear(hidden, self._head), self.top_k)
        return tokens if self.draft_ids is None else self.draft_ids[tokens], best


SPEC = DrafterSpec(
    "mamba",
    "Mamba",
    "a small Mamba-2 language model of the target's vocabulary, distilled from it (Mamba-2: arXiv 2405.21060)",
    Mamba,
    weights="required",
    train="mamba",
)
