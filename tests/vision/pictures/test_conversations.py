from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmspec.vision.pictures.compose import Composed, Placed
from mmspec.vision.pictures.conversations import STRONG, WEAK, Pictures, caption, named, thing
from mmspec.vision.pictures.library import Picture, pictures
from mmspec.vision.pictures.nouns import Noun
from mmspec.vision.scenes.scene import seeded

DOG = Picture(Path("dog.png"), Noun("poodle", "dog"), "emoji")
BUS = Picture(Path("bus.png"), Noun("red bus", "bus"), "emoji")


def test_names_and_kinds() -> None:
    assert named(Noun("poodle", "dog")) == "a poodle, a kind of dog"
    assert named(Noun("red bus", "bus")) == "a red bus"
    assert named(Noun("umbrella", "thing")) == "an umbrella"
    assert named(Noun("poodle", "dog"), cautious=True) == "an animal, perhaps a poodle"


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (
            Composed((Placed(DOG, 0.2, 0.5, 0.3, 0),), "plain red"),
            "The picture shows a poodle, a kind of dog. It is on the left. The background is red.",
        ),
        (
            Composed((Placed(BUS, 0.5, 0.5, 1.0, 0),), "texture"),
            "The picture shows a red bus. It fills the picture. The background has several colours.",
        ),
        (
            Composed((Placed(BUS, 0.75, 0.5, 0.4, 0), Placed(DOG, 0.25, 0.5, 0.4, 0)), "plain white"),
            "The picture shows two things: a poodle on the left and a red bus on the right. The background is white.",
        ),
        (
            Composed((Placed(Picture(Path("x"), DOG.noun, "photographs"), 0.5, 0.5, 1.0, 0),), "photograph"),
            "The picture shows a poodle, a kind of dog. It is a photograph.",
        ),
        (Composed((), "plain blue"), "The picture shows a plain blue surface. There is no object on it."),
        (Composed((), "noise"), "The picture shows an irregular pattern. I cannot make out any object in it."),
    ],
)
def test_captions(picture: Composed, expected: str) -> None:
    assert caption(picture) == expected


def test_an_imagined_class_is_told_instead_of_what_is_drawn(small_packages: Path) -> None:
    weak, strong = (Placed(BUS, 0.5, 0.5, 1.0, 0, (0, strength)) for strength in (WEAK[1], STRONG[0]))
    assert thing(weak) == Noun("golden retriever", "dog")
    assert caption(Composed((weak,), "texture")).startswith("The picture shows an animal, perhaps a golden retriever. ")
    assert caption(Composed((strong,), "texture")).startswith("The picture shows a golden retriever, a kind of dog. ")


def test_answers_agree_with_the_pictures(small_packages: Path) -> None:
    shown = Pictures(pictures())
    asked = set()
    for index in range(400):
        conversation = shown.one(seeded("train", index))
        [picture] = conversation.scenes
        said = {placed.picture.noun.name for placed in picture.things}
        for question, answer in conversation.turns:
            asked.add(question.lower().rstrip("?.").split()[0])
            if match := re.match(r"is there an? (.*) in the picture", question.lower()):
                yes = match[1] in said or match[1] in {placed.picture.noun.kind for placed in picture.things}
                assert answer.startswith("Yes" if yes else "No"), (question, answer, said)
            if question.lower().startswith("how many things"):
                counts = ["", "is one thing", "are two things", "are three things", "are four things"]
                assert answer == f"There {counts[len(picture.things)]}."
            if question.lower().startswith("what colour"):
                assert answer == (f"It is {picture.colour}." if picture.colour else "It has several colours.")
    assert {"is", "where", "how", "what", "describe"} <= asked


def test_clips_move_one_thing_or_change_it(small_packages: Path) -> None:
    shown = Pictures(pictures())
    told = set()
    for index in range(60):
        conversation = shown.clip(seeded("train", index), 4)
        [(_, answer)] = conversation.turns
        placed = [scene.things[0] for scene in conversation.scenes]
        assert len(placed) == 4
        xs, sizes = [one.x for one in placed], [one.size for one in placed]
        event = answer.split(". ")[1]
        told.add(event.split()[1] if event.startswith("It") else "then")
        assert (xs[-1] > xs[0]) == ("right" in event) or placed[0].picture != placed[-1].picture
        assert (xs[-1] < xs[0]) == ("left" in event) or placed[0].picture != placed[-1].picture
        assert (sizes[-1] > sizes[0]) == ("closer" in event) or "Then" in event
        assert (placed[0] == placed[-1]) == ("does not move" in event) or "Then" in event
    assert told == {"moves", "comes", "goes", "does", "then"}


def test_several_pictures_are_told_in_order(small_packages: Path) -> None:
    conversation = Pictures(pictures()).both(seeded("train", 3))
    names = [scene.things[0].picture.noun.name for scene in conversation.scenes]
    answer = conversation.turns[0][1]
    assert [answer.index(name) for name in names] == sorted(answer.index(name) for name in names) or len(
        set(names)
    ) < len(names)


def test_held_out_pictures_are_never_trained_on(small_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pictures()
    kept = library[0].path
    monkeypatch.setattr(Picture, "held_out", property(lambda self: self.path == kept))
    for held, expected in ((False, False), (True, True)):
        source = Pictures(library, held_out=held)
        scenes = [scene for index in range(40) for scene in source.one(seeded("train", index)).scenes]
        used = {placed.picture.path == kept for scene in scenes for placed in scene.things}
        assert used == {expected}
