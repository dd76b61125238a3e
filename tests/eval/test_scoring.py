"""Scores against values worked out by hand."""

import sys

import pytest

from eval.prompts import Conversation
from eval.sample import Sample
from eval.scoring import captions, choice, drawn, words, yes_no
from eval.tasks import TASKS
from mmspec.errors import UserError
from vision.scenes.captions import caption
from vision.scenes.clips import describe_clip
from vision.scenes.scene import seeded


def sample(*accepted, category="", about=None):
    return Sample("1", Conversation(("?",)), category, (accepted,), about)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Two dogs.", "2 dogs"),
        ("It's 1,000.5 metres!", "its 1000.5 metres"),
        ("well-known", "well known"),
        ("yes.", "yes"),
        ("an U.S. flag", "us flag"),
    ],
)
def test_words_are_made_alike(text, normal):
    assert words.plain(text).replace("u s", "us") == normal


@pytest.mark.parametrize(("agreeing", "score"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_accuracy_counts_humans(agreeing, score):
    humans = ["cat"] * agreeing + [f"dog {k}" for k in range(10 - agreeing)]
    assert words.vqa_accuracy([(sample(*humans), ["A cat."])]) == {"VQA accuracy": pytest.approx(score)}


@pytest.mark.parametrize(
    ("answer", "wanted", "score"),
    [("104", "100", 1), ("106", "100", 0), ("5%", "0.05", 1), ("Blue.", "blue", 1), ("7", "seven", 0), ("0", "0", 1)],
)
def test_relaxed_accuracy(answer, wanted, score):
    assert words.relaxed([(sample(wanted), [answer])]) == {"relaxed accuracy": score}


def test_anls_is_one_minus_the_edits_up_to_one_half():
    assert words.anls([(sample("hello"), ["hallo"])])["ANLS"] == pytest.approx(0.8)
    assert words.anls([(sample("hello"), ["hxxxx"])])["ANLS"] == 0
    assert words._edits("kitten", "sitting") == 3
    assert words.anls([(sample("a b"), ["A  B"]), (sample("x"), ["y"])])["ANLS"] == 0.5


def test_overlap_and_numbers():
    assert words.overlap([(sample("red big dog runs"), ["a red dog runs fast"])])["ROUGE-L"] == pytest.approx(2 * 3 / 8)
    assert (
        words.last_number([(sample("1,234"), ["First 5, then 1234."]), (sample("3"), ["3 of 4"])])["exact match"] == 0.5
    )
    assert (
        words.contained([(sample("red"), ["It is red."]), (sample("red"), ["reddish"])])["reference in answer"] == 0.5
    )


@pytest.mark.parametrize(
    ("answer", "letter"),
    [("B", "B"), ("(b) no", None), ("(B)", "B"), ("B. moon", "B"), ("The answer is A", "A"), ("the moon", "B"),
     ("sun and moon", None), ("E", None)],
)  # fmt: skip
def test_choices_are_read(answer, letter):
    assert choice.chosen(answer, ["sun", "moon"]) == letter


def test_pope_scores_yes():
    truth = ["yes", "yes", "no", "no"]
    said = ["Yes.", "no", "yes", "perhaps"]
    figures = yes_no.pope([(sample(t), [s]) for t, s in zip(truth, said, strict=True)])
    assert figures == {"F1": 0.5, "accuracy": 0.5, "precision": 0.5, "recall": 0.5, "yes": 0.5}


def test_mme_counts_questions_and_whole_images():
    pairs = [("a", "yes", "yes"), ("a", "no", "yes"), ("b", "yes", "yes"), ("b", "no", "no")]
    answered = [(sample(truth, category="count", about=image), [said]) for image, truth, said in pairs]
    assert yes_no.mme(answered) == {"score": pytest.approx(75 + 50), "accuracy": 0.75}


def test_cider_prefers_the_right_caption(monkeypatch):
    pytest.importorskip("pycocoevalcap")
    one, two = sample("a dog runs on grass", "the dog runs"), sample("two cats sleep on a bed", "cats asleep")
    right = captions.cider([(one, ["A dog runs on grass."]), (two, ["Two cats sleep on a bed."])])["CIDEr"]
    wrong = captions.cider([(one, ["Two cats sleep on a bed."]), (two, ["A dog runs on grass."])])["CIDEr"]
    assert right > 1 > wrong


def test_cider_names_the_package_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocoevalcap.cider.cider", None)
    with pytest.raises(UserError, match=r"CIDEr needs the package pycocoevalcap"):
        captions.cider([(sample("a"), ["a"])])


def test_drawn_answers_are_judged_by_what_was_drawn():
    scenes = TASKS["scenes-captions"].samples(None, 12)
    told = [(one, [caption(one.about, seeded("train", k))]) for k, one in enumerate(scenes)]
    assert set(drawn.objects(told).values()) == {1.0}
    shifted = [(one, other[1]) for one, other in zip(scenes, told[1:] + told[:1], strict=True)]
    assert drawn.objects(shifted)["objects right"] < 0.3
    clips = TASKS["scenes-video"].samples(None, 6, frames=2)
    assert drawn.events([(one, [describe_clip(one.about, seeded("train", 1))]) for one in clips]) == {
        "events right": 1.0
    }
    turns = TASKS["scenes-turns"].samples(None, 4)
    right = [(one, ["", *(question.answer for question in one.about[1:])]) for one in turns]
    assert drawn.questions(right) == {"accuracy": 1.0}
    assert drawn.questions([(one, ["", "Perhaps.", "Perhaps."]) for one in turns]) == {"accuracy": 0.0}
    texts = TASKS["texts"].samples(None, 5)
    assert drawn.generated([(one, [one.about.answer]) for one in texts]) == {"accuracy": 1.0}
    charts = TASKS["scenes-charts"].samples(None, 5)
    assert drawn.colour([(one, [f"It is {one.references[0][0]}."]) for one in charts]) == {"accuracy": 1.0}
    assert drawn.colour([(one, ["It is red, blue, green, cyan and yellow."]) for one in charts]) == {"accuracy": 0.0}
