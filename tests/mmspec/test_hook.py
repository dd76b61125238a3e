"""Inside transformers' ``generate``: the same arguments, the same tokens."""

import contextlib
import copy
import threading
from functools import partial

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import mmspec
from mmspec import UserError
from mmspec.checking.oracle import Oracle
from mmspec.drafters.registry import chosen_drafter, make_drafter, registered_name
from tests import dflash, gemma4, mtp, vocabularies
from tests.targets import CACHE
from tests.tiny import Script, byte_model, byte_tokenizer, shared_model
from tests.tiny.configs import TEXT_CONFIGS, VOCAB
from tests.tiny.drafters import tiny_drafter
from tests.tiny.models import text_inputs, text_model, vision_inputs, vision_model

GREEDY = {"max_new_tokens": 20, "do_sample": False}


def reference_and_oracle(model, inputs, **options):
    reference = model.generate(**{**GREEDY, **inputs, **options})
    return reference, Oracle(reference[:, inputs["input_ids"].shape[1] :].tolist(), vocab=90)


def same_tokens(model, inputs, **options):
    """Output of generate, which ``decode`` and ``mmspec.generate`` must equal."""
    options = {**inputs, **GREEDY, **options}
    reference, oracle = reference_and_oracle(model, options)
    both_equal(model, reference, drafter=oracle, nodes=10, **options)
    return reference


