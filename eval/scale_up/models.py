"""Function-preserving widening: where the features of a small model go in a big one, and the big one's weights.

A model built here has the small model's outputs and the big shape's cost: acceptance measured on it is the small
model's, time is the big shape's. Every table must say so.

Each axis of a weight is an ``Axis``: the small model's features, copied, among added ones. The residual stream is
padded with zeros; its norms are rescaled, since their mean is over more features. Added heads, MLP features and layers
are random and are computed, but the weights that would write them to the stream are zero, and so are the weights by
which a copied feature would read them. All other added weights are random, so that no zeros can be skipped and no
memory page is shared.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

from mmspec.errors import UserError

_STD = 0.02  # standard deviation of added weights


@dataclass(frozen=True)
class Shape:
    """Sizes of a language model.

    Attributes:
        hidden: width of the residual stream.
        mlp: intermediate width of the gated MLP.
        layers: number of layers.
        heads, kv_heads, head_dim: of each attention layer.
        vocab: vocabulary size.
        mamba: sizes of the Mamba-2 layers, for hybrids.
    """

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    mamba: MambaShape | None = None


@dataclass(frozen=True)
class MambaShape:
    """Sizes of a hybrid's Mamba-2 layers.

    Attributes:
        heads, head_dim, state: of each layer; the state of a head is (head_dim, state).
        groups: of heads that share B and C.
        attending: indices of the layers with attention instead.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    attending: tuple[int, ...]


SHAPES = {
    "1b": Shape(2048, 5632, 22, 32, 4, 64, 32064),
    "7b": Shape(4096, 11008, 32, 32, 32, 128, 32064),
    "13b": Shape(5120, 13824, 40, 40, 40, 128, 32064),
    "8b-hybrid": Shape(4096, 14336, 32, 32, 8, 128, 128256, MambaShape(128, 64, 128, 1, (9, 18, 27))),
}
"""The language models of TinyLlama, LLaVA-1.5-7B and -13B, and Bamba-9B, with transformers' vocabulary sizes."""


@dataclass(frozen=True)
class Axis:
    """An axis of a big model's weight.

    Attributes:
        source: (size,) int64, the small model's feature that each feature copies; -1 for added features.
        silent: (size,) bool, added features that are always zero. Other added features are noise.
        small: size of the small model's axis.
        stream: whether this is the residual stream.
    """

    source: Tensor
    silent: Tensor
    small: int
    stream: bool = False

    @property
    def size(self) -> int:
        return len(self.source)

    @property
    def copied(self) -> Tensor:
        """(size,) bool, features that copy the small model's."""
        return self.source >= 0

    @property
    def noisy(self) -> Tensor:
        """(size,) bool, added features that are not silent."""
        return ~self.copied & ~self.silent


def make_axis(source: Tensor, small: int, silent: Tensor | bool = False, *, stream: bool = False) -> Axis:
    """An axis given its sources.

    Args:
        silent: whether added features are silent, for all of them or by a mask, (size,).
    """
    return Axis(source, (source < 0) & silent, small, stream)


def grow_axis(small: int, big: int, name: str, silent: bool = False, *, stream: bool = False) -> Axis:
    """An axis with the small model's features first and added features after them.

    Raises:
        UserError: ``big`` is smaller than ``small``.
    """
    if big < small:
        raise UserError(f"a model can only grow: {name} must be at least {small}, got {big}")
    return make_axis(torch.cat([torch.arange(small), torch.full((big - small,), -1)]), small, silent, stream=stream)


def concat_axes(*parts: Axis) -> Axis:
    """The axis of stacked weights."""
    sources, before = [], 0
    for part in parts:
        sources.append(torch.where(part.copied, part.source + before, -1))
        before += part.small
    return Axis(torch.cat(sources), torch.cat([part.silent for part in parts]), before)


@dataclass(frozen=True)
class HeadAxes:
    """Axes of the attention projections.

    Attributes:
        queries, keys, values: outputs of the projections.
        output: input of the output projection.
        query_scale: factor of the query weights, since attention divides by the square root of a larger head size.
    """

    queries: Axis
    keys: Axis
    values: Axis
    output: Axis
    query_scale: float


