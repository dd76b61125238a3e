"""Scorers, against values computed by hand."""

import sys
import types

import pytest

from mmspec.errors import UserError
from mmspec.eval.harness.prompts import Questions
from mmspec.eval.suite import scoring
from mmspec.eval.suite.scoring import Sample


def sample(*accepted, category="", metadata=None):
    return Sample("1", Questions(("?",)), category, (accepted,), metadata)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Two dogs.", "2 dogs"),
        ("It's 1,000.5 metres!", "its 1000.5 metres"),
        ("well-known", "well known"),
        ("yes.", "yes"),
        ("an U.S. flag", "us flag"),
        ("3.14 is pi. So.", "3.14 is pi so"),
    ],
)
def test_normalisation(text, normal):
    assert scoring.normalise(text) == normal


@pytest.mark.parametrize(("agreeing", "score"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_accuracy_by_agreeing_annotators(agreeing, score):
    humans = ["cat"] * agreeing + [f"dog {k}" for k in range(10 - agreeing)]
    assert scoring.vqa_accuracy([(sample(*humans), ["A cat."])]) == {"VQA accuracy": pytest.approx(score)}


@pytest.mark.parametrize(
    ("answer", "wanted", "score"),
    [("104", "100", 1), ("106", "100", 0), ("5%", "0.05", 1), ("Blue.", "blue", 1), ("7", "seven", 0), ("0", "0", 1)],
)
def test_relaxed_accuracy(answer, wanted, score):
    assert scoring.relaxed([(sample(wanted), [answer])]) == {"relaxed accuracy": score}


def test_anls_is_zero_below_one_half():
    assert scoring.anls([(sample("hello"), ["hallo"])])["ANLS"] == pytest.approx(0.8)
    assert scoring.anls([(sample("hello"), ["hxxxx"])])["ANLS"] == 0
    assert scoring._edit_distance("kitten", "sitting") == 3
    assert scoring.anls([(sample("a b"), ["A  B"]), (sample("x"), ["y"])])["ANLS"] == 0.5


def test_rouge_l_numbers_and_containment():
    rouge = scoring.rouge_l([(sample("red big dog runs"), ["a red dog runs fast"])])
    assert rouge == {"ROUGE-L": pytest.approx(2 * 3 / 8)}
    numbers = [(sample("1,234"), ["First 5, then 1234."]), (sample("3"), ["3 of 4"])]
    assert scoring.last_number(numbers) == {"exact match": 0.5}
    texts = [(sample("red"), ["It is red."]), (sample("red"), ["reddish"])]
    assert scoring.contained(texts) == {"reference in answer": 0.5}


@pytest.mark.parametrize(
    ("answer", "letter"),
    [("B", "B"), ("(b) no", None), ("(B)", "B"), ("B. moon", "B"), ("The answer is A", "A"), ("the moon", "B"),
     ("sun and moon", None), ("E", None), ("Either (A) or (B)", None), ("It is (A), not (B).", None)],
)  # fmt: skip
def test_chosen_letter(answer, letter):
    assert scoring.chosen_letter(answer, ["sun", "moon"]) == letter


def test_pope_counts_yes_as_positive():
    truth = ["yes", "yes", "no", "no"]
    said = ["Yes.", "no", "yes", "perhaps"]
    figures = scoring.pope([(sample(t), [s]) for t, s in zip(truth, said, strict=True)])
    assert figures == {"F1": 0.5, "accuracy": 0.5, "precision": 0.5, "recall": 0.5, "yes": 0.5}


def test_mme_counts_questions_and_images():
    pairs = [("a", "yes", "yes"), ("a", "no", "yes"), ("b", "yes", "yes"), ("b", "no", "no")]
    answered = [(sample(truth, category="count", metadata=image), [said]) for image, truth, said in pairs]
    assert scoring.mme(answered) == {"score": pytest.approx(75 + 50), "accuracy": 0.75}


def test_cider_gets_all_references_as_words(monkeypatch):
    class Cider:
        def compute_score(self, wanted, said):
            assert wanted == {0: ["a dogs running on grass", "one dog"], 1: ["a cat"]}
            assert said == {0: ["a dog runs"], 1: ["cat"]}
            return 0.5, None

    monkeypatch.setitem(sys.modules, "pycocoevalcap.cider.cider", types.SimpleNamespace(Cider=Cider))
    for name in ("pycocoevalcap", "pycocoevalcap.cider"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    answered = [(sample("A dog's running, on grass!", "one dog"), ["A dog runs."]), (sample("a cat"), ["Cat"])]
    assert scoring.cider(answered) == {"CIDEr": 0.5}


def test_cider_prefers_the_right_caption():
    pytest.importorskip("pycocoevalcap")
    one, two = sample("a dog runs on grass", "the dog runs"), sample("two cats sleep on a bed", "cats asleep")
    right = scoring.cider([(one, ["A dog runs on grass."]), (two, ["Two cats sleep on a bed."])])["CIDEr"]
    wrong = scoring.cider([(one, ["Two cats sleep on a bed."]), (two, ["A dog runs on grass."])])["CIDEr"]
    assert right > 1 > wrong


def test_cider_names_the_package_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocoevalcap.cider.cider", None)
    with pytest.raises(UserError, match=r"CIDEr needs the package pycocoevalcap"):
        scoring.cider([(sample("a"), ["a"])])


def test_shares_of_what_is_mentioned():
    parts = (("red circle", "red disc"), ("blue star",))
    answered = [
        (sample(metadata=parts), ["A large red disc and a blue star."]),
        (sample(metadata=parts), ["A red circle, a blue ring and a star."]),
        (sample(metadata=()), ["Nothing to mention."]),
    ]
    assert scoring.mentioned(answered) == {"mentioned": 0.75, "all mentioned": 0.5}


def test_edits_are_compared_as_syntax_trees():
    """Layout, words of docstrings and types do not matter; a change that was not asked for does."""
    plain = "def f(x):\n    '''Doc.'''\n    return [y for y in x]"
    for answer, edited, parses in (
        (f"Here:\n\n```python\n{plain}\n```\nDone.", 1, 1),
        ('```\nimport re\n\ndef f( x ):  # new\n    """Other.\n\n    Words."""\n    return [y for y in x]\n```', 1, 1),
        (plain, 0, 0),  # no fenced block
        ("```python\n" + plain, 0, 0),  # cut
        ("```python\n" + plain.replace("    '''Doc.'''\n", "") + "\n```", 0, 1),
        ("```python\n" + plain.replace("(x)", "(x: list)") + "\n```", 0, 1),
        ("```python\n" + plain.replace("in x]", "in x if y]") + "\n```", 0, 1),
        ("```python\ndef f(x:\n```", 0, 0),
        ("```python\nx = 1\n```", 0, 0),  # no function
        ("```python\ndef f(x):\n    return '\\d'\n```", 0, 1),  # Python warns of such strings
    ):
        assert scoring.edited([(sample(plain), [answer])]) == {"edited": edited, "parses": parses}, answer
    typed = "def f(x: int, *rest: str) -> dict[str, int]:\n    return x"
    keywords = "def f(x, *, k: int = 0):\n    y: int = x\n    return y + k"
    assert scoring.edited([(sample(keywords), [f"```python\n{keywords.replace('int', 'float')}\n```"])])["edited"] == 1
    for answer, edited in ((typed.replace("dict[str, int]", "Mapping"), 1), (typed.replace(": str", ""), 0)):
        assert scoring.edited([(sample("def f(): pass", typed), [f"```py\n{answer}\n```"])])["edited"] == edited
