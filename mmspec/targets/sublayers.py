"""Decoders of residual sublayers in one native call: dense decoders, mixtures, and hybrids with recurrent mixers.

Weights stay in the decoder's own modules, packed for the C++ kernels. Unsupported passes run in the decoder's forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial
from inspect import signature
from itertools import chain, groupby, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cache.tree_cache import TreeCache, cache_argument
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, BlockLinear
from mmspec.quantisation.experts import PackedExperts
from mmspec.quantisation.linear import GROUP
from mmspec.targets.attention import NAME, SLIDING, windows
from mmspec.targets.recognise import PROJECTIONS, epsilon_of, gain_of, gate_of, is_hooked, router_of, switches

Part = dict[str, Any]
"""Arguments of ``cpu.sublayer_weights``, with groups of linear layers as modules."""

States = tuple[Tensor, Sequence[Tensor] | Tensor, Tensor]
"""The first layer's input, all layers' outputs, and the normed output of the last, (batch, nodes, hidden) each."""

Describe = Callable[[Any], Part | None]
"""Description of a module, without norms and places; None for modules of other kinds."""

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
_SCORES = 1 / 8  # factor of attention scores in comparisons: rounding queries and keys changes small scores little

_FORMS = {"float32": "float32", "bfloat16": "bfloat16"}
"""Forms of the kernels' inputs, by kind of weights; other kinds take int8."""

