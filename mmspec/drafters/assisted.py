"""Maps the arguments of transformers' assisted generation to a drafter."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from mmspec.core.drafter import Drafter
from mmspec.drafters.early_exit import EarlyExit
from mmspec.drafters.gemma4 import MODEL_TYPES, Gemma4
from mmspec.drafters.layouts import LAYOUTS, layout_of
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.registry import drafter_spec, make_drafter
from mmspec.drafters.small import Small
from mmspec.errors import UserError, shown
from mmspec.targets.support import base_model


def chosen_drafter(drafter: Any, config: GenerationConfig, assistant: Any, tokenizers: Any, home: str) -> Any:
    """The drafter for a call of ``generate``, from its arguments for assisted generation if it has any.

    Args:
        drafter: ``drafter`` argument of the call; ``"auto"`` if absent.
        assistant: ``assistant_model`` argument of the call.
        tokenizers: ``tokenizer`` and ``assistant_tokenizer`` arguments of the call.

    Raises:
        UserError: no drafter is equivalent, or the call also names a drafter.
    """
    chosen = _assisted(config, assistant, tokenizers, home)
    if chosen is not None and drafter != "auto":
        raise UserError(f"assisted generation chooses the drafter: expected no drafter argument, got {shown(drafter)}")
    return drafter if chosen is None else chosen


def _assisted(config: GenerationConfig, assistant: Any, tokenizers: Any, home: str) -> Drafter | None:
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise UserError("assistant_ensemble_weight changes the output, which drafters do not: expected None")
    if config.assistant_early_exit is not None:
        return EarlyExit(config.assistant_early_exit)
    if config.prompt_lookup_num_tokens is not None:
        return Ngram(config.max_matching_ngram_size) if config.max_matching_ngram_size else Ngram()
    if getattr(config, "use_mtp", None):
        return make_drafter("mtp", home)
    if assistant is None:
        return None
    assistant = base_model(assistant)
    if not isinstance(assistant, PreTrainedModel):
        raise UserError(f"assistant_model must be a model of transformers: got {shown(assistant)}")
    if assistant.config.model_type in MODEL_TYPES:
        return Gemma4(assistant)
    if (layout := layout_of({"architectures": [type(assistant).__name__]}, set())) in LAYOUTS:
        return drafter_spec(str(layout)).load().from_model(assistant)
    return Small(assistant, tokenizers=None if tokenizers[1] is None else tokenizers)
