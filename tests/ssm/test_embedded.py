"""The embedded hybrid model, as a user gets it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BambaForCausalLM

import mmspec
from mmspec import plugins
from mmspec.eval.suite.tasks import TASKS
from mmspec.ssm import tiny_hybrid

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plain():
    folder = plugins.find("models", "tiny-hybrid")()
    assert folder == tiny_hybrid()
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(), AutoTokenizer.from_pretrained(folder)


def test_it_is_a_plain_hybrid_of_transformers(plain):
    model, _ = plain
    assert type(model) is BambaForCausalLM
    kinds = model.config.layers_block_type
    assert {kinds.count("full_attention"), kinds.count("linear_attention")} == {2, 6}
    assert model.num_parameters() < 4_200_000
    assert model.generation_config.eos_token_id == model.config.eos_token_id


def test_it_solves_most_held_out_problems(plain):
    model, tokenizer = plain
    task = TASKS["texts"]
    asked = [sample for sample in task.samples(None, None) if sample.category in ("problem", "sums")][:16]
    chats = [[{"role": "user", "content": one.conversation.questions[0]}] for one in asked]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=200)
    answers = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert task.score is not None
    assert task.score([(one, [text]) for one, text in zip(asked, answers, strict=True)])["all mentioned"] > 0.6


@pytest.mark.parametrize("name", ["flash", "mamba"])
def test_its_drafters_guess_most_of_what_it_says(name, plain):
    model, tokenizer = plain
    pipe = mmspec.load("tiny-hybrid", "auto" if name == "flash" else name, dtype="float32")
    assert pipe.drafter.name == name
    samples = {sample.category: sample for sample in TASKS["texts"].samples(None, None)}
    for kind in ("problem", "program", "story"):
        prompt = samples[kind].conversation.questions[0]
        found = pipe.generate(prompt, max_new_tokens=80, nodes=16)
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        expected = model.generate(**inputs, max_new_tokens=80)[0, inputs["input_ids"].shape[1] :]
        assert found.token_ids == expected.tolist()
        assert found.stats.mean_acceptance_length > 3


def test_what_travels_is_small():
    files = [path for path in Path(tiny_hybrid()).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".jinja", ".md", ".safetensors"}
    assert (Path(tiny_hybrid()) / "model.safetensors").stat().st_size < 8.5e6
    folders = [ROOT / part / "embedded" for part in ("mmspec", "ssm", "vision")]
    assert sum(path.stat().st_size for at in folders for path in at.rglob("*") if path.is_file()) < 41_000_000
    for path in (path for at in folders for path in at.rglob("*.json")):
        assert not re.search(r'"/\w', path.read_text()), f"{path} names a folder of the machine that it was made on"
