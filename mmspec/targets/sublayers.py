"""Decoders of residual sublayers in one native call: hybrids of attention and recurrent mixers, and mixtures.

Weights stay in the decoder's own modules, packed for the C++ kernels. Prompts, and passes that the kernels do not
support, run in the decoder's forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, BlockLinear, JoinedLinear
from mmspec.quantisation.experts import PackedExperts
from mmspec.targets.attention import NAME
from mmspec.targets.packing import allowed_slots
from mmspec.targets.recognise import PROJECTIONS, epsilon_of, gain_of, gate_of, is_hooked, router_of

Part = dict[str, Any]
"""Arguments of ``cpu.sublayer_weights``, with linear layers as modules."""

Describe = Callable[[Any], Part | None]
"""Description of a module, without norm and places; None for modules of other kinds."""

_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "output_linear"),
    ("up_proj", "down_proj"),
)
_MULTIPLIERS = {
    "attention": ("attention_in_multiplier", "attn_out_multiplier"),
    "mamba": ("", "ssm_out_multiplier"),
}
"""A layer's multipliers of a sublayer's input and output (Falcon-H1)."""

_SHARED = "shared_expert", "shared_experts", "shared_mlp"
_FINAL_NORMS = "norm", "embedding_norm", "final_layernorm", "norm_f"
_TOLERANCE = 0.03  # of a layer's update, relative: inputs rounded to 8 bits, and keys and values to bfloat16
MAX_ROWS = 1024
"""Maximum tokens of a pass, which keeps the outputs of all layers."""


class SublayerStack:
    """A decoder's layers as residual sublayers.

    Args:
        decoder: its layers have norms and other modules, in the order in which they run: attention, MLPs, and modules
            that ``describe`` knows.
        describe: descriptions of recurrent mixers.

    Raises:
        ValueError: the kernels do not support a layer, or do not reproduce its output.
    """

    def __init__(self, decoder: Any, describe: Sequence[Describe] = ()) -> None:
        self._decoder, self._rotary = decoder, getattr(decoder, "rotary_emb", getattr(decoder, "pos_emb", None))
        self._embed: Any = getattr(decoder, "embed_tokens", None) or decoder.embeddings
        self._norm: Any = next(getattr(decoder, name) for name in _FINAL_NORMS if hasattr(decoder, name))
        self._scale = float(getattr(decoder, "embedding_multiplier", 1.0))
        kind = getattr(self._rotary, "rope_type", "default")
        self._fixed = not any(name in kind for name in ("dynamic", "longrope"))
        self._rotations = self._turns(torch.zeros(1, 1, dtype=torch.long))[0]  # by position
        rotated = 2 * self._rotations.shape[-1]
        known = (_attention, _experts, _mlp, *describe)
        layers = [list(_sublayers(layer, known, rotated)) for layer in decoder.layers]
        kinds = {_kind(layer, parts): (layer, parts) for layer, parts in zip(decoder.layers, layers, strict=True)}
        for layer, parts in kinds.values():
            self._check_layer(layer, parts)
        self._check_ends()
        self.weights = _weights(layers)
        attending = (part for part in chain(*layers) if part["kind"] == "attention")
        self._recurrent = any(part.channels for part in self.weights)
        self._keys = next(
            (torch.empty(part["groups"], 0, part["head_dim"], dtype=torch.bfloat16) for part in attending), None
        )

    @property
    def attends(self) -> bool:
        """Whether any layer has keys and values."""
        return self._keys is not None

    def states(self, inputs: dict[str, Any], cache: Any) -> tuple[list[Tensor], Tensor] | None:
        """Inputs of all layers and the last layer's output, and the normed output, of a verify pass.

        Args:
            inputs: the decoder's inputs: (batch, nodes) token ids, positions, and mask.
            cache: the ``TreeCache``.

        Returns:
            (batch, nodes, hidden) each; None if the decoder's forward is needed.
        """
        mask = inputs.get("attention_mask")
        verifies = not self._recurrent or cache.verifying
        if isinstance(mask, dict) or not verifies or not self.runs(cache):
            return None
        x = self._embedded(inputs)
        if x.shape[0] * x.shape[1] > MAX_ROWS:
            return None
        allowed = None if mask is None else allowed_slots(mask, len(x))
        return self._states(x, inputs, allowed, cache, *cache.recurrent(self.weights))

    def prompt(self, inputs: dict[str, Any], mask: Tensor | None, cache: Any) -> tuple[list[Tensor], Tensor]:
        """As ``states``, of tokens of a prompt after those in the cache; advances the states of recurrent layers.

        Args:
            mask: (batch, slots), 0 at padding on the left, up to the last of these tokens; None without padding.
        """
        x = self._embedded(inputs)
        batch, tokens, _ = x.shape
        first, allowed = None, None
        if mask is not None:
            start = mask.shape[1] - tokens
            first = ((mask == 0).sum(1) - start).clamp(0, tokens)
            causal = torch.ones(tokens, mask.shape[1], dtype=torch.bool).tril(start)
            allowed = mask[:, None, None, :].bool() & causal
        recurrent = cache.recurrent(self.weights, batch) or (None, None)
        return self._states(x, inputs, allowed, cache, *recurrent, first)

    def runs(self, cache: Any) -> bool:
        """Whether passes over a cache run in the kernels."""
        attention = getattr(self._decoder.config, "_attn_implementation", None)
        supported = self._keys is None or attention in (NAME, "sdpa")
        return supported and not cache.static_shapes and not any(map(is_hooked, self._decoder.layers))

    def _embedded(self, inputs: dict[str, Any]) -> Tensor:
        embeds = inputs.get("inputs_embeds")
        return (self._embed(inputs["input_ids"]) if embeds is None else embeds) * self._scale

    def _states(
        self, x: Tensor, inputs: dict[str, Any], allowed: Tensor | None, cache: Any, *recurrent: Any
    ) -> tuple[list[Tensor], Tensor]:
        (batch, nodes, _), start, keys = x.shape, cache.get_seq_length(), None
        if self._keys is not None:
            keys = cache.kv.shared(cache.attending, batch, nodes, self._keys, start)
        rotation = self._rotation(inputs.get("position_ids"), (batch, nodes)).contiguous()
        task = self.weights, x.float().contiguous(), rotation, allowed, keys, start
        outputs = cpu.decode_sublayers(*task, *recurrent, centre=cache.kv.centre)
        return [x, *outputs], self._norm(outputs[-1].to(x.dtype))

    def _rotation(self, positions: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """``_turns`` of a pass, from a table where rotations depend on the position alone."""
        if positions is None or positions.ndim > 2 or not self._fixed:
            return self._turns(positions, shape)
        highest = int(positions.max())
        if highest >= len(self._rotations):
            self._rotations = self._turns(torch.arange(2 * (highest + 1))[None])[0]
        return self._rotations[positions]

    def _turns(self, positions: Tensor | None, shape: tuple[int, int] = (1, 1)) -> Tensor:
        """Cosines and sines, (batch, nodes, 2, rotated / 2) float32; empty without rotary positions."""
        if self._rotary is None:
            return torch.empty(*(shape if positions is None else positions.shape[-2:]), 2, 0, dtype=torch.float32)
        cos, sin = self._rotary(torch.empty(0, dtype=torch.float32), position_ids=positions)
        half = cos.shape[-1] // 2
        return torch.stack([cos[..., :half], sin[..., :half]], dim=2).float()

    @torch.inference_mode()
    def _check_layer(self, layer: Any, parts: list[Part]) -> None:
        """Compare the kernels' updates of random hidden states with those of a copy of a layer in float32."""
        weights = _weights([[{**part, "ends_layer": 1} for part in parts]])
        memo: dict[int, Any] = {}
        norms = [copy.deepcopy(part["module"], memo) for part in parts if not part.get("beside")]
        layer = copy.deepcopy(layer, memo)
        for module in layer.modules():
            if not isinstance(module, BlockLinear):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(parameter.detach().float(), requires_grad=False))
        batch, nodes = 2, 5
        shape = batch, nodes, parts[0]["out"].out_features
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        positions = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]], dtype=torch.long)
        options: dict[str, Any] = {}
        if self._rotary is not None:
            options["position_embeddings"] = self._rotary(x, position_ids=positions)
        expected: list[Tensor] = []
        for norm in norms:  # whose inputs are the residuals
            norm.register_forward_pre_hook(lambda _, inputs: expected.append(inputs[0].float()))
        out = layer(x, attention_mask=None, **options)
        expected.append(out[0] if isinstance(out, tuple) else out)
        attending = [part for part in parts if part["kind"] == "attention"]
        shapes = [(2, batch, part["groups"], nodes, part["head_dim"]) for part in attending]
        keys = torch.zeros(shapes[0], dtype=torch.bfloat16) if shapes else None
        states = cpu.recurrent_buffers(weights, *zero_states(weights, batch), None)
        rotation = self._rotation(positions, (batch, nodes)).contiguous()
        outputs = cpu.decode_sublayers(weights, x, rotation, None, keys, 0, None, states)
        ends = [not part.get("beside") for part in parts[1:]] + [True]
        computed = [x, *(output for output, end in zip(outputs, ends, strict=True) if end)]
        for (before, after), (start, end) in zip(pairwise(computed), pairwise(expected), strict=True):
            error = (after - before - end + start).norm(dim=-1) / (end - start).norm(dim=-1)
            # The rounding of a token's inputs may change its experts.
            if not error.flatten().quantile(0.6) <= _TOLERANCE:
                raise ValueError(f"the kernels do not reproduce {type(layer).__name__}")

    @torch.inference_mode()
    def _check_ends(self) -> None:
        """Check what the decoder does before its first layer and after its last."""
        ends: list[Tensor] = []

        def record(layer: Any, args: Any, inputs: dict[str, Any], out: Any = None) -> None:
            ends.append((args[0] if args else inputs["hidden_states"]) if out is None else first_of(out))

        def first_of(out: Any) -> Tensor:
            return out[0] if isinstance(out, tuple) else out

        inputs, layers = {"input_ids": torch.arange(1, 5)[None]}, self._decoder.layers
        with (
            layers[0].register_forward_pre_hook(record, with_kwargs=True),
            layers[-1].register_forward_hook(record, with_kwargs=True),
        ):
            out = self._decoder(**inputs, use_cache=False)[0]
        if not torch.equal(ends[0], self._embedded(inputs)) or not torch.equal(self._norm(ends[1]), out):
            raise ValueError(f"{type(self._decoder).__name__} computes more than its layers and norm")


