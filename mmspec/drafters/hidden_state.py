"""Base classes of drafters on the target's hidden states, at token-count positions or the target's positions.

A step appends the accepted tokens with the target's hidden states to the drafter's KV cache, then grows a dynamic tree
(EAGLE-2, arXiv 2406.16858) on predicted states. Entry j of a row reads token j + 1 and the target's states at token j.

Entries of a growing tree follow the entries of accepted tokens (``TreeState``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import AHEAD, Counts, RowState, TrainedDrafter, commit_chain, write_last
from mmspec.drafters.growth import Reach, grow_tree
from mmspec.drafters.layer import FusedLayers, NativeCell, NativeLayers, Rotation, TokenLinear, rotary_of, take
from mmspec.errors import UserError
from mmspec.ops import cpu_library, kernels
from mmspec.ops.transfer import on_device
from mmspec.targets.packing import drafter_kind, pack_drafter
from mmspec.targets.static_forward import AttentionMetadata, add_product


def packing(kept: Tensor, left: bool) -> tuple[Tensor, Tensor]:
    """Gather indices that pack the kept entries of each row.

    Args:
        left: pad shorter rows on the left instead of the right.

    Returns:
        Index of the entry at each new position, (batch, most) int64; mask, (batch, most) bool, False at padding.
    """
    most = int(kept.sum(1).max())
    order = (kept if left else ~kept).int().sort(dim=1, stable=True).indices
    order = order[:, kept.shape[1] - most :] if left else order[:, :most]
    return order, kept.gather(1, order)


def causal(batch: int, width: int, device: torch.device, kept: Tensor | None = None) -> Tensor:
    """Causal attention mask of ``width`` entries, (batch, width, width) bool. ``kept``: (batch, width) bool, False at
    padding, which attends to itself so that no row is fully masked."""
    reach = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    return reach if kept is None else reach & kept[:, None] | torch.eye(width, dtype=torch.bool, device=device)


def counted_positions(prompt: Prompt) -> tuple[Tensor | slice, Tensor]:
    """Token-count positions of a prompt, (batch, length) int64 or a slice, and of the next tokens, (batch,) int64."""
    batch, length = prompt.input_ids.shape
    if prompt.attention_mask is None:
        return slice(0, length), torch.full((batch,), length, dtype=torch.long, device=prompt.input_ids.device)
    mask = prompt.attention_mask.bool().long()
    return (mask.cumsum(1) - 1).clamp(min=0), mask.sum(1)


def axis_positions(prompt: Prompt, output: TargetOutput) -> tuple[Tensor, Tensor] | None:
    """The target's multi-axis positions of a prompt, (3, batch, length) int64, and of each row's next token, (batch,)
    int64; None for a single axis."""
    if output.positions is None or output.positions.ndim < 3:
        return None
    axes = output.positions[-3:].expand(3, *prompt.input_ids.shape)  # skips a leading fourth axis that counts tokens
    return axes, axes.amax((0, 2)) + 1


def last_tokens(history: list[list[int]], device: torch.device) -> Tensor:
    """The last token of each row, (batch, 1) int64."""
    return on_device([[row[-1]] for row in history], device)


def following_embeds(target: Target, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> Tensor:
    """A prompt's input embeddings shifted left by one token, including image and video features, (batch, length,
    hidden); arguments as for ``Drafter.begin``."""
    fed = target.embed(prompt.input_ids) if output.embeds is None else output.embeds  # None for text
    return torch.cat([fed[:, 1:], target.embed(last_tokens(history, fed.device))], dim=1)


def plain_embedding(target: Any, tokens: Tensor) -> Tensor:
    """The target's embeddings without the norm of Muse Glimmer's table."""
    table = target.embedding
    return F.embedding(tokens, table.weight) if hasattr(table, "embed_norm") else target.embed(tokens)


def allowed_slots(cache: TreeCache, reach: Tensor, window: int = 0) -> Tensor:
    """Attention mask, (batch, 1, nodes, slots) bool: ``reach``, preceded by the prefix unless shapes are static.
    ``reach``: (batch, nodes, new) bool, new entries that each node attends to, including itself."""
    if cache.static_shapes:
        return reach[:, None]
    batch, nodes = reach.shape[:2]
    prefix = cache.attended[:, None, :] if cache.padded else reach.new_ones(1, 1, 1)
    if window:
        lengths = torch.tensor(cache.lengths, dtype=torch.long, device=reach.device)[:, None, None]
        at = lengths + reach.sum(-1, keepdim=True) - 1
        prefix = prefix & (at - torch.arange(cache.length, device=reach.device) < window)
    return torch.cat([prefix.expand(batch, nodes, cache.length), reach], dim=-1)[:, None]


def attention(
    qkv: tuple[Tensor, Tensor, Tensor], cache: TreeCache, layer: int, allowed: Tensor | None, window: int, depth: Any
) -> Tensor:
    """Write keys and values of new entries to the cache and attend to it: (batch, heads, nodes, head_dim).

    Args:
        qkv: queries, keys and values of new entries, (batch, heads or kv_heads, nodes, head_dim) each.
        allowed, window: see ``run``.
        depth: (batch, nodes) int64, entries between each node and the prefix; None derives it from the mask.
    """
    (q, k, v), entry = qkv, cast(Any, cache.layers[layer])
    keys, values = entry.update(k, v)
    if not cache.static_shapes:
        return F.scaled_dot_product_attention(q, keys, values, allowed, is_causal=allowed is None, enable_gqa=True)
    assert allowed is not None
    return attention_metadata(cache, allowed[:, 0], window, depth).attend(q, keys, values).transpose(1, 2)


def attention_metadata(
    cache: TreeCache, reach: Tensor, window: int = 0, depth: Tensor | None = None
) -> AttentionMetadata:
    """Attention metadata of new entries in a static-shape cache; ``depth`` as for ``attention``."""
    assert cache.bounds is not None
    depth = reach.sum(-1) - 1 if window and depth is None else depth
    return AttentionMetadata(cache.bounds.first(len(reach)), cache.offset, reach, depth, window or None)


def run(
    network: Any, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache, window: int = 0
) -> Tensor:
    """Run a network on new entries and write them to the cache.

    Args:
        network: called with inputs, rotation and an attention function.
        x: (batch, nodes, any), inputs.
        allowed: attention mask, see ``allowed_slots``; None for a prompt without padding.
        window: for static shapes, whose mask excludes the prefix; see ``HiddenStateDrafter.window``.
    """
    if cache.static_shapes:
        cache.set_write_slots(x.shape[1])

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        return attention((q, k, v), cache, layer, allowed, window, None)

    return network(x, rotation, attend)


class TreeState:
    """State of a growing tree: predictions of its last level and its entries in the drafter's cache.

    A node has a chain of ``slots`` entries for the tokens drafted since the previous pass. They follow the entries of
    accepted tokens; ``end`` drops them.

    Args:
        rotation: returns the rotation of the next positions of each row, (batch, positions, 1, head_dim) each.
        width: maximum nodes per level.

    Attributes:
        predicted, carried: (batch, nodes, hidden), states that predict the last level's children, and the recurrent
            cell's states; set by the drafter.
        block: per level since the last pass: tokens, states that predicted them, and indices of parents.
    """

    predicted: Tensor
    carried: Tensor

    def __init__(
        self,
        cache: TreeCache,
        rotation: Callable[[], Rotation],
        width: int,
        passes: int,
        slots: int = 1,
        window: int = 0,
    ) -> None:
        self._cache, self._rotation, self._slots, self._window = cache, rotation, slots, window
        self._most = width * slots, width * slots * passes
        self._reach, self._passes = Reach(slots), 0
        self.block: list[tuple[Tensor, Tensor, Tensor]] = []
        cache.offset = 0

    def run(self, layers: Callable[..., Tensor], x: Tensor, origin: Tensor) -> Tensor:
        """Run layers on the entries of the next level, (batch, width * slots, any).

        Args:
            layers: called with inputs, rotation, attention mask and cache; see ``run``.
            origin: (batch, width) int64, ancestor of each node in the previous pass.
        """
        reach = self._reach(origin)
        outputs = layers(x, self._turned(origin.shape[1]), self._mask(reach), self._cache)
        self._passes += 1
        self._cache.offset += x.shape[1]
        return outputs

    def end(self) -> None:
        """Drop the tree's entries."""
        self._cache.offset = 0

    def chains(self) -> tuple[Tensor, Tensor, Tensor]:
        """Take ``block`` and return the chains that end in its last level, concatenated.

        Returns:
            Tokens, (batch, width * levels); predicted states, (batch, width * levels, hidden), or the previous level's
            states if the block has one level; ancestor of each chain in the level before the block, (batch, width).
        """
        block, self.block = self.block, []
        if len(block) == 1:
            return block[0]
        chains, states, place = [], [], None
        for tokens, predicted, origin in reversed(block):
            chains.append(tokens if place is None else tokens.gather(1, place))
            place = origin if place is None else origin.gather(1, place)
            states.append(take(predicted, place))
        assert place is not None
        return torch.stack(chains[::-1], dim=2).flatten(1), torch.stack(states[::-1], dim=2).flatten(1, 2), place

    def _turned(self, width: int) -> Rotation:
        """Rotation of the next chains; all chains of a row start at the same position."""
        if self._passes == 0:
            self._rotations = self._rotation()
        begin = self._passes * self._slots
        cos, sin = (x[:, begin : begin + self._slots] for x in self._rotations)
        if self._slots == 1:
            return cos, sin  # broadcast
        return cos.repeat(1, width, 1, 1), sin.repeat(1, width, 1, 1)

    def _mask(self, reach: Tensor) -> Tensor:
        """See ``allowed_slots``; without a window, passes share the prefix part of the mask."""
        if self._cache.static_shapes or self._window:
            return allowed_slots(self._cache, reach, self._window)
        if self._passes == 0:
            self._allowed = allowed_slots(self._cache, reach.new_ones(len(reach), *self._most))
        prefix = self._cache.length
        mine = self._allowed[:, :, : reach.shape[1], : prefix + reach.shape[2]]
        mine[:, 0, :, prefix:] = reach
        return mine


