"""Native MTP drafter: drafts trees with the multi-token prediction layers of the target's checkpoint.

All layers have one cache entry per token: layer k reads the token and the output of layer k - 1 at the previous token;
layer 0 reads the target's last hidden state. Layer m predicts level m of a tree; the last layer also predicts all
deeper levels from its own outputs. Entries of accepted tokens are recomputed from the target's states, in all layers.

Entries use the target's input embeddings, including image and video features, and the position of the previous token.

The layers follow DeepSeek-V3 (arXiv 2412.19437, section 2.2), as built by transformers: a layer norms and projects a
token's embedding and the previous state, applies a decoder layer of the target's kind, and predicts the next token. The
first layer reads the target's last hidden states, every other layer the outputs of the layer before it.

Reading is strict, from the target's own checkpoint or GGUF file; transformers drops these tensors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.cache.tree_cache import TreeCache, cache_argument
from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import AHEAD, Counts, RowState, TreeDrafter, commit_chain, write_last
from mmspec.drafters.checkpoint import load_stored, load_weights, tensor_names, weight_files
from mmspec.drafters.growth import Reach, grow_tree
from mmspec.drafters.hidden_state import axis_positions, causal, counted_positions, following_embeds, take
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError, explained
from mmspec.ops import kernels
from mmspec.targets.attention import NAME, PASS, SLIDING, TreePass, set_attention, tail_mask, tree_mask, window_of
from mmspec.targets.checkpoints import from_pretrained
from mmspec.targets.gguf_file import opened
from mmspec.targets.gguf_models import read_config, read_mtp_weights
from mmspec.targets.packing import drafter_kind, pack_drafter

DRAFT_VOCABULARY = 32_768
"""Tokens that eager drafts choose from: the first, which are the most frequent in the order of a tokenizer's merges. A
level then reads a fraction of the output layer, often larger than the MTP layer (FR-Spec, arXiv 2502.14856)."""

_MOST_OUTSIDE = 1 / 8  # share of recent tokens outside of these above which drafts choose from the whole vocabulary
_RECENT = 64  # tokens

_WITHOUT_CLASS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Model types whose MTP layer has full attention and no configuration in transformers."""

_ATTENTION = {"full_attention", SLIDING[0]}


def layer_config(decoder: PreTrainedConfig, source: str) -> PreTrainedConfig:
    """Configuration of the MTP layers, ``num_hidden_layers`` in number, from the target's text configuration.

    Raises:
        UserError: the model has no MTP layers, or layers that do not support trees.
    """
    config = copy.deepcopy(decoder)
    if config.model_type in _WITHOUT_CLASS:
        for name, value in {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}.items():
            if (received := getattr(config, name, value)) != value:
                raise UserError(f"{source}: {name} must be {value} for its MTP layer: got {received!r}")
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    if not getattr(config, "num_mtp_layers", None):
        raise UserError(f"{source}: expected a model with MTP layers, received {config.model_type} without any")
    with explained(f"{source}: expected MTP layers that transformers builds", ValueError):
        layers: PreTrainedConfig = config.get_mtp_config()
    if other := sorted(set(getattr(layers, "layer_types", None) or ()) - _ATTENTION):
        raise UserError(
            f"{source}: MTP layers must be full or sliding-window attention: those of {config.model_type} are "
            f"{', '.join(other)}"
        )
    return layers


def build(config: PreTrainedConfig) -> tuple[Any, Any]:
    """A transformers ``MtpModel`` with these layers, and a model on the meta device that provides its classes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    built = MtpModel(model, config.num_hidden_layers)
    set_attention(built, NAME if model._supports_sdpa else "eager")
    return built, model


class MTPNetwork(nn.Module):
    """MTP layers with tree masks and caches."""

    def __init__(self, built: Any) -> None:
        super().__init__()
        self.config, self.count = built.config, len(built.layers)
        self.layers = built.layers
        self.norm = built.shared_post_norm if built.use_shared_post_norm else nn.Identity()
        self.attention: str = built.config._attn_implementation
        # In a list, not a submodule: frequencies must keep their dtype.
        self._rotary: list[Any] = []
        if built.rotary_emb is not None:
            with torch.device("cpu"):
                self._rotary.append(type(built.rotary_emb)(config=self.config))
        self._by_kind = any(isinstance(value, dict) for value in (self.config.rope_parameters or {}).values())

    def forward(
        self,
        number: int,
        embeds: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: TreeCache,
        **options: Any,
    ) -> Tensor:
        """Outputs of a layer, (batch, nodes, hidden).

        Args:
            embeds: (batch, nodes, hidden), embeddings of tokens.
            states: (batch, nodes, hidden), states at the previous tokens.
            positions: (batch, nodes) or (axes, batch, nodes) int64.
            mask: (batch, 1, nodes, slots); None for a causal prompt, or for a single node that attends to everything.
        """
        rotation = None
        for rotary in self._rotary:
            kind = {"layer_type": self.config.layer_types[number]} if self._by_kind else {}
            axes = positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions
            rotation = rotary.to(states.device)(states, position_ids=axes, **kind)
        outputs: Tensor = self.layers[number](
            embeds.to(states.dtype),
            states,
            position_embeddings=rotation,
            attention_mask=mask,
            position_ids=positions,
            **{cache_argument(self.layers[number]): cache},
            **options,
        )
        return self.norm(outputs)


_OWN = re.compile(r"^(?:model\.)?mtp\.(.*?)(\.(?:weight|bias))?$")
_PARTS = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
"""Published names of a layer's parts other than its decoder layer, and their names in transformers."""
_NUMBERED = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.(.*)$")
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's embedding and output layer."""