def both_equal(model, reference, **options):
    assert torch.equal(model.generate(**options, custom_generate=mmspec.decode), reference)
    assert torch.equal(mmspec.generate(model, **options), reference)


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 15, "max_new_tokens": None},
        {"eos_token_id": list(range(2, 40))},
        {"eos_token_id": list(range(2, 40)), "pad_token_id": 77},
        {"eos_token_id": None},
        {"bad_words_ids": [[5], [7, 8], [84, 3]]},
        {"sequence_bias": {(5,): 9.0, (5, 6): 8.0}},
        {"forced_eos_token_id": 2},
        {"forced_bos_token_id": 5},
        {"begin_suppress_tokens": list(range(3, 50))},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5},
        {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}},
        {"prefix_allowed_tokens_fn": lambda row, ids: [10 + row, 40 + row, 3 + row + len(ids) % 7]},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"max_time": 1e6},
        {"penalty_alpha": 0.6, "top_k": 1, "num_beams": 1, "num_beam_groups": 1},
        {"num_return_sequences": 3, "do_sample": True, "top_k": 1},
        {"position_ids": (text_inputs(3, 9)["attention_mask"].cumsum(1) - 1).clamp(min=0) + 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_generate(options):
    same_tokens(shared_model("llama"), text_inputs(3, 9), **options)


@pytest.mark.parametrize("drop", ["attention_mask", "both"])
def test_inputs_that_generate_completes(drop):
    inputs = {} if drop == "both" else {"input_ids": text_inputs(1, 9)["input_ids"]}
    model = shared_model("llama")
    reference = model.generate(**inputs, **GREEDY)
    assert torch.equal(mmspec.generate(model, drafter="ngram", nodes=4, **inputs, **GREEDY), reference)


def test_sampling_follows_torchs_seed():
    model, inputs = shared_model("llama"), text_inputs(1, 9)

    def sampled(seed):
        torch.manual_seed(seed)
        return mmspec.generate(model, drafter="ngram", nodes=4, **inputs, do_sample=True, max_new_tokens=12).tolist()

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def tail(input_ids, scores, **kwargs):
    """Per row: the last two tokens add up to a multiple of five."""
    return (input_ids[:, -1] + input_ids[:, -2]) % 5 == 0


class EveryRow(StoppingCriteria):
    """All rows together, and by calls: each row has had a token below 30 once, and at least four calls were made."""

    def __init__(self):
        self.calls, self.met = 0, set()

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        self.met |= set((input_ids[:, -1] < 30).nonzero().flatten().tolist())
        return self.calls >= 4 and len(self.met) == len(input_ids)


class OneToken(StoppingCriteria):
    """An end of sequence of the user's own: ``generate`` pads the rows that it ends."""

    def __init__(self, token):
        self.eos_token_id = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.eos_token_id


class NoLimit(MaxLengthCriteria):
    """A subclass that ends nothing."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def column(input_ids, scores, **kwargs):
    """Shape (rows, 1), as transformers' documentation says."""
    return tail(input_ids, scores)[:, None]


def failing(input_ids, scores, **kwargs):
    raise ValueError("no criterion")


@pytest.mark.parametrize("eos", [None, 17], ids=["no-eos", "eos"])
@pytest.mark.parametrize(
    "criteria",
    [
        lambda: [tail],
        lambda: [EveryRow()],
        lambda: [OneToken(40)],
        lambda: [NoLimit(10), tail],
        lambda: [MaxLengthCriteria(14), tail],
        lambda: [MaxLengthCriteria(3)],
    ],
    ids=["rows", "every-row", "own-eos", "subclass", "length", "short"],
)
def test_several_rows_with_criteria_end_as_in_generate(criteria, eos):
    inputs, model = text_inputs(3, 9, seed=3), shared_model("llama")
    options = {**GREEDY, "eos_token_id": eos, "pad_token_id": 80}
    one = criteria()
    reference = model.generate(**inputs, **options, stopping_criteria=StoppingCriteriaList(one))
    oracle = Oracle(reference[:, 9:].tolist(), vocab=90)
    again = criteria()
    out = mmspec.generate(
        model, drafter=oracle, nodes=10, stopping_criteria=again, return_dict_in_generate=True, **inputs, **options
    )
    assert torch.equal(out.sequences, reference)
    assert [vars(criterion) for criterion in again] == [vars(criterion) for criterion in one]
    lengths = [len(row) - row.count(80) for row in reference[:, 9:].tolist()]
    assert [stats.num_generated_tokens for stats in out.stats] == lengths


def test_criteria_that_return_a_column_or_fail():
    inputs, model = text_inputs(3, 9, seed=3), shared_model("llama")
    options = {**inputs, **GREEDY, "eos_token_id": None, "stopping_criteria": StoppingCriteriaList([column])}
    reference = model.generate(**options)
    assert torch.equal(mmspec.generate(model, drafter="ngram", nodes=4, **options), reference)
    for change, error, message in (
        ({"eos_token_id": 17}, UserError, r"must return a truth value per row, \(3,\), .* got shape \(3, 3\)"),
        ({"stopping_criteria": [failing]}, ValueError, "no criterion"),
    ):
        with pytest.raises(error, match=message):
            mmspec.generate(model, drafter="ngram", nodes=4, **options | change)


def test_rows_that_are_ahead_do_not_raise_after_the_end():
    """A logits processor that fails where ``generate`` would not have called it."""

    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 9 + 8:
                raise ValueError("too far")
            return scores

    def together(length):
        return lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= length)

    inputs, model = text_inputs(2, 9), shared_model("llama")
    options = {**GREEDY, "eos_token_id": None, "stopping_criteria": [MaxLengthCriteria(9 + 8)]}
    reference = model.generate(**inputs, **options)
    oracle = Oracle([reference[0, 9:].tolist(), []], vocab=90)  # row 0 runs ahead
    options |= {"logits_processor": [Failing()], "stopping_criteria": [together(9 + 8)]}
    assert torch.equal(mmspec.generate(model, drafter=oracle, nodes=10, **inputs, **options), reference)
    options["stopping_criteria"] = [together(9 + 10)]
    with pytest.raises(ValueError, match="too far"):
        mmspec.generate(model, drafter=oracle, nodes=10, **inputs, **options)


