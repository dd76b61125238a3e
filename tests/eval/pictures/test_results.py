"""Results of captions, counted by hand."""

import pytest

from mmspec.eval.harness.intervals import wilson_interval
from mmspec.eval.pictures.judging import judge, judge_blank
from mmspec.eval.pictures.picture import Picture

PICTURES = [
    Picture("cat", None, ("cat",), ("animal",), "animal"),
    Picture("bee", None, ("bee",), ("animal", "flower"), "animal"),
    Picture("car", None, ("car",), ("vehicle",), "vehicle"),
    Picture("rose", None, ("rose",), ("flower",), "plant"),
]
CAPTIONS = ["A car beside a cat.", "An animal on a flower.", "A red star.", "A flower."]


def test_captions_are_judged():
    result = judge(PICTURES, CAPTIONS)
    assert [(row["named"], row["named or its kind"], row["coloured shapes"]) for row in result["pictures"]] == [
        (True, True, []),
        (False, True, []),
        (False, False, ["red star"]),
        (False, True, []),
    ]
    assert {name: total["count"] for name, total in result["totals"].items()} == {
        "named": 1,
        "named or its kind": 3,
        "coloured shapes": 1,
    }
    assert result["totals"]["named"] == {"count": 1, "of": 4, **wilson_interval(1, 4)}
    assert result["groups"]["animal"] == {"pictures": 2, "named": 1, "named or its kind": 2, "coloured shapes": 0}
    # A flower is the bee's own group where the picture is of a bee, and the rose's.
    assert result["confusion"] == {"animal": {"vehicle": 1, "animal": 1}, "vehicle": {"none": 1}, "plant": {"plant": 1}}
    with pytest.raises(ValueError, match="shorter"):
        judge(PICTURES, CAPTIONS[:3])


def test_captions_of_blank_pictures_are_judged():
    blank = [Picture("a", None, group="noise"), Picture("b", None, group="noise"), Picture("c", None, group="text")]
    result = judge_blank(blank, ["Noise.", "A red star and cats.", 'The word "cat".'], ["cat"])
    assert [row["things"] for row in result["pictures"]] == [[], ["cat"], []]
    assert {name: total["count"] for name, total in result["totals"].items()} == {"coloured shapes": 1, "things": 1}
    assert result["groups"] == {
        "noise": {"pictures": 2, "coloured shapes": 1, "things": 1},
        "text": {"pictures": 1, "coloured shapes": 0, "things": 0},
    }
