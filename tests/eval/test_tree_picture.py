"""The picture of a step shows what happened in it."""

from xml.etree import ElementTree

from eval.tree_picture import Observed, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_every_node_once_and_the_path_in_green():
    step = Observed(tokens=[1, 2, 3, 4, 5], parents=[-1, 0, 0, 1, 1], path=[0, 1, 4], bonus=6)
    root = ElementTree.fromstring(draw(step, ["a", "b<", "c", "d", " "], "end"))
    labels = [element.text for element in root.iter(f"{SVG}text")]
    assert labels[0] == "4 drafted tokens, one pass of the target, 3 tokens emitted"
    assert labels[1:7] == ["a", "b<", "c", "d", "' '", "end"]
    edges = list(root.iter(f"{SVG}path"))
    assert len(edges) == 5  # one per drafted node and one to the bonus token
    assert sum(edge.get("stroke") == "#1a7f37" for edge in edges) == 3
    places = {(box.get("x"), box.get("y")) for box in list(root.iter(f"{SVG}rect"))[1:7]}
    assert len(places) == 6