_ROUNDING = 0.01  # of the last norm in bfloat16, relative
MAX_ROWS = 1024
"""Maximum tokens of a part of a prompt: a pass keeps the outputs of all layers."""


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
        self._decoder: Any = decoder
        self._rotary: Any = getattr(decoder, "rotary_emb", getattr(decoder, "pos_emb", None))
        self._embed: Any = getattr(decoder, "embed_tokens", None) or decoder.embeddings
        norms = [getattr(decoder, name) for name in _FINAL_NORMS if hasattr(decoder, name)]
        if not norms:
            raise ValueError(f"the decoder must end with a norm named as one of {_FINAL_NORMS}")
        self._norm: Any = norms[0]
        self._last = gain_of(self._norm).float().contiguous(), epsilon_of(self._norm)
        self._scale = float(getattr(decoder, "embedding_multiplier", 1.0))
        self._scales_given = True  # whether embeddings given in place of token ids are scaled
        kinds, self._window = windows(decoder.config)
        if "chunked_attention" in kinds:
            raise ValueError("attention has a window or none: got chunks")
        typed = self._rotary is not None and "layer_type" in signature(self._rotary.forward).parameters
        self._types = sorted(set(kinds)) if typed else [""]
        scalings = getattr(self._rotary, "rope_type", "default")
        scalings = list(scalings.values()) if isinstance(scalings, dict) else [scalings]
        self._fixed = not any(name in one for one in scalings for name in ("dynamic", "longrope"))
        first = torch.zeros(1, 1, dtype=torch.long)
        # gpt-oss does not repeat cosines for the second feature of each pair.
        self._repeated = self._rotary is None or torch.equal(*self._turned(first + 1, self._types[0])[0].chunk(2, -1))
        self._rotations = self._turns(first)[:, 0]  # by position
        chosen: dict[Hashable, tuple[int, bool]] = {}
        layers: list[list[Part]] = []
        for place, layer in enumerate(decoder.layers):
            kind = kinds[place] if kinds else ""
            parts, norms = _parts(layer, (_attention, _experts, _mlp, *describe))
            for part in parts:
                if part["kind"] == "attention":
                    part["rotation"] = self._types.index(kind) if typed else 0
                    part["windowed"] = self._window is not None and (not kinds or kind in SLIDING)
            key = type(layer), kind, *((part["kind"], *switches(part["module"])) for part in parts)
            if key not in chosen:
                chosen[key] = self._choice(layer, parts, norms)
            layers.append(self._sublayers(layer, parts, norms, *chosen[key]))
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

    def states(self, inputs: dict[str, Any], cache: Any) -> States | None:
        """States of a verify pass.

        Args:
            inputs: the decoder's inputs: (batch, nodes) token ids, positions, and mask, or masks by kind of layer.
            cache: the ``TreeCache``.

        Returns:
            None if the decoder's forward is needed.
        """
        mask = inputs.get("attention_mask")
        masks = (mask.get("full_attention"), mask.get("sliding_attention")) if isinstance(mask, dict) else (mask, None)
        verifies = not self._recurrent or cache.verifying
        if not verifies or any(one is not None and one.ndim != 4 for one in masks) or not self.runs(cache):
            return None
        x = self._embedded(inputs)
        allowed = [None if one is None else allowed_slots(one, len(x)) for one in masks]
        return self._states(x, inputs, allowed, cache, *cache.recurrent(self.weights))

    def prompt(self, inputs: dict[str, Any], mask: Tensor | None, cache: Any) -> States:
        """States of tokens of a prompt after those in the cache; advances the states of recurrent layers. ``mask``:
        (batch, slots), 0 at padding on the left, up to the last of these tokens; None without padding."""
        x = self._embedded(inputs)
        (batch, tokens, _), start = x.shape, cache.get_seq_length()
        first: Tensor | None = None
        masks: tuple[Tensor | None, Tensor | None] = None, None
        slides = self._window is not None and start + tokens > self._window
        if mask is not None or slides:
            allowed = torch.ones(tokens, start + tokens, dtype=torch.bool).tril(start).expand(batch, 1, -1, -1)
            allowed = allowed if mask is None else allowed & mask[:, None, None].bool()
            near = allowed.triu(start + 1 - self._window) if self._window is not None and slides else None
            masks = None if mask is None else allowed, near
        if mask is not None:
            first = ((mask == 0).sum(1) - start).clamp(0, tokens)
        recurrent = cache.recurrent(self.weights, batch) or (None, None)
        return self._states(x, inputs, masks, cache, *recurrent, first)

    def runs(self, cache: Any) -> bool:
        """Whether passes over a cache run in the kernels."""
        attention = self._decoder.config._attn_implementation
        usual = attention in (NAME, "sdpa") or (attention == "eager" and not self._decoder._supports_sdpa)
        supported = usual or self._keys is None
        return supported and not cache.static_shapes and not any(map(is_hooked, self._decoder.layers))

    def _embedded(self, inputs: dict[str, Any]) -> Tensor:
        embeds = inputs.get("inputs_embeds")
        scale = self._scale if embeds is None or self._scales_given else 1.0
        embeds = self._embed(inputs["input_ids"]) if embeds is None else embeds
        return embeds if scale == 1 else embeds * scale

    def _states(
        self, x: Tensor, inputs: dict[str, Any], masks: Sequence[Tensor | None], cache: Any, *recurrent: Any
    ) -> States:
        (batch, nodes, _), start, keys = x.shape, cache.get_seq_length(), None
        if self._keys is not None:
            keys = cache.kv.shared(cache.attending, batch, nodes, self._keys, start)
        rotation = self._rotation(inputs.get("position_ids"), (batch, nodes)).contiguous()
        task = self.weights, x.float().contiguous(), rotation, masks[0], keys, start
        passed = dict(zip(("ancestors", "recurrent", "first"), recurrent, strict=False))
        outputs = cpu.decode_sublayers(*task, masks[1], **passed, centre=cache.kv.centre)
        return x, outputs, cpu.norm(outputs[-1], *self._last)

    def _rotation(self, positions: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """``_turns`` of a pass, from a table where rotations depend on the position alone."""
        if positions is None or positions.ndim > 2 or not self._fixed:
            return self._turns(positions, shape)
        highest = int(positions.max())
        if highest >= self._rotations.shape[1]:
            self._rotations = self._turns(torch.arange(2 * (highest + 1))[None])[:, 0]
        return self._rotations[:, positions]

    def _turns(self, positions: Tensor | None, shape: tuple[int, int] = (1, 1)) -> Tensor:
        """Cosines and sines, (kinds of rotation, batch, nodes, 2, rotated / 2) float32; empty without rotations."""
        if self._rotary is None:
            return torch.empty(1, *(shape if positions is None else positions.shape[-2:]), 2, 0, dtype=torch.float32)
        turns = torch.stack([torch.stack(self._turned(positions, kind), dim=-2) for kind in self._types])
        return turns[..., : turns.shape[-1] // 2] if self._repeated else turns

    def _turned(self, positions: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
        rotary, options = self._rotary, {"layer_type": kind} if kind else {}
        cos, sin = rotary(torch.empty(0, dtype=torch.float32), position_ids=positions, **options)
        return cos, sin

    def _sublayers(self, layer: Any, parts: list[Part], norms: list[Any], order: int, rotates: bool) -> list[Part]:
        """Arguments of ``cpu.sublayer_weights``.

        Args:
            parts, norms: result of ``_parts``.
            order: index in ``_orders``.
            rotates: whether attention has rotary positions.
        """
        rotated, made = 2 * self._rotations.shape[-1] * rotates, []
        scale = float(getattr(layer, "residual_multiplier", 1.0))
        for part, (before, after) in zip(parts, _orders(parts, norms)[order], strict=True):
            first, last = (float(getattr(layer, name, 1.0)) for name in _MULTIPLIERS.get(part["kind"], ("", "")))
            gain = None if before is None else gain_of(before) * first * part.get("input_scale", 1.0)
            made.append(
                {
                    **{name: value for name, value in part.items() if name != "input_scale"},
                    **({"rotated": rotated} if part["kind"] == "attention" else {}),
                    "first": part["module"] if before is None else before,
                    "norm": None if gain is None else (gain, epsilon_of(before)),
                    "after": None if after is None else (gain_of(after), epsilon_of(after)),
                    "scale": scale * last * part.get("scale", 1.0),
                    "ends_layer": part is parts[-1],
                }
            )
        return made

    @torch.inference_mode()
    def _choice(self, layer: Any, parts: list[Part], norms: list[Any]) -> tuple[int, bool]:
        """Order of norms, and whether attention has rotary positions, with which the kernels reproduce a copy of the
        layer in float32: the updates of random hidden states, keys and values."""
        plain, inputs = copy.deepcopy(layer), dict[nn.Module, Tensor]()
        for module in plain.modules():
            if not isinstance(module, BlockLinear):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(parameter.detach().float(), requires_grad=False))

        def record(original: nn.Module, _: Any, args: Any, given: dict[str, Any]) -> None:
            inputs[original] = (args[0] if args else given["hidden_states"]).float()

        for original, child in zip(layer.children(), plain.children(), strict=True):
            child.register_forward_pre_hook(partial(record, original), with_kwargs=True)
            if hasattr(child, "scaling"):
                child.scaling *= _SCORES
        width, generator = int(parts[0]["inputs"][0][0].in_features), torch.Generator().manual_seed(0)
        x = torch.randn(2, 5, width, generator=generator, dtype=torch.float32)
        positions = torch.tensor([[0, 1, 2, 3, 4], [3, 5, 9, 20, 50]], dtype=torch.long)
        options: dict[str, Any] = {"attention_mask": None}
        attention = next((part for part in parts if part["kind"] == "attention"), None)
        if self._rotary is not None:
            kind = self._types[0 if attention is None else attention["rotation"]]
            options["position_embeddings"] = self._turned(positions, kind)
        if attention is not None and self._decoder.config._attn_implementation == "eager":
            options["attention_mask"] = torch.full((2, 1, 5, 5), -torch.inf, dtype=torch.float32).triu(1)
        cache = TreeCache(len(self._decoder.layers))
        cached = attention is not None and all(part["kind"] in ("attention", "mlp", "experts") for part in parts)
        out = plain(x, **options, **({cache_argument(layer): cache} if cached else {}))
        out = out[0] if isinstance(out, tuple) else out
        states: list[Tensor] = []
        if cached and attention is not None:
            states = [state[:, :, :5] for state in cache.kv.states(attention["module"].layer_idx)]
        turns = self._turns(positions).contiguous()
        for choice in product(range(len(_orders(parts, norms))), (True, False)):
            made = self._sublayers(layer, parts, norms, *choice)
            expected = [inputs[part["first"]] for part in made if not part.get("beside")]
            if self._reproduces(made, x, turns, [*expected, out], states):
                return choice
        raise ValueError(f"the kernels do not reproduce {type(layer).__name__}")

    @staticmethod
    def _reproduces(
        made: list[Part], x: Tensor, rotation: Tensor, expected: list[Tensor], states: Sequence[Tensor]
    ) -> bool:
        """Whether the kernels' residuals after sublayers of a layer, keys and values are those expected."""
        scaled = [{**part, "attention_scale": _SCORES * part.get("attention_scale", 0.0)} for part in made]
        weights = _weights([[{**part, "ends_layer": 1} for part in scaled]])
        shapes = [(2, 2, part["groups"], 5, part["head_dim"]) for part in made if part["kind"] == "attention"]
        keys = torch.zeros(shapes[0], dtype=torch.bfloat16) if shapes else None
        buffers = cpu.recurrent_buffers(weights, *zero_states(weights, 2), None)
        outputs = cpu.decode_sublayers(weights, x, rotation, None, keys, 0, recurrent=buffers)
        ends = [not part.get("beside") for part in made[1:]] + [True]
        computed = [x, *(output for output, end in zip(outputs, ends, strict=True) if end)]
        updates = (
            (after - before, end - start)
            for (before, after), (start, end) in zip(pairwise(computed), pairwise(expected), strict=True)
        )
        pairs = [*updates, *zip(() if keys is None else keys.float(), states, strict=False)]
        # The rounding of a token's inputs may change its experts.
        errors = [
            ((mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)).flatten().quantile(0.6) for mine, theirs in pairs
        ]
        return all(float(error) <= _TOLERANCE for error in errors)

    @torch.inference_mode()
    def _check_ends(self) -> None:
        """Check what the decoder does before its first layer and after its last."""
        ends: list[Tensor] = []

        def record(layer: Any, args: Any, inputs: dict[str, Any], out: Any = None) -> None:
            out = out[0] if isinstance(out, tuple) else out
            ends.append((args[0] if args else inputs["hidden_states"]) if out is None else out)

        inputs, layers = {"input_ids": torch.arange(1, 5)[None]}, self._decoder.layers
        with (
            layers[0].register_forward_pre_hook(record, with_kwargs=True),
            layers[-1].register_forward_hook(record, with_kwargs=True),
        ):
            out = self._decoder(**inputs, use_cache=False)[0]
            if self._scale != 1:  # Falcon-H1 scales the embeddings of token ids only
                given = {"inputs_embeds": self._embed(inputs["input_ids"])}
                self._decoder(**given, use_cache=False)
                self._scales_given = torch.equal(ends[2], self._embedded(given))
        error = (cpu.norm(ends[1].float(), *self._last) - out).norm() / out.norm()
        if not torch.equal(ends[0], self._embedded(inputs)) or not error < _ROUNDING:
            raise ValueError(f"{type(self._decoder).__name__} computes more than its layers and norm")


def zero_states(weights: Any, rows: int) -> tuple[Tensor, Tensor]:
    """Initial states of convolutions and scans, as arguments of ``cpu.recurrent_buffers``."""
    width = max(part.width for part in weights)
    scans = [part for part in weights if part.kind in cpu.SCANS]
    shape = (len(scans), scans[0].heads, scans[0].head_dim * scans[0].key_dim) if scans else (0,)
    conv = torch.zeros(rows, sum(part.channels for part in weights), max(width - 1, 0), dtype=torch.float32)
    return conv, torch.zeros(rows, *shape, dtype=torch.float32)


@lru_cache(maxsize=4)
def allowed_slots(mask: Tensor, batch: int) -> Tensor:
    """Convert a mask to (batch, 1, nodes, slots) bool with contiguous slots; cached per pass."""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    return (allowed if allowed.stride(-1) == 1 else allowed.contiguous()).expand(batch, 1, -1, -1)


def _parts(layer: Any, known: Sequence[Describe]) -> tuple[list[Part], list[Any]]:
    """Descriptions of a layer's modules, in the order in which they run, and its norms as declared."""
    children = [part for part in layer.children() if not isinstance(part, nn.Identity)]
    found = [(part, next(filter(None, (describe(part) for describe in known)), None)) for part in children]
    norms = [part for part, described in found if described is None and [*dict(part.named_parameters())] == ["weight"]]
    parts = [{**described, "module": part} for part, described in found if described is not None]
    if len(norms) + len(parts) != len(children):
        raise ValueError(f"expected norms and known parts of a layer: got {[type(part).__name__ for part in children]}")
    mixers = [part for part in parts if part["kind"] not in ("mlp", "experts")]
    routed, mlps = ([part for part in parts if part["kind"] == kind] for kind in ("experts", "mlp"))
    if routed and mlps:  # a shared MLP next to the experts
        [first], [second] = routed, mlps
        routed, mlps = [{**second, **first, "inputs": first["inputs"] + second["inputs"], "out": second["out"]}], []
    if len(mixers) == 2 and len(norms) == 1 + len(routed + mlps):  # of the same input (Falcon-H1)
        norms, mixers[1]["beside"] = [norms[0], *norms], 1
    return [*mixers, *routed, *mlps], norms  # MLPs may be declared before the mixer


def _orders(parts: Sequence[Part], norms: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
    """Possible norms before and after each part."""
    count = len(parts)
    none = [None] * count
    if len(norms) == count:
        return [list(zip(norms, none, strict=True)), list(zip(none, norms, strict=True))]
    if len(norms) == 2 * count:
        halves = (norms[::2], norms[1::2]), (norms[:count], norms[count:])
        return [list(zip(*half, strict=True)) for half in halves]
    raise ValueError(f"expected one or two norms for each of {count} parts of a layer: got {len(norms)}")


def _weights(layers: Sequence[Sequence[Part]]) -> Any:
    """Descriptors for the kernels, with places among keys and values, states and channels."""
    made, channels, places = [], 0, {"attention": 0, "recurrent": 0}
    for part in chain(*layers):
        sizes = {"first_channel": channels}
        if part["kind"] not in ("mlp", "experts"):
            name = "attention" if part["kind"] == "attention" else "recurrent"
            sizes["place"], places[name] = places[name], places[name] + 1
        channels += part.get("channels", 0)
        inputs = [linear for group in part["inputs"] for linear in _joined(group)]
        if part["kind"] in ("mlp", "experts") and len(inputs) > len(part["inputs"]):
            raise ValueError("gate and up must take the same inputs: got weights of which only some are quantised")
        out = cpu_library.Linear() if part["out"] is None else _native(part["out"])
        given = {name: value for name, value in part.items() if name not in ("module", "first")}
        made.append(cpu.sublayer_weights(**{**given, **sizes, "inputs": inputs, "out": out}))
        made[-1].kept = made[-1].kept, part
    return cpu.sublayers(made)


def _joined(layers: Sequence[Any]) -> Iterator[Any]:
    """Layers with adjacent outputs, as one for each form of inputs."""
    for _, group in groupby(map(_native, layers), key=lambda linear: _FORMS.get(cpu_library.KINDS[linear.kind])):
        yield cpu.joined_weights(list(group))


def _native(linear: Any) -> Any:
    if not isinstance(linear, BlockLinear):
        raise ValueError(f"expected a packed linear layer: got {type(linear).__name__}")
    if linear.in_features % GROUP:
        raise ValueError(f"inputs of a layer must be a multiple of {GROUP}: got {linear.in_features}")
    return linear.native


def _attention(module: Any) -> Part | None:
    if not all(hasattr(module, name) for name in (*PROJECTIONS, "head_dim", "scaling")):
        return None
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if getattr(module, "attn_logit_softcapping", None) or own - {"sinks"}:
        raise ValueError(f"attention has no cap of scores and no weights of its own: got {type(module).__name__}")
    query, key, value = (getattr(module, name) for name in PROJECTIONS)
    out, head_dim = getattr(module, "o_proj", None) or module.out_proj, module.head_dim
    heads, groups = out.in_features // head_dim, key.out_features // head_dim
    if head_dim not in cpu.HEAD_DIMS:
        raise ValueError(f"the size of heads must be one of {cpu.HEAD_DIMS}: got {head_dim}")
    norms = [getattr(module, f"{name}_norm", getattr(module, f"{name}_layernorm", None)) for name in "qk"]
    inner = None
    if norms[0] is not None:
        gains = [gain_of(norm).expand(count, head_dim) for norm, count in zip(norms, (heads, groups), strict=True)]
        inner = torch.cat(gains), epsilon_of(norms[0])
    tensors = {"sinks": module.sinks.detach()} if own else {}
    if (factor := getattr(module, "key_multiplier", 1.0)) != 1:
        scales = torch.ones(heads + 2 * groups, head_dim, dtype=torch.float32)
        scales[heads : heads + groups] = factor
        tensors["output_scale"] = scales.flatten()
    return dict(
        kind="attention",
        inputs=[[query, key, value]],
        out=out,
        inner_norm=inner,
        tensors=tensors,
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
    kind = gate_of(function)
    if kind is None or (kind == "squared_relu") != (names[0] == "up_proj"):
        raise ValueError(f"expected SiLU, GELU or, without a gate, squared ReLU: got {type(module).__name__}")
    part = dict(kind="mlp", inputs=[inputs], out=out, activation=kind)
    if hasattr(module, "gate_multiplier"):
        part |= {"gate_scale": module.gate_multiplier, "scale": module.down_multiplier}
    return part


def _experts(module: Any) -> Part | None:
    """A mixture of experts: a router, experts and maybe a shared MLP with a gate."""
    experts = next((part for part in module.children() if isinstance(part, PackedExperts)), None)
    if experts is None:
        return None
    router, weights = router_of(module, experts.num_experts)
    routing = BLOCKS["float32"](router.weight.float(), getattr(router, "bias", None))
    part = dict(kind="experts", inputs=[[routing]], out=None, experts=experts.native, router=weights)
    shared = next((getattr(module, name) for name in _SHARED if getattr(module, name, None) is not None), None)
    if shared is None:
        return part
    mlp, gate = _mlp(shared), getattr(module, "shared_expert_gate", None)
    assert mlp is not None
    inputs = [[routing], *mlp["inputs"], *([] if gate is None else [[gate]])]
    return {**mlp, **part, "inputs": inputs, "out": mlp["out"], "gated": gate is not None}
