"""Prompts that a target writes itself."""

from __future__ import annotations

import pytest
import torch

import mmspec
from mmspec.errors import UserError
from mmspec.sampling.params import SamplingParams
from mmspec.training.answering import _usable, draw_prompts, user_opening
from tests.model_folders import save_text_model

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
NUMBERS = range(48)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = save_text_model(tmp_path_factory.mktemp("text"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    pipe = mmspec.load(str(folder), None, "cpu", max_num_seqs=8)
    pipe.model.generation_config.top_k = 1  # the model's own, which does not hold
    with torch.no_grad():  # a letter in both cases, blanks and ends: short prompts that repeat
        words = [pipe.processor.tokenizer(text)["input_ids"][0] for text in ("a", "A", " ")]
        head = pipe.model.get_output_embeddings()
        allowed = torch.zeros(320, dtype=torch.bool).index_fill_(0, torch.tensor([2, *words]), True)
        head.weight.mul_(0.1)
        head.bias = torch.nn.Parameter(torch.where(allowed, 0.0, -50.0))
    return pipe


@pytest.fixture(scope="module")
def drawn(pipe):
    return texts(pipe)


def texts(pipe, numbers=NUMBERS, done=(), chunk=256, **sampling):
    params = SamplingParams(**{"temperature": 1.0, "seed": 0, **sampling})
    return {job.id: job.questions[0][0]["text"] for job in draw_prompts(pipe, numbers, done, params, chunk=chunk)}


def test_a_prompt_depends_on_its_number_and_the_seed_only(pipe, drawn):
    assert drawn == texts(pipe, chunk=5)
    assert drawn != texts(pipe, seed=1)


def test_sampling_parameters_reach_the_prompts(pipe):
    for nearly_greedy in ({"temperature": 0.001}, {"top_p": 0.01}):
        assert len(texts(pipe, range(12), **nearly_greedy)) < 2  # the same prompt again and again


def test_repeated_and_unusable_prompts_are_dropped(pipe, drawn):
    assert 3 < len(drawn) < len(NUMBERS)
    assert len({text.lower() for text in drawn.values()}) == len(drawn)
    alone = {name: text for number in NUMBERS for name, text in texts(pipe, [number]).items()}
    assert drawn.items() <= alone.items()
    assert len(alone) > len(drawn)  # there were repeated ones
    every = alone.values()
    assert len(set(every)) > len({text.lower() for text in every})  # and some that differ by case
    assert all(text == text.strip() and len(text.split()) > 1 for text in every)


def test_prompts_that_have_not_ended_are_dropped(pipe, drawn, monkeypatch):
    monkeypatch.setattr("mmspec.training.answering.MAX_TOKENS", 6)
    short = texts(pipe)
    assert 0 < len(short) < len(drawn)
    assert short.items() <= drawn.items()


def test_existing_conversations_are_not_drawn_again(pipe, drawn, monkeypatch):
    added = []
    submit = pipe.engine.submit
    monkeypatch.setattr(pipe.engine, "submit", lambda *given: added.append(0) or submit(*given))
    assert not drawn.keys() & texts(pipe, done=set(drawn)).keys()
    assert len(added) == len(NUMBERS) - len(drawn)


def test_the_opening_is_what_precedes_a_users_words(pipe):
    tokenizer = pipe.processor.tokenizer
    assert tokenizer.decode(user_opening(tokenizer)) == "<s>user: "
    for template in (None, "{{ messages[0]['content'] }}", "no words"):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match="chat template"):
            user_opening(tokenizer)
    tokenizer.chat_template = TEMPLATE


@pytest.mark.parametrize(
    ("text", "usable"), [("two words</s>", "two words"), (" one </s>", None), ("an <s> inside</s>", None)]
)
def test_usable_prompts(pipe, text, usable):
    io = pipe.processor
    assert _usable(io, io.tokenizer(text)["input_ids"]) == usable


def test_broken_characters_are_dropped(pipe):
    io = pipe.processor
    half = io.tokenizer("é")["input_ids"][0]
    assert _usable(io, [*io.tokenizer("two words")["input_ids"], half, 2]) is None
