"""Prompt reduction for draft models: which visual tokens and text chunks to keep.

Visual tokens (SpecVLM, arXiv 2508.16201): keep the tokens with the highest attention from the text after them until
they cover a share of the total attention (Top-P), then evenly spaced tokens of the rest. The authors' code
(github.com/zju-jiyicheng/SpecVLM) averages attention over all layers; this module reads one layer, at 2/3 of the depth.

Long text (RAPID, arXiv 2502.20330): keep the beginning, the end, which contains the question, and the chunks in between
that are most similar to the end. RAPID retrieves chunks by another model's embeddings; this module compares tokens,
weighted by rarity. RAPID's modified target distribution is not implemented because it is not lossless.

Attention kernels do not return weights. After an unchanged prefill, the queries of a prompt's last tokens are
recomputed from one layer's input and multiplied by the cached keys.
"""

from __future__ import annotations

from collections import Counter
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmspec.core.target import Feature, Target, TargetOutput
from mmspec.errors import UserError
from mmspec.targets.attention import window_of
from mmspec.targets.decoder import Decoder
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.targets.tree_layers import ATTENTION

TOP_P = 0.4  # in the authors' code
_QUERIES = 32  # maximum number of last prompt tokens whose attention is read


class VisualShare:
    """Selection of visual tokens.

    Args:
        share: share of each row's visual tokens to keep.
        top_p: share of the attention that the most attended tokens must cover; 0 selects evenly spaced tokens only.

    Attributes:
        layer: layer whose attention is read; None if no attention is read.
    """

    def __init__(self, share: float, top_p: float = TOP_P) -> None:
        for name, value in ("share of the prompt", share), ("part of the attention", top_p):
            if not 0 <= value <= 1:
                raise UserError(f"the {name} must be from 0 to 1: got {value}")
        self.share, self.top_p = share, top_p
        self.layer: int | None = None
        self._target: TransformersTarget | None = None

    def attach(self, target: Target) -> None:
        """Select the layer of this target whose attention is read."""
        self._target, self.layer = None, None
        if 0 < self.share < 1 and self.top_p > 0 and isinstance(target, TransformersTarget):
            layers = attention_layers(target.config)
            self._target, self.layer = target, layers[len(layers) * 2 // 3] if layers else None

    @property
    def features(self) -> tuple[Feature, ...]:
        """Features that the output of a prefill must contain."""
        return () if self.layer is None else (self.layer,)

    def selected(self, visual: Tensor, output: TargetOutput, first: int) -> Tensor:
        """The visual tokens to keep.

        Args:
            visual: (batch, length) bool.
            output: output of the target's prefill.
            first: row of the first prompt in the target's cache.
        """
        kept = (visual.sum(1, keepdim=True).float() * self.share).round().long().clamp(min=1)
        after = visual.flip(1).cumsum(1).flip(1) == 0
        queries = min(int(after.sum(1).max()), _QUERIES)
        weights = None
        if self._target is not None and self.layer is not None and queries:
            weights = prompt_attention(self._target, self.layer, output, first, queries)
        if weights is None:
            return evenly(visual, kept)
        return attended(visual, weights.where(after[:, -queries:, None], 0).sum(1), kept, self.top_p)


def attended(tokens: Tensor, weights: Tensor, kept: Tensor, top_p: float) -> Tensor:
    """Select the tokens with the highest weights, then evenly spaced tokens.

    Args:
        tokens: (batch, length) bool, to select from.
        weights: (batch, length), at least 0.
        kept: (batch, 1) int64, number of tokens to select per row.
        top_p: share of a row's total weight.

    Returns:
        (batch, length) bool: the fewest tokens that cover ``top_p`` of a row's weight, at most ``kept``; then evenly
        spaced tokens up to ``kept``.
    """
    known = weights.double() * tokens
    descending, order = known.sort(dim=1, descending=True, stable=True)
    before = descending.cumsum(1) - descending  # weight of all preceding tokens
    rank = torch.arange(tokens.shape[1], device=tokens.device)
    top = (before < top_p * descending.sum(1, keepdim=True)) & (rank < kept)
    first = torch.zeros_like(tokens).scatter(1, order, top)
    return first | evenly(tokens & ~first, kept - first.sum(1, keepdim=True))


def evenly(tokens: Tensor, kept: Tensor) -> Tensor:
    """Select ``kept``, (batch, 1) int64, evenly spaced ``tokens`` per row: (batch, length) bool in and out."""
    count = tokens.sum(1, keepdim=True).clamp(min=1)
    rank = tokens.long().cumsum(1)  # from 1
    return tokens & (rank * kept // count > (rank - 1) * kept // count)


LONG = 1024  # minimum length of a prompt to shorten
CHUNK = 64
BEGINNING, END = 64, 128  # always kept


def relevant(ids: Tensor, text: Tensor, share: float) -> Tensor:
    """The text tokens to keep.

    Args:
        ids: (batch, length) int64.
        text: (batch, length) bool, tokens to select from, without padding and visual tokens.
        share: share of the chunks between beginning and end to keep; 0 and 1 keep all.
    """
    kept = text.clone()
    for row in range(len(ids)) if 0 < share < 1 else ():
        places = text[row].nonzero()[:, 0]
        if len(places) >= LONG:
            kept[row, places] = _selected(ids[row, places].tolist(), share).to(kept.device)
    return kept


def _selected(tokens: list[int], share: float) -> Tensor:
    last = len(tokens) - END
    begins = range(BEGINNING, last, CHUNK)
    chunks = [set(tokens[begin : min(begin + CHUNK, last)]) for begin in begins]
    seen_in, asked = Counter(token for chunk in chunks for token in chunk), set(tokens[last:])
    common = [sum(log(len(chunks) / seen_in[token]) for token in sorted(chunk & asked)) for chunk in chunks]
    best = sorted(range(len(chunks)), key=common.__getitem__, reverse=True)[: max(1, round(share * len(chunks)))]
    kept = torch.zeros(len(tokens), dtype=torch.bool)
    kept[:BEGINNING] = kept[last:] = True
    for number in best:
        kept[begins[number] : min(begins[number] + CHUNK, last)] = True
    return kept


_NAME = "mmspec_queries"


def attention_layers(config: Any) -> list[int]:
    """Layers with full attention and unshared keys and values."""
    layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    full = ATTENTION - {"chunked_attention", "indexed_attention"}  # windows are excluded below
    return [layer for layer in range(layers) if kinds[layer] in full and window_of(config, layer) is None]


@torch.inference_mode()
def prompt_attention(
    target: TransformersTarget, layer: int, output: TargetOutput, first: int, queries: int
) -> Tensor | None:
    """Attention weights of the last tokens of prompts.

    Args:
        target: has the prompts in its cache, without any answer tokens.
        output: the prefill's output, with the layer's input (feature ``layer``).
        first: cache row of the first prompt.
        queries: number of last tokens.

    Returns:
        (batch, queries, length) float32, the mean over heads; undefined at padding tokens. None if the layer does not
        compute a softmax of scaled scores by an attention function of transformers, or the decoder takes no positions.
    """
    states, positions = output.features[layer], output.positions
    batch, length = states.shape[:2]
    found = None
    if positions is not None and target.decoder.attention.name != "sdpa":  # the layers compute their own masks
        found = _queries(target.decoder, layer, states[:, -queries:], positions[..., -queries:])
    if found is None:
        return None
    known = target.keys_values(layer, first + batch)
    keys, lengths = known.keys[first:], known.lengths[first:, None]
    grouped = found.query.unflatten(1, (keys.shape[1], -1))  # (batch, kv_heads, group, queries, head_dim)
    scores = grouped.float() @ keys[:, :, None].float().mT * found.scale
    if found.softcap is not None:
        scores = found.softcap * torch.tanh(scores / found.softcap)
    seen = (lengths - queries + 1 + torch.arange(queries, device=keys.device)).clamp(min=1)  # (batch, queries)
    later = torch.arange(keys.shape[2], device=keys.device) >= seen[:, :, None]
    weights = scores.masked_fill_(later[:, None, None], -torch.inf).softmax(-1).mean((1, 2))
    # Prompts are left-padded, the cache is not.
    slot = torch.arange(length, device=keys.device) - (length - lengths)
    return weights.gather(2, slot.clamp(min=0)[:, None].expand(-1, queries, -1)) * (slot >= 0)[:, None]


def _queries(decoder: Decoder, layer: int, hidden: Tensor, positions: Tensor) -> _AttentionReachedError | None:
    """Arguments of a layer's attention function for the layer's input, (batch, tokens, hidden)."""
    inputs = {"inputs_embeds": hidden, "attention_mask": hidden.new_ones(hidden.shape[:2], dtype=torch.long)}
    if decoder.takes_positions:
        inputs["position_ids"] = positions
    try:
        decoder.run_layer(layer, inputs, _NAME)
    except _AttentionReachedError as reached:
        return reached if reached.usual else None
    return None


class _AttentionReachedError(Exception):
    """Raised in a decoder's forward when a layer calls its attention function, to capture the arguments.

    Args:
        query: (batch, heads, tokens, head_dim).
        usual: whether the layer computes a plain softmax, without sinks or biases.
    """

    def __init__(self, query: Tensor, scale: float, softcap: float | None, usual: bool) -> None:
        self.query, self.scale, self.softcap, self.usual = query, scale, softcap, usual


def _stop(
    module: nn.Module,
    query: Tensor,
    *_: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> None:
    """Attention function that transformers calls."""
    usual = all(options.get(name) is None for name in ("position_bias", "s_aux"))
    raise _AttentionReachedError(query, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, usual)


AttentionInterface.register(_NAME, _stop)
AttentionMaskInterface.register(_NAME, sdpa_mask)