def zero_states(weights: Any, rows: int) -> tuple[Tensor, Tensor]:
    """Initial states of convolutions and scans, as arguments of ``cpu.recurrent_buffers``."""
    width = max(part.width for part in weights)
    scans = [part for part in weights if part.kind in cpu.SCANS]
    shape = (len(scans), scans[0].heads, scans[0].head_dim * scans[0].key_dim) if scans else (0,)
    conv = torch.zeros(rows, sum(part.channels for part in weights), max(width - 1, 0), dtype=torch.float32)
    return conv, torch.zeros(rows, *shape, dtype=torch.float32)


def _kind(layer: Any, parts: list[Part]) -> Hashable:
    """Key of layers with equal computations."""
    return type(layer), *(part["kind"] for part in parts)


def _sublayers(layer: Any, known: Sequence[Describe], rotated: int) -> Iterator[Part]:
    """Descriptions of a layer's sublayers, with norms."""
    children = [part for part in layer.children() if not isinstance(part, nn.Identity)]
    found = [(part, next(filter(None, (describe(part) for describe in known)), None)) for part in children]
    norms = [part for part, described in found if described is None and [*dict(part.named_parameters())] == ["weight"]]
    parts = [described for _, described in found if described is not None]
    if len(norms) + len(parts) != len(children):
        raise ValueError(f"expected norms and known parts of a layer: got {[type(part).__name__ for part in children]}")
    mixers = [part for part in parts if part["kind"] not in ("mlp", "experts")]
    routed, mlps = ([part for part in parts if part["kind"] == kind] for kind in ("experts", "mlp"))
    if routed and mlps:  # a shared MLP beside the experts
        [first], [second] = routed, mlps
        routed, mlps = [{**second, **first, "inputs": first["inputs"] + second["inputs"], "out": second["out"]}], []
    if len(mixers) == 2 and len(norms) == 1 + len(routed + mlps):  # of the same input (Falcon-H1)
        norms, mixers[1]["beside"] = [norms[0], *norms], 1
    parts = [*mixers, *routed, *mlps]  # which may be declared before the mixer
    if len(norms) != len(parts):
        raise ValueError(f"expected a norm for each of {len(parts)} parts of a layer: got {len(norms)}")
    scale = float(getattr(layer, "residual_multiplier", 1.0))
    for index, (norm, part) in enumerate(zip(norms, parts, strict=True)):
        before, after = (float(getattr(layer, name, 1.0)) for name in _MULTIPLIERS.get(part["kind"], ("", "")))
        yield {
            **{name: value for name, value in part.items() if name != "input_scale"},
            **({"rotated": rotated} if part["kind"] == "attention" else {}),
            "module": norm,
            "norm": (gain_of(norm) * before * part.get("input_scale", 1.0), epsilon_of(norm)),
            "scale": scale * after * part.get("scale", 1.0),
            "ends_layer": index == len(parts) - 1,
        }


