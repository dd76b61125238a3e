"""Captions, answers and descriptions are true, complete and varied."""

from __future__ import annotations

import re

import pytest

from mmspec.vision.scenes.captions import brief, caption, listing
from mmspec.vision.scenes.clips import ask_clip, describe_clip, sample_clip
from mmspec.vision.scenes.conversations import (
    describe_prompt,
    invention,
    one_image,
    questions_only,
    several_images,
    small_talk,
    video,
    words_only,
)
from mmspec.vision.scenes.questions import KINDS, Question, ask
from mmspec.vision.scenes.reading import (
    ReadEvent,
    clauses,
    read_events,
    read_names,
    read_objects,
    read_places,
    read_sign,
)
from mmspec.vision.scenes.scene import Item, Scene, sample_scene, seeded
from mmspec.vision.scenes.wording import scene_habit
from mmspec.vision.training.accuracy import events_of, is_right

NUMBER = {word: value for value, word in enumerate(["zero", "one", "two", "three", "four", "five"])}
ALIASES = {"violet": "purple", "turquoise": "cyan", "disc": "circle", "hoop": "ring", "plus sign": "cross"}
SIDES = {"left": (0, -1), "right": (0, 1), "above": (-1, 0), "below": (1, 0)}


def singular(noun: str) -> str:
    noun = noun.removesuffix("es") if noun.endswith("sses") else noun.removesuffix("s") if noun != "cross" else noun
    return ALIASES.get(noun, noun)


def holds(scene: Scene, sentence: str) -> bool:
    """Whether a sentence makes statements and all of them are true of the scene."""
    stated = []
    if '"' in sentence:
        sign = scene.sign
        row = 0 if "top" in sentence else 2 if "bottom" in sentence else 1
        wants = re.search(r"\b(word|number)\b", sentence.split('"')[0])
        fits = wants is None or sign is None or (wants.group(1) == "number") == sign.text.isdigit()
        return sign is not None and read_sign(sentence) == sign.text and sign.row == row and fits
    for mention in read_objects(sentence):
        found = [i for i in scene.items if (i.colour, i.shape, i.cell) == (mention.colour, mention.shape, mention.cell)]
        stated.append(len(found) == 1 and mention.size in (None, found[0].size))
    if match := re.search(r"\b(white|grey|black|brown)\b", sentence):
        stated.append(match.group(1) == scene.background)
    if match := re.search(r"\b(\w+) (?:object|shape|figure)s?\b", sentence):
        stated.append(NUMBER[match.group(1).lower()] == len(scene.items))
    if match := re.search(r"(\w+) of them are (.+)$", sentence):
        what = singular(match.group(2)) if match.group(2) not in ALIASES else ALIASES[match.group(2)]
        stated.append(NUMBER[match.group(1).lower()] == sum(what in (i.colour, i.shape) for i in scene.items))
    if match := re.search(r"Nothing here is (\w+)$|^No (\w+) is in the picture", sentence):
        what = match.group(1) or match.group(2)
        stated.append(all(what not in (i.colour, i.shape) for i in scene.items))
    if match := re.search(r"is (?:to the |just |directly )?(left of|right of|above|below) the", sentence):
        first, second = (the(scene, name.colour, name.shape) for name in read_names(sentence))
        step = SIDES[match.group(1).split()[0]]
        stated.append((first.cell[0] - second.cell[0], first.cell[1] - second.cell[1]) == step)
    return bool(stated) and all(stated)


def the(scene: Scene, colour: str, shape: str) -> Item:
    (item,) = [item for item in scene.items if (item.colour, item.shape) == (colour, shape)]
    return item


def test_captions_are_true_complete_and_two_to_six_sentences() -> None:
    for index in range(1500):
        rng = seeded("train", index)
        scene = sample_scene(rng)
        order = ("rows", "columns", "reversed")[index % 3]
        text = caption(scene, rng, order)
        sentences = clauses(text)
        assert 2 <= len(sentences) <= 6, text
        false = [sentence for sentence in sentences if not holds(scene, sentence)]
        assert not false, (false, scene)
        cells = [item.cell for item in scene.items]
        wanted = {"rows": cells, "columns": sorted(cells, key=lambda cell: cell[::-1]), "reversed": cells[::-1]}
        assert [mention.cell for mention in read_objects(text)] == wanted[order]
        assert read_sign(text) == (scene.sign.text if scene.sign else None)


