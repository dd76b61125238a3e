"""The class that lmms-eval makes for ``--model mmspec``; see ``eval.adapters.lmms``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from loguru import logger
from tqdm import tqdm

import mmspec
from eval.adapters.lmms import as_request, keywords_of
from eval.harness.acceptance import Tally


class Mmspec(lmms):
    """Answers lmms-eval's generation tasks.

    Args:
        pretrained, drafter, device, dtype: as for ``mmspec.load``.
        nodes: drafted nodes per step; None takes as many as pay.
        frames: per video; None takes the usual number.
        batch_size: requests at once.
        max_batch_size: lmms-eval always gives it; not used.

    Attributes:
        tally: what was accepted so far.
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
        self.tally = Tally()
        self._options = {"nodes": None if nodes is None else int(nodes)}
        if frames is not None:
            self._options["frames"] = int(frames)
        self._batch = int(batch_size)

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers in the order of the requests."""
        results: list[GenerationResult | None] = [None] * len(requests)
        order = sorted(range(len(requests)), key=lambda k: str(self._keywords(requests[k])))
        with tqdm(total=len(requests), desc="mmspec") as bar:
            for keywords, places in groupby(order, key=lambda k: self._keywords(requests[k])):
                alike = list(places)
                for start in range(0, len(alike), self._batch):
                    chosen = alike[start : start + self._batch]
                    for place, result in zip(
                        chosen, self._answer([requests[k] for k in chosen], keywords), strict=True
                    ):
                        results[place] = result
                    bar.update(len(chosen))
        logger.info(self.tally.told())
        return [result for result in results if result is not None]

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Not served."""
        raise NotImplementedError("mmspec does not serve lmms-eval's tasks of several rounds")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not served: nothing is generated there that speculation could speed up."""
        raise NotImplementedError("mmspec generates; lmms-eval's tasks by likelihood gain nothing from it")

    def _answer(self, requests: Sequence[Instance], keywords: dict[str, Any]) -> Iterator[GenerationResult]:
        asked = []
        for request in requests:
            _, messages_of, _, doc, task, split = request.args
            asked.append(as_request(messages_of(self.task_dict[task][split][doc])))
        for answer in self.pipe.generate_batch(asked, **keywords, **self._options):
            self.tally.add(len(self.tally.groups), answer.stats, equal=True)
            yield GenerationResult(answer.text.strip(), TokenCounts(output_tokens=len(answer.token_ids)))

    @staticmethod
    def _keywords(request: Instance) -> dict[str, Any]:
        return keywords_of(request.args[2])