def _weights(layers: Sequence[Sequence[Part]]) -> Any:
    """Descriptors for the kernels, with places among keys and values, states and channels."""
    made, channels, places = [], 0, {"attention": 0, "recurrent": 0}
    for part in chain(*layers):
        sizes = {"first_channel": channels}
        if part["kind"] not in ("mlp", "experts"):
            name = "attention" if part["kind"] == "attention" else "recurrent"
            sizes["place"], places[name] = places[name], places[name] + 1
        channels += part.get("channels", 0)
        out = cpu_library.Linear() if part["out"] is None else _native(part["out"])
        part = {name: value for name, value in part.items() if name != "module"}
        linears = {"inputs": [_native(linear) for linear in part["inputs"]], "out": out}
        made.append(cpu.sublayer_weights(**{**part, **linears, **sizes}))
        made[-1].kept = made[-1].kept, part
    return cpu.sublayers(made)


def _native(linear: Any) -> Any:
    if not isinstance(linear, BlockLinear | JoinedLinear):
        raise ValueError(f"expected a packed linear layer: got {type(linear).__name__}")
    return linear.native


def _attention(module: Any) -> Part | None:
    if not all(hasattr(module, name) for name in (*PROJECTIONS, "head_dim", "scaling")):
        return None
    if getattr(module, "attn_logit_softcapping", None) or list(module.parameters(recurse=False)):
        raise ValueError(f"attention has no cap of scores and no weights of its own: got {type(module).__name__}")
    query, key, value = (getattr(module, name) for name in PROJECTIONS)
    out, head_dim = getattr(module, "o_proj", None) or module.out_proj, module.head_dim
    heads, groups = out.in_features // head_dim, key.out_features // head_dim
    if head_dim not in cpu.HEAD_DIMS:
        raise ValueError(f"the size of heads must be one of {cpu.HEAD_DIMS}: got {head_dim}")
    norms = [getattr(module, f"{name}_norm", getattr(module, f"{name}_layernorm", None)) for name in "qk"]
    inner = None
    if norms[0] is not None:
        gains = [gain_of(norm).expand(count, -1) for norm, count in zip(norms, (heads, groups), strict=True)]
        inner = torch.cat(gains), epsilon_of(norms[0])
    factor = torch.ones(heads + 2 * groups, head_dim, dtype=torch.float32)
    factor[heads : heads + groups] = getattr(module, "key_multiplier", 1.0)
    scaled = {} if bool((factor == 1).all()) else {"tensors": {"output_scale": factor.flatten()}}
    return dict(
        **scaled,
        kind="attention",
        inputs=[query, key, value],
        out=out,
        inner_norm=inner,
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        gated=query.out_features == 2 * out.in_features,
        attention_scale=module.scaling,
    )