def has_mtp(folder: Path) -> bool:
    """Whether a checkpoint, a folder or a GGUF file, has tensors of native MTP layers."""
    stored = opened(folder)
    names = stored.tensors if stored else [one for file in weight_files(folder) for one in tensor_names(file)]
    return any(_OWN.match(name) or name.endswith(".eh_proj.weight") for name in names)


def read_mtp(folder: Path) -> tuple[MTPNetwork, dict[str, Any]]:
    """Read the MTP layers of a target's checkpoint, a folder or a GGUF file; other tensors are not read.

    Returns:
        The layers, in their original dtype, and the target, for ``checkpoint.check_verifier``.

    Raises:
        UserError: MTP layers are missing or do not support trees, or a tensor is missing, unexpected or misshapen.
    """
    if not has_mtp(folder):
        raise UserError(f"{folder}: expected the checkpoint of a target with native MTP layers, received none")
    if (stored := opened(folder)) is not None:
        decoder, count = read_config(stored, alone=True)[0], stored.count("nextn_predict_layers")
        decoder.num_mtp_layers = decoder.mtp_num_hidden_layers = count
    else:
        with explained(f"{folder}: expected the configuration of a model", OSError, ValueError):
            decoder = from_pretrained(AutoConfig, folder).get_text_config()
    config = layer_config(decoder, str(folder))
    errors = ValueError, TypeError, AttributeError, KeyError, IndexError
    with explained(f"{folder}: expected MTP layers that transformers builds", *errors), torch.device("meta"):
        built, model = build(config)
    if stored is not None:
        others = {name for name in built.state_dict() if not name.startswith("layers")}
        load_stored(built, read_mtp_weights(stored, built), others, "its MTP layers", stored)
    else:
        _load(built, model, _tensors(folder, decoder.num_hidden_layers), str(folder))
    verifier = {
        "name_or_path": folder.name,
        "model_type": decoder.model_type,
        "hidden_size": decoder.hidden_size,
        "vocab_size": decoder.vocab_size,
    }
    return MTPNetwork(built), verifier


def _tensors(folder: Path, layers: int) -> dict[str, Tensor]:
    """Tensors of the MTP layers under the names that transformers converts.

    Args:
        layers: number of target layers; layers with higher numbers are MTP layers.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        names = {name: own for name in tensor_names(file) if (own := _own_name(name, layers))}
        if names:
            loaded = load_weights(file, shapes_only=[name for name in tensor_names(file) if name not in names])
            tensors |= {own: loaded[name] for name, own in names.items()}
    return tensors


def _own_name(name: str, layers: int) -> str | None:
    if name.endswith(_SHARED):
        return None
    if match := _OWN.match(name):
        part, kind = match[1], match[2] or ""
        layer = re.match(r"layers\.(\d+)\.(.*)", part)
        own = f"layers.{layer[1]}.mtp_block.{layer[2]}" if layer else f"layers.0.{_PARTS.get(part, part)}"
        return own + kind
    match = _NUMBERED.match(name)
    return f"layers.{int(match[1]) - layers}.mtp_block.{match[2]}" if match and int(match[1]) >= layers else None


def _load(built: Any, model: Any, tensors: dict[str, Tensor], source: str) -> None:
    """Load tensors with transformers' weight conversions."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:  # float8 is meaningless without its scales
            raise UserError(f"{source}: {name} must be a floating point tensor: got {tensor.dtype}")
    conversions: list[Any] = [
        *get_model_conversion_mapping(built, add_legacy=False),
        *get_model_conversion_mapping(model),
    ]
    report, _ = convert_and_load_state_dict_in_model(
        model=built, state_dict=dict(tensors), load_config=LoadStateDictConfig(weight_mapping=conversions)
    )
    problems = [f"missing {name}" for name in sorted(report.missing_keys) if name.startswith(("layers", "shared_post"))]
    problems += [f"unknown {name}" for name in sorted(report.unexpected_keys)]
    problems += [
        f"{name} of shape {tuple(got)}, not {tuple(want)}" for name, got, want in sorted(report.mismatched_keys)
    ]
    problems += [f"{name} that cannot be converted" for name in sorted(report.conversion_errors)]
    if problems:
        raise UserError(f"{source}: expected exactly the tensors of its MTP layers, received {'; '.join(problems[:3])}")