def test_the_checker_detects_false_statements() -> None:
    rng = seeded("train", 6)
    scene = Scene("grey", (Item("star", "red", "small", 0, 1, 15), Item("ring", "blue", "large", 0, 2, 26)))
    lies = [
        "A blue star is at the top centre",
        "A red star is in the top left corner",
        "A large red star is at the top centre",
        "The background is white",
        "There are three objects in total",
        "Two of them are red",
        "Nothing here is blue",
        "No ring is in the picture",
        "The red star is to the right of the blue ring",
        "The red star is above the blue ring",
        'The word "CAT" is written at the top',
        "It is a nice day",
    ]
    assert all(not holds(scene, lie) for lie in lies)
    assert all(holds(scene, sentence) for sentence in clauses(caption(scene, rng)))


def test_lists_and_briefs_are_true() -> None:
    for index in range(300):
        rng = seeded("train", index)
        scene = sample_scene(rng)
        assert all(holds(scene, part) for part in clauses(listing(scene)))
        text = brief(scene, rng)
        assert scene.background in text
        assert read_sign(text) == (scene.sign.text if scene.sign else None)
        for name in read_names(text):
            the_ones = [item for item in scene.items if (item.colour, item.shape) == (name.colour, name.shape)]
            assert the_ones


def test_captions_vary() -> None:
    scene = sample_scene(seeded("train", 40))
    again = {caption(scene, seeded("train", index)) for index in range(500)}
    assert len(again) > 400
    skeletons = set()
    for index in range(500):
        rng = seeded("train", index)
        text = caption(sample_scene(rng), rng)
        text = re.sub(r'"[^"]*"', "SIGN", text)
        for name in read_names(text):
            text = re.sub(rf"\b\w+ \w+ {name.shape}\b", "OBJECT", text)
        skeletons.add(text)
    assert len(skeletons) > 450
    assert len({scene_habit(sample_scene(seeded("train", index))) for index in range(100)}) > 6


@pytest.mark.parametrize("kind", KINDS)
def test_answers_contain_their_key_and_are_true(kind: str) -> None:
    asked = 0
    for index in range(400):
        rng = seeded("train", index)
        scene = sample_scene(rng)
        question = ask(scene, rng, kind)
        if question is None:
            continue
        asked += 1
        assert question.kind == kind
        assert is_right(question, question.answer), question
        assert is_true(scene, question), (question, scene)
    assert asked > 80


def is_true(scene: Scene, question: Question) -> bool:
    """Whether the key answers the question, derived from the question's words."""
    key, text = question.key, question.question
    named = read_names(text)
    if question.kind == "background":
        return key == scene.background
    if question.kind == "text":
        return key == (scene.sign.text if scene.sign else "")
    if question.kind in ("position", "size"):
        item = the(scene, named[0].colour, named[0].shape)
        return key == (item.size if question.kind == "size" else f"{item.cell[0]},{item.cell[1]}")
    if question.kind == "yes/no":
        there = any((item.colour, item.shape) == (named[0].colour, named[0].shape) for item in scene.items)
        return key == ("yes" if there else "no")
    if question.kind == "shape":
        (cell,) = read_places(text)
        return [item.shape for item in scene.items if item.cell == cell] == ([key] if key else [])
    if question.kind == "colour":
        return [i.colour for i in scene.items if re.search(rf"\b{i.shape}\b", text)] == [key]
    if question.kind == "relation":
        base = the(scene, named[0].colour, named[0].shape)
        side = next(step for word, step in SIDES.items() if re.search(rf"\b{word}\b", text))
        cell = (base.cell[0] + side[0], base.cell[1] + side[1])
        return [f"{item.colour} {item.shape}" for item in scene.items if item.cell == cell] == [key]
    assert question.kind == "count"
    what = re.search(r"How many (\w+)", text)
    assert what
    word = what.group(1)
    if word in ("objects", "shapes"):
        return NUMBER[key] == len(scene.items)
    return NUMBER[key] == sum(singular(word) in (item.shape, item.colour) for item in scene.items)


