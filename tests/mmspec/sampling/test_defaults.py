"""Sampling defaults of a model: without keywords, a pipeline decodes as ``model.generate`` does."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation import logits_process as hf

import mmspec
from mmspec import Pipeline, SamplingParams, UserError
from mmspec.sampling.defaults import Defaults, signature
from tests.tiny import byte_model, byte_tokenizer

PROMPTS = ("Say: ", "What is it? It is ")
NEW = 24
PLAIN = byte_model().generate(torch.tensor([byte_tokenizer()(PROMPTS[0])["input_ids"]]), max_new_tokens=NEW)[0].tolist()
FIRST, SECOND = PLAIN[len(PROMPTS[0])], PLAIN[len(PROMPTS[0]) + 1]  # tokens of a greedy answer without defaults

GREEDY: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "suppressed": {"suppress_tokens": [FIRST, SECOND]},
    "suppressed at the beginning": {"begin_suppress_tokens": [FIRST]},
    "forced end": {"forced_eos_token_id": 7},
    "shortest": {"min_new_tokens": NEW, "eos_token_id": [2, FIRST]},
    "growing end": {"exponential_decay_length_penalty": (3, 9.0)},
    "several": {"repetition_penalty": 1.2, "suppress_tokens": [SECOND], "begin_suppress_tokens": [FIRST]},
    "greedy": {"do_sample": False, "temperature": 0.6, "top_p": 0.5, "repetition_penalty": 1.3},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {"do_sample": True},
    "warped": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "other warpers": {
        "do_sample": True,
        "typical_p": 0.9,
        "epsilon_cutoff": 1e-3,
        "top_k": 0,
        "renormalize_logits": True,
    },
    "with processors": {"do_sample": True, "repetition_penalty": 1.1, "suppress_tokens": [FIRST], "min_new_tokens": 3},
}


def model_with(**config: Any) -> LlamaForCausalLM:
    """The byte model with a generation config of its own; its weights are shared."""
    model = deepcopy(byte_model())
    model.generation_config = GenerationConfig(**{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **config})
    return model


def pipeline(model: LlamaForCausalLM, **options: Any) -> Pipeline:
    return mmspec.load(model, "ngram", processor=byte_tokenizer(), **options)


def asked(pipe: Pipeline, prompt: str = PROMPTS[0], **options: Any) -> list[int]:
    """The new tokens of an answer with four draft tokens per step."""
    return pipe.generate(prompt, nodes=4, **options).token_ids


def ids_of(prompt: str) -> torch.Tensor:
    return torch.tensor([byte_tokenizer()(prompt)["input_ids"]])


def generated(model: LlamaForCausalLM, prompt: str, **options: Any) -> list[int]:
    ids = ids_of(prompt)
    return model.generate(ids, **options)[0, ids.shape[1] :].tolist()


def prepared(model: LlamaForCausalLM, prompt: str, **options: Any) -> LogitsProcessorList:
    """The processors that ``generate`` makes."""
    seen: list[LogitsProcessorList] = []

    def record(model: Any, input_ids: Any, logits_processor: LogitsProcessorList, **_: Any) -> Any:
        seen.append(logits_processor)
        return input_ids

    model.generate(ids_of(prompt), custom_generate=record, **options)
    return seen[0]


@pytest.mark.filterwarnings("ignore:.*may be ignored.*", "ignore:.*flags are not valid.*")
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = model_with(**GREEDY[name])
    pipe = pipeline(model)
    expected = [generated(model, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    given = pipe.generate_batch([{"prompt": prompt} for prompt in PROMPTS], max_new_tokens=NEW, nodes=8)
    assert [answer.token_ids for answer in given] == expected
    assert pipe.generate(PROMPTS[0], max_new_tokens=NEW, nodes=8).token_ids == expected[0]
    library = pipeline(model, generation_config="mmspec").generate(PROMPTS[0], max_new_tokens=NEW, nodes=8)
    assert library.token_ids != expected[0]


@pytest.mark.parametrize("name", SAMPLED)
def test_processors_of_sampling_are_those_of_generate(name: str) -> None:
    model = model_with(**SAMPLED[name])
    pipe = pipeline(model)
    expected = prepared(model, PROMPTS[0], max_new_tokens=NEW)
    params = pipe.defaults.complete(SamplingParams(max_new_tokens=NEW))
    found = pipe.defaults.processors(params, ids_of(PROMPTS[0]))
    assert [type(one) for one in found] == [type(one) for one in expected]
    scores, history = torch.randn(1, 259), ids_of("Say: abca")
    torch.testing.assert_close(found(history, scores.clone()), expected(history, scores.clone()), rtol=0, atol=0)
    assert params.do_sample
    assert asked(pipe, seed=1) != asked(pipe, seed=2)


def test_a_requests_own_values_win() -> None:
    model = model_with(do_sample=True, temperature=1.5, top_k=20, repetition_penalty=1.4, max_new_tokens=5)
    pipe, plain = pipeline(model), pipeline(byte_model())
    expected = asked(plain, max_new_tokens=9)
    assert asked(pipe, max_new_tokens=9, temperature=0, repetition_penalty=1) == expected
    assert len(asked(pipe)) == 5
    penalised = asked(plain, max_new_tokens=5, repetition_penalty=1.4)
    assert asked(pipe, temperature=0.0) == penalised
    own = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_new_tokens=9)
    requests = [{"prompt": PROMPTS[0], "params": own}, {"prompt": PROMPTS[0]}]
    assert [one.token_ids for one in pipe.generate_batch(requests, temperature=0, nodes=4)] == [expected, penalised]
    drawn = asked(plain, temperature=0.5, top_k=20, repetition_penalty=1.4, seed=1, max_new_tokens=5)
    assert asked(pipe, temperature=0.5, seed=1) == drawn


def test_a_temperature_without_do_sample_is_greedy() -> None:
    """And temperatures next to zero, which some checkpoints have."""
    expected = asked(pipeline(byte_model()), max_new_tokens=9)
    for config in ({"temperature": 0.9}, {"do_sample": True, "temperature": 1e-6, "top_k": 1}):
        pipe = pipeline(model_with(**config))
        assert asked(pipe, max_new_tokens=9) == expected
        assert not pipe.defaults.complete(SamplingParams()).do_sample


def test_what_is_not_set_anywhere_is_the_librarys() -> None:
    params = pipeline(byte_model()).defaults.complete(SamplingParams(seed=4))
    assert params == SamplingParams(0.0, 1.0, 0, 0.0, 1.0, 256, (), 4, min_new_tokens=0)
    assert pipeline(model_with(stop_strings=["ab"])).defaults.complete(SamplingParams()).stop_strings == ("ab",)


def test_the_generation_config_is_read_and_checked_at_each_request() -> None:
    model = model_with()
    pipe, config = pipeline(model), model.generation_config
    before = asked(pipe, max_new_tokens=NEW)
    config.suppress_tokens = [FIRST]
    after = asked(pipe, max_new_tokens=NEW)
    assert after == generated(model, PROMPTS[0], max_new_tokens=NEW) != before
    assert pickle.loads(pickle.dumps(pipe)).generate(PROMPTS[0], max_new_tokens=NEW, nodes=4).token_ids == after
    for config.top_p in (0.5, 0.25):
        assert pipe.defaults.complete(SamplingParams()).top_p == config.top_p
    config.top_p = 7
    with pytest.raises(UserError, match=r"top_p must be <= 1: got 7"):
        pipe.generate(PROMPTS[0])


@pytest.mark.parametrize("params", [{"temperature": 1.5, "top_p": 0}, {"temperature": 9e-5}])
def test_the_most_probable_token_alone(params: dict[str, Any]) -> None:
    """Without warpers, and so without draws."""
    model = model_with()
    expected = generated(model, PROMPTS[0], max_new_tokens=NEW)
    assert asked(pipeline(model), max_new_tokens=NEW, seed=1, **params) == expected
    assert not SamplingParams(**params).do_sample


def test_custom_processors_come_between_the_models_and_the_warpers() -> None:
    def mine(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    defaults = pipeline(model_with(do_sample=True, temperature=0.5, suppress_tokens=[FIRST])).defaults
    found = defaults.processors(defaults.complete(SamplingParams()), ids_of(PROMPTS[0]), [mine])
    names = [getattr(one, "__name__", type(one).__name__) for one in found]
    assert names == ["SuppressTokensLogitsProcessor", "mine", "TemperatureLogitsWarper", "TopKLogitsWarper"]


@pytest.mark.parametrize("config", [{"suppress_tokens": [FIRST]}, {"begin_suppress_tokens": [FIRST]}])
def test_requests_decode_in_one_group_where_their_processors_are_equal(config: dict[str, Any]) -> None:
    defaults = pipeline(model_with(**config)).defaults
    params = defaults.complete(SamplingParams())
    keys = [defaults.sampler(params, ids_of(prompt)).key for prompt in (*PROMPTS, PROMPTS[0])]
    assert keys[0] == keys[2]
    assert (keys[0] == keys[1]) == ("suppress_tokens" in config)  # the other depends on the prompt's length
    assert defaults.sampler(params, ids_of(PROMPTS[0]), [lambda ids, scores: scores]).key != keys[0]


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    [
        (hf.SequenceBiasLogitsProcessor, {(5,): 2.0}, {(5,): 3.0}),
        (hf.SequenceBiasLogitsProcessor, {(5,): 2.0}, {(6,): 2.0}),
        (hf.SuppressTokensLogitsProcessor, [3, 4], [3, 5]),
        (hf.RepetitionPenaltyLogitsProcessor, 1.5, 1.6),
    ],
)
def test_processors_with_equal_settings_have_equal_keys(kind: type, value: object, other: object) -> None:
    assert signature([kind(value)]) == signature([kind(value)]) != signature([kind(other)])


def test_processors_with_other_state_have_no_equal() -> None:
    class Other:
        def __init__(self) -> None:
            self.state = object()

    assert signature([Other()]) != signature([Other()])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_beams": 3}, "greedy search or sampling: got beam search"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
        ({"do_sample": True, "top_p": 1.5}, "top_p must be <= 1"),
    ],
)
def test_what_cannot_be_applied_is_refused_at_loading(config: dict[str, Any], message: str) -> None:
    model = model_with()
    for name, value in config.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(UserError, match=f"generation_config.*'mmspec' ignores it.*{message}"):
        mmspec.load(model, None, processor=byte_tokenizer())
    pipe = mmspec.load(model, None, processor=byte_tokenizer(), generation_config="mmspec")
    assert type(pipe.defaults) is Defaults
    assert asked(pipe, max_new_tokens=NEW) == PLAIN[len(PROMPTS[0]) :]
    ids = ids_of(PROMPTS[0])
    neutral = {"num_beams": 1, "guidance_scale": None, "do_sample": False}
    assert mmspec.generate(model, ids, drafter="ngram", max_new_tokens=NEW, **neutral)[0].tolist() == PLAIN


def test_defaults_in_force_are_described() -> None:
    pipe = pipeline(model_with(do_sample=True, temperature=0.6, top_k=20, suppress_tokens=[5]))
    assert pipe.defaults.describe() == "temperature 0.6, top_k 20, SuppressTokensLogitsProcessor"
    assert pipeline(byte_model()).defaults.describe() == ""
