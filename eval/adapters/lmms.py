"""mmspec as a model of lmms-eval, registered by an entry point.

This module imports lmms-eval only when its registry calls ``manifest``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmspec.cli.options import GENERATING
from mmspec.errors import UserError

MODEL = "mmspec"


def manifest() -> Any:
    """The model's entry in lmms-eval's registry."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id=MODEL, chat_class_path="mmspec.eval.adapters.lmms_model.MmspecLMM")


def generation_keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate lmms-eval's generation options to keywords of ``Pipeline.generate``.

    Raises:
        UserError: beam search, which is not supported.
    """
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