class ScoreSum(StoppingCriteria):
    """Ends rows whose chosen scores reach a sum, and records its arguments."""

    def __init__(self, most):
        self.most, self.calls = most, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.clone(), None if scores is None else [one.clone() for one in scores]))
        if scores is None:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        sums = [
            sum(float(step[row, token]) for step, token in zip(scores, ids[-len(scores) :].tolist(), strict=True))
            for row, ids in enumerate(input_ids)
        ]
        return torch.tensor([one >= self.most for one in sums])


@pytest.mark.parametrize(("batch", "returned"), [(1, True), (3, True), (3, False), (1, False)])
def test_criteria_get_the_scores_that_generate_passes(batch, returned):
    """With ``output_scores`` and ``return_dict_in_generate``, else None; all tokens, with scores of the last token. All
    criteria are called, also at the last token."""
    model, inputs = shared_model("llama"), text_inputs(batch, 9)
    options = {**GREEDY, "eos_token_id": None, "repetition_penalty": 1.3, "max_new_tokens": 16, "output_scores": True}
    options["return_dict_in_generate"] = returned
    theirs, ours, plain = ScoreSum(50.0), ScoreSum(50.0), model.generate(**inputs, **GREEDY)
    oracle = Oracle(plain[:, 9:].tolist(), vocab=90)
    if batch == 1:
        options["eos_token_id"] = int(plain[0, 9 + 13])
    more = [] if returned else [lambda ids, scores, **_: tail(ids, scores) & (ids.shape[1] > 9 + 8)]
    reference = model.generate(**inputs, **options, stopping_criteria=StoppingCriteriaList([*more, theirs]))
    out = mmspec.generate(model, drafter=oracle, nodes=10, **inputs, **options, stopping_criteria=[*more, ours])
    if returned:
        assert 9 + 2 < reference.sequences.shape[1] < 9 + 16
        assert torch.equal(out.sequences, reference.sequences)
        torch.testing.assert_close(out.scores, reference.scores, atol=1e-4, rtol=1e-4)
    else:
        assert torch.equal(out, reference)
    assert len(ours.calls) == len(theirs.calls)
    for (ids, scores), (other, wanted) in zip(ours.calls, theirs.calls, strict=True):
        assert torch.equal(ids, other)
        assert (scores is None) == (wanted is None) == (not returned)
        if returned:
            torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=1e-4)


class Recording(LogitsProcessor):
    """Adds a bias that depends on its calls, and records them."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores.clone()))
        return scores.index_fill(1, torch.tensor([len(self.calls) % 7]), 3.0)


@pytest.mark.parametrize(("end", "scored"), [("stop", True), ("length", False)])
def test_a_callers_processor_keeps_what_it_records(end, scored):
    model, inputs = shared_model("llama"), text_inputs(1, 9)
    options = {**GREEDY, "max_new_tokens": 17, "eos_token_id": None}
    plain = model.generate(**inputs, **options, logits_processor=[Recording()])[0, 9:].tolist()
    options |= {"return_dict_in_generate": True, "output_scores": scored}
    if end == "stop":
        options["eos_token_id"] = plain[8]
    theirs, ours = Recording(), Recording()
    reference = model.generate(**inputs, **options, logits_processor=[theirs])
    oracle = Oracle([plain], vocab=90)
    out = mmspec.generate(model, drafter=oracle, nodes=10, **inputs, **options, logits_processor=[ours])
    assert torch.equal(out.sequences, reference.sequences)
    assert out.stats[0].mean_acceptance_length > 1.2
    assert [ids.tolist() for ids, _ in ours.calls] == [ids.tolist() for ids, _ in theirs.calls]
    for (_, mine), (_, other) in zip(ours.calls, theirs.calls, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    if scored:
        torch.testing.assert_close(out.scores, reference.scores, atol=1e-4, rtol=1e-4)


def test_a_processor_that_cannot_be_copied_serves_one_sequence():
    class Locked(Recording):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    model, inputs = shared_model("llama"), text_inputs(1, 9)
    reference = model.generate(**inputs, **GREEDY, logits_processor=[Locked()])
    assert torch.equal(mmspec.generate(model, **inputs, **GREEDY, logits_processor=[Locked()]), reference)


# ---------------------------------------------------------------------- text


class Order:
    """A streamer that records its inputs and the end."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


