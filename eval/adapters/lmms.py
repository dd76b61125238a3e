"""mmspec as a model of lmms-eval, found through its entry point: no fork.

    lmms-eval --model mmspec --model_args pretrained=llava-hf/llava-1.5-7b-hf,drafter=auto --tasks pope --batch_size 1

``model_args``: ``pretrained`` (as ``model`` of ``mmspec.load``), ``drafter`` (``none`` decodes plainly), ``nodes`` (per
step; by default as many as pay), ``device``, ``dtype``, ``frames`` (per video). The figures of speculation over all
requests are logged at the end. This module imports nothing of lmms-eval until that asks for the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmspec.cli.options import GENERATING
from mmspec.errors import UserError

MODEL = "mmspec"


def manifest() -> Any:
    """What lmms-eval's registry takes."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id=MODEL, chat_class_path="eval.adapters.lmms_model.Mmspec")


def keywords_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """lmms-eval's generation options as ours.

    Raises:
        UserError: beams, which speculation does not serve.
    """
    if int(given.get("num_beams") or 1) > 1:
        raise UserError(f"num_beams must be 1: speculation keeps one sequence per prompt, got {given['num_beams']}")
    keywords = {name: given[name] for name in GENERATING if given.get(name) is not None}
    keywords["max_new_tokens"] = int(keywords.get("max_new_tokens", 1024))
    if not given.get("do_sample", float(given.get("temperature") or 0) > 0):
        keywords = {"max_new_tokens": keywords["max_new_tokens"], "temperature": 0.0}
    until = given.get("until") or ()
    stop = [until] if isinstance(until, str) else list(until)
    # Many tasks stop at blank lines by default, which a chat model's end of turn makes superfluous.
    return {**keywords, "stop": [text for text in stop if text and text.strip()]}


def as_request(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """lmms-eval's chat messages as a request of ours: media apart, in their order."""
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
                raise UserError(f"messages may hold text, images and videos: got {item['type']!r}")
        text_only = len(items) == 1 and items[0]["type"] == "text"
        prompt.append({"role": message["role"], "content": items[0]["text"] if text_only else items})
    return {"prompt": prompt, **media}
