from __future__ import annotations

from pathlib import Path

import pytest

from mmspec.errors import UserError
from mmspec.vision.pictures import nouns
from mmspec.vision.pictures.nouns import Noun, article, classes, compound, general, noun


def test_the_nearest_kind_above_a_word_is_its_kind(small_packages: Path) -> None:
    assert noun("golden retriever") == Noun("golden retriever", "dog")
    assert noun("blue bicycle") == Noun("blue bicycle", "bicycle")
    assert noun("very old mountain bike") == Noun("very old mountain bike", "bicycle")
    assert noun("two dogs") == Noun("two dogs", "dog")
    assert noun("idea") is None
    assert noun("unheard-of") is None
    assert noun("") is None


def test_animals_go_before_food_and_persons_are_no_senses(small_packages: Path) -> None:
    assert noun("chicken") == Noun("chicken", "bird")
    assert noun("apple") == Noun("apple", "fruit")


def test_a_compound_is_a_word_as_a_whole(small_packages: Path) -> None:
    assert compound("mountain bike") == Noun("mountain bike", "bicycle")
    assert compound("anna bike") is None


def test_classes_have_their_shortest_common_names_and_kinds(small_packages: Path) -> None:
    assert classes() == (Noun("golden retriever", "dog"), Noun("apple", "fruit"), Noun("idea", "thing"))


def test_general_words() -> None:
    assert [general(kind) for kind in ("dog", "fruit", "church", "thing")] == ["animal", "food", "building", "thing"]
    known = {*nouns.KINDS.values()}
    assert set(nouns.GENERAL) <= known
    assert known >= nouns.ANIMALS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("apple", "an apple"),
        ("unicycle", "a unicycle"),
        ("umbrella", "an umbrella"),
        ("scissors", "scissors"),
        ("bus", "a bus"),
        ("compass", "a compass"),
        ("bread", "bread"),
        ("Airedale", "an Airedale"),
    ],
)
def test_articles(name: str, expected: str) -> None:
    assert article(name) == expected


def test_missing_packages_are_said_with_their_commands(
    small_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nouns, "WORDNET", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"nowhere/data\.noun: run apt-get install wordnet-base"):
        noun("dog")
    monkeypatch.setattr(nouns, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="files of timm: run pip install --no-deps timm"):
        classes()