def scripted(text, prompt="Say: "):
    tokenizer = byte_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    options = {**GREEDY, "max_new_tokens": 60, "logits_processor": [Script(tokenizer(text)["input_ids"], ids.shape[1])]}
    return tokenizer, {"input_ids": ids}, options


TEXT = "Größe: 3 €, 日本語 und 🙂!\nEND of it. Größe: 3 €, 日本語 END"


@pytest.mark.parametrize("stop", [["END"], "本語", ["nowhere"], [" und", "Größe: 4"]])
def test_stop_strings(stop):
    tokenizer, inputs, options = scripted(TEXT)
    same_tokens(byte_model(), inputs, **options, stop_strings=stop, tokenizer=tokenizer)


def test_stop_strings_of_several_rows_without_an_end_of_sequence():
    """Rows that have met their stop string go on until all have."""
    tokenizer = byte_tokenizer()
    texts = [tokenizer(text)["input_ids"] for text in ("ab END and more, all of it", "much later the END and on")]
    ids = tokenizer(["Say: ", "Tell:"], return_tensors="pt")["input_ids"]
    options = {**GREEDY, "max_new_tokens": 24, "stop_strings": ["END"], "eos_token_id": None, "input_ids": ids}
    options |= {"tokenizer": tokenizer, "prefix_allowed_tokens_fn": lambda row, seen: [texts[row][len(seen) - 5]]}
    reference = byte_model().generate(**options)
    assert tokenizer.batch_decode(reference[:, 5:]) == ["ab END and more, a", "much later the END"]
    ours = mmspec.generate(byte_model(), drafter=Oracle(reference[:, 5:].tolist(), vocab=90), nodes=6, **options)
    assert torch.equal(ours, reference)


def test_a_streamers_reader_does_not_wait_for_a_call_that_failed():
    streamer = TextIteratorStreamer(byte_tokenizer(), timeout=60)
    options = {**GREEDY, "custom_generate": mmspec.decode, "streamer": streamer, "penalty_alpha": 0.6, "top_k": 4}
    with pytest.raises(UserError, match="contrastive search"):
        shared_model("llama").generate(**text_inputs(1, 9), **options)
    list(streamer)


def test_another_custom_function_gets_what_transformers_passes():
    seen = []

    def method(model, input_ids, logits_processor, stopping_criteria, generation_config, drafter=None, **inputs):
        seen.append((drafter, sorted(inputs)))
        return input_ids

    shared_model("llama").generate(
        **text_inputs(1, 4), **GREEDY, custom_generate=method, streamer=Order(), drafter=5, tokenizer=byte_tokenizer()
    )
    ((drafter, inputs),) = seen
    assert drafter == 5
    assert {"streamer", "tokenizer"}.isdisjoint(inputs)


def test_a_streamer_is_fed_as_generate_feeds_it():
    model, inputs, theirs = shared_model("llama"), text_inputs(1, 4), Order()
    reference, oracle = reference_and_oracle(model, inputs, streamer=theirs)
    assert len(theirs.calls) == 2 + reference.shape[1] - 4
    hooked = ({"custom_generate": method} for method in (mmspec.decode, partial(mmspec.decode)))
    for generate, more in ((partial(mmspec.generate, model), {}), *((model.generate, one) for one in hooked)):
        ours = Order()
        generate(**inputs, **GREEDY, streamer=ours, drafter=oracle, nodes=10, **more)
        assert ours.calls == theirs.calls