def test_clip_descriptions_state_exactly_the_events() -> None:
    for index in range(600):
        rng = seeded("train", index)
        clip = sample_clip(rng)
        text = describe_clip(clip, rng)
        assert 2 <= len(clauses(text)) <= 5, text
        assert sorted(map(str, read_events(text))) == sorted(map(str, events_of(clip))), text
        opening = read_objects(clauses(text)[0])
        start = clip.at(0.0).items
        assert {(m.colour, m.shape, m.cell) for m in opening} == {(i.colour, i.shape, i.cell) for i in start}, text
        for match in re.finditer(r"background is (\w+)", text):
            assert match.group(1) == clip.background
        for match in re.finditer(r"The (\w+ [\w ]+?) (?:stays|does not change|remains)", text):
            (still,) = read_names("the " + match.group(1))
            assert (still.colour, still.shape) not in {(e.colour, e.shape) for e in events_of(clip)}
        for way in re.finditer(r"The [^.]*? (?:moves|slides|glides) (to the left|to the right|up|down)", text, re.I):
            assert way_of(clip.items, events_of(clip), way.group(0)) == way.group(1), text


def way_of(items: tuple[Item, ...], truth: list[ReadEvent], clause: str) -> str:
    """The direction of the move in a clause, from the object's initial and final cells."""
    name = read_names(clause)[0]
    item = next(item for item in items if (item.colour, item.shape) == (name.colour, name.shape))
    goal = next(e.detail for e in truth if e.kind == "move" and (e.colour, e.shape) == (name.colour, name.shape))
    assert isinstance(goal, tuple)
    if goal[0] != item.cell[0]:
        return "down" if goal[0] > item.cell[0] else "up"
    return "to the right" if goal[1] > item.cell[1] else "to the left"


def test_clip_questions_have_true_answers() -> None:
    for index in range(300):
        rng = seeded("train", index)
        clip = sample_clip(rng)
        question, answer = ask_clip(clip, rng)
        if question.startswith("How many"):
            number = next(word for word in NUMBER if re.search(rf"\b{word}\b", answer))
            assert NUMBER[number] == len(clip.at(1.0).items)
            continue
        assert set(map(str, read_events(answer))) <= set(map(str, events_of(clip))), (question, answer)
        assert read_events(answer)


def test_conversations_fit_their_images() -> None:
    for index in range(100):
        assert len(one_image(seeded("train", index)).scenes) == 1
        assert 2 <= len(several_images(seeded("train", index)).scenes) <= 3
        assert len(video(seeded("train", index), 8).scenes) == 8
        assert not words_only(seeded("train", index)).scenes
        assert len(questions_only(seeded("train", index)).scenes) == 1
        for example in (one_image(seeded("train", index)), words_only(seeded("train", index))):
            assert example.turns
            assert all(user and answer for user, answer in example.turns)


def test_several_images_are_described_in_order() -> None:
    for index in range(100):
        example = several_images(seeded("train", index))
        for user, answer in example.turns:
            if not answer.startswith("The first image"):
                continue
            parts = re.split(r"The (?:first|second|third) image shows ", answer)[1:]
            assert len(parts) == len(example.scenes), user
            for scene, part in zip(example.scenes, parts, strict=True):
                assert all(holds(scene, clause) for clause in clauses(part))


def test_prompts_and_small_talk_vary() -> None:
    prompts = {describe_prompt(seeded("train", index), of_video=index % 2 == 0) for index in range(1000)}
    assert len(prompts) > 250
    assert len({small_talk(seeded("train", index)) for index in range(400)}) > 30
    assert len({invention(seeded("train", index))[1] for index in range(100)}) == 100
