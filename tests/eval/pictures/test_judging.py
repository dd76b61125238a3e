"""Words in captions, against cases whose answer is plain to a reader."""

import pytest

from mmspec.eval.pictures.judging import claimed_things, coloured_shapes, mentioned, names
from mmspec.vision.scenes.captions import caption
from mmspec.vision.scenes.reading import read_objects
from mmspec.vision.scenes.scene import sample_scene, seeded


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("A car.", "car"),
        ("Two cars on a street", "car"),
        ("Some BUSES wait", "bus"),
        ("three mice and a man", "mouse"),
        ("a flock of sheep", "sheep"),
        ("ripe cherries", "cherry"),
        ("golden leaves", "leaf"),
        ("potatoes in a bowl", "potato"),
        ("A light-bulb", "light bulb"),
        ("light\nbulbs", "light bulb"),
        ("(dog)", "dog"),
        ("a black-and-white cat", "cat"),
        ("No clouds, a dog runs", "dog"),
        ("Half an orange on a table", "orange"),
        ("orange slices", "orange"),
        ("a kiwi and an orange.", "orange"),
        ("lemons and oranges", "orange"),
        ("a hot dog", "hot dog"),
    ],
)
def test_a_word_is_named(text, word):
    assert names(text, (word,))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a red carpet", "car"),
        ("she cares", "car"),
        ("a bush", "bus"),
        ("a butterfly", "butter"),
        ("a scar", "car"),
        ("pines", "pin"),
        ("a cat-like shape", "cat"),
        ("the dog's bed", "dog"),
        ("the dog\u2019s bed", "dog"),
        ("There are no dogs in the picture.", "dog"),
        ("It isn't a dog", "dog"),
        ("It isn\u2019t a dog", "dog"),
        ("a street without cars", "car"),
        ("a hot dog in a bun", "dog"),
        ("an orange square", "orange"),
        ("an orange cat", "orange"),
        ("an orange and white cat", "orange"),
        ("The background is orange.", "orange"),
        ('The word "DOG" is written at the top.', "dog"),
        ("It says \u201cdog\u201d.", "dog"),
        ("", "dog"),
    ],
)
def test_a_word_is_not_named(text, word):
    assert not names(text, (word,))


def test_words_are_listed_by_their_place():
    assert mentioned("A dog beside two cats and a car.", {"car", "cat", "dog", "tree"}) == ["dog", "cat", "car"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A red star and two BLUE  crosses.", ["red star", "blue crosses"]),
        ("red, green and yellow rings", ["yellow rings"]),
        ("a violet plus sign", ["violet plus sign"]),
        ("an orange ring-tailed cat", []),
        ("a red crossing, a blue starfish, a yellow sun", []),
        ("a red car under a star", []),
        ("no red star", []),
        ("a white square", []),  # no colour of an object in a scene
    ],
)
def test_coloured_shapes(text, found):
    assert coloured_shapes(text) == found


def test_every_caption_of_a_scene_has_its_coloured_shapes():
    for index in range(50):
        scene = sample_scene(seeded("heldout", index))
        text = caption(scene, seeded("heldout", index))
        assert len(coloured_shapes(text)) >= len(read_objects(text)) == len(scene.items)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The image shows a smooth gradient from blue to white.", []),
        ("A plain white background with no objects.", []),
        ("The picture is black.", []),
        ("Random coloured noise, a pattern of many small dots.", []),
        ('The text "A dog" in black letters on a white page.', []),
        ("A red square on a grey background.", []),
        ("A photo of a jellyfish in blue water.", ["jellyfish"]),
        ("A man and trees.", ["man", "tree"]),
        ("It is a large spotted animal standing in a field.", ["animal", "field"]),
        ("There are no dogs, only the sky.", ["sky"]),
        ("A large ring can be seen in the upper left, while a small star sits in the middle. Two of them are red.", []),
        ("There is a big green disc in the top row.", []),
    ],
)
def test_claimed_things(text, found):
    assert sorted(claimed_things(text, {"tree", "dog", "animal"})) == sorted(found)
