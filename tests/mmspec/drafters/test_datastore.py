"""Datastore: index and look-ups against a plain search, trees against a plain loop, stores that appear whole."""

import json
import os
import random

import pytest
import torch

from mmspec import UserError
from mmspec.core.plan import StepPlan
from mmspec.drafters import datastore
from mmspec.drafters.datastore import DEPTH, Datastore, SuffixIndex, build_store
from tests.mmspec.drafters.test_drafters import target_of

VOCAB = 101


def random_texts(count=12, tokens=5, seed=0):
    """Texts with many repetitions, also of more than ``DEPTH`` tokens."""
    rng = random.Random(seed)
    texts = [[rng.randrange(tokens) for _ in range(rng.randrange(60))] for _ in range(count)]
    return [*texts, texts[1] * 2, [0] * 50, [100]]


def occurrences(texts, context):
    """Text and place after each occurrence of a context."""
    size = len(context)
    return [
        (number, start + size)
        for number, text in enumerate(texts)
        for start in range(len(text) - size + 1)
        if text[start : start + size] == context
    ]


@pytest.mark.parametrize(("in_memory", "files", "vocab"), [(10**6, 200, VOCAB), (7, 3, VOCAB), (20, 2, 1 << 16)])
def test_suffixes_are_in_order_and_found(tmp_path, monkeypatch, in_memory, files, vocab):
    monkeypatch.setattr(datastore, "_SORTED", in_memory)
    monkeypatch.setattr(datastore, "_FILES", files)
    monkeypatch.setattr(datastore, "_CHUNK", 13)
    texts = random_texts()
    config = build_store(iter(texts), vocab, "tiny", tmp_path / "store")
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["config.json", "suffixes", "tokens"]
    assert (config.width, config.place) == (2 if vocab < 1 << 16 else 4, 4)
    assert (config.model, config.vocab_size) == ("tiny", vocab)
    assert config.tokens == DEPTH + sum(1 + len(text) for text in texts if text)
    index = SuffixIndex(tmp_path / "store")
    positions = [index._position(place) for place in range(config.suffixes)]
    assert config.suffixes == sum(map(len, texts)) == len(set(positions))
    keys = [[index.token(place + k) for k in range(DEPTH)] for place in positions]
    assert keys == sorted(keys)
    for place, key in enumerate(keys):  # the last key, too, after which the text ends
        assert all(place in index.find(key[:length]) for length in (1, 2, DEPTH))
    rng = random.Random(1)
    for _ in range(200):
        context = [rng.randrange(5) for _ in range(rng.randrange(1, 9))]
        assert len(index.find(context)) == len(occurrences(texts, context))
        length, places = index.longest(context)
        found = [n for n in range(1, len(context) + 1) if occurrences(texts, context[-n:])]
        assert length == max(found)
        after = sorted(texts[t][p] if p < len(texts[t]) else vocab for t, p in occurrences(texts, context[-length:]))
        assert sorted(index.token(place) for place in index.following(places, length, 10**6)) == after
        assert len(index.following(places, length, 3)) <= 3


def test_nodes_have_the_share_of_occurrences_that_pass_through_them(tmp_path):
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [9, 2, 6]]
    build_store(texts, VOCAB, "tiny", tmp_path / "store")
    drafter = Datastore(str(tmp_path / "store"))
    drafter.rows = [[7, 1, 2]]
    tree = drafter.propose(torch.tensor([2]), StepPlan(8, 3))
    found = {}
    for node, children in enumerate(tree.children[0]):
        for token, child in children.items():
            found[node and tree.tokens[0, node].item(), token] = tree.log_probs[0, child].exp().item()
    # After 1, 2 all three go on with 3; after 2 three of four; the longer context has 3 / 3.5 of the weight.
    three = 3 / 3.5 + 0.5 / 3.5 * 3 / 4.5
    four = 2 / 3.5 + 0.5 / 3.5 * 2 / 3.5
    assert found[0, 3] == pytest.approx(three, rel=1e-4)
    assert found[0, 6] == pytest.approx(0.5 / 3.5 / 4.5, rel=1e-4)
    assert found[3, 4] == pytest.approx(three * four, rel=1e-4)
    assert drafter.continuations(0, [3])[0][0] == 4


def test_an_interrupted_build_leaves_nothing(tmp_path):
    def texts():
        yield [1, 2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(texts(), VOCAB, "tiny", tmp_path / "store")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="a datastore needs texts: got none"):
        build_store([[]], VOCAB, "tiny", tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tokens", "suffixes"])
def test_a_store_that_is_cut_while_in_use_is_an_error(tmp_path, name):
    build_store(random_texts(), VOCAB, "tiny", tmp_path / "store")
    drafter = Datastore(tmp_path / "store")
    os.truncate(tmp_path / "store" / name, 4)
    drafter.rows = [[1, 2]]
    with pytest.raises(UserError, match=rf"{name}: expected \d+ bytes at \d+, received \d"):
        drafter.propose(torch.tensor([2]), StepPlan(8, 3))


def test_a_store_that_is_replaced_while_in_use_stays_as_it_was(tmp_path):
    build_store([[1, 2, 3]], VOCAB, "tiny", tmp_path / "store")
    drafter = Datastore(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "before")
    build_store([[1, 2, 4]], VOCAB, "tiny", tmp_path / "store")
    drafter.rows = [[1, 2]]
    assert drafter.propose(torch.tensor([2]), StepPlan(1, 1)).tokens.tolist() == [[2, 3]]


def test_ids_beyond_the_vocabulary_are_not_drafted(tmp_path):
    build_store([[1, 2, 3]], VOCAB, "tiny", tmp_path / "store")
    file = tmp_path / "store" / "tokens"
    file.write_bytes(file.read_bytes().replace(b"\0\3", b"\xff\3"))
    drafter = Datastore(tmp_path / "store")
    drafter.rows = [[1, 2]]
    assert drafter.propose(torch.tensor([2]), StepPlan(8, 3)).nodes == 1


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("place", 5, "place must be 4 or 8: got 5"),
        ("width", 3, "width must be 2 or 4: got 3"),
        ("vocab_size", 1 << 16, "expected tokens of 4 bytes, received 2"),
    ],
)
def test_configurations_that_no_build_writes(tmp_path, field, value, expected):
    build_store([[1, 2, 3]], VOCAB, "tiny", tmp_path / "store")
    file = tmp_path / "store" / "config.json"
    config = json.loads(file.read_text()) | {field: value}
    if field == "place":  # with as many bytes as it announces
        (tmp_path / "store" / "suffixes").write_bytes(bytes(config["suffixes"] * value))
    if field == "width":
        (tmp_path / "store" / "tokens").write_bytes(bytes(config["tokens"] * value))
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"config\.json: {expected}"):
        Datastore(tmp_path / "store")


def test_errors(tmp_path):
    build_store([[1, 2, 3]], VOCAB + 1, "tiny", tmp_path / "store")
    with pytest.raises(UserError, match="expected a new folder, received one that exists"):
        build_store([[1]], VOCAB, "tiny", tmp_path / "store")
    with pytest.raises(UserError, match=f"a vocabulary of {VOCAB + 1} tokens: the target has {VOCAB}"):
        Datastore(tmp_path / "store").attach(target_of("llama"))
    (tmp_path / "store" / "tokens").write_bytes(b"1")
    with pytest.raises(UserError, match="tokens: expected 40 bytes, received 1"):
        Datastore(tmp_path / "store")
    (tmp_path / "store" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="format is required"):
        Datastore(tmp_path / "store")
    with pytest.raises(UserError, match="expected a JSON object"):
        Datastore(tmp_path / "none")