def test_a_request_ends_where_its_streamer_raises():
    """With the step that runs then, the second one; the next request on the model takes more steps than are left."""
    raised, steps = threading.Event(), []

    class Full(Order):
        def put(self, value):
            super().put(value)
            if len(self.calls) == 2:  # the prompt, and a token
                raise OSError("no space left")

    class Held(LogitsProcessor):
        def __call__(self, input_ids, scores):
            steps.append(input_ids.shape[1])
            assert len(steps) < 2 or raised.wait(60)
            return scores

    inputs = {**text_inputs(1, 9), "eos_token_id": None, "do_sample": False, "drafter": None}
    with pytest.raises(OSError, match="no space left"):
        mmspec.generate(shared_model("llama"), streamer=Full(), logits_processor=[Held()], max_new_tokens=20, **inputs)
    raised.set()
    mmspec.generate(shared_model("llama"), max_new_tokens=40, **inputs)
    assert len(steps) <= 2


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_padding_is_each_rows_own_after_others_have_ended(seed):
    """The row with the most padding ends first."""
    ids = torch.randint(3, VOCAB - 5, (3, 9), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(9) >= torch.tensor([[7], [3], [0]])).long()
    inputs, model = {"input_ids": ids * mask, "attention_mask": mask}, shared_model("llama")
    options = {"repetition_penalty": 5.0, "pad_token_id": 0, "max_new_tokens": 20, "do_sample": False}
    third = int(model.generate(**inputs, **options, eos_token_id=None)[0, 11])
    assert len(same_tokens(model, inputs, **options, eos_token_id=third)[1]) == 29


# ---------------------------------------------------------------------- results and refusals


@pytest.mark.parametrize(
    ("sampling", "several_criteria"), [({}, True), ({"do_sample": True, "top_k": 1, "temperature": 0.7}, False)]
)
def test_scores_and_logits_are_those_of_generate(sampling, several_criteria):
    """Up to the end of each row: generate goes on with padding."""
    model, inputs = shared_model("llama"), text_inputs(3, 9)
    options = {**GREEDY, "repetition_penalty": 1.3, "min_new_tokens": 4, **sampling}
    criteria = StoppingCriteriaList([lambda ids, _: torch.zeros(len(ids), dtype=torch.bool)] * several_criteria)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    reference = model.generate(**inputs, **options, **wanted)
    oracle = Oracle(reference.sequences[:, 9:].tolist(), vocab=90)
    out = mmspec.generate(model, drafter=oracle, nodes=10, stopping_criteria=criteria, **inputs, **options, **wanted)
    assert torch.equal(out.sequences, reference.sequences)
    assert max(stats.mean_acceptance_length for stats in out.stats) > 1.2
    steps = reference.sequences.shape[1] - 9
    for ours, theirs in ((out.scores, reference.scores), (out.logits, reference.logits)):
        assert len(ours) == len(theirs) == steps
        for row, stats in enumerate(out.stats):
            end = stats.num_generated_tokens
            for mine, other in zip(ours[:end], theirs[:end], strict=True):
                torch.testing.assert_close(mine[row], other[row], atol=1e-4, rtol=1e-4)
            assert all(not one[row].any() for one in out.logits[end:])
    only = mmspec.generate(model, drafter=oracle, nodes=10, **inputs, **options, **{**wanted, "output_scores": False})
    assert only.scores is None
    assert len(only.logits) == steps


def test_a_drafter_object_keeps_what_it_learned():
    model, inputs, drafter = shared_model("llama"), text_inputs(1, 9), make_drafter("recycle")
    options = {**GREEDY, "return_dict_in_generate": True, "drafter": drafter, "nodes": 12}
    first = mmspec.generate(model, **inputs, **options).stats[0]
    again = mmspec.generate(model, **inputs, **options).stats[0]
    assert again.num_spec_steps < first.num_spec_steps


