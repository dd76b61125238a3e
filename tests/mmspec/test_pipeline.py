"""The front door: answers, batches, streams and mistakes, with a model of bytes that says what a script wants."""

import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor

import mmspec
from eval.oracle import Oracle
from mmspec import Generation, Piece, Pipeline, UserError
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.transformers_target import TransformersTarget
from tests.tiny import Script, byte_model, byte_tokenizer

PROMPT = "Say: "
TEXT = "Größe: 3 €, 日本語 und 🙂! EN ENDE and END."


def ids_of(text):
    return byte_tokenizer()(text)["input_ids"]


def pipeline(drafter=None):
    return Pipeline(TransformersTarget(byte_model(), byte_tokenizer()), drafter)


def scripted(text=TEXT, prompt=PROMPT):
    return {"logits_processor": [Script(ids_of(text), len(ids_of(prompt)))], "max_new_tokens": 99, "nodes": 10}


def oracle(text=TEXT, seed=0):
    return Oracle([[*ids_of(text), 2]], vocab=90, seed=seed)


DRAFTERS = {"none": lambda: None, "ngram": Ngram, "recycle": Recycle, "oracle": oracle}


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_answer(name):
    answer = pipeline(DRAFTERS[name]()).generate(PROMPT, **scripted())
    assert isinstance(answer, Generation)
    assert answer.text == TEXT
    assert answer.token_ids == [*ids_of(TEXT), 2]
    assert answer.finish_reason == "stop"
    assert answer.stats.num_generated_tokens == len(answer.token_ids)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_models_own_words_equal_generate(name):
    ids = torch.tensor([ids_of(PROMPT)])
    reference = byte_model().generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :].tolist()
    answer = pipeline(DRAFTERS[name]()).generate(PROMPT, max_new_tokens=30, nodes=10)
    assert answer.token_ids == reference
    assert answer.finish_reason == ("stop" if reference[-1] == 2 else "length")


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
def test_limits(limit):
    answer = pipeline(oracle()).generate(PROMPT, **{**scripted(), "max_new_tokens": limit})
    assert answer.token_ids == ids_of(TEXT)[:limit]
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("END", TEXT[: TEXT.index("END")]),
        (["nowhere", "日本"], TEXT[: TEXT.index("日本")]),
        (["END.", "ENDE a"], TEXT[: TEXT.index("ENDE")]),
        ("G", ""),
        ("nowhere", TEXT),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_text_ends_before_a_stop_string(stop, text, seed):
    answer = pipeline(oracle(seed=seed)).generate(PROMPT, stop=stop, **scripted())
    assert answer.text == text
    streamed = list(pipeline(oracle(seed=seed)).stream(PROMPT, stop=stop, **scripted()))
    assert "".join(piece.text for piece in streamed) == text
    assert [t for piece in streamed for t in piece.token_ids] == answer.token_ids


