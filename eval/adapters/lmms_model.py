"""The model class that lmms-eval instantiates for ``--model mmspec``; see ``mmspec.eval.adapters.lmms``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from loguru import logger
from tqdm import tqdm

import mmspec
from mmspec.eval.adapters.lmms import generation_keywords, messages_to_request
from mmspec.eval.harness.acceptance import AcceptanceStats


class MmspecLMM(lmms):
    """Run lmms-eval's generation tasks.

    Args:
        pretrained, drafter, device, dtype: as for ``mmspec.load``.
        nodes: draft tokens per step; None is adaptive.
        frames: per video; None takes the default number.
        batch_size: requests decoded at once.
        max_batch_size: always passed by lmms-eval; ignored.

    Attributes:
        acceptance: statistics over all requests so far.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = "tiny-llava",
        drafter: str = "auto",
        device: str | None = "auto",
        dtype: str = "auto",
        nodes: int | None = None,
        frames: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.pipe = mmspec.load(pretrained, drafter, device or "auto", dtype)
        self.acceptance = AcceptanceStats()
        self._options: dict[str, Any] = {"nodes": None if nodes is None else int(nodes)}
        if frames is not None:
            self._options["frames"] = int(frames)
        self._batch = int(batch_size)

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers in the order of the requests."""
        results: list[GenerationResult | None] = [None] * len(requests)
        order = sorted(range(len(requests)), key=lambda k: str(self._keywords(requests[k])))
        with tqdm(total=len(requests), desc="mmspec") as bar:
            for keywords, group in groupby(order, key=lambda k: self._keywords(requests[k])):
                indices = list(group)
                for start in range(0, len(indices), self._batch):
                    chosen = indices[start : start + self._batch]
                    answers = self._answer([requests[k] for k in chosen], keywords)
                    for index, result in zip(chosen, answers, strict=True):
                        results[index] = result
                    bar.update(len(chosen))
        logger.info(self.acceptance.log_line())
        return [result for result in results if result is not None]

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Not supported."""
        raise NotImplementedError("mmspec does not support lmms-eval's multi-round tasks")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not supported: likelihoods generate no tokens."""
        raise NotImplementedError("mmspec supports lmms-eval's generation tasks, not its likelihood tasks")

    def _answer(self, requests: Sequence[Instance], keywords: dict[str, Any]) -> Iterator[GenerationResult]:
        inputs = []
        for request in requests:
            _, messages_of, _, doc, task, split = request.args
            inputs.append(messages_to_request(messages_of(self.task_dict[task][split][doc])))
        for answer in self.pipe.generate_batch(inputs, **keywords, **self._options):
            self.acceptance.add(len(self.acceptance.groups), answer.stats, equal=True)
            yield GenerationResult(answer.text.strip(), TokenCounts(output_tokens=len(answer.token_ids)))

    @staticmethod
    def _keywords(request: Instance) -> dict[str, Any]:
        return generation_keywords(request.args[2])