def grow_heads(small: Shape, big: Shape, rotary: float = 1.0) -> HeadAxes:
    """Place the small model's attention heads among the big one's.

    Where the big model's query groups are smaller, a KV head is copied for several groups.

    Args:
        rotary: share of a head's features with rotary embeddings. Frequency i of a small head becomes frequency
            i * ratio of a big head, with the ratio of the head sizes.

    Raises:
        UserError: too few KV heads, or a head size that is not a multiple of the small one.
    """
    group, wide = small.heads // small.kv_heads, big.heads // big.kv_heads
    each = ceil(group / wide)  # big KV heads per small one
    if big.heads % big.kv_heads or each * small.kv_heads > big.kv_heads or big.head_dim % small.head_dim:
        raise UserError(
            f"heads must be grouped evenly, with at least {each * small.kv_heads} key-value heads of a multiple of "
            f"{small.head_dim} features: got {big.heads} and {big.kv_heads} of {big.head_dim}"
        )
    queries, keys = torch.full((big.heads,), -1), torch.full((big.kv_heads,), -1)
    for head in range(small.heads):
        kv, place = divmod(head, group)
        at = kv * each + place // wide
        keys[at] = kv
        queries[at * wide + place % wide] = head
    rotated = _rotary_source(small.head_dim, big.head_dim, rotary)
    plain = grow_axis(small.head_dim, big.head_dim, "head_dim").source
    return HeadAxes(
        _head_axis(queries, small.heads, rotated, small.head_dim, silent=True),
        _head_axis(keys, small.kv_heads, rotated, small.head_dim),
        _head_axis(keys, small.kv_heads, plain, small.head_dim),
        _head_axis(queries, small.heads, plain, small.head_dim),
        (big.head_dim / small.head_dim) ** 0.5,
    )


