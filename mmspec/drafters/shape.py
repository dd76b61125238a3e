"""Shapes shared by drafter configurations: trees, decoder layers, rotary positions, heads."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

from mmspec.errors import UserError
from mmspec.validation import option, options


@options
class TreeShape:
    """Tree limits of a drafter that grows trees level by level."""

    top_k: int = option(..., ge=1, le=64)
    depth: int = option(..., ge=1, le=64)
    total_tokens: int = option(..., ge=1, le=512)


SCALINGS = ("linear", "llama3", "yarn")
"""Rotary scaling types whose frequencies do not depend on the length."""

TREE = tuple(one.name for one in fields(TreeShape))


@options
class LayerShape:
    """Shape of a drafter's decoder layers."""

    hidden_size: int = option(..., ge=1, le=2**16)
    heads: int = option(..., "Attention heads; by default the target's.", ge=1, le=2**10)
    kv_heads: int = option(..., "By default the target's.", ge=1, le=2**10)
    head_dim: int = option(..., "By default the target's.", ge=2, le=2**12)
    mlp: int = option(..., "Intermediate size of the MLP; by default the target's.", ge=1, le=2**18)
    rope_theta: float = option(10000.0, ge=1, le=1e12)
    norm_eps: float = option(1e-6, ge=1e-12, le=1)

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(f"kv_heads must divide heads: got {self.kv_heads} for {self.heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even, as rotary positions turn pairs: got {self.head_dim}")

    @classmethod
    def like(cls, config: object, **changes: object) -> Self:
        """Configuration for a target's text configuration."""
        get = lambda name, default=None: getattr(config, name, None) or default  # noqa: E731
        heads = get("num_attention_heads")
        if heads is None:
            name = type(config).__name__
            raise UserError(f"the drafter requires a target with attention: {name} has no num_attention_heads")
        rope = get("rope_parameters", {})
        fields = {
            "hidden_size": get("hidden_size"),
            "heads": heads,
            "kv_heads": get("num_key_value_heads", heads),
            "head_dim": get("head_dim", get("hidden_size") // heads),
            "mlp": get("intermediate_size"),
            "rope_theta": rope.get("rope_theta", 10000.0),
            "norm_eps": get("rms_norm_eps", 1e-6),
        }
        return cls(**(fields | changes))


@options
class RotaryShape(LayerShape):
    """Shape of decoder layers with the target's kind of rotary positions: a ``LayerShape``, and

    Attributes:
        rope: rotary positions as transformers' ``rope_parameters``; empty means unscaled, with ``rope_theta``.
    """

    rope: dict = option(dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        rope = self.rope_parameters
        if (kind := rope["rope_type"]) not in ("default", *SCALINGS):
            raise UserError(f"rotary positions must be default, {', '.join(SCALINGS)}: got {kind!r}")
        if (factor := rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise UserError(f"rotary positions must turn whole heads: got a partial_rotary_factor of {factor}")
        sections, half = rope.get("mrope_section"), self.head_dim // 2
        if sections is not None:
            whole_numbers = isinstance(sections, list) and all(isinstance(one, int) and one >= 0 for one in sections)
            if not whole_numbers or len(sections) != 3 or sum(sections) != half:
                raise UserError(f"mrope_section must be three sections of {half} frequencies in all: got {sections!r}")

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """``rope`` with its defaults."""
        return {"rope_type": "default", "rope_theta": self.rope_theta, **self.rope}


@options
class HeadShape(RotaryShape):
    """Shape of a network with an optional output layer and embedding: a ``RotaryShape``, and

    Attributes:
        head: rows of the network's output layer, the draft vocabulary; 0 uses the target's output layer.
        embedding: rows of the network's embedding; 0 uses the target's.
    """

    layers: int = option(1, "Decoder layers.", ge=1, le=64)
    head: int = option(0, ge=0, le=2**24)
    embedding: int = option(0, ge=0, le=2**24)
