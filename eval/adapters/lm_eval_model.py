"""mmspec as a model of EleutherAI's lm-evaluation-harness, registered by an entry point.

Only decoding is replaced: the harness prepares prompts, batches and transformers' ``generate``, which calls mmspec's
decoding, and the harness computes likelihoods by plain passes of the same model.
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
from mmspec.engine.stats import Stats
from mmspec.eval.suite.summary import acceptance_line
from mmspec.targets.detokenizer import AnswerReader, Vocabulary

_log = logging.getLogger("lm_eval.mmspec")  # below the harness's logger


class MmspecLM(HFLM):
    """Run generation tasks by speculative decoding, and likelihood tasks as ``hf`` does. Options are those of
    ``mmspec.load``, ``nodes`` (draft tokens per step; None is adaptive) and those of ``HFLM``."""

    def __init__(
        self,
        pretrained: str = "tiny-hybrid",
        drafter: str | None = "auto",
        device: str | None = None,
        dtype: str = "auto",
        nodes: int | None = None,
        **options: Any,
    ) -> None:
        # The harness passes the first GPU if the user gives no device.
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"
        self.pipe = mmspec.load(pretrained, drafter, device, dtype)
        self.stats: list[Stats] = []
        self._nodes = None if nodes is None else int(nodes)
        # The model's own limit would take precedence over the harness's.
        self.pipe.model.generation_config.max_new_tokens = None
        super().__init__(pretrained=self.pipe.model, tokenizer=self.pipe.processor.tokenizer, **options)

    def generate_until(self, requests: list[Any], *args: Any, **options: Any) -> list[str]:
        """Answers in the order of the requests."""
        answers = super().generate_until(requests, *args, **options)
        _log.info(acceptance_line(self.stats))
        return answers

    def _model_generate(self, context: Tensor, max_length: int, stop: Sequence[str], **options: Any) -> Tensor:
        # The harness's stopping criterion searches a window of tokens, our criterion all text after the prompt.
        stop_texts = _StopTexts(self.tokenizer, stop, context.shape[1])
        return super()._model_generate(
            context, max_length, [], custom_generate=partial(self._decode, stop_texts), **options
        )

    def _decode(
        self,
        stop_texts: _StopTexts,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Tensor:
        generation_config.return_dict_in_generate = True
        criteria = [*stopping_criteria, stop_texts]
        inputs |= {"drafter": self.pipe, "nodes": self._nodes}
        out: Any = mmspec.decode(model, input_ids, logits_processor, criteria, generation_config, **inputs)
        self.stats += out.stats
        return out.sequences


class _StopTexts(StoppingCriteria):
    """Stop a row once its generated text contains one of some texts; the prompt is ignored."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], prompt_length: int) -> None:
        self._length, self._rows = prompt_length, list[AnswerReader]()
        self._read = partial(AnswerReader, Vocabulary(tokenizer), stop=[text for text in texts if text])

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        rows = input_ids.tolist()
        self._rows = self._rows or [self._read(row[: self._length]) for row in rows]
        for row, reader in zip(rows, self._rows, strict=True):
            for token in row[self._length :]:
                reader.append(token)
        self._length = input_ids.shape[1]
        met = [bool(reader.answer.stopped) for reader in self._rows]
        return torch.tensor(met, dtype=torch.bool, device=input_ids.device)