class HiddenStateDrafter(TrainedDrafter):
    """Drafter with one cache entry per token and trees grown on predicted states. Entries have the target's rotary
    positions: multi-axis at images if the network's configuration has ``mrope_section``.

    Args:
        network: trained network, moved to the target's device and dtype; without ``layers``, it needs no KV cache.
        draft_ids: (n,) int64, draft vocabulary: target token of each output row; None is the full vocabulary.
        **settings: top_k, depth, total_tokens, verifier: see ``TrainedDrafter``.

    Attributes:
        counts_tokens: without ``mrope_section``, replace multi-axis positions by token counts, not the largest axis.
        node_inputs: maps drafted tokens and the states that predicted them, (batch, entries, hidden), to network
            inputs, (batch, nodes, any); arguments as for ``NodeInputs``. Set by ``scoring``.
        cell_input: like ``node_inputs``, for the recurrent cell before its activation, with several slots.
        sample_embedding: (1, hidden), a target embedding in the network's dtype and device; set by ``attach``.
        window: sliding window in entries, with the query; 0 is full attention. It never hides entries of one step.
    """

    node_inputs: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    cell_input: TokenLinear
    sample_embedding: Tensor
    _scores: Callable[[Tensor], Tensor]
    native: NativeCell | None = None
    native_layers: NativeLayers | None = None
    fused_layers: FusedLayers | None = None
    features: Sequence[Feature] = ("last",)
    position_slack = 0  # maximum excess of a row's next position over its number of tokens
    window = 0
    counts_tokens = True

    def __init__(self, network: Any, draft_ids: Tensor | None = None, **settings: Any) -> None:
        (self._rotary, self._axis), self._layers = rotary_of(self.shape_of(network)), len(network.layers)
        super().__init__(network.eval().requires_grad_(False), draft_ids, **settings)

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        self.cache = TreeCache(self._layers, static_shapes=static_shapes)
        self._output = RowTensor(static_shapes)  # (rows, hidden or 2 * hidden), output at each row's last entry
        self._position = RowTensor(static_shapes)  # (rows,) int64, position of the next entry
        self._history: list[list[int]] = []
        self._constants: dict[tuple[str, int], Tensor] = {}  # by name and size

    def place(self, target: Target, probe: Tensor) -> None:
        self.check_width(probe.shape[-1])
        kind = drafter_kind(target, probe)
        pack_drafter(self.network, probe, kind)
        self.native_layers, self.fused_layers = self._native_layers(kind), self._fused_layers()
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(probe.device)
        self.sample_embedding = probe.detach()
        with torch.inference_mode():
            self._scores = self.scoring(target)

    @staticmethod
    def shape_of(network: Any) -> Any:
        """``LayerShape`` of a network's layers; by default, its configuration."""
        return network.config

    @property
    def slots(self) -> int:
        """Tokens drafted per pass of the layers."""
        return 1

    @abstractmethod
    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        """Set ``node_inputs`` for a target and return the output layer, from predicted states to draft logits."""

    def states(self, output: TargetOutput) -> Tensor:
        """Target hidden states of each entry, (batch, nodes, any): by default, all features concatenated."""
        read = [output.features[name] for name in self.features]
        return torch.cat(read, dim=-1) if len(read) > 1 else read[0]

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Network inputs of accepted tokens, (batch, width, any): by default, the states. ``states``: (batch, width,
        any), see ``states``, at the previous tokens."""
        return states

    def keep_to(self, rows: int | None, target: Any) -> None:
        """Limit drafts to the first ``rows`` tokens, the trained vocabulary, if the target has more tokens."""
        if self.draft_ids is None and rows is not None and rows < target.config.vocab_size:
            self.draft_ids = torch.arange(rows, device=target.device)

    def target_head(self, target: Target) -> Callable[[Tensor], Tensor]:
        """The target's output layer for the draft vocabulary."""
        return target.head if self.draft_ids is None else target.narrow_head(self.draft_ids)

    def check_width(self, width: int) -> None:
        """Raise ``UserError`` if the target's hidden size, ``width``, is not the network's."""
        if self.network.config.hidden_size != width:
            raise UserError(
                f"{self.name} must have the target's hidden size {width}: the drafter has "
                f"{self.network.config.hidden_size}"
            )

    @property
    def parts(self) -> tuple[RowState, ...]:
        return self.cache, self._output, self._position

    def join(self, rows: int, static_shapes: bool) -> None:
        if not self.rows:
            self.position_slack = 0
        super().join(rows, static_shapes)

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        mask = None if prompt.attention_mask is None else prompt.attention_mask.bool()
        first = last_tokens(history, prompt.input_ids.device)
        x = self.inputs(torch.cat([prompt.input_ids[:, 1:], first], dim=1), self.states(output))
        self.join(len(history), kernels.static_shapes(x.device))
        rotation, position = self._places(output, prompt, x)
        self.start(x, rotation, mask, position, history)

    def _places(self, output: TargetOutput, prompt: Prompt, x: Tensor) -> tuple[Rotation, Tensor]:
        """Rotation of the prompt's entries, and the position of each row's next entry, (batch,) int64."""
        length, (at, tokens) = prompt.input_ids.shape[1], counted_positions(prompt)
        found = None if self._axis is None and self.counts_tokens else axis_positions(prompt, output)
        if found is None:
            self._rotary.reserve(length + AHEAD, x)
            return self._rotary(at), tokens
        axes, position = found
        # Video positions follow frame times and may exceed the number of tokens.
        self.position_slack = max(self.position_slack, int((position - tokens).max()))
        self._rotary.reserve(max(int(position.max()), length) + AHEAD, x)
        if self._axis is None:
            return self._rotary(axes.amax(0)), position
        return self._rotary.by_axis(axes, self._axis), position

    def start(
        self, x: Tensor, rotation: Rotation, mask: Tensor | None, position: Tensor, history: list[list[int]]
    ) -> None:
        """Run the network on prompts of new rows, already registered by ``join``.

        Args:
            x: (batch, entries, any), network inputs.
            mask: (batch, entries) bool, False at left padding; None without padding.
            position: (batch,) int64, position of each row's next entry.
            history: see ``Drafter.begin``.
        """
        entries, allowed = x.shape[1], None
        if mask is not None or 0 < self.window < entries:
            allowed = causal(len(x), entries, x.device, mask)[:, None]
            allowed = allowed.triu(1 - self.window) if self.window else allowed
        alone = not (self.static_shapes or self.cache.rows)
        self.cache.kv.device = x.device
        cache = TreeCache(self._layers, reserve=entries + (AHEAD if alone else 1))
        outputs = self.enter(x, rotation, allowed, cache)
        cache.commit_prompt(entries, mask, len(x))
        if alone:
            self.cache = cache
        else:
            self.cache.append(cache, entries + AHEAD)
        self._output.append(outputs[:, -1])
        self._position.append(position)
        self._history += history

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._history = [self._history[row] for row in rows]

    def enter(self, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache) -> Tensor:
        """Run the network on new entries; returns its outputs, (batch, entries, any)."""
        return self.run(x, rotation, allowed, cache)

    def run(self, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache) -> Tensor:
        """Run the network on new entries with the fastest kernels that support its layers; see the function ``run``."""
        if cache.static_shapes and self.fused_layers is not None:
            assert allowed is not None
            metadata = attention_metadata(cache, allowed[:, 0], self.window)
            return self.fused_layers(x, rotation, [metadata] * self._layers, cache, middle=self.slots > 1)
        if self.native_layers is None or cache.static_shapes:
            return run(self.network, x, rotation, allowed, cache, self.window)
        return self.native_layers(x, rotation, allowed, cache, middle=self.slots > 1)

    def _fused_layers(self) -> FusedLayers | None:
        return FusedLayers.of(self.network.layers, self.shape_of(self.network)) if self._layers else None

    def _native_layers(self, kind: str | None) -> NativeLayers | None:
        """Layers in the C++ kernels; None if unsupported."""
        shape, layers = self.shape_of(self.network), self._layers
        if not layers or kind is None or not cpu_library.available() or not NativeLayers.takes(shape):
            return None
        return NativeLayers([layer.parts for layer in self.network.layers], shape, kind)

    @property
    def _version(self) -> tuple[Hashable, ...]:
        return *super()._version, self._rotary.version

    def reserve(self, width: int) -> None:
        self.cache.reserve_nodes(width + self.top_k * self.slots * (self.depth + 1))
        longest = max(map(len, self._history)) + self.position_slack
        self._rotary.reserve(longest + width + self.depth, self.sample_embedding)

    def advance(self, accepted: Counts) -> None:
        self.cache.advance(accepted)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the accepted tokens and the target's hidden states at their parents."""
        self.queue((verdict.tokens, take(self.states(output), verdict.path.clamp(min=0))), verdict)

    def update(self, tokens: Tensor, states: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Append accepted tokens, (batch, width), with the target's states before them, (batch, width, any)."""
        self.cache.offset = 0  # reset after a failed capture
        batch, width = tokens.shape
        x = self.inputs(tokens, states)
        outputs = self.enter(x, self.rotation(batch, width), self._chain_mask(batch, width), self.cache)
        commit_chain([self.cache], length, width)
        self._position.data[:batch] += length
        write_last(self._output, outputs, length)

    def _chain_mask(self, batch: int, width: int) -> Tensor | None:
        """Attention mask of accepted tokens, see ``allowed_slots``; None if the kernels apply a causal mask."""
        if not self._layers:
            return None
        if self.native_layers is not None and not (self.static_shapes or self.cache.padded or self.window):
            return None
        reach = self._constant("causal", width, partial(causal, 1)).expand(batch, -1, -1)
        return allowed_slots(self.cache, reach, self.window)

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        self.cache.offset = 0
        predicted, carried = self.network.begin(self._output.data[: len(token)])
        first = self.children(predicted, carried)
        deepest = min(self.depth, plan.depth)
        if self.native is not None and not self.static_shapes and deepest <= self.slots:
            first = first if not plan.chain else (first[0][:, :1], first[1][:, :1])
            width = 1 if plan.chain else self.top_k
            return self.native(*(token, carried, first, self.draft_ids), width, deepest, plan, self.total_tokens)
        state = self._tree_state(len(token), -(-self.depth // self.slots) - 1, self.slots)
        state.predicted, state.carried = predicted[:, None], carried[:, None]
        extend = partial(self._extend, state)
        tree = grow_tree(token, first, extend, plan, self.top_k, depth=self.depth, nodes=self.total_tokens)
        state.end()
        if self.draft_ids is not None:
            tree.tokens[:, 1:] = self.draft_ids[tree.tokens[:, 1:]]
        return tree

    def _constant(self, name: str, size: int, make: Callable[..., Tensor]) -> Tensor:
        if (name, size) not in self._constants:
            self._constants[name, size] = make(size, device=self._position.data.device)
        return self._constants[name, size]

    def _tree_state(self, batch: int, passes: int, slots: int = 1) -> TreeState:
        rotation = partial(self.rotation, batch, self.depth)
        return TreeState(self.cache, rotation, self.top_k, passes, slots, self.window)

    def _extend(self, state: TreeState, beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """Children of the next level, see ``grow_tree``, in draft-vocabulary indices.

        The cell predicts them while the last forward pass has slots left; then a new pass starts.
        """
        network, slots = self.network, self.slots
        state.block.append((beam, state.predicted, origin))
        if len(state.block) < slots:
            read, carried = self.cell_input.split(beam, state.carried, origin)
            # In place: ``carried`` is a fresh copy.
            state.carried = network.cell.norm(add_product(carried, network.cell.out, F.silu(read)))
            if network.config.rank:
                tokens, log_probs = ops.top_log_probs(network.cell.scores(state.carried), self.top_k)
                return self.adjusted(tokens, log_probs, state.predicted, state.carried)
            state.predicted = network.guess(state.carried)
        else:
            tokens, predicted, origin = state.chains()
            x = self.node_inputs(tokens, predicted, origin if slots == 1 else None)
            outputs = state.run(self.run, x, origin)
            state.predicted, state.carried = network.begin(outputs[:, slots - 1 :: slots])
        return self.children(state.predicted, state.carried)

    def rotation(self, batch: int, count: int) -> Rotation:
        """Rotation of the next ``count`` positions of each row, (batch, count, 1, head_dim) each."""
        step = self._constant("steps", count, torch.arange)
        return self._rotary(self._position.data[:batch, None] + step)

    def children(self, predicted: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k draft-vocabulary indices and log probabilities, (..., top_k) each, from the output of ``begin``."""
        return self.adjusted(*ops.top_log_probs(self._scores(predicted), self.top_k), predicted, carried)

    def adjusted(self, tokens: Tensor, log_probs: Tensor, predicted: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Hook for subclasses to adjust the tokens and log probabilities of ``children``."""
        return tokens, log_probs