def _rotary_source(small: int, big: int, rotary: float) -> Tensor:
    """(big,) int64, the small head's feature with the same rotary frequency as each feature of a big head, or -1."""
    ratio, inner, outer = big // small, int(small * rotary), int(big * rotary)
    source = torch.full((big,), -1)
    half = torch.arange(inner // 2)
    source[half * ratio] = half
    source[outer // 2 + half * ratio] = inner // 2 + half
    source[outer : outer + small - inner] = torch.arange(inner, small)
    return source


def _head_axis(heads: Tensor, small_heads: int, within: Tensor, head_dim: int, silent: bool = False) -> Axis:
    """The axis of concatenated heads; ``silent`` silences features added to copied heads."""
    copied = (heads >= 0)[:, None] & (within >= 0)
    source = torch.where(copied, heads[:, None] * head_dim + within, -1)
    quiet = (heads >= 0)[:, None].expand(-1, len(within)) & silent
    return make_axis(source.flatten(), small_heads * head_dim, quiet.flatten())


class Weights:
    """Makes the big model's tensors, one at a time.

    Args:
        device, dtype: of the tensors.
        seed: of added weights.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def random(self, *size: int) -> Tensor:
        """Small random weights."""
        return torch.empty(size, device=self.device, dtype=self.dtype).normal_(0.0, _STD, generator=self._generator)

    def matrix(self, small: Tensor | None, out: Axis, into: Axis, scale: float = 1.0) -> Tensor:
        """A projection, (out, into), from the small model's; None for an added layer, which writes zeros."""
        big = self.random(out.size, into.size)
        if small is None:
            return big.zero_() if out.stream else big
        assert small.shape == (out.small, into.small), "axes must be those of the small model"
        where = self.device
        big[out.silent.to(where)] = 0
        rows = out.copied.nonzero()[:, 0]
        columns = into.copied.nonzero()[:, 0].to(where)
        noisy = into.noisy.to(where)
        # In pieces, so that large embedding tables need little extra memory.
        for piece in rows.split(4096):
            values = big[piece.to(where)]
            values[:, noisy] = 0
            source = small[out.source[piece].to(small.device)][:, into.source[into.copied].to(small.device)]
            values[:, columns] = (source.to(where).float() * scale).to(self.dtype)
            big[piece.to(where)] = values
        return big

    def vector(self, small: Tensor | None, size: torch.Size, out: Axis, scale: float = 1.0) -> Tensor:
        """A bias or another tensor of size (out, ...)."""
        big = self.random(*size)
        if small is None:
            return big.zero_() if out.stream else big
        big[out.silent.to(self.device)] = 0
        values = small[out.source[out.copied].to(small.device)].to(self.device).float() * scale
        big[out.copied.to(self.device)] = values.to(self.dtype)
        return big

    def norm(self, small: Tensor | None, out: Axis, scale: float) -> Tensor:
        """The weight of an RMSNorm over ``out``, whose added features must be silent."""
        big = torch.ones(out.size, device=self.device, dtype=self.dtype)
        if small is not None:
            big[out.copied.to(self.device)] = (small.to(self.device).float() * scale).to(self.dtype)
        return big


_CONTEXT = 32768  # positions; rotary embeddings have no weights


def shape_of(config: Any) -> Shape:
    """The shape of a language model, from its text configuration.

    Raises:
        UserError: the architecture is not supported.
    """
    if config.model_type not in ("llama", "bamba"):
        raise UserError(f"only Llama and Bamba language models can be scaled up: got {config.model_type}")
    mamba = None
    if config.model_type == "bamba":
        attending = tuple(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")
        heads, groups = config.mamba_n_heads, config.mamba_n_groups
        mamba = MambaShape(heads, config.mamba_d_head, config.mamba_d_state, groups, attending)
    heads = config.num_attention_heads
    return Shape(
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.vocab_size,
        mamba,
    )


@torch.no_grad()
def scale_up(
    model: PreTrainedModel,
    shape: Shape,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """Build the model in a bigger shape, on the device and tensor by tensor, without additional memory.

    Args:
        model: a Llama or Bamba model, or a LLaVA of either; its vision tower keeps its size.
        shape: of the big language model.

    Raises:
        UserError: another architecture, or a shape with a smaller size or too few heads or layers.
    """
    small = model.config.get_text_config()
    config = _config(model.config, shape)
    features = FeatureMap(small, shape)
    with torch.device("meta"):
        big = type(model)(config)
    decoder: Any = big.get_decoder()
    with torch.device(device):
        decoder.rotary_emb = type(decoder.rotary_emb)(config.get_text_config())
    if hasattr(big.base_model, "vision_tower"):
        big.base_model.vision_tower = copy.deepcopy(model.base_model.vision_tower).to(device, dtype)
    weights, parameters = Weights(device, dtype), dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in list(big.named_parameters()):
        if parameter.is_meta:
            _assign(
                big, name, features.tensor(weights, name, parameters.get(features.small_name(name)), parameter.shape)
            )
    for module in decoder.modules():
        if isinstance(norm := getattr(module, "norm", None), BambaRMSNormGated):
            norm.variance_epsilon = small.rms_norm_eps * features.gated_scale**2
    unset = [name for name, tensor in chain(big.named_parameters(), big.named_buffers()) if tensor.is_meta]
    assert not unset, f"without values: {unset}"
    big.generation_config = copy.deepcopy(model.generation_config)
    return big.eval()


def _config(config: Any, shape: Shape) -> Any:
    """The configuration of the big model: the small one's with other sizes."""
    big = copy.deepcopy(config)
    text = big.get_text_config()
    ratio = shape.hidden / text.hidden_size
    changes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": text.rms_norm_eps / ratio,
        "max_position_embeddings": max(_CONTEXT, text.max_position_embeddings),
        "tie_word_embeddings": False,
    }
    if (shape.mamba is None) != (text.model_type != "bamba"):
        raise UserError(f"the shape must be that of a {text.model_type} model: got {shape}")
    if shape.mamba is not None:
        changes |= {
            "attn_layer_indices": list(shape.mamba.attending),
            "mamba_n_heads": shape.mamba.heads,
            "mamba_d_head": shape.mamba.head_dim,
            "mamba_d_state": shape.mamba.state,
            "mamba_n_groups": shape.mamba.groups,
            "mamba_expand": shape.mamba.heads * shape.mamba.head_dim // shape.hidden,
        }
    if text.model_type == "bamba" and shape.head_dim * shape.heads != shape.hidden:
        raise UserError(
            f"heads * head_dim of a Bamba model must equal its width {shape.hidden}: "
            f"got {shape.heads} * {shape.head_dim}"
        )
    for name, value in changes.items():
        setattr(text, name, value)
    big.tie_word_embeddings = False
    return big


def _assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    parameters = module.get_submodule(owner)._parameters
    expected = parameters[leaf]
    assert expected is not None
    assert tensor.shape == expected.shape, f"{name} must be {tuple(expected.shape)}: got {tuple(tensor.shape)}"
    parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


class FeatureMap:
    """Axes of all weights of a scaled-up language model."""

    def __init__(self, config: Any, shape: Shape) -> None:
        small = shape_of(config)
        self.stream = grow_axis(small.hidden, shape.hidden, "hidden", True, stream=True)
        self.mlp = grow_axis(small.mlp, shape.mlp, "mlp")
        tokens = grow_axis(small.vocab, shape.vocab, "vocab").source
        # Added tokens copy padding, which the model never emits.
        self.vocab = make_axis(torch.where(tokens < 0, config.pad_token_id, tokens), small.vocab)
        rotary = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        self.heads: HeadAxes = grow_heads(small, shape, rotary)
        self.norm_scale = (small.hidden / shape.hidden) ** 0.5
        self.gated_scale = 1.0
        self._layers = _match_layers(_attention_layers(small), _attention_layers(shape))
        stream, heads = self.stream, self.heads
        inner = grow_axis(small.hidden, shape.hidden, "hidden")
        self._linear: dict[str, tuple[Axis, Axis | None, float]] = {
            "q_proj": (heads.queries, stream, heads.query_scale),
            "k_proj": (heads.keys, stream, 1.0),
            "v_proj": (heads.values, stream, 1.0),
            "o_proj": (stream, heads.output, 1.0),
            "gate_proj": (self.mlp, stream, 1.0),
            "up_proj": (self.mlp, stream, 1.0),
            "down_proj": (stream, self.mlp, 1.0),
            "lm_head": (self.vocab, stream, 1.0),
            "linear_1": (inner, None, 1.0),
            "linear_2": (stream, inner, 1.0),
        }
        self._vectors: dict[str, Axis] = {}
        self._gate: Axis | None = None
        if small.mamba is not None and shape.mamba is not None:
            self._place_mamba(small.mamba, shape.mamba)

    def _place_mamba(self, small: MambaShape, big: MambaShape) -> None:
        """Heads stay in their group, which shares B and C. The gate silences added heads, since a norm follows it."""
        each, wide = small.heads // small.groups, big.heads // big.groups
        if big.groups < small.groups or wide < each or big.state < small.state or big.head_dim < small.head_dim:
            raise UserError(f"Mamba layers can only grow, in each group: expected at least {small}, got {big}")
        heads, groups = torch.full((big.groups, wide), -1), torch.full((big.groups,), -1)
        heads[: small.groups, :each] = torch.arange(small.heads).view(small.groups, each)
        groups[: small.groups] = torch.arange(small.groups)
        within = grow_axis(small.head_dim, big.head_dim, "head_dim").source
        state = grow_axis(small.state, big.state, "state").source
        source = torch.where(
            (heads.flatten() >= 0)[:, None] & (within >= 0), heads.flatten()[:, None] * small.head_dim + within, -1
        ).flatten()
        shared = torch.where((groups >= 0)[:, None] & (state >= 0), groups[:, None] * small.state + state, -1)
        inner, shares = small.heads * small.head_dim, small.groups * small.state
        self._gate = make_axis(source, inner, True)
        x, b = make_axis(source, inner), make_axis(shared.flatten(), shares)
        c = make_axis(shared.flatten(), shares, (groups >= 0)[:, None].expand(-1, big.state).flatten())
        step = make_axis(heads.flatten(), small.heads)
        ratio = inner / len(source)
        if "group_size" in signature(BambaRMSNormGated).parameters:  # older releases normalise over all groups
            ratio *= big.groups / small.groups
        self.gated_scale = ratio**0.5
        self._linear["in_proj"] = (concat_axes(self._gate, x, b, c, step), self.stream, 1.0)
        self._linear["out_proj"] = (self.stream, self._gate, 1.0)
        self._vectors = {"conv1d": concat_axes(x, b, c), "dt_bias": step, "A_log": step, "D": step}

    def small_name(self, name: str) -> str:
        """The name of a big model's parameter in the small model; empty in an added layer."""
        prefix, separator, rest = name.partition(".layers.")
        if not separator:
            return name
        number, _, rest = rest.partition(".")
        layer = self._layers.get(int(number))
        return "" if layer is None else f"{prefix}.layers.{layer}.{rest}"

    def tensor(self, weights: Weights, name: str, small: Tensor | None, size: torch.Size) -> Tensor:
        """A parameter of the big model, from the small model's; None in an added layer."""
        *_, owner, leaf = name.split(".")
        if owner == "embed_tokens":
            table = weights.matrix(small, self.vocab, self.stream)
            table[:, self.stream.silent.to(table.device)] = 0  # embeddings are written to the stream
            return table
        if owner in self._linear:
            out, into, scale = self._linear[owner]
            if leaf == "bias":
                return weights.vector(small, size, out, scale)
            into = grow_axis(size[1], size[1], owner) if into is None else into
            return weights.matrix(small, out, into, scale)
        if name.endswith("mamba.norm.weight"):
            assert self._gate is not None
            return weights.norm(small, self._gate, self.gated_scale)
        if "norm" in owner:
            return weights.norm(small, self.stream, self.norm_scale)
        known = self._vectors.get(leaf if owner == "mamba" else owner)
        if known is None:
            raise UserError(f"a model can be scaled up if all its parameters are known: got {name}")
        return weights.vector(small, size, known)


def layer_in(big: Shape, layer: int, small: Shape) -> int:
    """The layer of a scaled-up model that is the small one's ``layer``."""
    matches = _match_layers(_attention_layers(small), _attention_layers(big))
    return next(place for place, was in matches.items() if was == layer)


def _attention_layers(shape: Shape) -> list[bool]:
    attending = range(shape.layers) if shape.mamba is None else shape.mamba.attending
    return [layer in attending for layer in range(shape.layers)]


def _match_layers(small: list[bool], big: list[bool]) -> dict[int, int]:
    """The small model's layer for layers of the big one, in order and of the same kind."""
    matches: dict[int, int] = {}
    at = 0
    for layer, kind in enumerate(small):
        while at < len(big) and big[at] != kind:
            at += 1
        if at == len(big):
            raise UserError(
                f"{len(small)} layers must fit, in order and kind, into the big model's: layer {layer} does not"
            )
        matches[at] = layer
        at += 1
    return matches
