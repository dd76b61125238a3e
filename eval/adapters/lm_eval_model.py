"""mmspec as a model of EleutherAI's lm-evaluation-harness, found through its entry point: no fork.

    lm-eval run --model mmspec --model_args pretrained=tiny-hybrid,drafter=auto --tasks gsm8k --batch_size 4

Releases of the harness up to 0.4.13 do not look for entry points: there, ``python -m eval.lm_eval_model`` replaces
``lm-eval``.

``model_args``: ``pretrained`` (as ``model`` of ``mmspec.load``), ``drafter`` (``none`` decodes plainly), ``nodes`` (per
step; by default as many as pay), ``device``, ``dtype``, and what the harness's own ``hf`` model takes beside these.

All but decoding is the harness's own: it prepares prompts, batches and transformers' ``generate``, whose decoding
method is exchanged, and it takes likelihoods from plain passes of the same model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria

import mmspec
from eval.harness.acceptance import Tally
from mmspec.stopping import Stopper

_log = logging.getLogger("lm_eval.mmspec")  # among the harness's own lines


class Mmspec(HFLM):
    """Answers generation tasks by speculation, and likelihood tasks as ``hf`` does.

    Args:
        pretrained, drafter, device, dtype: as for ``mmspec.load``.
        nodes: drafted nodes per step; None takes as many as pay.
        **options: as for the harness's ``HFLM``.

    Attributes:
        pipe: the model and its drafter.
        tally: what was accepted so far.
    """

    def __init__(
        self,
        pretrained: str = "tiny-hybrid",
        drafter: str | None = "auto",
        device: str | None = None,
        dtype: str = "auto",
        nodes: int | None = None,
        **options: Any,
    ) -> None:
        # The harness asks for the first GPU where the user asks for nothing.
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"
        self.pipe = mmspec.load(pretrained, drafter, device, dtype)
        self.tally = Tally()
        self._nodes = None if nodes is None else int(nodes)
        # A model's own limit would come before the harness's.
        self.pipe.model.generation_config.max_new_tokens = None
        super().__init__(pretrained=self.pipe.model, tokenizer=self.pipe.target.tokenizer, **options)

    def generate_until(self, requests: list[Any], *args: Any, **options: Any) -> list[str]:
        """Answers in the order of the requests."""
        answers = super().generate_until(requests, *args, **options)
        _log.info(self.tally.told())
        return answers

    def _model_generate(self, context: Tensor, max_length: int, stop: Sequence[str], **options: Any) -> Tensor:
        # The harness's own rule must see all rows of a batch in every call, and ours is asked row by row.
        until = _Until(self.tokenizer, stop, context.shape[1])
        return super()._model_generate(context, max_length, [], custom_generate=partial(self._decode, until), **options)

    def _decode(
        self,
        until: _Until,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Tensor:
        generation_config.return_dict_in_generate = True
        criteria = [*stopping_criteria, until]
        inputs |= {"drafter": self.pipe, "nodes": self._nodes}
        out: Any = mmspec.decode(model, input_ids, logits_processor, criteria, generation_config, **inputs)
        for stats in out.stats:
            self.tally.add(len(self.tally.groups), stats, equal=True)
        return out.sequences


class _Until(StoppingCriteria):
    """A row ends as soon as what was generated contains one of some texts; the prompt is not looked at."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._stopper = Stopper(1, stop=[text for text in texts if text], tokenizer=tokenizer)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        return self._stopper.at_stop_string(input_ids[0].tolist(), self._prompt_length)
