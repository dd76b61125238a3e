"""DFlash drafter (arXiv 2602.06036) for any target: text, vision-language and hybrid models.

One pass of the network drafts all levels of a tree, see ``grow_slots``. With a Markov head (DSpark, arXiv 2607.05147)
the children of a node depend on its token, with a recurrent one on its path: each node has a memory of its own. The
exact distributions of all nodes that a level extends are one product. The probability of a path is the product of its
tokens' probabilities and of the confidences at their parents (section 3.2).

Entry j of a row's cache is the context of token j, image positions included; the block is never committed. Positions
are the target's, of a target with several axes the largest of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mmspec import ops
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.budget import Budget
from mmspec.core.target import Target
from mmspec.core.tree import TokenTree
from mmspec.drafters import checkpoint
from mmspec.drafters.dflash import DFlashConfig
from mmspec.drafters.dflash.network import DFlashNetwork, attended, block_tokens
from mmspec.drafters.growth import grow_levels, grow_slots
from mmspec.drafters.hidden_state.drafter import PositionedDrafter
from mmspec.drafters.hidden_state.entries import allowed_slots, attention, take
from mmspec.drafters.hidden_state.layer import Rotation
from mmspec.drafters.hidden_state.native import Native, NativeLayers
from mmspec.drafters.shape import TreeShape
from mmspec.errors import UserError
from mmspec.ops import cpu_growth
from mmspec.quantisation.blocks import BlockLinear


class DFlash(PositionedDrafter):
    """DFlash drafter; trees have at most a level per drafted position."""

    name: ClassVar[str] = "dflash"
    counts_tokens = False

    config_class = DFlashConfig
    network_class = DFlashNetwork
    layout = "dflash"
    usual_tree = TreeShape(top_k=10, depth=15, total_tokens=59)
    features = ()  # known when attached
    _markov: NativeMarkov | None = None

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> Self:
        """The drafter of a model of transformers (``MuseGlimmerAssistantModel``); raises ``UserError`` as above."""
        name = type(model).__name__
        config, tensors, draft_ids, found = cls.convert(model.config.to_dict(), model.state_dict(), name)
        drafter = cls(checkpoint.load_network(DFlashNetwork, config, tensors, Path(name)), draft_ids)
        drafter.published = found
        return drafter

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        network, decoder = self.network, target.config  # type: ignore[attr-defined]
        self.features = network.config.features(decoder.num_hidden_layers)
        rows = network.config.embedding or decoder.vocab_size
        if network.config.mask_token_id >= rows:
            raise UserError(f"mask_token_id must be a token below {rows}: got {network.config.mask_token_id}")
        self.keep_to(network.config.head or (self.published or {}).get("vocab_size"), target)
        head = network.lm_head if network.config.head else self.target_head(target)
        drafted = head(self.sample_embedding).shape[-1]
        if network.config.markov_outputs not in (0, drafted):
            raise UserError(f"markov_outputs must be the {drafted} draft tokens: got {network.config.markov_outputs}")
        self._markov = NativeMarkov.of(network, self.draft_ids)
        return head

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        return self.network.project(states)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of blocks, by the target's table without the norm that some targets apply to it."""
        if rows := self.network.config.embedding:
            # A target may have more tokens than the drafter was trained for.
            return self.network.embed_tokens(tokens.masked_fill(tokens >= rows, 0))
        return plain_embedding(self.target, tokens).to(self.sample_embedding.dtype)

    def reserve(self, width: int) -> None:
        block = self.network.config.block_size
        self.cache.reserve_nodes(width + block)
        self._rotary.reserve(max(map(len, self._history)) + self.position_slack + width + block, self.sample_embedding)

    def _native_layers(self, kind: str | None) -> NativeLayers | None:
        config = self.network.config
        alike = not config.sliding and len(config.causal) in (0, config.layers)  # the kernels take one mask
        return super()._native_layers(kind) if alike else None

    def enter(self, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache) -> Tensor:
        """Write keys and values of a context; trees grow from nothing else."""
        if self.native_layers is not None and not cache.static_shapes:
            self.native_layers.write(x, rotation, cache)
            return x[..., :0]
        if cache.static_shapes:
            cache.set_write_slots(x.shape[1])
        layer: Any
        for layer, (keys, values) in zip(cache.layers, self.network.context(x, rotation), strict=True):
            layer.update(keys, values)
        return x[..., :0]

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        self.cache.offset = 0
        config = self.network.config
        nodes = min(self.total_tokens, budget.nodes)
        deepest = max(1, min(self.depth, config.drafts, budget.max_depth, nodes))
        block = self._denoise(token)
        states = block[:, config.first : config.first + deepest]
        scores = self._scores(states)
        if self._markov is not None and not self.static_shapes:
            tokens, parents, log_probs = self._markov(scores, token, min(self.top_k, nodes), nodes)
            return TokenTree(tokens, parents, log_probs=log_probs, check=False)
        if not config.markov_rank:
            tokens, log_probs, _ = self._ranked(scores, states, token[:, None])
            return grow_slots(token, tokens, log_probs, budget, self.total_tokens)
        memory = self.network.first_memory(block, token)
        memory = None if memory is None else memory[:, None]

        def children(level: int, parents: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal memory
            before = None if memory is None else take(memory, above)
            slot = scores[:, level, None], states[:, level, None]
            tokens, log_probs, memory = self._ranked(*slot, parents, before)
            return tokens, log_probs

        return grow_levels(token, children, budget, self.top_k, depth=deepest, nodes=self.total_tokens)

    def _ranked(
        self, scores: Tensor, states: Tensor, previous: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The target's tokens that are most probable and their log probabilities, (batch, nodes, top_k), and the memory
        after them; arguments as for ``DFlashNetwork.corrected``."""
        scores, confidence, memory = self.network.corrected(scores, states, previous, memory)
        tokens, log_probs = ops.top_log_probs(scores, self.top_k)
        if confidence is not None:
            log_probs = log_probs + F.logsigmoid(confidence.float())[..., None]
        return self.target_tokens(tokens), log_probs, memory

    def _denoise(self, token: Tensor) -> Tensor:
        """The network's outputs over a block per row, (batch, block, hidden)."""
        config, cache, batch = self.network.config, self.cache, len(token)
        x, rotation = self.embed(block_tokens(token, config)), self.rotation(batch, config.block_size)
        if self.native_layers is not None and not cache.static_shapes:
            return self.network.norm(self.native_layers(x, rotation, self._block_mask(batch), cache))
        if cache.static_shapes:
            cache.set_write_slots(config.block_size)
        place = torch.arange(config.block_size, device=token.device)
        if cache.static_shapes:
            masks = [mask.expand(batch, 1, -1, -1) for mask in attended(place[:, None] - place, config)]
        else:
            masks = _slot_masks(cache, place, config)

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            # A window of the operation excludes its last distance.
            window = config.window + 1 if layer in config.sliding else 0
            return attention((q, k, v), cache, layer, masks[layer], window, place.expand(batch, -1))

        return self.network(x, rotation, attend)

    def _block_mask(self, batch: int) -> Tensor | None:
        """What a block attends to in all layers, (batch, 1, block, slots) bool; None is causal."""
        size, causal = self.network.config.block_size, bool(self.network.config.causal)
        if not self.cache.padded:
            slots = self.cache.length + size
            return None if causal else torch.ones(slots, dtype=torch.bool).expand(batch, 1, size, -1)
        reach = torch.ones(size, size, dtype=torch.bool)
        return allowed_slots(self.cache, (reach.tril() if causal else reach).expand(batch, -1, -1))


def plain_embedding(target: Any, tokens: Tensor) -> Tensor:
    """The target's embeddings without the norm that its table may apply (Muse Glimmer)."""
    table = target.model.get_input_embeddings()
    return F.embedding(tokens, table.weight) if hasattr(table, "embed_norm") else target.embed(tokens)


def _slot_masks(cache: TreeCache, place: Tensor, config: DFlashConfig) -> list[Tensor]:
    """Masks of all layers over context and block, (batch, 1, block, slots) bool."""
    lengths = torch.tensor(cache.lengths, device=place.device)[:, None, None]
    prefix = lengths + place[:, None] - torch.arange(cache.length, device=place.device)
    block = (place[:, None] - place).expand(len(prefix), -1, -1)
    slots = allowed_slots(cache, torch.ones_like(block, dtype=torch.bool))
    return [slots & mask[:, None] for mask in attended(torch.cat([prefix, block], dim=2), config)]


class NativeMarkov(Native):
    """A Markov head in the C++ kernels: a tree is one call.

    Args:
        out: from a token's embedding to the draft vocabulary.
        table: (tokens, rank), embeddings of the target's tokens.
        draft_ids: (n,) int64, draft vocabulary; None is the target's.
    """

    def __init__(self, out: BlockLinear, table: Tensor, draft_ids: Tensor | None) -> None:
        super().__init__(out, table, draft_ids)
        self._table = table.float().contiguous()
        self._weights = cpu_growth.markov_weights(out.native, self._table, draft_ids)

    @classmethod
    def of(cls, network: DFlashNetwork, draft_ids: Tensor | None) -> NativeMarkov | None:
        """The native form of a network's head; None where the kernels do not take it: it is gated or recurrent, or a
        confidence head adds to the scores."""
        config = network.config
        alone = config.markov_type == "vanilla" and config.confidence == "none"
        if not config.markov_rank or not alone or not isinstance(network.markov_out, BlockLinear):
            return None
        return cls(network.markov_out, network.markov_embed.weight.detach(), draft_ids)

    def __call__(self, scores: Tensor, last: Tensor, width: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``mmspec.ops.cpu_growth.draft_slots``; scores (batch, slots, draft tokens) of any dtype."""
        return cpu_growth.draft_slots(self._weights, scores.float(), last, width, nodes)
