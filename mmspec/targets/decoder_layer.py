"""Decoder layers of the families of Llama, Qwen3 and Gemma 3 with fewer and larger operations, for passes over few
tokens on a CPU.

Queries, keys and values are one product, gate and up another. The residual stream is float32, so that little is
converted. The C++ kernels attend to keys and values in bfloat16, in any cache, transformers' included; other attention
is float32. Rotary embeddings are one complex product: the rows of queries and keys are reordered so that the two
features of a rotated pair are neighbours, which changes no dot product of a query and a key.
"""

from __future__ import annotations

import sys
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmspec.ops import cpu
from mmspec.quantisation.blocks import BlockLinear, JoinedLinear
from mmspec.quantisation.linear import GROUP, PackedLinear
from mmspec.targets.attention import NAME, PASS
from mmspec.targets.merged_weights import head_norm, merged, norm_of, paired

if TYPE_CHECKING:
    from mmspec.targets.stack import Stack

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_NORMS = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}


class MergedLayer(nn.Module):
    """A pre-norm decoder layer: attention with rotary positions, then a gated MLP.

    Heads of queries and keys may be normalised (Qwen3), outputs of attention and MLP, too (Gemma 3).

    Args:
        layer: a layer of transformers with the parts of one of these families; it loses its projections.
        last: the decoder's last layer; the norm and the head after it take bfloat16.
    """

    place: int
    stack: Stack | None

    def __init__(self, layer: Any, last: bool = False) -> None:
        super().__init__()
        self.last = last
        self.place, self.stack = 0, None
        attention, mlp = layer.self_attn, layer.mlp
        self.config, self.head_dim = attention.config, attention.head_dim
        self.self_attn, self.act_fn = attention, mlp.act_fn
        query, key, value = (getattr(attention, name) for name in PROJECTIONS)
        self.heads, self.kv_heads = (part.out_features // self.head_dim for part in (query, key))
        self.qkv = merged([paired(query, self.head_dim), paired(key, self.head_dim), value])
        self.gate_up = merged([mlp.gate_proj, mlp.up_proj])
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.norms = nn.ModuleDict({name: norm_of(norm) for name, norm in _norms(layer).items()})
        if hasattr(attention, "q_norm"):
            self.norms["head"] = head_norm(attention, self.heads, self.kv_heads, self.head_dim)
        for name in (*PROJECTIONS, "o_proj"):
            delattr(attention, name)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        assert position_embeddings is not None
        rotation = rotation_of(*position_embeddings)
        if self.stack is not None and self.attends_by_kernel(kwargs):
            output = self.stack.output(self.place, hidden_states, rotation, attention_mask, past_key_values)
            if output is not None:
                return output
        x = hidden_states.float()
        qkv = self._qkv(x, rotation)
        query, key, value = qkv.transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.native is not None and self.attends_by_kernel(kwargs):
            key, value = key.bfloat16(), value.bfloat16()
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.self_attn.layer_idx)
        read = self._attend(query, key, value, attention_mask, kwargs)
        return self.rounded(self._outputs(read.flatten(2), x))

    def separate(self) -> dict[str, Tensor]:
        """The weights under their names in a layer of Llama, Qwen2 or Qwen3, without those that these have not."""
        found: dict[str, Any] = {
            **{f"self_attn.{name}": weight for name, weight in self.self_attn.named_parameters()},  # norms of heads
            **{f"{theirs}.weight": self.norms[ours].weight for ours, theirs in _NORMS.items()},
        }
        sizes = [self.head_dim * count for count in (self.heads, self.kv_heads, self.kv_heads)]
        for kind in ("weight", "bias"):
            for name, layer in {"self_attn.o_proj": self.out, "mlp.down_proj": self.down}.items():
                found[f"{name}.{kind}"] = getattr(layer, kind)
            if (joined := getattr(self.qkv, kind)) is not None:
                *pairs, value = joined.split(sizes)
                halves = (x.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) for x in pairs)
                names = (f"self_attn.{name}.{kind}" for name in PROJECTIONS)
                found |= zip(names, (*halves, value), strict=True)
            if (joined := getattr(self.gate_up, kind)) is not None:
                found[f"mlp.gate_proj.{kind}"], found[f"mlp.up_proj.{kind}"] = joined.chunk(2)
        return {name: weight for name, weight in found.items() if weight is not None}

    def rounded(self, x: Tensor) -> Tensor:
        """The output in the dtype of the next layer's, norm's or head's input."""
        return x.bfloat16() if self.last and isinstance(self.down, PackedLinear) else x

    def _qkv(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Queries, keys and values, (batch, tokens, heads + 2 * kv_heads, head_dim), the first two rotated."""
        if self.native is not None:
            rotation = rotation.expand(len(x), -1, -1, -1).contiguous()
            return cpu.attention_inputs(self.native, x.contiguous(), rotation)
        qkv = self.qkv(self.norms["attention"](x)).unflatten(-1, (-1, self.head_dim))
        turned = self.heads + self.kv_heads
        pairs = torch.view_as_complex(self._normed("head", qkv[..., :turned, :]).unflatten(-1, (-1, 2)))
        return torch.cat([torch.view_as_real(pairs * rotation).flatten(-2), qkv[..., turned:, :]], dim=-2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Attention output, (batch, tokens, heads, head_dim), by transformers' implementation or the kernel."""
        scaling = self.self_attn.scaling
        usual = key.dtype == value.dtype == torch.bfloat16 and key.stride() == value.stride() and key.stride(3) == 1
        if self.native is not None and usual and self.attends_by_kernel(options):
            allowed = None if mask is None else allowed_slots(mask, len(query))
            return cpu.attention(query.transpose(1, 2), key, value, allowed, scaling)
        implementation = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, _eager(self.self_attn))
        key, value = key.to(query.dtype), value.to(query.dtype)
        return attend(self.self_attn, query, key, value, mask, dropout=0.0, scaling=scaling, **options)[0]

    def attends_by_kernel(self, options: dict[str, Any]) -> bool:
        """Whether attention is to be torch's or a tree's, in shapes that vary."""
        return self.config._attn_implementation in (NAME, "sdpa") and PASS not in options

    def _outputs(self, read: Tensor, x: Tensor) -> Tensor:
        """The layer's output, from the attention output and the layer's input."""
        if self.native is not None:
            return cpu.layer_outputs(self.native, read.contiguous(), x.contiguous())
        x = x + self._normed("attention_after", self.out(read))
        after = self.norms["mlp"](x)
        # In the precision of the next product, its only reader.
        gate, up = self.gate_up(after.bfloat16() if isinstance(self.gate_up, PackedLinear) else after).chunk(2, dim=-1)
        return x + self._normed("mlp_after", self.down(self.act_fn(gate) * up))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return self.norms[name](x) if name in self.norms else x

    @cached_property
    def native(self) -> Any:
        """The weights for the functions of ``mmspec.ops.cpu``; None where these do not compute the layer."""
        linears: list[Any] = [self.qkv, self.out, self.gate_up, self.down]
        whole = all(layer.in_features % GROUP == 0 for layer in linears) and self.head_dim in cpu.HEAD_DIMS
        blocks = all(isinstance(layer, BlockLinear | JoinedLinear) for layer in linears)
        gate = _gate(self.act_fn)
        if not whole or not blocks or gate is None:
            return None
        parts: Any = self.norms
        norms = {name: (norm.weight, norm.epsilon.item()) for name, norm in parts.items()}
        native = [layer.native for layer in linears]
        return cpu.layer_weights(native, norms, self.heads, self.kv_heads, self.head_dim, gelu=gate == "gelu")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "native"}


