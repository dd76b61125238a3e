"""Copies of a pipeline by ``pickle`` and ``copy.deepcopy``, as Ray and multiprocessing send them to other processes."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import plugins
from mmspec.drafters.ngram import Ngram
from mmspec.pipeline import Pipeline
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.embedded import samples
from tests.tiny import byte_model, byte_tokenizer, shared_model
from tests.tiny.drafters import tiny_drafter, tiny_drafters

WAYS: dict[str, Callable[[Any], Any]] = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy}
OPTIONS = [{"prefix_cache": 2**26}, {"max_num_seqs": 2}, *({"dtype": kind} for kind in ("bfloat16", "int8", "int4"))]
CASES = [
    *(("tiny-llava", drafter, {}) for drafter in ("auto", "flash", "msd", "flash+ngram", "none")),
    *(("tiny-hybrid", drafter, {}) for drafter in ("auto", "mamba", "mamba+recycle", "none")),
    *((name, "auto", options) for name in ("tiny-llava", "tiny-hybrid") for options in OPTIONS),
    *(("smollm2", "auto", {}), ("smol-llava", "auto", {}), ("gemma3-270m", "ngram", {})),
]
missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]


def asked(pipe: Pipeline, **changes: Any) -> dict[str, Any]:
    images = [samples() / "scene.png"] if hasattr(pipe.model.config, "vision_config") else None
    return {"prompt": "one,two,one,two", "images": images, "max_new_tokens": 12, "nodes": 6, **changes}


def answer(pipe: Pipeline) -> tuple[list[int], int]:
    found = pipe.generate(**asked(pipe))
    return found.token_ids, found.stats.num_spec_steps


def check_copies(pipe: Pipeline) -> None:
    """Before a request, after one, and during one: the same tokens in as many steps, if the drafter does not learn."""
    fresh = [way(pipe) for way in WAYS.values()]
    tokens, steps = answer(pipe)
    assert [answer(one) for one in fresh] == [(tokens, steps)] * 2
    assert [answer(way(pipe))[0] for way in WAYS.values()] == [tokens] * 2
    stream = pipe.stream(**asked(pipe))
    head = next(stream).token_ids
    for way in WAYS.values():
        copied = way(pipe)
        assert answer(copied)[0] == tokens
        assert (copied.max_num_seqs, copied.name) == (pipe.max_num_seqs, pipe.name)
        assert copied.model is not pipe.model
    assert [*head, *(token for piece in stream for token in piece.token_ids)] == tokens


@pytest.mark.long
@pytest.mark.parametrize(("model", "drafter", "options"), CASES)
def test_embedded_models(model: str, drafter: str, options: dict[str, Any]) -> None:
    if model not in plugins.installed() or (missing and model not in ("tiny-llava", "tiny-hybrid")):
        pytest.skip(f"not installed: {', '.join(missing) or model}")
    pipe = mmspec.load(model, drafter, device="cpu", **options)
    check_copies(pipe)
    if "prefix_cache" in options:
        copied = WAYS["pickle"](pipe).engine.prefixes
        assert (copied.limit, len(copied)) == (2**26, 0)


@pytest.mark.parametrize("exact", [False, True])
def test_a_copy_of_a_target_checks_as_much(exact: bool) -> None:
    for way in (*WAYS.values(), TransformersTarget.fork):
        assert way(TransformersTarget(shared_model("llama"), exact))._exact == exact


OF_BYTES = {
    "mamba": {"vocab": 259},
    **{key: {"target_layer_ids": [0]} for key in ("dflash", "dflash2", "dspark", "xpress")},
}
"""Settings that fit the model of bytes, which has 259 tokens and one layer."""


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in (*tiny_drafters(), "recycle+ngram") if kind != "recycle"]


@pytest.mark.parametrize("kind", ["recycle", *LONG])
def test_every_drafter(kind: str) -> None:
    model = byte_model(2) if kind in ("early-exit", "kangaroo") else byte_model()  # a layer before the last
    drafter = tiny_drafter(kind, model, 40, **OF_BYTES.get(kind, {}))
    check_copies(Pipeline(TransformersTarget(model), Processor(byte_tokenizer()), drafter))


@pytest.mark.parametrize("name", ["gemma2", "bamba"])
def test_windows_and_recurrent_states(name: str) -> None:
    check_copies(Pipeline(TransformersTarget(shared_model(name)), Processor(byte_tokenizer()), Ngram()))


@pytest.mark.slow
def test_another_process(tmp_path: Path) -> None:
    pipe = Pipeline(TransformersTarget(shared_model("bamba")), Processor(byte_tokenizer()), Ngram())
    (tmp_path / "pipe").write_bytes(pickle.dumps((pipe, asked(pipe))))
    program = """
import pickle, sys
pipe, asked = pickle.load(open(sys.argv[1], "rb"))
print(pipe.generate(**asked).token_ids)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, tmp_path / "pipe"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(answer(pipe)[0])


@pytest.mark.long
def test_a_model_that_has_returned_hidden_states() -> None:
    """transformers' hooks for these are local functions, which it installs again in the copy."""
    pipe = mmspec.load("tiny-llava", device="cpu")
    ids = torch.tensor([[5, 6, 7]])
    expected = pipe.model(input_ids=ids, output_hidden_states=True).hidden_states
    found = WAYS["pickle"](pipe).model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert pipe.model(input_ids=ids, output_hidden_states=True).hidden_states is not None
