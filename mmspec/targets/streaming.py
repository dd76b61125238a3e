"""Weights that are quantised while a checkpoint is read: transformers reads one tensor after the other, of which layers
keep nothing but quantised rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mmspec.quantisation.formats import StoredRows

NAME = "mmspec"

Takes = Mapping[str, Callable[[Tensor], StoredRows]]
"""By the name of a weight, what makes rows of it. Its layer keeps them as ``stored`` for ``pack_model``; its ``weight``
stays on the meta device."""


@register_quantization_config(NAME)
class RowsConfig(QuantizationConfigMixin):
    """For ``from_pretrained(quantization_config=...)``.

    Args:
        takes: of a model without weights.
    """

    def __init__(self, takes: Callable[[PreTrainedModel], Takes]) -> None:
        self.quant_method: Any = NAME
        self.takes = takes


@register_quantizer(NAME)
class _Rows(HfQuantizer):
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self._takes: Takes = self.quantization_config.takes(model)  # type: ignore[attr-defined]

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._takes

    def get_quantize_ops(self) -> ConversionOps:
        return _Take(self._takes)

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.remove_quantization_config(model)


class _Take(ConversionOps):
    def __init__(self, takes: Takes) -> None:
        self._takes = takes

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: Any = None,
        full_layer_name: str = "",
        missing_keys: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        kept = {}
        for name, value in input_dict.items():
            name = full_layer_name if len(input_dict) == 1 else name
            tensor = value[0] if isinstance(value, list) else value
            if name in self._takes:
                model.get_submodule(name.rpartition(".")[0]).stored = [self._takes[name](tensor)]
                missing_keys.discard(name)
            else:
                kept[name] = tensor
        return kept
