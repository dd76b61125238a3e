"""Cases about states, on a small random model of every family of text models and hybrids."""

import pytest

import mmspec
from mmspec.checking.cases import run_case
from tests.checking import trial_of
from tests.tiny import byte_tokenizer
from tests.tiny.configs import HYBRID_CONFIGS, TEXT_CONFIGS, TINY_SIZES
from tests.tiny.models import text_model

NAMES = ("rehearsed", "now-and-then", "prefix", "sessions", "abort", "batch")
FEW = ("llama", "mamba2")


@pytest.mark.parametrize(
    "family",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.long)
        for name in {**TEXT_CONFIGS, **HYBRID_CONFIGS}
    ],
)
def test_a_family(family, monkeypatch):
    monkeypatch.setitem(TINY_SIZES, "vocab_size", len(byte_tokenizer()))
    monkeypatch.setitem(TINY_SIZES, "max_position_embeddings", 1024)
    pipe = mmspec.load(text_model(family), "ngram", processor=byte_tokenizer())
    trial = trial_of(pipe)
    found = {name: run_case(trial, name) for name in NAMES}
    assert [one for one in found.values() if one["outcome"] != "equal"] == []
    assert found["rehearsed"]["rehearsed"] > 20