def test_a_pipeline_keeps_all_that_it_prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    model, inputs = shared_model("llama"), text_inputs(3, 9)
    reference = model.generate(**inputs, **GREEDY)
    target = mmspec.plugins.target_class(model.config)(model)
    pipe = mmspec.Pipeline(target, drafter=make_drafter("recycle"), max_num_seqs=2)  # three rows start together
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **GREEDY, custom_generate=mmspec.decode, drafter=pipe), reference)
    assert pipe.policy is not None
    assert pipe.drafter.entries > 0  # it was this drafter that drafted
    with pytest.raises(UserError, match="a pipeline as drafter must hold the model that generates: it holds Llama"):
        mmspec.generate(text_model("llama"), drafter=pipe, **inputs, **GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_beams": 2},
            "^generation must be greedy search or sampling: got beam search, use model.generate for it$",
        ),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "got group beam search, "),
        ({"force_words_ids": [[5]]}, "got constrained beam search, "),
        ({"dola_layers": "high"}, "got dola generation, "),
        ({"penalty_alpha": 0.6, "top_k": 4}, "got contrastive search, "),
        ({"prompt_lookup_num_tokens": 3}, "^assisted generation chooses the drafter: .* argument, got 'ngram'$"),
        ({"assistant_model": text_model("llama")}, "^assisted generation chooses the drafter: "),
        (
            {"assistant_early_exit": 2, "drafter": "auto"},
            "^an early exit must be after a layer before the last: expected 1 to 1, got 2$",
        ),
        ({"assistant_ensemble_weight": 0.5}, "^assistant_ensemble_weight changes the output, which drafters do not"),
        ({"nodes": -1}, "^num_draft_tokens must be >= 0: got -1$"),
        ({"nodes": "8"}, "^num_draft_tokens must be a whole number: got '8'$"),
        (
            {"output_attentions": True, "return_dict_in_generate": True},
            "sequences, scores, logits and stats are returned: output_attentions cannot be",
        ),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor does not, use model.generate for it"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGramLogitsProcessor does not"),
        ({"drafter": "nobody"}, "unknown drafter: expected one of .*, got 'nobody'"),
        ({"drafter": 5}, "drafter must be a name, a folder, None or derive from mmspec.Drafter: got int"),
        ({"stop_strings": ["x"]}, "stop_strings need the tokenizer: none was given"),
        ({"streamer": Order(), **text_inputs(3, 9)}, "^a streamer takes one sequence: got a batch of 3$"),
    ],
)
def test_refuses(options, message):
    model, options = shared_model("llama"), {"drafter": "ngram", "nodes": 4, **text_inputs(1, 9), **GREEDY, **options}
    with pytest.raises(UserError, match=message):
        mmspec.generate(model, **options)
    if "stop_strings" not in options:  # refused by generate itself
        with pytest.raises(UserError, match=message):
            model.generate(custom_generate=mmspec.decode, **options)


def test_the_prompt_and_the_config_by_position():
    model, inputs = shared_model("llama"), text_inputs(3, 9)
    config = GenerationConfig(**GREEDY, repetition_penalty=1.3)
    mask = {"attention_mask": inputs["attention_mask"]}
    reference = model.generate(inputs["input_ids"], config, **mask)
    assert torch.equal(mmspec.generate(model, inputs["input_ids"], config, drafter="ngram", nodes=4, **mask), reference)
    with pytest.raises(UserError, match=r"^model must be a model of transformers: got 'llama'$"):
        mmspec.generate("llama", inputs["input_ids"])