@pytest.mark.parametrize("name", DRAFTERS)
def test_streamed_pieces_are_whole_characters(name):
    pieces = list(pipeline(DRAFTERS[name]()).stream(PROMPT, **scripted()))
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert [t for piece in pieces for t in piece.token_ids] == [*ids_of(TEXT), 2]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert [piece.stats is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert len(pieces) > 5


def test_nothing_of_a_stop_string_is_shown_early():
    shown = ""
    for piece in pipeline(oracle()).stream(PROMPT, stop="END.", **scripted()):
        shown += piece.text
        assert TEXT.startswith(shown)
        assert not shown.endswith("END") or "ENDE" in shown
    assert shown == TEXT[:-4]


def test_what_a_limit_cuts_off_is_shown_at_the_end():
    cut = len("Größe: 3 ".encode()) + 1  # one byte of the euro sign
    pieces = list(pipeline().stream(PROMPT, **{**scripted(), "max_new_tokens": cut}))
    assert "".join(piece.text for piece in pieces) == "Größe: 3 \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("drafter", [None, Ngram(), Recycle()])
def test_a_batch_equals_one_by_one(drafter):
    prompts = ["a", "The second one", "Three"]
    pipe = pipeline(drafter)
    together = pipe.generate_batch([{"prompt": p} for p in prompts], max_new_tokens=25, nodes=8, repetition_penalty=1.2)
    for prompt, row in zip(prompts, together, strict=True):
        alone = pipe.generate(prompt, max_new_tokens=25, nodes=8, repetition_penalty=1.2)
        assert (row.text, row.token_ids, row.finish_reason) == (alone.text, alone.token_ids, alone.finish_reason)
    assert pipe.generate_batch([]) == []


def test_seeds():
    pipe = pipeline(Ngram())
    options = dict(max_new_tokens=20, temperature=1.5, nodes=6)
    first = pipe.generate(PROMPT, seed=3, **options).token_ids
    assert pipe.generate(PROMPT, seed=3, **options).token_ids == first
    assert pipe.generate(PROMPT, seed=4, **options).token_ids != first


@pytest.mark.parametrize("batch", [1, 3])
def test_a_seed_gives_the_same_tokens_whatever_is_drafted(batch):
    prompts = [{"prompt": p} for p in ("a", "The second one", "Three")[:batch]]
    options = dict(max_new_tokens=30, temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=11)
    plain = [row.token_ids for row in pipeline().generate_batch(prompts, **options)]
    for drafter, nodes in ((Ngram(), 4), (Recycle(), 9), (Recycle(), 30)):
        rows = pipeline(drafter).generate_batch(prompts, nodes=nodes, **options)
        assert [row.token_ids for row in rows] == plain


def test_what_a_budget_learnt_stays_with_the_pipeline():
    pipe = pipeline(Ngram())
    pipe.generate(PROMPT, max_new_tokens=5)
    first = pipe.budgets[1]
    pipe.generate(PROMPT, max_new_tokens=5)
    pipe.generate_batch([{"prompt": "a"}, {"prompt": "b"}], max_new_tokens=5)
    assert pipe.budgets[1] is first
    assert set(pipe.budgets) == {1, 2}
    pipe.generate(PROMPT, max_new_tokens=5, nodes=3)
    assert set(pipe.budgets) == {1, 2}


def test_sampling_without_choice_is_greedy():
    pipe = pipeline(Ngram())
    greedy = pipe.generate(PROMPT, max_new_tokens=20, nodes=6).token_ids
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert pipe.generate(PROMPT, max_new_tokens=20, temperature=1.0, nodes=6, **options).token_ids == greedy


def test_processors_and_criteria_of_the_users_own():
    ids = torch.tensor([ids_of(PROMPT)])
    longer = MinNewTokensLengthLogitsProcessor(ids.shape[1], 8, 2)
    answer = pipeline(Ngram()).generate(
        PROMPT,
        max_new_tokens=30,
        nodes=6,
        logits_processor=[longer],
        stopping_criteria=[lambda ids, scores, **_: torch.tensor([ids.shape[1] >= len(ids_of(PROMPT)) + 6])],
    )
    assert len(answer.token_ids) == 6
    assert answer.finish_reason == "stop"


def test_the_context_is_filled_and_not_overrun():
    pipe = pipeline(Ngram())
    answer = pipe.generate("x" * 120, max_new_tokens=50, nodes=6, logits_processor=[Script([70] * 99, 120)])
    assert len(answer.token_ids) == 8
    assert answer.finish_reason == "length"
    assert len(pipe.generate("x" * 127, max_new_tokens=50, nodes=6).token_ids) == 1
    with pytest.raises(
        UserError, match=r"^the prompt must be shorter than the model's context of 128 tokens: got 128$"
    ):
        pipe.generate("x" * 128)


def test_the_plain_objects_are_at_hand():
    pipe = pipeline()
    assert pipe.model is byte_model()
    assert pipe.processor is byte_tokenizer()


def test_a_checkpoint_folder(tmp_path):
    byte_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    pipe = mmspec.load(str(tmp_path), drafter="ngram", device="cpu")
    expected = pipeline().generate(PROMPT, max_new_tokens=10)
    assert pipe.generate(PROMPT, max_new_tokens=10, nodes=4).token_ids == expected.token_ids
    assert mmspec.load(str(tmp_path), drafter=None, dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16


def test_chat_messages(tmp_path):
    tokenizer = type(byte_tokenizer())(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    target = TransformersTarget(byte_model(), tokenizer)
    said = target.encode([{"prompt": "hi"}]).input_ids[0].tolist()
    assert said == ids_of("user: hi\nA:")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert target.encode([{"prompt": messages}]).input_ids[0].tolist() == ids_of("system: be brief\nuser: hi\nA:")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"prompt": ""}, "^the prompt must not be empty$"),
        ({"prompt": []}, "^the prompt must not be empty$"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "chat messages need a chat template: the tokenizer has none"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be a whole number in \[1, 2147483648\]: got 0"),
        ({"nodes": -1}, "nodes must be None or a whole number >= 0: got -1"),
        ({"temperature": -1}, "temperature must be 0 or >= 0.0001: got -1"),
        ({"top_p": 2}, r"top_p must be in \(0, 1\]: got 2"),
        ({"stop": ""}, "stop must be text or a list of texts, none of them empty: got ''"),
        ({"images": ["a.png"]}, "LlamaForCausalLM reads text only: images or videos were given"),
        ({"frames": 3}, "unknown option for a text model: got frames"),
        ({"tempreature": 3}, "unknown option for a text model: got tempreature"),
    ],
)
def test_mistakes_are_named(keywords, message):
    with pytest.raises(UserError, match=message):
        pipeline(Ngram()).generate(**{"prompt": PROMPT, **keywords})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"model": "/no/such/folder"},
            "cannot load model '/no/such/folder': expected an embedded model .*local folder",
        ),
        ({"model": "{folder}"}, "cannot load model .*: expected"),
        ({"model": "{folder}", "dtype": "int3"}, "dtype must be auto, float32, bfloat16, float16: got 'int3'"),
        ({"model": "{folder}", "device": "abacus"}, "device must be auto or one that torch can use here: got 'abacus'"),
    ],
)
def test_what_cannot_be_loaded_is_named(keywords, message, tmp_path):
    with pytest.raises(UserError, match=message):
        mmspec.load(**{"drafter": None, **{k: v.format(folder=tmp_path) for k, v in keywords.items()}})
