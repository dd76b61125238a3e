"""Scorers, against values computed by hand."""

import sys
from types import SimpleNamespace

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
        ("an U.S. flag", "us flag"),
        ("3.14 is pi. So.", "3.14 is pi so"),
    ],
)
def test_normalisation(text, normal):
    assert scoring.normalise(text) == normal


def annotators(agreeing):
    return sample(*["cat"] * agreeing, *(f"dog {k}" for k in range(10 - agreeing)))


YES = [("yes", "Yes."), ("yes", "no"), ("no", "yes"), ("no", "perhaps")]
MME = [("a", "yes", "yes"), ("a", "no", "yes"), ("b", "yes", "yes"), ("b", "no", "no")]
PARTS = (("red circle", "red disc"), ("blue star",))


@pytest.mark.parametrize(
    ("scorer", "answered", "scores"),
    [
        *((scoring.vqa_accuracy, [(annotators(k), "A cat.")], {"VQA accuracy": score})
          for k, score in ((0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0))),
        *((scoring.relaxed, [(sample(wanted), answer)], {"relaxed accuracy": score})
          for answer, wanted, score in (("104", "100", 1), ("106", "100", 0), ("5%", "0.05", 1), ("Blue.", "blue", 1),
                                        ("7", "seven", 0), ("0", "0", 1))),
        (scoring.anls, [(sample("hello"), "hallo")], {"ANLS": 0.8}),
        (scoring.anls, [(sample("hello"), "hxxxx")], {"ANLS": 0}),  # it is zero below one half
        (scoring.anls, [(sample("kitten"), "sitting")], {"ANLS": 4 / 7}),
        (scoring.anls, [(sample("a b"), "A  B"), (sample("x"), "y")], {"ANLS": 0.5}),
        (scoring.anls, [(sample("xyz", "ac", "z"), "ab")], {"ANLS": 0.5}),  # of the nearest reference
        (scoring.anls, [(sample(""), ""), (sample("abc"), "ab")], {"ANLS": 5 / 6}),
        (scoring.rouge_l, [(sample("blue", "red dog", "cat"), "a red cat")], {"ROUGE-L": 2 * 1 / 3}),
        (scoring.rouge_l, [(sample("red", "a"), "The."), (sample("a red"), "red")], {"ROUGE-L": 0.5}),
        (scoring.rouge_l, [(sample("red big dog runs"), "a red dog runs fast")], {"ROUGE-L": 2 * 3 / 8}),
        *((scoring.last_number, [(sample(wanted), answer)], {"exact match": score})
          for answer, wanted, score in (("First 5, then 1234.", "1,234", 1), ("3 or 4", "3", 0), ("None.", "3", 0),
                                        ("7 less, so -2.50", "-2.5", 1), ("It is -3.", "3", 0))),
        (scoring.contained, [(sample("red"), "It is red."), (sample("red"), "reddish")], {"reference in answer": 0.5}),
        (scoring.pope, [(sample(truth), said) for truth, said in YES],  # yes is positive
         {"F1": 0.5, "accuracy": 0.5, "precision": 0.5, "recall": 0.5, "yes": 0.5}),
        (scoring.mme, [(sample(truth, category="count", metadata=image), said) for image, truth, said in MME],
         {"score": 75 + 50, "accuracy": 0.75}),  # of questions, and of images
        (scoring.mentioned, [(sample(metadata=PARTS), "A large red disc and a blue star."),
                             (sample(metadata=PARTS), "A red circle, a blue ring and a star."),
                             (sample(metadata=()), "Nothing to mention.")], {"mentioned": 0.75, "all mentioned": 0.5}),
    ],
)  # fmt: skip
def test_scores(scorer, answered, scores):
    assert scorer([(one, [answer]) for one, answer in answered]) == pytest.approx(scores)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [("B", "B"), ("(b) no", None), ("(B)", "B"), ("B. moon", "B"), ("The answer is A", "A"), ("the moon", "B"),
     ("sun and moon", None), ("E", None), ("Either (A) or (B)", None), ("It is (A), not (B).", None)],
)  # fmt: skip
def test_chosen_letter(answer, letter):
    assert scoring.chosen_letter(answer, ["sun", "moon"]) == letter


