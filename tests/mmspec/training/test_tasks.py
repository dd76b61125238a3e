"""Acceptance length of a drafter's evaluation, from answers with known steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.pipeline import Generation
from mmspec.training import tasks
from mmspec.training.data import Conversation
from mmspec.training.options import RunOptions
from mmspec.training.plan import TEXT
from mmspec.training.tasks import DrafterSetup, DrafterTask, frequent_tokens


def conversation(name: str) -> Conversation:
    turns = [("user", [{"type": "text", "text": name}]), ("assistant", "yes")]
    return Conversation(name, tuple({"role": role, "content": content} for role, content in turns), (None,))


class Drafter:
    def __init__(self, network: object, draft_ids: None) -> None:
        self.tree_size = 7


def test_acceptance_counts_verify_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of each answer comes from its prefill; a prompt too long for the target is skipped."""
    accepted = {"a": [2, 0, 1], "b": [0], "c": []}

    class Scripted:
        def __init__(self, *_: object) -> None: ...

        def generate(self, prompt: list, temperature: float, max_new_tokens: int, nodes: int) -> Generation:
            (name,) = (message["content"] for message in prompt)
            if name == "long":
                raise UserError("too long")
            assert (max_new_tokens, nodes) == (5, 7)
            stats = Stats(num_generated_tokens=1)
            for count in accepted[name]:
                stats.record_step(4, 3, count, count + 1)
            return Generation("", [0] * stats.num_generated_tokens, "length", stats)

    monkeypatch.setattr(tasks, "Pipeline", Scripted)
    held_out = [conversation(name) for name in ("a", "long", "b", "c")]
    pipe = SimpleNamespace(target=None, processor=SimpleNamespace(reads_media=False))
    setup = DrafterSetup(torch.nn.Linear(1, 1), None, Drafter)  # type: ignore[arg-type]
    options = RunOptions(out=Path("unused"), prompts=4, max_new_tokens=5)
    task = DrafterTask(pipe, setup, {TEXT: held_out}, held_out, None, options)  # type: ignore[arg-type]
    assert task._acceptance() == {"mean_acceptance_length": (3 + 1 + 2 + 1) / 4}
    accepted |= {"a": [], "b": []}
    assert task._acceptance() == {}


def test_the_most_frequent_tokens_come_first() -> None:
    answers = [[5, 5, 5, 9, 9], [9, 5, 7]]
    assert frequent_tokens(answers, 2, [2], 10).tolist() == [2, 5]
    assert frequent_tokens(answers, 3, [2], 10).tolist() == [2, 5, 9]
    assert frequent_tokens(answers, 6, [2], 10).tolist() == [0, 1, 2, 5, 7, 9]  # then the first of the vocabulary
    assert frequent_tokens([[5, 9]], 99, [2, 9], 10).tolist() == list(range(10))
