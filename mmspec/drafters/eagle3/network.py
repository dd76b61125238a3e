"""Network of EAGLE-3 (arXiv 2503.01840) and 3.1: hidden states of several target layers are projected to one state,
which decoder layers combine with the next token's embedding.

The first layer reads the normed embedding beside the normed state, later ones the residual stream. The last layer's
output, normed, gives the next token's logits over a draft vocabulary; as it is, or normed, it is the state of the next
level, in place of the target's. Switches differ between projects that train these networks, under the names used here:
SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, NVIDIA/Model-Optimizer.

EAGLE-4 scores few tokens by the output layer: those that a product of low rank with the same state ranks first.

P-EAGLE (arXiv 2602.01469) feeds all levels after the first at once, with a mask token and a learnt ``mask_hidden`` in
place of the target's states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mmspec.drafters.eagle3 import Eagle3Config
from mmspec.drafters.hidden_state.layer import Attend, DecoderLayer, LayerParts, LlamaLayer, Norm, Rotation


class FirstLayer(DecoderLayer):
    """Decoder layer whose attention reads a token's embedding beside a state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.normed_residual = config.norm_before_residual
        self.embed_norm = Norm(config.hidden_size, config.norm_eps)
        self.hidden_norm = Norm(config.hidden_size, config.norm_eps)

    @property
    def parts(self) -> LayerParts:
        norms = [self.embed_norm, self.hidden_norm]
        return replace(super().parts, attention_norms=norms, normed_residual=self.normed_residual)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """(batch, nodes, 2 * hidden), embedding and state, -> (batch, nodes, hidden)."""
        embeds, hidden = x.chunk(2, dim=-1)
        normed = self.hidden_norm(hidden)
        read = torch.cat([self.embed_norm(embeds), normed], dim=-1)
        x = (normed if self.normed_residual else hidden) + self.attention(read, rotation, attend)
        return x + self.mlp(x)


class Eagle3Network(nn.Module):
    """See the module."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width, source, eps = config.hidden_size, config.source, config.norm_eps
        self.fc = nn.Linear(config.states * source, width, bias=False)
        if config.norm_before_fc:
            self.input_norm = Norm(config.states * source, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(source, eps) for _ in range(config.states))
        later = [LlamaLayer(config) for _ in range(1, config.layers)]
        self.layers = nn.ModuleList([FirstLayer(config), *later])
        self.norm = Norm(width, eps)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.states * source))
        if config.candidates:
            self.efficient_lm_head_down_proj = nn.Linear(width, config.head_rank, bias=False)
            self.efficient_lm_head = nn.Linear(config.head_rank, config.head, bias=False)
        if config.head:
            by_row = config.candidates > 0  # the rows of candidates are read as those of an embedding
            self.lm_head: nn.Linear | nn.Embedding = (
                nn.Embedding(config.head, width) if by_row else nn.Linear(width, config.head, bias=False)
            )
        if config.embedding:
            self.embed_tokens = nn.Embedding(config.embedding, width)

    def project(self, states: Tensor) -> Tensor:
        """One state per position from the target's: (..., states * source) -> (..., hidden)."""
        if self.config.fc_norm:
            parts = states.split(self.config.source, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        return self.fc(states)

    def combine(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Layer inputs, (..., 2 * hidden), from embeddings and the states one position before, (..., hidden) each."""
        return torch.cat([embeds.to(states.dtype), states], dim=-1)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Output of the last layer, (batch, nodes, hidden).

        Args:
            x: (batch, nodes, 2 * hidden) from ``combine``.
            rotation: see ``DecoderLayer.attention``.
            attend: the same, with the number of the layer as ``layer``.
        """
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, partial(attend, layer=number))
        return x

    def begin(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The state of the next level, from the last layer's output, and nothing else, (..., 0)."""
        return self.norm(output) if self.config.norm_output else output, output[..., self.config.hidden_size :]

    def scores(self, head: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
        """Logits of a level's state, (..., hidden), by an output layer."""
        return head(state if self.config.norm_output else self.norm(state))

    def retrieve(self, state: Tensor) -> Tensor:
        """Logits of the candidates, (..., head), from normed states, (..., hidden); -inf for all other tokens."""
        ranked = self.efficient_lm_head(self.efficient_lm_head_down_proj(state))
        candidates = ranked.topk(self.config.candidates, dim=-1).indices
        logits = (self.lm_head(candidates) @ state[..., None])[..., 0].to(ranked.dtype)
        return torch.full_like(ranked, -torch.inf).scatter(-1, candidates, logits)
