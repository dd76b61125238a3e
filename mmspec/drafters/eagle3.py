"""EAGLE-3, EAGLE-3.1 and P-EAGLE drafter (arXiv 2503.01840, 2602.01469) for any target: text, vision-language and
hybrid models. EAGLE-4 is EAGLE-3.1 with a sliding window and candidate retrieval before the output layer.

At image positions the input is the placeholder token's embedding, as in the training code of all published projects;
the target's hidden states contain the image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Target, output_of
from mmspec.core.tree import TokenTree
from mmspec.drafters.growth import grow_slots
from mmspec.drafters.hidden_state import HiddenStateDrafter, allowed_slots, causal
from mmspec.drafters.layer import Attend, DecoderLayer, LlamaLayer, NodeInputs, Norm, Rotation
from mmspec.drafters.spec import DrafterSpec, HeadShape, TreeShape
from mmspec.errors import UserError
from mmspec.targets.static_forward import FusedLayer, FusedNorm
from mmspec.validation import option, options


@options
class Eagle3Config(HeadShape):
    """Configuration of an ``Eagle3Network``: a ``HeadShape``, and

    Attributes:
        target_size: the target's hidden size; 0 is ``hidden_size``.
        states: number of target hidden states per position.
        reads: target layers whose inputs are read, 0 to the number of layers L; empty means 2, L/2 and L - 3.
        outputs: read the raw outputs of these layers instead of their inputs.
        mask_token_id: input token of all levels after the first, in one pass (P-EAGLE, arXiv 2602.01469); None: one
        pass per level.
        window: sliding window in entries, including the query; 0 is full attention.
        head_rank: rank of the low-rank head that retrieves candidates for the output layer (EAGLE-4); 0 disables it.
        candidates: number of retrieved tokens that the output layer scores.
    """

    target_size: int = option(0, ge=0, le=2**16)
    states: int = option(3, ge=1, le=64)
    reads: list[int] = option(list, "Layers of the target whose inputs the head reads; by default 2, L/2 and L-3 of L.")
    outputs: bool = option(
        False, "Read the outputs of these layers.", default_text="inputs", names=("--outputs/--inputs",)
    )
    norm_before_residual: bool = option(False, "The residual of the first layer is the normed state.")
    norm_before_fc: bool = option(False, "Norm of the concatenated states, before their projection.")
    fc_norm: bool = option(
        False, "Norm of each of them (EAGLE-3.1).", default_text="on, unless they are normed together"
    )
    norm_output: bool = option(False, "Feed normed states to the next level (EAGLE-3.1).", default_text="on")
    mask_token_id: int | None = option(None, ge=0, le=2**24)
    window: int = option(0, ge=0, le=2**24)
    head_rank: int = option(0, ge=0, le=2**16)
    candidates: int = option(0, ge=0, le=2**24)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads and (len(self.reads) != self.states or min(self.reads) < 0):
            raise UserError(f"reads must name {self.states} layers, from 0 on: got {self.reads}")
        if not self.reads and self.states != 3:
            raise UserError(f"reads must name the {self.states} layers that the drafter was trained on: got none")
        if bool(self.head_rank) != bool(self.candidates) or self.candidates > self.head:
            raise UserError(
                f"candidates must be given with head_rank only, and at most the {self.head} tokens of the head: got "
                f"{self.candidates} with head_rank {self.head_rank}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise UserError("one of norm_before_fc and fc_norm must be false: got both true")

    @property
    def source(self) -> int:
        """The target's hidden size."""
        return self.target_size or self.hidden_size

    @property
    def parallel(self) -> bool:
        """Whether one pass drafts all levels after the first (P-EAGLE)."""
        return self.mask_token_id is not None

    def inputs_read(self, layers: int) -> list[int]:
        """``reads`` for a target with ``layers`` layers; by default 2, L/2 and L - 3."""
        return self.reads or sorted(min(max(layer, 0), layers) for layer in (2, layers // 2, layers - 3))

    def features(self, layers: int) -> tuple[Feature, ...]:
        """Target features that the network reads, for a target with ``layers`` layers. Raises ``UserError``: the target
        has too few layers."""
        reads = self.inputs_read(layers)
        if max(reads) > layers - self.outputs:
            raise UserError(
                f"the drafter reads {'outputs' if self.outputs else 'inputs'} of layers {', '.join(map(str, reads))}: "
                f"the target has {layers} layers"
            )
        if self.outputs:
            return tuple(output_of(layer) for layer in reads)
        return tuple(layer if layer < layers else output_of(layer - 1) for layer in reads)


def parse_layers(layers: str) -> dict[str, Any]:
    """Read the layers of ``eagle3:FOLDER@LAYERS``: inputs of ``2,16,29``, or outputs as ``outputs:1,15,28``."""
    kind, _, numbers = layers.rpartition(":")
    if kind not in ("", "inputs", "outputs") or not all(number.isdecimal() for number in numbers.split(",")):
        raise UserError(f"layers to read must be as in FOLDER@2,16,29 or FOLDER@outputs:1,15,28: got @{layers}")
    return {"reads": [int(number) for number in numbers.split(",")], "outputs": kind == "outputs"}


class FirstLayer(DecoderLayer):
    """Decoder layer whose attention input is the concatenated token embedding and state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.normed_residual = config.norm_before_residual
        self.embed_norm = Norm(config.hidden_size, config.norm_eps)
        self.hidden_norm = Norm(config.hidden_size, config.norm_eps)

    @property
    def parts(self) -> FusedLayer:
        both = SimpleNamespace(weight=torch.stack([self.embed_norm.weight, self.hidden_norm.weight]))
        plain = super().parts
        norms = {**plain.norms, "attention": FusedNorm(both, self.embed_norm.eps)}
        return replace(plain, norms=norms, normed_residual=self.normed_residual)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """(batch, nodes, 2 * hidden), embedding and state, -> (batch, nodes, hidden)."""
        embeds, hidden = x.chunk(2, dim=-1)
        normed = self.hidden_norm(hidden)
        read = torch.cat([self.embed_norm(embeds), normed], dim=-1)
        x = (normed if self.normed_residual else hidden) + self.attention(read, rotation, attend)
        return x + self.mlp(x)


class Eagle3Network(nn.Module):
    """Network of EAGLE-3 (arXiv 2503.01840) and 3.1: projects hidden states of several target layers to one state,
    which decoder layers combine with the next token's embedding.

    The first layer reads the normed embedding and the normed state, later layers the residual stream. The last layer's
    normed output gives the next token's logits over a draft vocabulary; the output, raw or normed, is also the state of
    the next level. Projects that train these networks set the switches differently: SafeAILab/EAGLE,
    sgl-project/SpecForge, vllm-project/speculators, NVIDIA/Model-Optimizer.

    In EAGLE-4, a low-rank head retrieves candidates and the output layer scores only these.

    P-EAGLE (arXiv 2602.01469) runs all levels after the first in one pass, with a mask token and a learned
    ``mask_hidden`` instead of target states.
    """

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
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.states * source, dtype=torch.float32))
        if config.candidates:
            self.efficient_lm_head_down_proj = nn.Linear(width, config.head_rank, bias=False)
            self.efficient_lm_head = nn.Linear(config.head_rank, config.head, bias=False)
        if config.head:
            by_row = config.candidates > 0  # rows of candidates are gathered as from an embedding
            self.lm_head: nn.Linear | nn.Embedding = (
                nn.Embedding(config.head, width) if by_row else nn.Linear(width, config.head, bias=False)
            )
        if config.embedding:
            self.embed_tokens = nn.Embedding(config.embedding, width)

    def project(self, states: Tensor) -> Tensor:
        """Project the target's states to one state per position: (..., states * source) -> (..., hidden)."""
        if self.config.fc_norm:
            parts = states.split(self.config.source, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        return self.fc(states)

    def combine(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Layer inputs, (..., 2 * hidden), from embeddings and previous positions' states, (..., hidden) each."""
        return torch.cat([embeds.to(states.dtype), states], dim=-1)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Output of the last layer, (batch, nodes, hidden).

        Args:
            x: (batch, nodes, 2 * hidden) from ``combine``.
            attend: see ``DecoderLayer.attention``; also receives the layer index, ``layer``.
        """
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, partial(attend, layer=number))
        return x

    def begin(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The next level's state, from the last layer's output, and an empty carried state, (..., 0)."""
        return self.norm(output) if self.config.norm_output else output, output[..., self.config.hidden_size :]

    def scores(self, head: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
        """Logits from a level's state, (..., hidden), and an output layer."""
        return head(state if self.config.norm_output else self.norm(state))

    def retrieve(self, state: Tensor) -> Tensor:
        """Logits of the candidates, (..., head), from normed states, (..., hidden); -inf for all other tokens."""
        ranked = self.efficient_lm_head(self.efficient_lm_head_down_proj(state))
        candidates = ranked.topk(self.config.candidates, dim=-1).indices
        logits = (self.lm_head(candidates) @ state[..., None])[..., 0].to(ranked.dtype)
        return torch.full_like(ranked, -torch.inf).scatter(-1, candidates, logits)


class Eagle3(HiddenStateDrafter):
    name: ClassVar[str] = "eagle3"

    config_class = Eagle3Config
    network_class = Eagle3Network
    usual_tree = TreeShape(top_k=10, depth=8, total_tokens=59)
    features = ()  # known when attached

    def check_width(self, width: int) -> None:
        config = self.network.config
        if config.source != width or (not config.embedding and config.hidden_size != width):
            raise UserError(
                f"{self.name} must have the target's hidden size {width}: the drafter reads states of {config.source} "
                f"and embeddings of {config.hidden_size}"
            )

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        network: Any = self.network
        decoder: Any = target.config  # type: ignore[attr-defined]
        self.features, self.window = network.config.features(decoder.num_hidden_layers), network.config.window
        rows = network.config.head or (self.verifier or {}).get("vocab_size", decoder.vocab_size)
        self.keep_to(rows, target)
        self._embed = network.embed_tokens if network.config.embedding else target.embed
        self._embedded = network.config.embedding or decoder.vocab_size
        if (network.config.mask_token_id or 0) >= self._embedded:
            raise UserError(f"mask_token_id must be a token below {self._embedded}: got {network.config.mask_token_id}")
        own = network.embed_tokens if network.config.embedding else None
        self.node_inputs = (
            NodeInputs.of(target, self.draft_ids) if own is None else NodeInputs(own, own, self.draft_ids)
        )
        if network.config.head:
            head = network.retrieve if network.config.candidates else network.lm_head
        else:
            head = self.target_head(target)
        return partial(network.scores, head)

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        # A placeholder's id may be outside the embedding table.
        embeds = self._embed(tokens.masked_fill(tokens >= self._embedded, 0))
        return self.network.combine(embeds, self.network.project(states))

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        if self.network.config.mask_token_id is None:
            return super().grow(token, plan)
        self.cache.offset = 0
        outputs, later = self._output.data[: len(token), None], min(self.depth, plan.depth) - 1
        if later > 0:
            outputs = torch.cat([outputs, self._later(len(token), later)], dim=1)
        tokens, log_probs = self.children(*self.network.begin(outputs))
        return grow_slots(token, self.target_tokens(tokens), log_probs, plan, self.total_tokens)

    def _later(self, batch: int, count: int) -> Tensor:
        """Outputs of the levels after the first, (batch, count, hidden), with causal attention."""
        network, device = self.network, self._position.data.device
        mask = torch.full((1, 1), network.config.mask_token_id, dtype=torch.long, device=device)
        x = network.combine(self._embed(mask), network.project(network.mask_hidden)).repeat(batch, count, 1)
        allowed = allowed_slots(self.cache, causal(batch, count, device), self.window)
        return self.run(x, self.rotation(batch, count), allowed, self.cache)

    @property
    def checks(self) -> str:
        reads = ", ".join(map(str, self.features))
        return super().checks and f"{super().checks}, and the layers {reads} that it reads: try eagle3:FOLDER@LAYERS"


SPEC = DrafterSpec(
    "eagle3",
    "EAGLE-3",
    "EAGLE-3, EAGLE-3.1, EAGLE-4 and P-EAGLE heads, which read several layers of the target (arXiv 2503.01840)",
    Eagle3,
    weights="required",
    parse_settings=parse_layers,
    train="eagle3",
)