def test_the_users_model_stays_as_it_was():
    model, inputs = text_model("qwen2"), text_inputs(1, 9)
    for options in ({}, {"num_beams": 2}):
        with contextlib.suppress(UserError):
            model.generate(**inputs, **GREEDY, **options, custom_generate=mmspec.decode, drafter="ngram", nodes=4)
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")
@pytest.mark.parametrize("name", ["llama", "gemma2", "mamba2"])
def test_prompts_of_embeddings(name):
    """Of embeddings that belong to no tokens. With token ids as well, processors see the token ids; drafters get
    placeholders in place of the prompt's tokens."""
    model, inputs = shared_model(name), text_inputs(3, 9)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    embeds = embeds + 0.3 * torch.randn(embeds.shape, generator=torch.Generator().manual_seed(3))
    mask = {"attention_mask": inputs["attention_mask"]}
    for given in ({"inputs_embeds": embeds}, {**inputs, "inputs_embeds": embeds}):
        options = {**GREEDY, "repetition_penalty": 1.5, **given, **mask}
        reference = model.generate(**options)
        oracle = Oracle(reference[:, 9 if "input_ids" in given else 0 :].tolist(), vocab=90)
        both_equal(model, reference, drafter=oracle, nodes=8, **options)
    options = {**GREEDY, "max_new_tokens": 8, "inputs_embeds": embeds, **mask}
    for drafter in ("recycle", "small", "eagle", "medusa") if name == "llama" else ():
        found = mmspec.generate(model, drafter=tiny_drafter(drafter, model), nodes=6, **options)
        assert torch.equal(found, model.generate(**options)), drafter


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Position ids are not supported for parameter efficient")
@pytest.mark.parametrize("kind", ["adapter", "prompts"])
def test_models_that_peft_has_wrapped(kind):
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(**lora) if kind == "adapter" else peft.PromptTuningConfig(num_virtual_tokens=4)
    config.task_type = "CAUSAL_LM"
    torch.manual_seed(3)
    model = peft.get_peft_model(text_model("llama"), config).eval()
    inputs, tokens = text_inputs(1, 9), [list(range(3, 12))]
    calls = [
        lambda: mmspec.generate(model, drafter="ngram", **inputs, **GREEDY),
        lambda: model.generate(custom_generate=mmspec.decode, drafter="ngram", **inputs, **GREEDY),
        lambda: mmspec.load(model, processor=byte_tokenizer()).generate(tokens[0], max_new_tokens=5).token_ids,
        lambda: mmspec.generate(shared_model("llama"), assistant_model=model, nodes=4, **inputs, **GREEDY),
    ]
    if kind == "prompts":
        for call in calls:
            with pytest.raises(UserError, match=r"^adapters of peft must .*got learned prompts, "):
                call()
        return
    reference = model.generate(**inputs, **GREEDY)
    assert torch.equal(calls[0](), reference)
    assert torch.equal(calls[1](), reference)
    expected = model.generate(input_ids=torch.tensor(tokens), max_new_tokens=5, do_sample=False)
    assert calls[2]() == expected[0, 9:].tolist()
    assert torch.equal(calls[3](), shared_model("llama").generate(**inputs, **GREEDY))


def test_gradient_checkpointing_is_refused_where_it_keeps_no_states():
    model, inputs = text_model("llama"), text_inputs(1, 9)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its newer name
    assert torch.equal(mmspec.generate(model, drafter="ngram", **inputs, **GREEDY), model.generate(**inputs, **GREEDY))
    model.train()
    with pytest.raises(UserError, match=r"^gradient checkpointing keeps no keys .* call model.eval\(\) first$"):
        mmspec.generate(model, drafter="ngram", **inputs, **GREEDY)


def test_models_that_read_images_in_every_pass_are_refused():
    sizes = {"vocab_size": 37, "additional_vocab_size": 0, "hidden_size": 32, "intermediate_size": 48}
    vision = {"embed_dim": 32, "image_size": 30, "patch_size": 10, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = IdeficsConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, vision_config=vision)
    model = IdeficsForVisionText2Text(config).eval()
    ids = torch.tensor([[5, 6, 7]])
    images = {"pixel_values": torch.zeros(1, 1, 3, 30, 30), "image_attention_mask": torch.ones(1, 3, 1)}
    for options in ({"drafter": "ngram"}, {"assistant_model": text_model("llama")}):
        with pytest.raises(UserError, match="IdeficsForVisionText2Text reads images in every pass"):
            mmspec.generate(model, input_ids=ids, **images, **options, **GREEDY)
    with pytest.raises(UserError, match="IdeficsForVisionText2Text reads images in every pass"):
        mmspec.generate(shared_model("llama"), assistant_model=model, **text_inputs(1, 9), **GREEDY)


