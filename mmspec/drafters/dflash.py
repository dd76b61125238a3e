"""DFlash drafter (arXiv 2602.06036) for any target: text, vision-language and hybrid models.

One forward pass drafts all levels of a tree, see ``grow_slots``. With a Markov head (DSpark, arXiv 2607.05147) or a
selector (DFlash2), the children of a node depend on its token; with a recurrent Markov head they depend on its path, so
each node has its own memory. One matrix product gives the exact distributions of all nodes that a level extends. The
probability of a path is the product of its tokens' probabilities and of the confidences at their parents (section 3.2).

Entry j of a row's cache is the context of token j, including image positions; the block is never committed. Positions
are the target's, or the largest axis of multi-axis positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Prompt, Target, TargetOutput, output_of
from mmspec.core.tree import TokenTree
from mmspec.drafters import checkpoint
from mmspec.drafters.captured import RowState
from mmspec.drafters.growth import grow_levels, grow_slots
from mmspec.drafters.hidden_state import (
    HiddenStateDrafter,
    allowed_slots,
    attention,
    attention_metadata,
    plain_embedding,
)
from mmspec.drafters.layer import Attend, FusedLayers, Native, NativeLayers, Norm, Rotation, rotate, take
from mmspec.drafters.spec import DrafterSpec, HeadShape, TreeShape
from mmspec.errors import UserError
from mmspec.ops import cpu
from mmspec.ops.transfer import on_device
from mmspec.quantisation.blocks import BlockLinear
from mmspec.targets.static_forward import FusedLayer, FusedNorm, JoinedLinear
from mmspec.validation import option, options


@options(kw_only=True)
class DFlashConfig(HeadShape):
    """Configuration of a ``DFlashNetwork``: a ``HeadShape``, and

    Attributes:
        block_size: positions of a block, including the last accepted token.
        mask_token_id: target token whose embedding fills all other positions of a block.
        target_layer_ids: target layers whose outputs form the context.
        sliding: layers with sliding-window attention.
        window: largest distance that a sliding-window layer attends to; 0 without such layers.
        causal: layers with causal attention inside a block (JetSpec, arXiv 2606.18394).
        from_anchor: also predict from the last token's position: position k predicts the (k+1)-th token after the last.
        markov_rank: rank of the Markov head (DSpark, arXiv 2607.05147, formula 5); 0 disables it.
        markov_inputs, markov_outputs: input and output vocabulary sizes of the Markov head.
        markov_type: kind of Markov head: its correction depends only on the previous token (vanilla), is gated by the
            position's state (gated), or comes from a recurrent state over the block's tokens (rnn) or a ``Refiner``
            (xpress).
        refiner_ratio: width of a ``Refiner``'s MLP, in ranks.
        confidence: inputs of the confidence head: the state, or the state and the Markov head's embedding (formula 7).
        selector_tokens: vocabulary size of the target.
    """

    block_size: int = option(..., "Tokens per block, with the last one.", default_text="8", ge=2, le=64)
    mask_token_id: int = option(..., "Mask token; by default an unused token.", ge=0, le=2**24)
    target_layer_ids: list[int] = option(
        ..., "Layers of the target whose outputs are read; by default five, evenly spaced.", names=("--reads",)
    )
    sliding: list[int] = option(list)
    window: int = option(0, ge=0, le=2**24)
    causal: list[int] = option(list, "Layers with causal attention inside a block (JetSpec).")
    from_anchor: bool = option(
        False, "Also predict from the last token's position (DSpark).", names=("--from-anchor/--from-masks",)
    )
    markov_rank: int = option(0, "Rank of the Markov head (DSpark); 0 disables it.", ge=0, le=2**16)
    markov_inputs: int = option(0, ge=0, le=2**24)
    markov_outputs: int = option(0, ge=0, le=2**24)
    markov_type: Literal["vanilla", "gated", "rnn", "xpress"] = option(
        "vanilla",
        "Markov head on the previous token alone, gated by the state, or over the block's tokens (rnn, xpress).",
    )
    refiner_ratio: int = option(2, ge=1, le=64)
    confidence: Literal["none", "state", "markov"] = option(
        "none", "Inputs of the head that predicts acceptance (DSpark)."
    )
    conv_kernel_size: int = option(0, "Taps of convolutions around attention and MLP (DFlash2); 0: off.", ge=0, le=64)
    conv_group_size: int = option(16, "Channels that share the input-dependent part of a tap.", ge=1, le=2**16)
    selector_rank: int = option(0, "Rank of the candidate selector (DFlash2); 0 disables it.", ge=0, le=2**16)
    selector_top_k: int = option(16, "Candidates per position for the selector.", ge=1, le=1024)
    selector_tokens: int = option(0, ge=0, le=2**24)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= len(self.target_layer_ids) <= 64 or min(self.target_layer_ids) < 0:
            raise UserError(
                f"target_layer_ids must name 1 to 64 layers of the target, from 0 on: got {self.target_layer_ids}"
            )
        for name, named in (("sliding", self.sliding), ("causal", self.causal)):
            if any(not 0 <= layer < self.layers for layer in named):
                raise UserError(f"{name} must name layers below {self.layers}: got {named}")
        if bool(self.sliding) != bool(self.window):
            raise UserError(f"window must be given with sliding layers only: got {self.window} for {self.sliding}")
        for tokens in (self.markov_inputs, self.markov_outputs):
            if bool(tokens) != bool(self.markov_rank):
                raise UserError(f"markov_inputs and markov_outputs must be given with markov_rank only: got {tokens}")
        if self.markov_type != "vanilla" and not self.markov_rank:
            raise UserError(f"markov_rank must be positive for a {self.markov_type} Markov head: got 0")
        if self.head and self.markov_rank and self.markov_outputs != self.head:
            raise UserError(f"markov_outputs must be the {self.head} rows of the head: got {self.markov_outputs}")
        if self.confidence == "markov" and not self.markov_rank:
            raise UserError("markov_rank must be positive for a confidence head that reads the Markov head: got 0")
        if bool(self.selector_tokens) != bool(self.selector_rank):
            raise UserError(f"selector_tokens must be given with selector_rank only: got {self.selector_tokens}")
        if self.selector_rank and (self.head or self.dspark):
            raise UserError("selector_rank requires the target's output layer, and no heads of DSpark")
        if self.selector_rank and self.selector_top_k > self.selector_tokens:
            raise UserError(f"selector_top_k must be at most {self.selector_tokens}: got {self.selector_top_k}")
        if self.conv_kernel_size > self.block_size:
            raise UserError(f"conv_kernel_size must be at most {self.block_size}: got {self.conv_kernel_size}")
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise UserError(f"conv_group_size must divide {self.hidden_size}: got {self.conv_group_size}")

    @property
    def first(self) -> int:
        """Index of the first predicting position of a block."""
        return 0 if self.from_anchor else 1

    @property
    def dspark(self) -> bool:
        """Whether the network has a Markov or a confidence head (DSpark)."""
        return bool(self.markov_rank) or self.confidence != "none"

    @property
    def drafts(self) -> int:
        """Number of tokens that a block predicts."""
        return self.block_size - self.first

    def features(self, layers: int) -> tuple[Feature, ...]:
        """Target features that the network reads, for a target with ``layers`` layers whose last output is normed.
        Raises ``UserError``: the target has too few layers."""
        if max(self.target_layer_ids) >= layers:
            read = ", ".join(map(str, self.target_layer_ids))
            raise UserError(f"the drafter reads outputs of layers {read}: the target has {layers} layers")
        return tuple("last" if layer == layers - 1 else output_of(layer) for layer in self.target_layer_ids)


def default_layer_ids(layers: int) -> list[int]:
    """Default target layers to read: five, evenly spaced, or all ``layers`` if there are fewer."""
    first, last = (1, layers - 3) if layers > 4 else (0, layers - 1)
    return sorted({round(first + (last - first) * step / 4) for step in range(5)})


class BlockConvolution(nn.Module):
    """Two convolutions over the positions of a block, before and after a sublayer (DFlash2, z-lab/dflash).

    Both have causal taps, ``y_t = sum_i (base_i + delta_i(t)) * x_(t-i)``, zero-padded at the start of the block.
    ``base`` is per channel; ``delta``, a projection of the sublayer's input at t, is per group of channels.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, self.block = config.hidden_size, config.block_size
        self.taps, self.group = config.conv_kernel_size, config.conv_group_size
        base = torch.zeros(2, self.taps, width, dtype=torch.float32)
        base[:, 0] = 1.0  # the identity, as projections start at 0
        self.base = nn.Parameter(base)
        self.delta = nn.Linear(width, 2 * self.taps * width // self.group, bias=False)
        nn.init.zeros_(self.delta.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply the first convolution, the sublayer and the second; (batch, blocks * block, hidden) in and out."""
        groups = self.delta(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, dim=-1)
        before, after = (self.base + groups).unbind(-3)
        return self._convolve(sublayer(self._convolve(x, before)), after)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """x (batch, nodes, hidden), kernel (batch, nodes, taps, hidden)."""
        blocks = x.unflatten(1, (-1, self.block))
        shifted = [F.pad(blocks, (0, 0, tap, -tap)).flatten(1, 2) for tap in range(self.taps)]
        return sum((one * kernel[:, :, tap] for tap, one in enumerate(shifted[1:], 1)), shifted[0] * kernel[:, :, 0])


class Refiner(nn.Module):
    """Corrects latents of a block's positions by the block's tokens so far (XPress, arXiv 2608.02438).

    ``x_t = I [H h_t; G mean(h); e_t]`` with the embedding e of the previous token, ``y_t = x_t + sum_(j<=t) L_tj *
    x_j``, and a gated MLP on y. A position's memory is ``G mean(h)``, shared by the block, and x of earlier positions.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, rank, inner = config.hidden_size, config.markov_rank, config.markov_rank * config.refiner_ratio
        self.embed = nn.Embedding(config.markov_inputs, rank)
        self.out = nn.Linear(rank, config.markov_outputs, bias=False)
        self.state, self.mean = (nn.Linear(width, rank, bias=False) for _ in range(2))
        self.into = nn.Linear(3 * rank, rank, bias=False)
        self.mix = nn.Parameter(torch.zeros(rank, config.block_size, config.block_size, dtype=torch.float32))
        self.gate_up, self.down = nn.Linear(rank, 2 * inner, bias=False), nn.Linear(inner, rank, bias=False)

    def forward(self, embeds: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Latents of a position, (..., rank), and the next position's memory, (..., its index + 2, rank flattened).

        Args:
            embeds: (..., rank), embedding of the previous token.
            memory: (..., its index + 1, rank flattened).
        """
        mean, *earlier = memory.unflatten(-1, (-1, embeds.shape[-1])).unbind(-2)
        x = self.into(torch.cat([self.state(states), mean, embeds], dim=-1))
        known = torch.stack([*earlier, x], dim=-1)  # (..., rank, positions)
        y = x + (known * self.mix[:, len(earlier), : len(earlier) + 1]).sum(-1)
        gate, up = self.gate_up(y).chunk(2, dim=-1)
        return y + self.down(F.silu(gate) * up), torch.cat([memory, x], dim=-1)


class BlockLayer(nn.Module):
    """Decoder layer whose attention reads the context and the block. Parameters are (out, in); ``kv`` stacks keys and
    values, ``gate_up`` gate and up."""

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
        self.attention_conv = BlockConvolution(config) if config.conv_kernel_size else None
        self.mlp_conv = BlockConvolution(config) if config.conv_kernel_size else None

    @property
    def parts(self) -> FusedLayer:
        norms = {"attention": self.input_norm, "mlp": self.post_norm, "query": self.q_norm, "key": self.k_norm}
        fused, qkv = {name: FusedNorm(norm, norm.eps) for name, norm in norms.items()}, JoinedLinear([self.q, self.kv])
        return FusedLayer(qkv, self.out, self.gate_up, self.down, fused, self.head_dim**-0.5)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values, (batch, kv_heads, nodes, head_dim) each, of context or normed block, (batch, nodes, width).
        ``rotation``: cosines and sines, broadcastable to (batch, nodes, heads, head_dim)."""
        keys, values = self.kv(x).unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(2)
        return rotate(self.k_norm(keys), rotation).transpose(1, 2), values.transpose(1, 2)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """(batch, nodes, hidden) -> (batch, nodes, hidden); ``attend`` adds the context."""

        def attention(normed: Tensor) -> Tensor:
            queries = rotate(self.q_norm(self.q(normed).unflatten(-1, (self.heads, self.head_dim))), rotation)
            read = attend(queries.transpose(1, 2), *self.keys_values(normed, rotation))
            return self.out(read.transpose(1, 2).flatten(2))

        def mlp(normed: Tensor) -> Tensor:
            gate, up = self.gate_up(normed).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)

        if self.attention_conv is None or self.mlp_conv is None:
            x = x + attention(self.input_norm(x))
            return x + mlp(self.post_norm(x))
        x = x + self.attention_conv(self.input_norm(x), attention)
        return x + self.mlp_conv(self.post_norm(x), mlp)


class DFlashNetwork(nn.Module):
    """Network of DFlash (arXiv 2602.06036): denoises a block, the last token and mask tokens, in one pass.

    Queries come from the block; keys and values from the context and the block, with bidirectional attention inside it.
    The context has one state per token that the target has processed: the concatenated outputs of several target
    layers, projected and normed, shared by all layers. Position k of the block predicts the k-th token after the last.

    DSpark (arXiv 2607.05147) adds a Markov head, which corrects these logits given the previous token, and a confidence
    head, which predicts the probability that the drafted token is accepted. The Markov head has three types
    (deepseek-ai/DeepSpec), with the previous token's embedding e, the position's state h and, for a recurrent head, the
    memory m of earlier positions, 0 at the start of the block (xpress: see ``Refiner``):

    - vanilla: ``W e``;
    - gated: ``W (sigmoid(G [h; e]) * e)``;
    - rnn: ``W tanh(o)`` with ``[g; c; o] = J [m; e; h]``, then ``m = sigmoid(g) * m + (1 - sigmoid(g)) * tanh(c)``.

    DFlash2 (z-lab/dflash) adds convolutions to the layers and a selector, which rescores the most probable tokens of a
    position: the logit of token b after token a becomes ``U(b) + <P[a] * W h, S[b]>``.
    """

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
        if config.markov_type == "xpress":
            self.refiner = Refiner(config)
        elif config.markov_rank:
            self.markov_embed = nn.Embedding(config.markov_inputs, config.markov_rank)
            self.markov_out = nn.Linear(config.markov_rank, config.markov_outputs, bias=False)
        if config.markov_type == "gated":
            self.markov_gate = nn.Linear(width + config.markov_rank, config.markov_rank)
        if config.markov_type == "rnn":
            self.markov_cell = nn.Linear(2 * config.markov_rank + width, 3 * config.markov_rank)
        if config.selector_rank:
            self.predecessors, self.successors = (
                nn.Embedding(config.selector_tokens, config.selector_rank) for _ in range(2)
            )
            self.selector_state = nn.Linear(width, config.selector_rank, bias=False)
        if config.confidence != "none":
            self.confidence = nn.Linear(width + config.markov_rank * (config.confidence == "markov"), 1)

    @property
    def markov_head(self) -> nn.Linear:
        return self.refiner.out if self.config.markov_type == "xpress" else self.markov_out

    def project(self, states: Tensor) -> Tensor:
        """Context from the target's states: (..., reads * hidden) -> (..., hidden)."""
        return self.hidden_norm(self.fc(states))

    def context(self, x: Tensor, rotation: Rotation) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of a context from ``project``."""
        layers: Any = self.layers
        return (layer.keys_values(x, rotation) for layer in layers)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Normed output states, (batch, nodes, hidden), the inputs of the output layer.

        Args:
            x: (batch, nodes, hidden), embeddings of blocks.
            attend: attention function of queries, keys, values and the layer index, ``layer``.
        """
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, partial(attend, layer=number))
        return self.norm(x)

    def corrected(
        self, scores: Tensor, states: Tensor, previous: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits corrected by the Markov head given previous tokens, and the confidence head's logits of acceptance.

        Args:
            scores: (..., drafts), logits of the output layer.
            states: (..., hidden), inputs of the output layer.
            previous: (...) int64, previous tokens; the other arguments broadcast to its dimensions.
            memory: (..., any), memory of a recurrent Markov head before these positions; None is zero.

        Returns:
            Logits, (..., drafts), unchanged without a Markov head; confidences, (...), None without a confidence head;
            memory after these positions, (..., any), None without a recurrent Markov head.
        """
        config, read = self.config, states
        if config.markov_rank:
            embeds = self._markov_embeds(previous)
            latent, memory = self._latent(embeds, states, memory)
            scores = scores + self.markov_head(latent)
            if config.confidence == "markov":
                read = torch.cat([states.expand(*embeds.shape[:-1], -1), embeds], dim=-1)
        return scores, None if config.confidence == "none" else self.confidence(read).squeeze(-1), memory

    def select(self, scores: Tensor, tokens: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        """Selector logits of candidates given previous tokens.

        Args:
            scores: (..., candidates), logits of the output layer, up to a constant per position.
            tokens: (..., candidates) int64.
            states, previous: as for ``corrected``.
        """
        known = _below(previous, self.config.selector_tokens)
        latent = self.predecessors(known) * self.selector_state(states)
        return scores + torch.einsum("...r,...cr->...c", latent, self.successors(tokens))

    def first_memory(self, states: Tensor, last: Tensor, before: Tensor | None = None) -> Tensor | None:
        """Memory of a recurrent Markov head before the first predicting position; None is zero.

        Args:
            states: (..., block, hidden).
            last: (...) int64, first token of the block.
            before: (...) int64, the token before ``last``; read by a ``Refiner``.
        """
        memory, kind = None, self.config.markov_type
        if kind == "xpress":
            memory, last = self.refiner.mean(states.mean(-2)), last if before is None else before
        if kind not in ("rnn", "xpress") or self.config.from_anchor:
            return memory
        return self._latent(self._markov_embeds(last), states[..., 0, :], memory)[1]

    def _markov_embeds(self, tokens: Tensor) -> Tensor:
        table = self.refiner.embed if self.config.markov_type == "xpress" else self.markov_embed
        return table(_below(tokens, self.config.markov_inputs))

    def _latent(self, embeds: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Input of the Markov head's output layer, (..., rank), and the new memory."""
        if self.config.markov_type == "vanilla":
            return embeds, None
        states = states.expand(*embeds.shape[:-1], -1)
        if self.config.markov_type == "gated":
            return self.markov_gate(torch.cat([states, embeds], dim=-1)).sigmoid() * embeds, None
        if self.config.markov_type == "xpress":
            assert memory is not None, "first_memory comes first"
            return self.refiner(embeds, states, memory)
        memory = torch.zeros_like(embeds) if memory is None else memory
        gate, candidate, out = self.markov_cell(torch.cat([memory, embeds, states], dim=-1)).chunk(3, dim=-1)
        kept = gate.sigmoid()
        return out.tanh(), kept * memory + (1.0 - kept) * candidate.tanh()


def _below(tokens: Tensor, rows: int) -> Tensor:
    """Map tokens outside a table of ``rows`` rows to 0: a target may have more tokens than the drafter's vocabulary."""
    return tokens.masked_fill(tokens >= rows, 0)


def block_tokens(last: Tensor, config: DFlashConfig) -> Tensor:
    """Append mask tokens to the last tokens, (...) int64 -> (..., block)."""
    return F.pad(last[..., None], (0, config.block_size - 1), value=config.mask_token_id)


def attended(distance: Tensor, config: DFlashConfig) -> list[Tensor]:
    """Attention mask of each layer, bool, from the distances query - key.

    Layers of the same kind share a tensor.
    """
    kinds: dict[tuple[bool, bool], Tensor] = {}
    for layer in range(config.layers):
        slides, causal = kind = layer in config.sliding, layer in config.causal
        if kind not in kinds:
            mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
            kinds[kind] = mask & (distance.abs() <= config.window) if slides else mask
    return [kinds[layer in config.sliding, layer in config.causal] for layer in range(config.layers)]


class DFlash(HiddenStateDrafter):
    """DFlash drafter; trees have at most a level per drafted position."""

    name: ClassVar[str] = "dflash"
    counts_tokens = False

    config_class = DFlashConfig
    network_class = DFlashNetwork
    usual_tree = TreeShape(top_k=10, depth=15, total_tokens=59)
    features = ()  # known when attached
    _markov: NativeMarkov | None = None

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        self._ends = RowTensor(static_shapes)  # (rows, 2) int64, last two tokens, for a ``Refiner``

    @property
    def parts(self) -> tuple[RowState, ...]:
        return *super().parts, self._ends

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        super().begin(prompt, output, history)
        self._ends.append(on_device([(row[-2:] * 2)[:2] for row in history], prompt.input_ids.device))

    def update(self, tokens: Tensor, states: Tensor, length: Tensor) -> None:  # type: ignore[override]
        super().update(tokens, states, length)
        known = torch.cat([self._ends.data[: len(tokens)], tokens], dim=1)
        self._ends.write(known.gather(1, length[:, None] + torch.arange(2, device=length.device)))

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> Self:
        """Convert a transformers ``MuseGlimmerAssistantModel``; raises ``UserError`` if unsupported."""
        name = type(model).__name__
        config, tensors, draft_ids, verifier = cls.convert(model.config.to_dict(), model.state_dict(), name)
        network = checkpoint.load_network(DFlashNetwork, config, tensors, Path(name))
        return cls(network, draft_ids, verifier=verifier)

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        network, decoder = self.network, target.config  # type: ignore[attr-defined]
        self.features = network.config.features(decoder.num_hidden_layers)
        rows = network.config.embedding or decoder.vocab_size
        if network.config.mask_token_id >= rows:
            raise UserError(f"mask_token_id must be a token below {rows}: got {network.config.mask_token_id}")
        self.keep_to(network.config.head or (self.verifier or {}).get("vocab_size"), target)
        head = network.lm_head if network.config.head else self.target_head(target)
        drafted = head(self.sample_embedding).shape[-1]
        for name in ("markov_outputs", "selector_tokens"):
            if (outputs := getattr(network.config, name)) not in (0, drafted):
                raise UserError(f"{name} must be the {drafted} draft tokens: got {outputs}")
        self._markov = NativeMarkov.of(network, self.draft_ids)
        return head

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        return self.network.project(states)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of blocks, by the drafter's table, or the target's without the norm that some targets apply."""
        if rows := self.network.config.embedding:
            return self.network.embed_tokens(_below(tokens, rows))
        return plain_embedding(self.target, tokens).to(self.sample_embedding.dtype)

    def reserve(self, width: int) -> None:
        block = self.network.config.block_size
        self.cache.reserve_nodes(width + block)
        self._rotary.reserve(max(map(len, self._history)) + self.position_slack + width + block, self.sample_embedding)

    def _native_layers(self, kind: str | None) -> NativeLayers | None:
        config = self.network.config
        alike = not config.sliding and len(config.causal) in (0, config.layers)  # the kernels accept a single mask
        return super()._native_layers(kind) if alike and not config.conv_kernel_size else None

    def _fused_layers(self) -> FusedLayers | None:
        return None if self.network.config.conv_kernel_size else super()._fused_layers()

    def enter(self, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache) -> Tensor:
        """Write keys and values of a context to the cache; the block reads nothing else."""
        if self.native_layers is not None and not cache.static_shapes:
            self.native_layers.write(x, rotation, cache)
            return x[..., :0]
        if cache.static_shapes and self.fused_layers is not None:
            self.fused_layers.write(x, rotation, attention_metadata(cache, x.new_empty(len(x), 0, 0)), cache)
            return x[..., :0]
        if cache.static_shapes:
            cache.set_write_slots(x.shape[1])
        layer: Any
        for layer, (keys, values) in zip(cache.layers, self.network.context(x, rotation), strict=True):
            layer.update(keys, values)
        return x[..., :0]

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        self.cache.offset = 0
        config = self.network.config
        nodes = min(self.total_tokens, plan.nodes)
        deepest = max(1, min(self.depth, config.drafts, plan.depth, nodes))
        block = self._denoise(token)
        states = block[:, config.first : config.first + deepest]
        scores = self._scores(states)
        if self._markov is not None and not self.static_shapes:
            width = 1 if plan.chain else min(self.top_k, nodes)
            tokens, parents, log_probs = self._markov(scores, token, width, nodes)
            return TokenTree(tokens, parents, log_probs=log_probs, check=False)
        if config.selector_rank:
            scored = self._selecting(scores, states)
            return grow_levels(token, scored, plan, self.top_k, depth=deepest, nodes=self.total_tokens)
        if not config.markov_rank:
            tokens, log_probs, _ = self._ranked(scores, states, token[:, None])
            return grow_slots(token, tokens, log_probs, plan, self.total_tokens)
        memory = self.network.first_memory(block, token, self._ends.data[: len(token), 0])
        memory = None if memory is None else memory[:, None]

        def children(level: int, parents: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal memory
            before = None if memory is None else take(memory, above)
            slot = scores[:, level, None], states[:, level, None]
            tokens, log_probs, memory = self._ranked(*slot, parents, before)
            return tokens, log_probs

        return grow_levels(token, children, plan, self.top_k, depth=deepest, nodes=self.total_tokens)

    def _selecting(self, scores: Tensor, states: Tensor) -> Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """``children`` for ``grow_levels``, by the selector, which keeps the candidates' total probability."""
        drafts, unary = ops.top_log_probs(scores, self.network.config.selector_top_k)
        tokens, share = self.target_tokens(drafts), unary.logsumexp(-1, keepdim=True)

        def children(level: int, parents: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
            among, one = drafts[:, level, None], states[:, level, None]
            chosen = self.network.select(unary[:, level, None], among, one, parents).float().log_softmax(-1)
            best = chosen.topk(min(self.top_k, chosen.shape[-1]), dim=-1)
            return tokens[:, level, None].expand_as(chosen).gather(2, best.indices), best.values + share[:, level, None]

        return children

    def _ranked(
        self, scores: Tensor, states: Tensor, previous: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Top-k target tokens and their log probabilities, (batch, nodes, top_k), and the new memory; arguments as for
        ``DFlashNetwork.corrected``."""
        scores, confidence, memory = self.network.corrected(scores, states, previous, memory)
        tokens, log_probs = ops.top_log_probs(scores, self.top_k)
        if confidence is not None:
            log_probs = log_probs + F.logsigmoid(confidence.float())[..., None]
        return self.target_tokens(tokens), log_probs, memory

    def _denoise(self, token: Tensor) -> Tensor:
        """Run the network on one block per row: (batch, block, hidden)."""
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

        # The kernel's window excludes its last distance.
        windows = [(config.window + 1) * (layer in config.sliding) for layer in range(config.layers)]
        depth = place.expand(batch, -1)
        if cache.static_shapes and self.fused_layers is not None:
            metadata = [
                attention_metadata(cache, mask[:, 0], window, depth)
                for mask, window in zip(masks, windows, strict=True)
            ]
            return self.fused_layers(x, rotation, metadata, cache, last=self.network.norm)

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return attention((q, k, v), cache, layer, masks[layer], windows[layer], depth)

        return self.network(x, rotation, attend)

    def _block_mask(self, batch: int) -> Tensor | None:
        """Attention mask of a block, shared by all layers, (batch, 1, block, slots) bool; None is causal."""
        size, causal = self.network.config.block_size, bool(self.network.config.causal)
        if not self.cache.padded:
            slots = self.cache.length + size
            return None if causal else torch.ones(slots, dtype=torch.bool).expand(batch, 1, size, -1)
        reach = torch.ones(size, size, dtype=torch.bool)
        return allowed_slots(self.cache, (reach.tril() if causal else reach).expand(batch, -1, -1))


def _slot_masks(cache: TreeCache, place: Tensor, config: DFlashConfig) -> list[Tensor]:
    """Per-layer attention masks over context and block, (batch, 1, block, slots) bool."""
    lengths = torch.tensor(cache.lengths, dtype=torch.long, device=place.device)[:, None, None]
    prefix = lengths + place[:, None] - torch.arange(cache.length, device=place.device)
    block = (place[:, None] - place).expand(len(prefix), -1, -1)
    slots = allowed_slots(cache, torch.ones_like(block, dtype=torch.bool))
    return [slots & mask[:, None] for mask in attended(torch.cat([prefix, block], dim=2), config)]


class NativeMarkov(Native):
    """Markov head in the C++ kernels, which grow a tree in one call.

    Args:
        out: output layer, from a token's embedding to the draft vocabulary.
        table: (tokens, rank), embeddings of target tokens.
        draft_ids: (n,) int64, draft vocabulary; None is the target's.
    """

    def __init__(self, out: BlockLinear, table: Tensor, draft_ids: Tensor | None) -> None:
        super().__init__(out, table, draft_ids)
        self._table = table.float().contiguous()
        self._weights = cpu.markov_weights(out.native, self._table, draft_ids)

    @classmethod
    def of(cls, network: DFlashNetwork, draft_ids: Tensor | None) -> NativeMarkov | None:
        """Native form of a network's head; None for gated and recurrent heads and with a confidence head."""
        config = network.config
        alone = config.markov_type == "vanilla" and config.confidence == "none"
        if not config.markov_rank or not alone or not isinstance(network.markov_out, BlockLinear):
            return None
        return cls(network.markov_out, network.markov_embed.weight.detach(), draft_ids)

    def __call__(self, scores: Tensor, last: Tensor, width: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``mmspec.ops.cpu.draft_slots``; scores (batch, slots, draft tokens) of any dtype."""
        return cpu.draft_slots(self._weights, scores.float(), last, width, nodes)


SPEC = DrafterSpec(
    "dflash",
    "DFlash",
    "a block of tokens in one pass, verified as a tree (arXiv 2602.06036, 2604.12989)",
    DFlash,
    weights="required",
    train="dflash",
)
