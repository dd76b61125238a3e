"""The study of batch sizes: how many sequences decode together, and its figures."""

from __future__ import annotations

import json

from click.testing import CliRunner

from mmspec.eval import batching
from mmspec.targets.transformers_target import TransformersTarget

SMALL = ["--requests", "4", "--slots", "3", "--drafters", "ngram", "--rounds", "1", "--max-new-tokens", "6"]


def test_every_method_decodes_as_many_sequences_as_it_is_named_for(monkeypatch):
    widest = {}
    forward = TransformersTarget.forward_tree

    def counted(target, tree):
        widest[target] = max(widest.get(target, 0), len(tree.tokens))
        return forward(target, tree)

    monkeypatch.setattr(TransformersTarget, "forward_tree", counted)
    done = CliRunner().invoke(batching.main, SMALL)
    assert done.exit_code == 0, done.output
    # Calibration, then plain decoding and the drafter, each with one and with three slots.
    assert sorted(widest.values()) == [1, 1, 1, 3, 3]
    methods = json.loads(done.stdout.splitlines()[-1])["methods"]
    assert [row["equal"] for row in methods] == [4] * 6