def _eager(attention: nn.Module) -> Any:
    """The eager attention of a layer's modelling file."""
    return getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)


def _gate(function: Any) -> str | None:
    """The kernels' name of an activation function."""
    x = torch.linspace(-3, 3, 7)
    known = {"silu": nn.functional.silu(x), "gelu": nn.functional.gelu(x, approximate="tanh")}
    return next((name for name, expected in known.items() if torch.allclose(function(x), expected)), None)


def _norms(layer: Any) -> dict[str, Any]:
    """The norms of hidden states, by their names in ``cpu.layer_weights``."""
    if not hasattr(layer, "pre_feedforward_layernorm"):
        return {"attention": layer.input_layernorm, "mlp": layer.post_attention_layernorm}
    after = {"attention_after": layer.post_attention_layernorm, "mlp_after": layer.post_feedforward_layernorm}
    return {"attention": layer.input_layernorm, "mlp": layer.pre_feedforward_layernorm, **after}


@lru_cache(maxsize=4)
def allowed_slots(mask: Tensor, batch: int) -> Tensor:
    """A mask as (batch, 1, nodes, slots) bool with contiguous slots; made once per pass, not per layer."""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    return (allowed if allowed.stride(-1) == 1 else allowed.contiguous()).expand(batch, 1, -1, -1)


@lru_cache(maxsize=4)
def rotation_of(cos: Tensor, sin: Tensor) -> Tensor:
    """(batch, tokens, 1, head_dim / 2) complex64, from (batch, tokens, head_dim) each; once per pass, not per layer."""
    half = cos.shape[-1] // 2
    return torch.complex(cos[..., :half].float(), sin[..., :half].float())[:, :, None]
