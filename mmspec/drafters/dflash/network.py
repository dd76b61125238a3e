"""Network of DFlash (arXiv 2602.06036): the last token and mask tokens, a block, denoised in one pass.

Queries come from the block; keys and values from the context, then the block, without a mask inside it. The context is
one state per token that the target has processed: the outputs of several target layers, projected together and normed,
the same for every layer. Position k of the block, normed, gives the logits of the k-th token after the last.

DSpark (arXiv 2607.05147) adds a Markov head, a correction of these logits by the token before, and a confidence head,
the probability that a token drafted from them is accepted. The Markov head has three types (deepseek-ai/DeepSpec),
with the embedding e of the token before, the position's state h and, of a recurrent head, the memory m of the
positions before, 0 at the block's first:

- vanilla: ``W e``;
- gated: ``W (sigmoid(G [h; e]) * e)``;
- rnn: ``W tanh(o)`` with ``[g; c; o] = J [m; e; h]``, then ``m = sigmoid(g) * m + (1 - sigmoid(g)) * tanh(c)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.dflash import DFlashConfig
from mmspec.drafters.hidden_state.layer import Attend, LayerParts, Norm, Rotation, rotate


class BlockLayer(nn.Module):
    """Decoder layer whose attention reads the context beside the block. Parameters are (out, in); ``kv`` stacks keys
    and values, ``gate_up`` gate and up."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width, inner, keys = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.input_norm = Norm(width, config.norm_eps)
        self.q = nn.Linear(width, inner, bias=False)
        self.kv = nn.Linear(width, 2 * keys, bias=False)
        self.q_norm, self.k_norm = Norm(config.head_dim, config.norm_eps), Norm(config.head_dim, config.norm_eps)
        self.out = nn.Linear(inner, width, bias=False)
        self.post_norm = Norm(width, config.norm_eps)
        self.gate_up = nn.Linear(width, 2 * config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, width, bias=False)

    @property
    def parts(self) -> LayerParts:
        norms, head_norms = [self.input_norm], [self.q_norm, self.k_norm]
        return LayerParts([self.q, self.kv], self.out, self.gate_up, self.down, self.post_norm, norms, head_norms)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values, (batch, kv_heads, nodes, head_dim) each, of context or normed block, (batch, nodes, width).

        Args:
            rotation: of their positions, broadcastable to (batch, nodes, heads, head_dim).
        """
        keys, values = self.kv(x).unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(2)
        return rotate(self.k_norm(keys), rotation).transpose(1, 2), values.transpose(1, 2)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """(batch, nodes, hidden) -> (batch, nodes, hidden); ``attend`` adds the context."""
        normed = self.input_norm(x)
        queries = rotate(self.q_norm(self.q(normed).unflatten(-1, (self.heads, self.head_dim))), rotation)
        read = attend(queries.transpose(1, 2), *self.keys_values(normed, rotation))
        x = x + self.out(read.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class DFlashNetwork(nn.Module):
    """See the module."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = Norm(width, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.layers))
        self.norm = Norm(width, eps)
        if config.head:
            self.lm_head = nn.Linear(width, config.head, bias=False)
        if config.embedding:
            self.embed_tokens = nn.Embedding(config.embedding, width)
        if config.markov_rank:
            self.markov_embed = nn.Embedding(config.markov_inputs, config.markov_rank)
            self.markov_out = nn.Linear(config.markov_rank, config.markov_outputs, bias=False)
        if config.markov_type == "gated":
            self.markov_gate = nn.Linear(width + config.markov_rank, config.markov_rank)
        if config.markov_type == "rnn":
            self.markov_cell = nn.Linear(2 * config.markov_rank + width, 3 * config.markov_rank)
        if config.confidence != "none":
            self.confidence = nn.Linear(width + config.markov_rank * (config.confidence == "markov"), 1)

    def project(self, states: Tensor) -> Tensor:
        """Context from the target's states: (..., reads * hidden) -> (..., hidden)."""
        return self.hidden_norm(self.fc(states))

    def context(self, x: Tensor, rotation: Rotation) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of a context from ``project``, of each layer."""
        layers: Any = self.layers
        return (layer.keys_values(x, rotation) for layer in layers)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """States that predict tokens, (batch, nodes, hidden).

        Args:
            x: (batch, nodes, hidden), embeddings of blocks.
            rotation: see ``BlockLayer.keys_values``.
            attend: attention of queries, keys and values, with the number of the layer as ``layer``.
        """
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, partial(attend, layer=number))
        return self.norm(x)

    def corrected(
        self, scores: Tensor, states: Tensor, previous: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits after given tokens, by the Markov head, and the confidence head's logits of acceptance.

        Args:
            scores: (..., drafts), logits of the output layer.
            states: (..., hidden), that it read.
            previous: (...) int64, the target's tokens before; each dimension of the others may be 1.
            memory: (..., rank), of a recurrent Markov head before the positions; None is zero.

        Returns:
            (..., drafts), the given ones without a Markov head; (...), None without a confidence head; (..., rank), the
            memory after the positions, None without a recurrent Markov head.
        """
        config, read = self.config, states
        if config.markov_rank:
            embeds = self._markov_embeds(previous)
            latent, memory = self._latent(embeds, states, memory)
            scores = scores + self.markov_out(latent)
            if config.confidence == "markov":
                read = torch.cat([states.expand(*embeds.shape[:-1], -1), embeds], dim=-1)
        return scores, None if config.confidence == "none" else self.confidence(read).squeeze(-1), memory

    def first_memory(self, states: Tensor, last: Tensor) -> Tensor | None:
        """Memory of a recurrent Markov head before the first position that predicts; None is zero.

        Args:
            states: (..., block, hidden), of a block.
            last: (...) int64, its first token.
        """
        if self.config.markov_type != "rnn" or self.config.from_anchor:
            return None
        return self._latent(self._markov_embeds(last), states[..., 0, :], None)[1]

    def _markov_embeds(self, tokens: Tensor) -> Tensor:
        # A target may have more tokens than the drafter was trained for.
        return self.markov_embed(tokens.masked_fill(tokens >= self.config.markov_inputs, 0))

    def _latent(self, embeds: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the Markov head's output layer reads, (..., rank), and its memory, see the module."""
        if self.config.markov_type == "vanilla":
            return embeds, None
        states = states.expand(*embeds.shape[:-1], -1)
        if self.config.markov_type == "gated":
            return self.markov_gate(torch.cat([states, embeds], dim=-1)).sigmoid() * embeds, None
        memory = torch.zeros_like(embeds) if memory is None else memory
        gate, candidate, out = self.markov_cell(torch.cat([memory, embeds, states], dim=-1)).chunk(3, dim=-1)
        kept = gate.sigmoid()
        return out.tanh(), kept * memory + (1.0 - kept) * candidate.tanh()


def block_tokens(last: Tensor, config: DFlashConfig) -> Tensor:
    """Tokens of blocks: the last ones, (...) int64, and mask tokens -> (..., block)."""
    return F.pad(last[..., None], (0, config.block_size - 1), value=config.mask_token_id)


def attended(distance: Tensor, config: DFlashConfig) -> list[Tensor]:
    """What a position attends to in each layer, bool, by the distance to it, positive to earlier positions.

    Layers of a kind share a tensor.
    """
    kinds: dict[tuple[bool, bool], Tensor] = {}
    for layer in range(config.layers):
        slides, causal = kind = layer in config.sliding, layer in config.causal
        if kind not in kinds:
            mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
            kinds[kind] = mask & (distance.abs() <= config.window) if slides else mask
    return [kinds[layer in config.sliding, layer in config.causal] for layer in range(config.layers)]
