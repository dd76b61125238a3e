"""Network of EAGLE-3 (arXiv 2503.01840) and 3.1: hidden states of several target layers are projected to one state,
which decoder layers combine with the next token's embedding.

The first layer reads the normed embedding beside the normed state, later ones the residual stream. The last layer's
output, normed, gives the next token's logits over a draft vocabulary; as it is, or normed, it is the state of the next
level, in place of the target's. Switches differ between projects that train these networks, under the names used here:
SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, NVIDIA/Model-Optimizer.

EAGLE-4 scores few tokens by the output layer: those that a product of low rank with the same state ranks first.

P-EAGLE (arXiv 2602.01469) feeds all levels after the first at once, with a mask token and a learnt ``mask_hidden`` in
place of the target's states.

Published EAGLE-3, EAGLE-4 and P-EAGLE checkpoints (arXiv 2503.01840, 3.1, 2602.01469): strict reading, without
running their code.

Three layouts of one network, also with ``mask_hidden`` (P-EAGLE):

- ``midlayer.*`` (SafeAILab/EAGLE, sgl-project/SpecForge, Tencent/AngelSlim);
- ``layers.0.*`` and further layers, with a nested ``transformer_layer_config`` (vllm-project/speculators);
- ``layers.0.*`` without embedding and ``t2d`` (NVIDIA/Model-Optimizer).

EAGLE-4 heads (class ``LlamaForCausalLMEagle4``) have ``layers.0.*`` and ``efficient_lm_head_down_proj.weight``, (rank,
hidden), and ``efficient_lm_head.weight``, (vocabulary, rank), as the documentation of NVIDIA-NeMo/Automodel describes
them. Quantised output layers and mixtures of experts are not read.

``d2t`` holds offsets: row i of the output layer is the target's token i + d2t[i].

Layers to read are given in two conventions: ``eagle_aux_hidden_state_layer_ids`` of speculators are layers whose inputs
are read; those in ``eagle_config``, and AngelSlim's ``aux_hidden_states_layer_ids``, are layers whose outputs are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.checks import whole
from mmspec.drafters.eagle3 import Eagle3Config
from mmspec.drafters.hidden_state.layer import Attend, DecoderLayer, LayerParts, LlamaLayer, Norm, Rotation, rotary_of
from mmspec.drafters.parts import check_tensors, parameters, rows_of, shapes_of, stack
from mmspec.drafters.published import (
    LAYER,
    Published,
    PublishedConfig,
    draft_tokens,
    named_verifier,
    read_layout,
    rope_parameters,
)
from mmspec.errors import UserError


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


_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_UNSUPPORTED = ("attention_bias", "mlp_bias", "qkv_bias")
_MASKS = ("mask_token_id", "ptd_token_id", "pard_token")
_VOCABULARIES = {"d2t", "t2d"}
_CANDIDATES = "efficient_lm_head"  # of EAGLE-4
_RETRIEVED = 256  # candidates per state where the configuration names no number
_SLIDING = "sliding_attention"
_LAYER = {**LAYER, "embed_norm": LAYER["input_norm"], "hidden_norm": ["hidden_norm"]}


def read_published(folder: Path) -> Published:
    """Read a published EAGLE-3 head; see ``convert``."""
    return convert(*read_layout(folder, "eagle3", "the tensors of an EAGLE-3 head"), str(folder))


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> Published:
    """Validate published tensors and convert them to those of an ``Eagle3Network``.

    Args:
        config: contents of ``config.json``.
        tensors: the published ones; may be on the meta device.
        source: name of the checkpoint in error messages.

    Raises:
        UserError: an unsupported network, or a tensor that is missing, unexpected or does not match ``config.json``.
    """
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    common = PublishedConfig.read(layer, f"{source}/config.json", others=True)
    vocab = whole(1).check(f"{source}/config.json: vocab_size", common.vocab_size)
    draft = common.draft_vocab_size or rows_of(tensors, "lm_head.weight") or vocab
    network = _network(common, config, layer, tensors, draft, source)
    rotary_of(network)  # raises
    prefix = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    parts = published_parts(network, prefix)
    shapes = shapes_of(parameters(Eagle3Network, network), parts, network)
    shapes |= {"d2t": (draft,), "t2d": (vocab,)}
    optional = {"t2d"} if draft != vocab else _VOCABULARIES
    what = "an EAGLE-4 head" if network.candidates else "an EAGLE-3 head"
    check_tensors(tensors, shapes, what, source, optional, _VOCABULARIES)
    verifier = {**named_verifier(config), "hidden_size": network.source, "vocab_size": vocab}
    return network, stack(tensors, parts), draft_tokens(tensors, draft, vocab, source), verifier


def _network(
    common: PublishedConfig,
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    draft: int,
    source: str,
) -> Eagle3Config:
    eagle = config.get("eagle_config") or {}
    for name in _UNSUPPORTED:
        if layer.get(name):
            raise UserError(f"{source}/config.json: expected linear layers without bias, received {name}")
    reads = _reads(config, eagle, source)
    eagle4 = any(name.startswith(_CANDIDATES) for name in tensors) or any(
        "eagle4" in str(name).lower() for name in config.get("architectures") or []
    )
    own = eagle4 or "lm_head.weight" in tensors
    ours = {
        **common.shape(),
        "target_size": common.target_hidden_size or common.hidden_size,
        "states": len(reads) or 3,
        "reads": reads,
        "layers": common.num_hidden_layers,
        "head": draft if own else 0,
        "embedding": common.vocab_size if "embed_tokens.weight" in tensors else 0,
        "rope": rope_parameters(layer, source),
        **{name: bool(config.get(name, eagle.get(name))) for name in SWITCHES},
        "mask_token_id": _mask_token(config, tensors, source),
        "window": _window(config, layer, common.num_hidden_layers, eagle4, source),
        **(_retrieval(config, tensors, draft, source) if eagle4 else {}),
    }
    return Eagle3Config.read(ours, f"{source}/config.json")


def _reads(config: Mapping[str, Any], eagle: Mapping[str, Any], source: str) -> list[int]:
    """Layers whose inputs the head reads; empty if the configuration does not tell."""
    inputs = next((config[name] for name in _IDS if config.get(name)), None)
    outputs = next((eagle[name] for name in _IDS if eagle.get(name)), config.get("aux_hidden_states_layer_ids"))
    layers = inputs if inputs is not None else outputs if outputs is not None else []
    if not isinstance(layers, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in layers):
        raise UserError(f"{source}/config.json: {_IDS[0]} must be a list of layers: got {layers!r}")
    return layers if inputs is not None else [layer + 1 for layer in layers]


def _mask_token(config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> int | None:
    """Token of the levels after the first of P-EAGLE; None of other heads."""
    named = [*(config.get("architectures") or []), config.get("speculators_model_type")]
    if "mask_hidden" not in tensors and not any("peagle" in str(name).lower() for name in named):
        return None
    token = next((config[name] for name in _MASKS if config.get(name) is not None), None)
    return whole(0).check(f"{source}/config.json: {_MASKS[0]}", token)


def _window(config: Mapping[str, Any], layer: Mapping[str, Any], layers: int, eagle4: bool, source: str) -> int:
    """Sliding window of all layers; 0 without one. Flat configurations of EAGLE-3 repeat the target's: not read."""
    known = eagle4 or "transformer_layer_config" in config
    kinds = list((layer.get("layer_types") if known else None) or ())[:layers]
    if eagle4 and not kinds and layer.get("sliding_window") is not None:
        kinds = [_SLIDING]
    sliding = {kind == _SLIDING for kind in kinds}
    if len(sliding) > 1:
        raise UserError(f"{source}/config.json: layer_types must be all {_SLIDING} or none: got {kinds}")
    if sliding != {True}:
        return 0
    return whole(1).check(f"{source}/config.json: sliding_window", layer.get("sliding_window"))


def _retrieval(config: Mapping[str, Any], tensors: Mapping[str, Tensor], draft: int, source: str) -> dict[str, int]:
    """``head_rank`` and ``candidates`` of EAGLE-4."""
    given = config.get("candidate_head")
    number = (given if isinstance(given, dict) else config).get("num_candidates", _RETRIEVED)
    candidates: int = whole(1).check(f"{source}/config.json: num_candidates", number)
    rank = rows_of(tensors, f"{_CANDIDATES}_down_proj.weight") or 1  # refused by name if it is missing
    return {"head_rank": rank, "candidates": min(candidates, draft)}


def published_parts(network: Eagle3Config, prefix: str) -> dict[str, list[str]]:
    """Our parameters, and the published ones that each of them stacks.

    Args:
        prefix: published name of the first layer.
    """
    parts: dict[str, list[str]] = {}
    for name in parameters(Eagle3Network, network):
        kind, _, rest = name.partition(".")
        number, _, module = rest.removesuffix(".weight").partition(".")
        at = prefix if number == "0" else f"layers.{number}"
        parts[name] = [f"{at}.{one}.weight" for one in _LAYER[module]] if kind == "layers" else [name]
    return parts