def states(cache):
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "llava", "qwen2_vl"])
def test_a_callers_cache_is_filled_as_by_generate(name):
    """With rows that are padded, and rows that end early."""
    model = shared_model(name)
    inputs = text_inputs(3, 9) if name in TEXT_CONFIGS else vision_inputs(name, 3)
    answers = model.generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    options = {**GREEDY, "return_dict_in_generate": True, "eos_token_id": int(answers[0, 7]), "pad_token_id": 0}
    ours, theirs, none = (DynamicCache(config=model.config) for _ in range(3))
    expected = model.generate(**inputs, **options, **{CACHE: theirs})
    found = mmspec.generate(model, drafter="ngram", nodes=6, **{CACHE: ours}, **inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert found[CACHE] is ours
    assert ours.get_seq_length() == theirs.get_seq_length() == expected.sequences.shape[1] - 1
    for own, other in zip(states(ours), states(theirs), strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
    hooked = model.generate(**inputs, **options, **{CACHE: none}, custom_generate=mmspec.decode, drafter="ngram")
    assert hooked[CACHE] is none
    for own, other in zip(states(none), states(theirs), strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


def test_a_filled_cache_continues_a_conversation():
    model, inputs = shared_model("llama"), text_inputs(1, 9)
    past = DynamicCache(config=model.config)
    first = mmspec.generate(model, drafter="ngram", **{CACHE: past}, **inputs, **GREEDY)
    with pytest.raises(UserError, match="the cache given must be empty: it holds 28 tokens"):
        mmspec.generate(model, drafter="ngram", nodes=4, **{CACHE: past}, **inputs, **GREEDY)
    second = torch.cat([first, torch.tensor([[5, 6, 7]])], dim=1)
    assert torch.equal(model.generate(second, **{CACHE: past}, **GREEDY), model.generate(second, **GREEDY))


def test_caches_of_recurrent_states_stay_empty_with_a_warning():
    model, inputs = shared_model("bamba"), text_inputs(1, 9)
    past = DynamicCache(config=model.config)
    with pytest.warns(UserWarning, match="the cache given stays empty: layers with states"):
        mmspec.generate(model, drafter="ngram", **{CACHE: past}, **inputs, **GREEDY)
    assert past.get_seq_length() == 0


def test_beyond_the_context_as_generate_does():
    model = text_model("llama")
    inputs = {"input_ids": torch.randint(3, 90, (1, 505), generator=torch.Generator().manual_seed(0))}
    reference = same_tokens(model, inputs, eos_token_id=None)
    assert reference.shape[1] == 525 > model.config.max_position_embeddings


# ---------------------------------------------------------------------- assisted generation


HYBRIDS = ("qwen3_5_text", "qwen3_next", "nemotron_h", "granitemoehybrid", "falcon_h1", "bamba")
OPTIONS = {**GREEDY, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}


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
    wider = dflash.reference(hidden_size=64)
    with pytest.raises(UserError, match=r"^the drafter was trained for another target \(hidden_size 64\)"):
        mmspec.generate(shared_model("llama"), **text_inputs(1, 9), **OPTIONS, assistant_model=wider)


def test_a_gemma_4_assistant():
    model = gemma4.target_model()
    assistant = gemma4.assistant_of(model)
    assistant.generation_config.num_assistant_tokens = 4
    assert drafted(model, text_inputs(1, 9), assistant_model=assistant) == "gemma4"


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