def _mlp(module: Any) -> Part | None:
    names = next((names for names in _MLPS if all(hasattr(module, name) for name in names)), None)
    if names is None:
        return None
    *inputs, out = (getattr(module, name) for name in names)
    functions = (getattr(module, name, None) for name in ("act_fn", "activation"))
    function = next(filter(None, functions), nn.functional.silu)  # LFM2 has no attribute
    kind = gate_of(function) if names[0] != "up_proj" else "squared_relu" if _squares(function) else None
    if kind is None:
        raise ValueError(f"expected SiLU, GELU or, without a gate, squared ReLU: got {type(module).__name__}")
    part: Part = dict(kind="mlp", inputs=inputs, out=out, activation=kind)
    if hasattr(module, "gate_multiplier"):
        factor = torch.tensor([module.gate_multiplier, 1.0], dtype=torch.float32)
        part["tensors"] = {"output_scale": factor.repeat_interleave(out.in_features)}
        part["scale"] = module.down_multiplier
    return part


def _experts(module: Any) -> Part | None:
    """A mixture of experts: a router, experts and maybe a shared MLP with a gate."""
    experts = next((part for part in module.children() if isinstance(part, PackedExperts)), None)
    if experts is None:
        return None
    router, weights = router_of(module, experts.num_experts)
    routing = BLOCKS["float32"](router.weight.float(), getattr(router, "bias", None))
    part = dict(kind="experts", inputs=[routing], out=None, experts=experts.native, router=weights)
    shared = next((getattr(module, name) for name in _SHARED if getattr(module, name, None) is not None), None)
    if shared is None:
        return part
    mlp, gate = _mlp(shared), getattr(module, "shared_expert_gate", None)
    assert mlp is not None
    inputs = [routing, *mlp["inputs"], *([] if gate is None else [gate])]
    return {**mlp, **part, "inputs": inputs, "out": mlp["out"], "gated": gate is not None}


def _squares(function: Any) -> bool:
    x = torch.linspace(-3, 3, 7, dtype=torch.float32)
    return torch.equal(function(x), x.relu().square())
