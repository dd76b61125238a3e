"""What one text request runs through: files of the project, and checks of values. Both numbers may only fall."""

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mmspec
from mmspec import Pipeline, SamplingParams
from mmspec.drafters.ngram import Ngram
from mmspec.sampling import grammar, syntax
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

FILES = 39  # two of them where an earlier test has loaded the C++ kernels
CHECKS = 53

CHECKING = {"validation.py", "engine/request.py", "sampling/params.py", "sampling/syntax.py"}
"""Files whose functions check values of requests."""

ROOT = Path(mmspec.__file__).parent


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    pipe = Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), Ngram())
    pipe.generate("Hello there", max_new_tokens=16)  # calibrates and fills caches
    return pipe


def calls(pipe: Pipeline, **keywords: Any) -> Counter[str]:
    """Calls of the project's functions during a request, in all threads, by file."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found[str(path.relative_to(ROOT))] += 1

    pipe.engine.drain()  # the next request starts a thread, which is counted
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        pipe.generate("Hello there", **keywords)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def test_files_of_a_request(pipe: Pipeline) -> None:
    """Files of every request; further files depend on the machine's load."""
    files = set.intersection(*(set(calls(pipe, max_new_tokens=16)) for _ in range(3)))
    assert "engine/core.py" in files, "the worker thread was not counted"
    assert len(files) <= FILES, " ".join(sorted(files))


@pytest.mark.parametrize("keywords", [{"max_new_tokens": 16}, {"params": SamplingParams(max_new_tokens=16, seed=1)}])
def test_checks_of_a_request(pipe: Pipeline, keywords: dict[str, Any]) -> None:
    found = calls(pipe, **keywords)
    assert sum(found[name] for name in CHECKING) <= CHECKS


def test_a_grammar_is_compiled_once_for_bytes_and_once_for_the_tokenizer(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def counting(kind: str, tokenizer: Any, source: str) -> Any:
        compiled.append(kind)
        return plain(kind, tokenizer, source)

    plain = syntax.compiled
    monkeypatch.setattr(syntax, "compiled", counting)
    monkeypatch.setattr(grammar, "compiled", counting)
    for _ in range(2):
        pipe.generate("Hello there", regex="[xyz]{3,19}", max_new_tokens=5)
    assert compiled == ["regex", "regex"]
