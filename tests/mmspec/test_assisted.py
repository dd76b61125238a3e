"""Arguments of transformers' assisted generation choose the drafter, and give the same tokens."""

from __future__ import annotations

import copy

import pytest
import torch

import mmspec
from mmspec import UserError
from mmspec.checking.oracle import Oracle
from mmspec.drafters.registry import chosen_drafter, registered_name
from tests import dflash, gemma4, mtp, vocabularies
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.models import text_inputs, text_model, vision_inputs, vision_model

HYBRIDS = ("qwen3_5_text", "qwen3_next", "nemotron_h", "granitemoehybrid", "falcon_h1", "bamba")
OPTIONS = dict(do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=0)


def drafted(model, inputs, **asked):
    """The registered name of the drafter that the arguments choose; its tokens must equal plain decoding."""
    expected = model.generate(**inputs, **OPTIONS)
    options = dict(**inputs, **OPTIONS, **asked, num_draft_tokens=4, return_dict_in_generate=True)
    for out in (model.generate(custom_generate=mmspec.decode, **options), mmspec.generate(model, **options)):
        assert torch.equal(out.sequences, expected)
        assert out.stats[0].num_draft_tokens > 0
    tokenizers = asked.pop("tokenizer", None), asked.pop("assistant_tokenizer", None)
    config, assistant = copy.deepcopy(model.generation_config), asked.pop("assistant_model", None)
    config.update(**asked)
    return registered_name(chosen_drafter("auto", config, assistant, tokenizers, model.config.name_or_path))


def test_prompt_lookup():
    model = shared_model("llama")
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8] * 4])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    assert drafted(model, inputs, prompt_lookup_num_tokens=4, max_matching_ngram_size=3) == "ngram"


def test_early_exit():
    model, inputs = text_model("llama"), text_inputs(1, 9)
    assert drafted(model, inputs, assistant_early_exit=1) == "early-exit"
    theirs = model.generate(**inputs, **OPTIONS, assistant_early_exit=1)
    assert torch.equal(theirs, model.generate(**inputs, **OPTIONS))


@pytest.mark.parametrize(
    ("name", "assistant"),
    [
        ("llama", lambda: {"assistant_model": text_model("llama")}),
        ("llama", lambda: {"assistant_model": text_model("mamba2")}),
        ("llava", lambda: {"assistant_model": vision_model("llava", seed=1)}),
        (
            "llama",
            lambda: {
                "assistant_model": vocabularies.smaller(),
                **dict(zip(("tokenizer", "assistant_tokenizer"), vocabularies.pair(), strict=True)),
            },
        ),
    ],
    ids=["attention", "recurrent", "vision", "another tokenizer"],
)
def test_a_smaller_model(name, assistant):
    inputs = vision_inputs(name, 1) if name == "llava" else text_inputs(1, 9)
    assert drafted(shared_model(name), inputs, **assistant()) == "small"


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_which_transformers_refuses(name):
    model, draft_model = shared_model(name), text_model("llama")
    options = dict(**text_inputs(1, 9), **OPTIONS)
    with pytest.raises(ValueError, match=r"^assisted generation is not supported with stateful models"):
        model.generate(**options, assistant_model=draft_model)
    expected = model.generate(**options)
    options |= dict(return_dict_in_generate=True, num_draft_tokens=4)
    drafter = Oracle(expected[:, 9:].tolist(), vocab=VOCAB)
    hooked = model.generate(**options, custom_generate=mmspec.decode, drafter=drafter)
    assisted = mmspec.generate(model, **options, assistant_model=draft_model)
    assert torch.equal(hooked.sequences, expected)
    assert torch.equal(assisted.sequences, expected)
    assert hooked.stats[0].num_accepted_draft_tokens > 0
    assert assisted.stats[0].num_draft_tokens > 0


def test_a_dflash_drafter():
    assistant = dflash.reference()
    asked = dict(assistant_model=assistant, speculation_type="dflash")
    before = {name: value.clone() for name, value in assistant.state_dict().items()}
    assert drafted(shared_model("llama"), text_inputs(1, 9), **asked) == "dflash"
    assert all(torch.equal(value, before[name]) for name, value in assistant.state_dict().items())
    damaged = copy.deepcopy(assistant)
    damaged.norm = torch.nn.Identity()
    with pytest.raises(UserError, match=r"^MuseGlimmerAssistantModel: expected exactly .* missing norm.weight$"):
        mmspec.generate(shared_model("llama"), **text_inputs(1, 9), **OPTIONS, assistant_model=damaged)


def test_a_gemma_4_assistant():
    model = gemma4.target_model()
    assistant = gemma4.assistant_of(model)
    assistant.generation_config.num_assistant_tokens = 4
    assert drafted(model, text_inputs(1, 9), assistant_model=assistant) == "gemma4"
    expected = model.generate(**text_inputs(1, 9), **OPTIONS)
    assert torch.equal(model.generate(**text_inputs(1, 9), **OPTIONS, assistant_model=assistant), expected)


def test_native_mtp(tmp_path, monkeypatch):
    model, _ = mtp.dense("glm4_moe", 2)
    folder = mtp.published(tmp_path, "glm4_moe", 2)
    monkeypatch.setattr(model.config, "name_or_path", str(folder))
    assert drafted(model, text_inputs(1, 9), use_mtp=True) == "mtp"
    monkeypatch.setattr(shared_model("llama").config, "name_or_path", str(tmp_path / "none"))
    with pytest.raises(UserError, match="expected the folder of a drafter checkpoint, there is none"):
        mmspec.generate(shared_model("llama"), **text_inputs(1, 9), **OPTIONS, use_mtp=True)


def test_an_assistant_that_is_no_model():
    with pytest.raises(UserError, match=r"^assistant_model must be a model of transformers: got 'llama'$"):
        mmspec.generate(shared_model("llama"), **text_inputs(1, 9), **OPTIONS, assistant_model="llama")