class MTP(TreeDrafter):
    """Native MTP drafter.

    Args:
        network: MTP layers, moved to the target's device and dtype.
    """

    name: ClassVar[str] = "mtp"
    features: Sequence[Feature] = ("last",)

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Self:
        """Load the layers of a target's checkpoint; raises ``UserError`` if invalid."""
        network, verifier = read_mtp(folder)
        drafter = cls(network.eval().requires_grad_(False))
        drafter.verifier = verifier
        return drafter

    def place(self, target: Target, probe: Tensor) -> None:
        if (width := self.network.config.hidden_size) != probe.shape[-1]:
            raise UserError(f"mtp must have the target's hidden size {probe.shape[-1]}: the layers have {width}")
        pack_drafter(self.network, probe, drafter_kind(target, probe))
        self._scores, self._outside = target.head, 0.0
        self._frequent: Callable[[Tensor], Tensor] | None = None
        if target.head(probe).shape[-1] >= 2 * DRAFT_VOCABULARY and not kernels.static_shapes(probe.device):
            self._frequent = target.narrow_head(torch.arange(DRAFT_VOCABULARY))

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        count = self.network.count
        self.caches = [TreeCache(count, attending=[k], static_shapes=static_shapes) for k in range(count)]
        self._output = RowTensor(static_shapes)  # (rows, layers * hidden), outputs at each row's last token
        self._position = RowTensor(static_shapes)  # (rows,) int64, position of the next entry

    @property
    def parts(self) -> tuple[RowState, ...]:
        return *self.caches, self._output, self._position

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        embeds, states = following_embeds(self.target, prompt, output, history), output.features["last"]
        mask = None if prompt.attention_mask is None else prompt.attention_mask.bool()
        positions, following = _positions(output, prompt)
        self.join(len(history), self.network.attention == NAME and kernels.static_shapes(embeds.device))
        length, count = embeds.shape[1], self.network.count
        if length < count:  # some layers would have no entry
            short = (count - length, 0)
            mask = F.pad(torch.ones_like(prompt.input_ids).bool() if mask is None else mask, short)
            embeds, states = (F.pad(x, (0, 0, *short)) for x in (embeds, states))
            positions, length = F.pad(positions, short), count
        last = []
        for number in range(count):  # each layer's entries start one token after the layer before
            entries = length - number
            kept = None if mask is None else mask[:, :entries]
            cache = TreeCache(count, reserve=entries + 1, attending=[number])
            allowed = self._prompt_mask(number, cache, kept, len(history), entries, states)
            places = positions[..., number:]
            outputs = self.network(number, embeds[:, number:], states, places, allowed, cache)
            cache.commit_prompt(entries, kept, len(history))
            self.caches[number].append(cache, entries + AHEAD)
            states = outputs[:, :-1]
            last.append(outputs[:, -1])
        self._output.append(torch.cat(last, dim=-1))
        self._position.append(following)

    def _prompt_mask(
        self, number: int, cache: TreeCache, kept: Tensor | None, batch: int, entries: int, like: Tensor
    ) -> Tensor | None:
        """Attention mask of a layer over a prompt's entries; None for causal attention."""
        config = self.network.config
        cache.commit_prompt(0, None, batch)
        if kept is None and self.network.attention == NAME and window_of(config, number) is None:
            return None
        reach = causal(batch, entries, like.device, kept)
        depth = torch.arange(entries, device=like.device).expand(batch, -1)
        if kept is not None:
            depth = (kept.cumsum(1) - 1).clamp(min=0)
        return self._of_layer(number, tree_mask(config, cache, depth, None, reach, like.dtype))

    def _of_layer(self, number: int, masks: Any) -> Any:
        return masks[self.network.config.layer_types[number]] if isinstance(masks, dict) else masks

    def reserve(self, width: int) -> None:
        for cache in self.caches:
            cache.reserve_nodes(width + self.top_k * (self.depth + 1))

    def advance(self, accepted: Counts) -> None:
        for cache in self.caches:
            cache.advance(accepted)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the accepted tokens and the target's hidden states at their parents."""
        self.queue((verdict.tokens, take(output.features["last"], verdict.path.clamp(min=0))), verdict)
        if self._frequent is not None:
            tokens = [token for _, row in verdict.host for token in row]
            outside = sum(token >= DRAFT_VOCABULARY for token in tokens) / len(tokens)
            self._outside += (outside - self._outside) * min(1.0, len(tokens) / _RECENT)

    def update(self, tokens: Tensor, states: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Append accepted tokens, (batch, width), with the target's states before them, (batch, width, hidden)."""
        self._drop_nodes()
        batch, width = tokens.shape
        embeds, outputs, chain = self.target.embed(tokens), [], causal(batch, width, tokens.device)
        depth = torch.arange(width, device=tokens.device).expand(batch, -1)
        for number, before in enumerate(self._last_outputs(batch)):
            outputs.append(self._pass(number, embeds, states, depth, None, chain))
            states = torch.cat([before, outputs[-1][:, :-1]], dim=1)
        commit_chain(self.caches, length, width)
        self._position.data[:batch] += length
        write_last(self._output, torch.cat(outputs, dim=-1), length)

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        self._drop_nodes()
        states = dict(enumerate(self._last_outputs(len(token))))
        reach, last = Reach(), self.network.count - 1
        depths: list[Tensor] = []

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            """Run layers ``level`` and up for one level: deeper levels need the entries of the later layers."""
            nonlocal states
            level = len(depths)  # number of levels above, without the root
            depth, tail = torch.full_like(beam, level), torch.cat(depths, dim=1) if depths else None
            depths.append(depth)
            embeds, allowed, outputs = self.target.embed(beam), reach(origin), {}
            for number in range(min(level + 1, last), last + 1):
                above = states[number - 1] if number - 1 in states else states[number]
                outputs[number] = self._pass(number, embeds, take(above, origin), depth, tail, allowed)
                self.caches[number].offset += beam.shape[1]
            states = outputs
            return self._children(outputs[min(outputs)])

        first = self._children(states[0][:, 0])
        tree = grow_tree(token, first, extend, plan, self.top_k, depth=self.depth, nodes=self.total_tokens)
        self._drop_nodes()
        return tree

    def _drop_nodes(self) -> None:
        for cache in self.caches:
            cache.offset = 0

    def _last_outputs(self, batch: int) -> list[Tensor]:
        """Outputs of each layer at the rows' last tokens, (batch, 1, hidden)."""
        return list(self._output.data[:batch, None].chunk(self.network.count, dim=-1))

    def _pass(
        self, number: int, embeds: Tensor, states: Tensor, depth: Tensor, tail: Tensor | None, reach: Tensor
    ) -> Tensor:
        """Outputs of a layer at new nodes, (batch, nodes, hidden)."""
        cache, config, options = self.caches[number], self.network.config, {}
        if cache.static_shapes:
            cache.set_write_slots(depth.shape[1])
            masks = tail_mask(config, depth, tail, reach)
            assert cache.bounds is not None
            options = {PASS: TreePass(config, cache.bounds.first(len(depth)), depth)}
        else:
            masks = tree_mask(config, cache, depth, tail, reach, states.dtype)  # type: ignore[assignment]
        positions = self._position.data[: len(depth), None] + depth
        return self.network(number, embeds, states, positions, self._of_layer(number, masks), cache, **options)

    def _children(self, states: Tensor) -> tuple[Tensor, Tensor]:
        head = self._scores if self._frequent is None or self._outside > _MOST_OUTSIDE else self._frequent
        return ops.top_log_probs(head(states), self.top_k)


def _positions(output: TargetOutput, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Positions of a prompt's tokens, (batch, length) or (3, batch, length) int64, and of each row's next token,
    (batch,)."""
    if (found := axis_positions(prompt, output)) is not None:
        return found
    (batch, length), (at, following) = prompt.input_ids.shape, counted_positions(prompt)
    if isinstance(at, slice):
        at = torch.arange(length, device=following.device).expand(batch, -1)
    return at, following


SPEC = DrafterSpec(
    "mtp",
    "MTP",
    "the multi-token prediction layers of the target's checkpoint, over a tree's levels (arXiv 2412.19437)",
    MTP,
    weights="target",
    recognises=has_mtp,
)