def test_cider_gets_all_references_as_words(monkeypatch):
    class Cider:
        def compute_score(self, wanted, said):
            assert wanted == {0: ["a dogs running on grass", "one dog"], 1: ["a cat"]}
            assert said == {0: ["a dog runs"], 1: ["cat"]}
            return 0.5, None

    monkeypatch.setitem(sys.modules, "pycocoevalcap.cider.cider", SimpleNamespace(Cider=Cider))
    answered = [(sample("A dog's running, on grass!", "one dog"), ["A dog runs."]), (sample("a cat"), ["Cat", "no"])]
    assert scoring.cider(answered) == {"CIDEr": 0.5}
    monkeypatch.setitem(sys.modules, "pycocoevalcap.cider.cider", None)
    with pytest.raises(UserError, match=r"CIDEr needs the package pycocoevalcap"):
        scoring.cider(answered)


def test_cider_prefers_the_right_caption():
    pytest.importorskip("pycocoevalcap")
    one, two = sample("a dog runs on grass", "the dog runs"), sample("two cats sleep on a bed", "cats asleep")
    right = scoring.cider([(one, ["A dog runs on grass."]), (two, ["Two cats sleep on a bed."])])["CIDEr"]
    wrong = scoring.cider([(one, ["Two cats sleep on a bed."]), (two, ["A dog runs on grass."])])["CIDEr"]
    assert right > 1 > wrong


DOCUMENTED = "def f(x):\n    '''Doc.'''\n    return [y for y in x]"
LAID_OUT = 'import re\n\ndef f( x ):  # new\n    """Other.\n\n    Words."""\n    return [y for y in x]'
TYPED = "def f(x: int, *rest: str) -> dict[str, int]:\n    return x"
KEYWORDS = "def f(x, *, k: int = 0):\n    y: int = x\n    return y + k"


def fenced(code, language="python"):
    return f"```{language}\n{code}\n```"


@pytest.mark.parametrize(
    ("expected", "answer", "edited", "parses"),
    [
        (DOCUMENTED, f"Here:\n\n{fenced(DOCUMENTED)}\nDone.", 1, 1),
        (DOCUMENTED, fenced(LAID_OUT), 1, 1),
        (DOCUMENTED, DOCUMENTED, 0, 0),  # no fenced block
        (DOCUMENTED, "```python\n" + DOCUMENTED, 0, 0),  # cut
        (DOCUMENTED, fenced(DOCUMENTED.replace("    '''Doc.'''\n", "")), 0, 1),
        (DOCUMENTED, fenced(DOCUMENTED.replace("(x)", "(x: list)")), 0, 1),
        (DOCUMENTED, fenced(DOCUMENTED.replace("in x]", "in x if y]")), 0, 1),
        (DOCUMENTED, fenced("def f(x:"), 0, 0),
        (DOCUMENTED, fenced("x = 1"), 0, 0),  # no function
        (DOCUMENTED, fenced("def f(x):\n    return '\\d'"), 0, 1),  # Python warns of such strings
        (KEYWORDS, fenced(KEYWORDS.replace("int", "float"), "py"), 1, 1),
        (TYPED, fenced(TYPED.replace("dict[str, int]", "Mapping"), ""), 1, 1),
        (TYPED, fenced(TYPED.replace(": str", "")), 0, 1),
    ],
)  # fmt: skip
def test_edits_are_compared_as_syntax_trees(expected, answer, edited, parses):
    """Layout, words of docstrings and types do not matter; a change that was not asked for does."""
    scores = {"edited": edited, "parses": parses}
    assert scoring.edited([(sample(expected), [answer])]) == scores
    assert scoring.edited([(sample("def f(): pass", expected), [answer])]) == scores
