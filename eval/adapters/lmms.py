"""The model class that lmms-eval instantiates for ``--model mmspec``, see ``mmspec.eval.adapters.manifest``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from loguru import logger
from tqdm import tqdm

import mmspec
from mmspec.cli.options import GENERATING
from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.eval.suite.summary import acceptance_line


class MmspecLMM(lmms):
    """Run lmms-eval's generation tasks.

    Args:
        pretrained, drafter, device, dtype: as for ``mmspec.load``.
        nodes: draft tokens per step; None is adaptive.
        frames: per video; None takes the default number.
        batch_size: requests decoded at once.
        max_batch_size: always passed by lmms-eval; ignored.
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
        self.stats: list[Stats] = []
        self._options: dict[str, Any] = {"nodes": None if nodes is None else int(nodes)}
        if frames is not None:
            self._options["frames"] = int(frames)
        self._batch = int(batch_size)

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers in the order of the requests."""
        results: dict[int, GenerationResult] = {}
        options = [generation_keywords(request.args[2]) for request in requests]
        order = sorted(range(len(requests)), key=lambda k: str(options[k]))
        with tqdm(total=len(requests), desc="mmspec") as bar:
            for keywords, group in groupby(order, key=lambda k: options[k]):
                indices = list(group)
                for start in range(0, len(indices), self._batch):
                    chosen = indices[start : start + self._batch]
                    answers = self._answer([requests[k] for k in chosen], keywords)
                    results |= zip(chosen, answers, strict=True)
                    bar.update(len(chosen))
        logger.info(acceptance_line(self.stats))
        return [results[k] for k in range(len(requests))]

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
            self.stats.append(answer.stats)
            yield GenerationResult(answer.text.strip(), TokenCounts(output_tokens=len(answer.token_ids)))


def generation_keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate lmms-eval's generation options to keywords of ``Pipeline.generate``. Raises ``UserError``: beam search,
    which is not supported."""
    if int(options.get("num_beams") or 1) > 1:
        raise UserError(f"num_beams must be 1: speculation has one sequence per prompt, got {options['num_beams']}")
    keywords = {name: options[name] for name in GENERATING if options.get(name) is not None}
    keywords["max_new_tokens"] = int(keywords.get("max_new_tokens", 1024))
    if not options.get("do_sample", float(options.get("temperature") or 0) > 0):
        keywords = {"max_new_tokens": keywords["max_new_tokens"], "temperature": 0.0}
    until = options.get("until") or ()
    stop = [until] if isinstance(until, str) else list(until)
    # Many tasks stop at blank lines by default; chat models end their turn instead.
    return {**keywords, "stop": [text for text in stop if text and text.strip()]}


def messages_to_request(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Translate lmms-eval's chat messages to a request, with media listed separately in their order."""
    prompt: list[dict[str, Any]] = []
    media: dict[str, list[Any]] = {"images": [], "videos": []}
    for message in messages:
        content = message["content"]
        items = []
        for item in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if item["type"] in ("image", "video"):
                media[f"{item['type']}s"].append(item["url"])
                items.append({"type": item["type"]})
            elif item["type"] == "text":
                items.append({"type": "text", "text": item["text"]})
            else:
                raise UserError(f"messages may contain text, images and videos: got {item['type']!r}")
        text_only = len(items) == 1 and items[0]["type"] == "text"
        prompt.append({"role": message["role"], "content": items[0]["text"] if text_only else items})
    return {"prompt": prompt, **media}
