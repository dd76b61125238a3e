"""The check for leftovers of test modules finds every kind, and waits for threads that are ending."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama

from mmspec.core.plan import StepPlan
from mmspec.engine.stopping import Stopper
from mmspec.sampling.sampler import Sampler
from mmspec.targets.transformers_target import TransformersTarget
from tests import leftovers
from tests.decoding import SteppedEngine
from tests.leftovers import Leftovers
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.models import text_inputs


def thread(patch: pytest.MonkeyPatch) -> Callable:
    end = threading.Event()
    threading.Thread(target=end.wait, name="left").start()
    return end.set


def process(patch: pytest.MonkeyPatch) -> Callable:
    one = subprocess.Popen([sys.executable, "-c", "input()  # left"], stdin=subprocess.PIPE)
    return lambda: one.communicate(b"\n")


def rows(patch: pytest.MonkeyPatch) -> Callable:
    """An engine that does not tell its target that a sequence has ended."""
    target = TransformersTarget(shared_model("llama"))
    patch.setattr(target, "keep", lambda rows: None)
    engine = SteppedEngine(target, None, StepPlan(0))
    (row,) = engine.add(prompt_of(text_inputs(1)), Sampler(), Stopper(3))
    engine.wait(lambda: row.done)
    return lambda: TransformersTarget.keep(engine.target, [])


def patched(kind: str, *arguments: object) -> Callable[[pytest.MonkeyPatch], Callable]:
    return lambda patch: (getattr(patch, kind)(*arguments), patch.undo)[1]


ATTENTION = modeling_llama.LlamaAttention
KINDS = {
    "attention functions: left was None": patched("setitem", AttentionInterface._global_mapping, "left", print),
    "LlamaAttention.forward is a function of this tree": patched("setattr", ATTENTION, "forward", lambda x: x),
    "environment: MMSPEC_LEFT was None, is '1'": patched("setenv", "MMSPEC_LEFT", "1"),
    "working directory: was ": patched("chdir", os.sep),
    "the thread left runs": thread,
    "# left": process,
    "TransformersTarget has 1 rows after all requests have ended": rows,
}


@pytest.mark.parametrize("message", KINDS)
def test_what_is_left_is_named(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as brief:
        brief.setattr(leftovers, "GRACE", 0.2)
        before = Leftovers()
        undo = KINDS[message](monkeypatch)
        try:
            (found,) = before.found()
        finally:
            undo()
        assert message in found
        assert before.found() == []
