"""Accuracy of the model on held-out scenes: captions, questions and clips, decoded greedily with transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image

from mmspec.vision.scenes.clips import Clip, sample_clip
from mmspec.vision.scenes.drawing import picture
from mmspec.vision.scenes.questions import KINDS, Question, ask
from mmspec.vision.scenes.reading import (
    Mention,
    ReadEvent,
    read_events,
    read_names,
    read_objects,
    read_places,
    read_sign,
)
from mmspec.vision.scenes.scene import Item, Scene, sample_scene, seeded
from mmspec.vision.scenes.wording import sign_kind

FIRST_SCENE = 1_000_000
"""First held-out index of accuracy measurements; lower ones are for evaluations during the training."""

BATCH = 25
MAX_NEW_TOKENS = 220


def scene_accuracy(model: Any, processor: Any, scenes: int = 200) -> dict[str, float]:
    """Returns accuracies by name, such as "objects", "words", "question colour", "video 8 events".

    Args:
        model: a transformers image-text model.
        processor: its processor.
        scenes: number of captions; a quarter as many questions of each kind and clips of each length.
    """
    report = _caption_accuracy(model, processor, scenes)
    report |= _question_accuracy(model, processor, max(scenes // 4, 1))
    for frames in (4, 8, 16):
        report |= _clip_accuracy(model, processor, max(scenes // 4, 1), frames)
    return report


def answer(model: Any, processor: Any, prompts: Sequence[str], images: Sequence[Sequence[Image.Image]]) -> list[str]:
    """Returns greedy answers to prompts, each with its images before the text."""
    answers: list[str] = []
    for start in range(0, len(prompts), BATCH):
        texts: list[str] = []
        pictures: list[Image.Image] = []
        for prompt, own in zip(prompts[start : start + BATCH], images[start : start + BATCH], strict=True):
            content = [*({"type": "image"} for _ in own), {"type": "text", "text": prompt}]
            chat = [{"role": "user", "content": content}]
            texts.append(processor.apply_chat_template(chat, add_generation_prompt=True))
            pictures += own
        inputs = processor(text=texts, images=pictures or None, padding=True, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        new = ids[:, inputs["input_ids"].shape[1] :]
        answers += [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]
    return answers


def _caption_accuracy(model: Any, processor: Any, count: int) -> dict[str, float]:
    scenes = [sample_scene(seeded("heldout", FIRST_SCENE + index)) for index in range(count)]
    # Every other image is enlarged, as users' images are.
    pictures = [[picture(scene, scale=1 if index % 2 else 4)] for index, scene in enumerate(scenes)]
    captions, lists = (
        answer(model, processor, [prompt] * count, pictures) for prompt in ("Describe the image.", "List the objects.")
    )
    tally, listed = Counter[str](), Counter[str]()
    for texts, counts in ((captions, tally), (lists, listed)):
        for scene, text in zip(scenes, texts, strict=True):
            _score_caption(scene, text, counts)
    report = {name: tally[name] / max(tally["all objects"], 1) for name in ("objects", "colour", "shape", "position")}
    report["objects in lists"] = listed["objects"] / max(listed["all objects"], 1)
    report["size"] = tally["size"] / max(tally["sized objects"], 1)
    report["objects invented"] = tally["invented"] / max(tally["all objects"], 1)
    report["count"] = tally["count"] / count
    report["whole captions"] = tally["whole"] / count
    for kind in ("word", "number"):
        report[f"{kind}s"] = tally[kind] / max(tally[f"all {kind}s"], 1)
    report["caption tokens"] = sum(len(processor.tokenizer(text).input_ids) for text in captions) / count
    report["distinct captions"] = len(set(captions)) / count
    return report


def _score_caption(scene: Scene, text: str, tally: Counter[str]) -> None:
    mentions = read_objects(text)
    tally["all objects"] += len(scene.items)
    tally["count"] += len(mentions) == len(scene.items)
    right = 0
    for item, mention in match(scene.items, mentions):
        if mention is None:
            continue
        same = (mention.colour == item.colour, mention.shape == item.shape, mention.cell == item.cell)
        for name, good in zip(("colour", "shape", "position"), same, strict=True):
            tally[name] += good
        right += all(same)
        if mention.size is not None:
            tally["sized objects"] += 1
            tally["size"] += mention.size == item.size
    tally["objects"] += right
    tally["invented"] += max(len(mentions) - len(scene.items), 0)
    read = True
    if scene.sign is not None:
        kind = sign_kind(scene.sign)
        read = read_sign(text) == scene.sign.text
        tally[f"all {kind}s"] += 1
        tally[kind] += read
    tally["whole"] += read and right == len(scene.items) == len(mentions)


def match(items: Sequence[Item], mentions: Sequence[Mention]) -> Iterator[tuple[Item, Mention | None]]:
    """Yields each object with its mention: the one at its place, else one of its colour and shape, else any."""
    left = list(mentions)
    pairs: dict[int, Mention] = {}
    tests = (
        lambda item, mention: mention.cell == item.cell,
        lambda item, mention: (mention.colour, mention.shape) == (item.colour, item.shape),
        lambda item, mention: True,
    )
    for test in tests:
        for index, item in enumerate(items):
            if index in pairs:
                continue
            suitable = next((mention for mention in left if test(item, mention)), None)
            if suitable is not None:
                pairs[index] = suitable
                left.remove(suitable)
    for index, item in enumerate(items):
        yield item, pairs.get(index)


def _question_accuracy(model: Any, processor: Any, count: int) -> dict[str, float]:
    report = {}
    for kind in KINDS:
        asked: list[Question] = []
        pictures: list[list[Image.Image]] = []
        index = FIRST_SCENE
        while len(asked) < count:
            rng = seeded("heldout", index)
            scene = sample_scene(rng)
            question = ask(scene, rng, kind)
            index += 1
            if question is not None:
                asked.append(question)
                pictures.append([picture(scene)])
        answers = answer(model, processor, [question.question for question in asked], pictures)
        good = sum(is_right(question, text) for question, text in zip(asked, answers, strict=True))
        report[f"question {kind}"] = good / count
    return report


def is_right(question: Question, text: str) -> bool:
    words = text.lower().replace(".", " ").replace(",", " ").split()
    if not question.key:
        return bool({"nothing", "no"} & set(words)) and not read_names(text) and read_sign(text) is None
    if question.kind == "text":
        return read_sign(text) == question.key
    if question.kind == "position":
        return [f"{row},{col}" for row, col in read_places(text)] == [question.key]
    if question.kind == "relation":
        return any(f"{name.colour} {name.shape}" == question.key for name in read_names(text)[:1])
    if question.kind == "shape":
        return [name.shape for name in read_names(text)[:1]] == [question.key]
    return question.key in words


def _clip_accuracy(model: Any, processor: Any, count: int, frames: int) -> dict[str, float]:
    clips = [sample_clip(seeded("heldout", FIRST_SCENE + index)) for index in range(count)]
    pictures = [[picture(scene) for scene in clip.frames(frames)] for clip in clips]
    captions = answer(model, processor, ["Describe the video."] * count, pictures)
    total = correct = kinds = 0
    for clip, text in zip(clips, captions, strict=True):
        truth, read = events_of(clip), read_events(text)
        total += len(truth)
        correct += sum(event in read for event in truth)
        kinds += (Counter(event.kind for event in truth) & Counter(event.kind for event in read)).total()
    return {f"video {frames} events": correct / total, f"video {frames} kinds": kinds / total}


def events_of(clip: Clip) -> list[ReadEvent]:
    """Returns a clip's events in the form that `read_events` reads from a correct caption."""
    events = []
    for event in clip.events:
        item = clip.items[event.index]
        detail: str | tuple[int, int] | None = None
        if event.kind == "recolour":
            detail = event.goal.colour
        elif event.kind in ("move", "appear"):
            detail = event.goal.cell
        events.append(ReadEvent(event.kind, item.colour, item.shape, detail))
    return events
