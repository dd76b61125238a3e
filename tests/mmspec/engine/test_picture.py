"""The picture of a step shows what happened in it."""

from xml.etree import ElementTree

from mmspec.engine.picture import draw_tree
from mmspec.engine.trace import JudgedTree

SVG = "{http://www.w3.org/2000/svg}"
TEXTS = {1: "a", 2: "b<", 3: "a very long token", 4: "d", 5: " ", 6: "end"}
STEP = JudgedTree(
    tokens=[1, 2, 3, 4, 5],
    parents=[-1, 0, 0, 1, 1],
    path=[0, 1, 4],
    bonus=6,
    probs=[1.0, 0.75, 0.0001, 0.2, 0.9999],
    bonus_prob=0.5,
    guesses=[1.0, 0.6, 0.3, 0.25, 0.5],
)


def drawn(step=STEP):
    return ElementTree.fromstring(draw_tree(step, lambda ids: TEXTS[ids[0]]))


def test_every_node_once_and_the_path_marked():
    root = drawn()
    labels = [element.text for element in root.iter(f"{SVG}text")]
    assert labels[0] == "4 drafted tokens, one pass of the target, 3 tokens emitted"
    assert labels[1:7] == ["a", "b<", "a very lo…", "d", "' '", "end"]
    edges = list(root.iter(f"{SVG}path"))
    assert len(edges) == 5  # one per drafted node and one to the bonus token
    assert sum(edge.get("class") == "kept" for edge in edges) == 3
    boxes = list(root.iter(f"{SVG}g"))[:6]
    assert [box.get("class") for box in boxes] == ["root", "kept", "rejected", "rejected", "kept", "bonus"]
    assert len({(box[1].get("x"), box[1].get("y")) for box in boxes}) == 6


def test_probabilities_are_told():
    told = [title.text for title in drawn().iter(f"{SVG}title")]
    assert told[1] == "'b<': accepted: drafter 60.0%, target 75.0%"
    assert told[2] == "'a very long token': rejected: drafter 30.0%, target < 0.1%"
    assert told[4] == "\"' '\": accepted: drafter 50.0%, target > 99.9%"
    assert told[5] == "'end': bonus token: target 50.0%"


def test_a_step_without_drafts():
    step = JudgedTree([1], [-1], [0], 6, [1.0], 0.5)
    labels = [element.text for element in drawn(step).iter(f"{SVG}text")]
    assert labels[:3] == ["no drafted tokens, one pass of the target, 1 token emitted", "a", "end"]
