"""The check of what modules leave behind notices each kind of it, and waits for what is ending."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama

from mmspec.core.budget import Budget
from mmspec.engine.stopping import Stopper
from mmspec.sampling.sampler import Sampler
from mmspec.targets.transformers_target import TransformersTarget
from tests import leftovers
from tests.decoding import SteppedEngine
from tests.leftovers import Leftovers
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.models import text_inputs


def setting(call: Callable, value: object) -> Callable[[pytest.MonkeyPatch], Callable]:
    """Calls a function with a value; returns what undoes that."""

    def leave(patch: pytest.MonkeyPatch) -> Callable:
        before = call(value)
        return lambda: call(before)

    return leave


def registered(patch: pytest.MonkeyPatch) -> Callable:
    AttentionInterface.register("left", lambda: None)
    return lambda: AttentionInterface._global_mapping.pop("left")


def grad_mode(patch: pytest.MonkeyPatch) -> Callable:
    torch.set_grad_enabled(False)
    return lambda: torch.set_grad_enabled(True)


def default_dtype(patch: pytest.MonkeyPatch) -> Callable:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def thread(patch: pytest.MonkeyPatch) -> Callable:
    end = threading.Event()
    one = threading.Thread(target=end.wait, name="left")
    one.start()
    return lambda: (end.set(), one.join())


def process(patch: pytest.MonkeyPatch) -> Callable:
    one = subprocess.Popen([sys.executable, "-c", "input()  # left"], stdin=subprocess.PIPE)
    return lambda: one.communicate(b"\n")


def rows(patch: pytest.MonkeyPatch) -> Callable:
    """An engine that does not tell its target that a sequence has ended."""
    target = TransformersTarget(shared_model("llama"))
    patch.setattr(target, "select", lambda rows: None)
    engine = SteppedEngine(target, None, lambda batch, nodes: Budget(0))
    (row,) = engine.add(prompt_of(text_inputs(1)), Sampler(), Stopper(3))
    engine.wait(lambda: row.done)
    return lambda: TransformersTarget.select(engine.target, [])


def patched(owner: object, name: str) -> Callable[[pytest.MonkeyPatch], Callable]:
    def leave(patch: pytest.MonkeyPatch) -> Callable:
        patch.setattr(owner, name, lambda *_: None)
        return patch.undo

    return leave


def variable(patch: pytest.MonkeyPatch) -> Callable:
    patch.setenv("MMSPEC_LEFT", "1")
    return patch.undo


def directory(patch: pytest.MonkeyPatch) -> Callable:
    patch.chdir(os.sep)
    return patch.undo


KINDS = [
    (setting(threading.stack_size, 1 << 20), "stack size of threads: was 0, is 1048576"),
    (default_dtype, "default dtype: was torch.float32, is torch.float64"),
    (grad_mode, "gradients: was True, is False"),
    (registered, "attention functions: left was None"),
    (patched(modeling_llama, "rotate_half"), "modeling_llama.rotate_half is a function of this tree"),
    (patched(modeling_llama.LlamaAttention, "forward"), "LlamaAttention.forward is a function of this tree"),
    (variable, "environment: MMSPEC_LEFT was None, is '1'"),
    (directory, "working directory: was "),
    (thread, "the thread left runs"),
    (process, "# left"),
    (rows, "TransformersTarget has 1 rows after all requests have ended"),
]


@pytest.mark.parametrize(("leave", "message"), KINDS, ids=[message for _, message in KINDS])
def test_what_is_left_is_named(leave: Callable, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as brief:
        brief.setattr(leftovers, "GRACE", 0.2)
        before = Leftovers()
        assert before.found() == []
        undo = leave(monkeypatch)
        try:
            found = before.found()
        finally:
            undo()
        assert len(found) == 1
        assert message in found[0]
        assert before.found() == []


def test_a_thread_that_is_ending_is_waited_for() -> None:
    before, end = Leftovers(), threading.Event()
    threading.Thread(target=end.wait, name="ending").start()
    threading.Timer(0.3, end.set).start()
    assert before.found() == []
