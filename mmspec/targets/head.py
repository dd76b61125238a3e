"""Output layer of a target: logits from hidden states, over the whole vocabulary or a subset."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmspec.errors import UserError
from mmspec.quantisation.linear import PackedLinear
from mmspec.targets.placement import is_split
from mmspec.targets.support import output_layer, refuse_not_finite


class Head:
    """A model's output layer, with an optional module before it and its logit scaling.

    Args:
        model: model with an output layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layer = output_layer(model)
        config = model.config.get_text_config()
        self._scale = _logit_scaling(config)
        self._size = getattr(config, "unpadded_vocab_size", None)  # the layer's remaining rows are padding
        self._before: Callable[[Tensor], Tensor] = _unchanged
        others = [part for part in model.children() if not isinstance(part, PreTrainedModel)]
        self._candidates: list[Callable[[Tensor], Tensor]] = [_unchanged, *others]
        self._model, self._name = model, type(model).__name__
        self._checked = False

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._scale(_by_rows(self._layer, self._before(hidden)))[..., : self._size]
        return logits.to(hidden.device)  # a dispatched model's output layer may be on another device

    def narrow(self, token_ids: Tensor) -> NarrowHead:
        """Restrict the head to some tokens.

        Args:
            token_ids: (tokens,) int64, on the layer's device.
        """
        if is_split(self._model):
            return NarrowHead(self, _unchanged, partial(torch.index_select, dim=-1, index=token_ids))
        # A prefix of the vocabulary needs no copy of the weight.
        first = torch.equal(token_ids, torch.arange(len(token_ids), device=token_ids.device))
        rows = slice(len(token_ids)) if first else token_ids
        layer = self._layer
        if isinstance(layer, PackedLinear):
            return NarrowHead(layer.rows(rows), self._before, self._scale)
        weight = layer.weight.detach()[rows]
        bias = layer.bias.detach()[rows] if getattr(layer, "bias", None) is not None else None
        narrow = nn.Linear(weight.shape[1], len(weight), bias is not None, device="meta")
        narrow.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            narrow.bias = nn.Parameter(bias, requires_grad=False)
        return NarrowHead(narrow, self._before, self._scale)

    def check(self, hidden: Tensor, logits: Tensor) -> None:
        """At the first call, check that the head reproduces the model's logits; finds the module before the output
        layer (ModernBERT's decoder) and corrects the scaling.

        Raises:
            UserError: the model transforms its logits in an unknown way, or they are NaN.
        """
        if self._checked:
            return
        # Some vision-language models do not scale logits as their text model does (Cohere).
        for before, scale in product(self._candidates, (self._scale, _unchanged)):
            self._before, self._scale = before, scale
            if self._gives(logits, hidden):
                break
        else:
            if bool(logits.isnan().any()):
                refuse_not_finite(self._model.state_dict().items())
                raise UserError(f"{self._name}: expected logits that are numbers, received NaN")
            raise UserError(
                f"{self._name} transforms its logits after the output layer in an unknown way: expected "
                "head(hidden) to equal the model's logits"
            )
        self._checked = True

    def _gives(self, logits: Tensor, hidden: Tensor) -> bool:
        tolerance = 1e-3 if logits.dtype == torch.float32 else 0.1
        try:
            computed = self(hidden)
        except (RuntimeError, TypeError):  # width mismatch: a projection precedes the output layer
            return False
        fits = computed.shape == logits.shape
        return fits and torch.allclose(computed.float(), logits.float(), atol=tolerance, rtol=tolerance)


class NarrowHead:
    """An output layer restricted to some tokens.

    Attributes:
        linear: the linear layer if nothing precedes or follows it; else None.
    """

    def __init__(
        self,
        layer: Callable[[Tensor], Tensor],
        before: Callable[[Tensor], Tensor],
        scale: Callable[[Tensor], Tensor],
    ) -> None:
        self._layer, self._before, self._scale = layer, before, scale
        self.linear = layer if before is _unchanged and scale is _unchanged else None

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._scale(_by_rows(self._layer, self._before(hidden)))

    def __deepcopy__(self, memo: dict[int, Any]) -> NarrowHead:
        return self  # copies of a drafter share weights


def contiguous_input(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook of the output layer: makes its input contiguous; see ``_by_rows``."""
    return inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:]


def _by_rows(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a linear layer to (..., features) flattened to a matrix: for a slice of few nodes torch would run a batched
    product and copy the whole weight."""
    y = layer(x.reshape(-1, x.shape[-1]))
    return y.view(*x.shape[:-1], y.shape[-1])


def _logit_scaling(config: Any) -> Callable[[Tensor], Tensor]:
    """Scaling of logits after the output layer (Gemma, Cohere, Granite, Falcon-H1, Muse, Inkling)."""
    if cap := getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None):
        return partial(_capped, cap=cap, scale=getattr(config, "output_multiplier", 1.0))
    if scale := getattr(config, "logit_scale", None):
        return partial(torch.mul, other=scale)
    if scale := getattr(config, "logits_scaling", None) or getattr(config, "logits_mup_width_multiplier", None):
        return partial(torch.div, other=scale)
    if scale := getattr(config, "lm_head_multiplier", None):
        return partial(torch.mul, other=scale)
    return _unchanged


def _capped(logits: Tensor, cap: float, scale: float) -> Tensor:
    return torch.tanh(logits * (scale / cap)) * cap if scale != 1.0 else torch.tanh(logits / cap) * cap


def _unchanged(states: Tensor) -> Tensor:
    return states
