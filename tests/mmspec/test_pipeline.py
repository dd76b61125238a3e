"""The front door: answers, batches, streams and mistakes, with a model of bytes that emits a script."""

import threading
from copy import deepcopy

import pytest
import torch
from transformers import LogitsProcessor, MinNewTokensLengthLogitsProcessor, OPTConfig, OPTForCausalLM

import mmspec
from mmspec import Generation, Piece, Pipeline, UserError
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.engine.policy import AdaptivePolicy
from mmspec.eval.decoding.oracle import Oracle
from mmspec.loading import pick_device
from mmspec.targets.packing import pack_model
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import Script, byte_model, byte_tokenizer

PROMPT = "Say: "
TEXT = "Größe: 3 €, 日本語 und 🙂! EN ENDE and END."


def ids_of(text):
    return byte_tokenizer()(text)["input_ids"]


def pipeline(drafter=None):
    return Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), drafter)


def scripted(text=TEXT, prompt=PROMPT):
    return {"logits_processor": [Script(ids_of(text), len(ids_of(prompt)))], "max_new_tokens": 99, "nodes": 10}


def oracle(text=TEXT, seed=0):
    return Oracle([[*ids_of(text), 2]], vocab=90, seed=seed)


def learned_positions():
    """A model whose table of positions ends at the context limit: a position beyond it is an error."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=259,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        init_std=0.3,
        eos_token_id=2,
        pad_token_id=0,
    )
    return OPTForCausalLM(config).eval()


class NoEnd(LogitsProcessor):
    """No answer ends before its room does."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([2]), -1e4)


DRAFTERS = {"none": lambda: None, "ngram": Ngram, "recycle": Recycle, "oracle": oracle}


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("END", TEXT[: TEXT.index("END")]),
        (["nowhere", "日本"], TEXT[: TEXT.index("日本")]),
        (["END.", "ENDE a"], TEXT[: TEXT.index("ENDE")]),
        (["ND", "END"], TEXT[: TEXT.index("END")]),
        ("G", ""),
        ("nowhere", TEXT),
    ],
)
def test_text_ends_before_a_stop_string(stop, text):
    """Of a stop string nothing is shown early."""
    answer = pipeline(oracle()).generate(PROMPT, stop=stop, **scripted())
    assert answer.text == text
    shown, tokens = "", []
    for piece in pipeline(oracle()).stream(PROMPT, stop=stop, **scripted()):
        shown, tokens = shown + piece.text, tokens + piece.token_ids
        assert text.startswith(shown)
    assert (shown, tokens) == (text, answer.token_ids)


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_answer_and_its_pieces_of_whole_characters(name):
    answer = pipeline(DRAFTERS[name]()).generate(PROMPT, **scripted())
    assert isinstance(answer, Generation)
    assert (answer.text, answer.token_ids, answer.finish_reason) == (TEXT, [*ids_of(TEXT), 2], "stop")
    assert answer.stats.num_generated_tokens == len(answer.token_ids)
    going_on = scripted() | {"max_new_tokens": len(answer.token_ids) + 2, "ignore_eos": True}
    longer = pipeline(DRAFTERS[name]()).generate(PROMPT, **going_on)
    assert (longer.token_ids, longer.finish_reason) == ([*answer.token_ids, 2, 2], "length")
    pieces = list(pipeline(DRAFTERS[name]()).stream(PROMPT, **scripted()))
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert [t for piece in pieces for t in piece.token_ids] == [*ids_of(TEXT), 2]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert [piece.stats is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]


@pytest.mark.parametrize("name", ["none", "oracle"])
def test_a_piece_arrives_before_the_answer_is_complete(name):
    """The model waits with the third token until the first piece is there."""
    received = threading.Event()
    before = len(ids_of(PROMPT))

    class Waiting(Script):
        def __call__(self, ids, scores):
            if ids.shape[1] > before + 1:
                assert received.wait(120)
            return super().__call__(ids, scores)

    processor = Waiting(ids_of(TEXT), before)
    pieces = []
    for piece in pipeline(DRAFTERS[name]()).stream(PROMPT, **{**scripted(), "logits_processor": [processor]}):
        pieces.append(piece)
        received.set()
    assert len(pieces) > 1


def test_what_a_limit_cuts_off_is_shown_at_the_end():
    cut = len("Größe: 3 ".encode()) + 1  # one byte of the euro sign
    pieces = list(pipeline().stream(PROMPT, **{**scripted(), "max_new_tokens": cut}))
    assert "".join(piece.text for piece in pieces) == "Größe: 3 \N{REPLACEMENT CHARACTER}"


def test_a_batch_equals_one_by_one_and_generate():
    prompts, reference = ["a", "The second one", "Three"], []
    for prompt in prompts:
        ids = torch.tensor([ids_of(prompt)])
        options = {"max_new_tokens": 25, "do_sample": False, "repetition_penalty": 1.2}
        reference.append(byte_model().generate(ids, **options)[0, ids.shape[1] :].tolist())
    pipe = pipeline(Recycle())
    together = pipe.generate_batch([{"prompt": p} for p in prompts], max_new_tokens=25, nodes=8, repetition_penalty=1.2)
    for prompt, row in zip(prompts, together, strict=True):
        alone = pipe.generate(prompt, max_new_tokens=25, nodes=8, repetition_penalty=1.2)
        assert (row.text, row.token_ids, row.finish_reason) == (alone.text, alone.token_ids, alone.finish_reason)
    assert [row.token_ids for row in together] == reference
    assert pipe.generate_batch([]) == []


def test_a_seed_gives_the_same_tokens_whatever_is_drafted():
    prompts = [{"prompt": p} for p in ("a", "The second one", "Three")]
    options = dict(max_new_tokens=30, temperature=0.9, top_p=0.95, repetition_penalty=1.1)
    plain, other = ([row.token_ids for row in pipeline().generate_batch(prompts, **options, seed=n)] for n in (11, 12))
    assert all(one != another for one, another in zip(plain, other, strict=True))
    for drafter, nodes in ((Ngram(), 4), (Recycle(), 30)):
        rows = pipeline(drafter).generate_batch(prompts, nodes=nodes, **options, seed=11)
        assert [row.token_ids for row in rows] == plain


def test_the_policy_learns_from_all_requests_but_those_with_a_fixed_number_of_drafts(monkeypatch):
    seen, observe = [], AdaptivePolicy.observe
    monkeypatch.setattr(AdaptivePolicy, "observe", lambda policy, *step: seen.append(policy) or observe(policy, *step))
    pipe = pipeline(Ngram())
    for requests in (["a"], ["a", "b"]):
        pipe.generate_batch([{"prompt": prompt} for prompt in requests], max_new_tokens=5)
        assert set(seen) == {pipe.policy}
    count = len(seen)
    pipe.generate(PROMPT, max_new_tokens=5, nodes=3)
    assert len(seen) == count


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
    for limit, length in ((24, 4), (999, 50)):  # a request may lower the limit only
        script = Script([70] * 99, 20)
        answer = pipe.generate("x" * 20, context_limit=limit, logits_processor=[script], max_new_tokens=50)
        assert len(answer.token_ids) == length
    with pytest.raises(UserError, match=r"^the prompt must be shorter than the model's context of 20 tokens: got 20$"):
        pipe.generate("x" * 20, context_limit=20)
    with pytest.raises(
        UserError, match=r"^the prompt must be shorter than the model's context of 128 tokens: got 128$"
    ):
        pipe.generate("x" * 128)


@pytest.mark.parametrize("drafter", ["none", "oracle"])
def test_a_long_prompt_leaves_its_neighbours_their_room(drafter):
    target = TransformersTarget(learned_positions())
    processor = Processor(byte_tokenizer())
    prompts = ["abc", "y" * 97, "one, two"]
    keywords = {"max_new_tokens": 61, "nodes": 8, "logits_processor": [NoEnd()]}
    alone = [Pipeline(target, processor).generate(prompt, **keywords).token_ids for prompt in prompts]
    assert [len(tokens) for tokens in alone] == [61, 31, 61]
    made = Oracle(alone, vocab=90) if drafter == "oracle" else DRAFTERS[drafter]()
    together = Pipeline(target, processor, made).generate_batch([{"prompt": prompt} for prompt in prompts], **keywords)
    assert [row.token_ids for row in together] == alone
    assert [row.finish_reason for row in together] == ["length"] * 3


def test_a_checkpoint_folder(tmp_path):
    byte_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    pipe = mmspec.load(str(tmp_path), drafter="ngram", device="cpu")
    expected = pipeline().generate(PROMPT, max_new_tokens=10)
    assert pipe.generate(PROMPT, max_new_tokens=10, nodes=4).token_ids == expected.token_ids
    for dtype in ("bfloat16", torch.bfloat16):
        assert mmspec.load(tmp_path, drafter=None, dtype=dtype, device="cpu").model.dtype == torch.bfloat16


def test_chat_messages(tmp_path):
    tokenizer = type(byte_tokenizer())(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    processor = Processor(tokenizer)
    said = processor.encode([{"prompt": "hi"}]).input_ids[0].tolist()
    assert said == ids_of("user: hi\nA:")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert processor.encode([{"prompt": messages}]).input_ids[0].tolist() == ids_of("system: be brief\nuser: hi\nA:")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"prompt": ""}, "^the prompt must not be empty$"),
        ({"prompt": []}, "^the prompt must not be empty$"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "chat messages need a chat template: the tokenizer has none"),
        ({"nodes": -1}, "num_draft_tokens must be >= 0: got -1"),
        ({"images": ["a.png"]}, "the model reads text only: images or videos were given"),
        ({"frames": 3}, "unknown option for this model: got frames$"),
        ({"tempreature": 3}, "unknown option for this model: got tempreature; did you mean temperature"),
        ({"stop_strings": ["a"]}, "unknown option for this model: got stop_strings; write stop instead$"),
        ({"streamer": None}, "unknown option for this model: got streamer; write Pipeline.stream instead$"),
    ],
)
def test_mistakes_are_named(keywords, message):
    with pytest.raises(UserError, match=message):
        pipeline(Ngram()).generate(**{"prompt": PROMPT, **keywords})


def test_text_items_of_a_text_model_are_one_text():
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '|' }}{% endfor %}"
    processor = Processor(tokenizer)
    items = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = processor.encode([{"prompt": [{"role": "user", "content": items}]}]).input_ids
    assert found.tolist() == processor.encode([{"prompt": [{"role": "user", "content": "a\nb"}]}]).input_ids.tolist()
    with pytest.raises(UserError, match=r"^the model reads text only: got an item of type image_url$"):
        processor.encode([{"prompt": [{"role": "user", "content": [*items, {"type": "image_url"}]}]}])


def test_accelerators_are_named(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"can use here \(cpu, cuda:0, cuda:1\): got 'abacus'$"):
        pick_device("abacus")


def test_a_pipeline_shows_what_it_is():
    pipe = mmspec.load(deepcopy(byte_model()), drafter="recycle+ngram", processor=byte_tokenizer())
    assert repr(pipe) == f"Pipeline(model={pipe.name!r}, drafter='recycle+ngram', device='cpu', dtype='float32')"
    pack_model(pipe.model, "int8")
    assert repr(pipe).endswith("device='cpu', dtype='int8')")
    assert repr(pipeline(None)).startswith(f"Pipeline(model={pipeline(None).name!r}, drafter=None, ")


def test_dir_has_public_names_only():
    assert [name for name in dir(mmspec) if name not in mmspec.__all__] == ["__version__"]
    assert set(mmspec.__all__) <= set(dir(mmspec))


def test_a_model_of_ones_own():
    model = byte_model()
    pipe = mmspec.load(model, drafter="ngram", processor=byte_tokenizer())
    assert (pipe.model, pipe.hf_processor) == (model, byte_tokenizer())
    assert (
        pipe.generate(PROMPT, max_new_tokens=10, nodes=4).token_ids
        == pipeline().generate(PROMPT, max_new_tokens=10).token_ids
    )
    assert model.config._attn_implementation == "sdpa"
    for keywords, message in (
        ({}, "^a model object needs processor=, its tokenizer or processor: got LlamaForCausalLM$"),
        (
            {"processor": byte_tokenizer(), "dtype": "bfloat16", "revision": "main"},
            "^a model object stays on its device and in its dtype: got dtype='bfloat16', revision='main'$",
        ),
    ):
        with pytest.raises(UserError, match=message):
            mmspec.load(model, **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"model": 5}, "^model must be a name, a folder or a model of transformers: got 5$"),
        ({"model": torch.nn.Linear(2, 2)}, "^model must be a name, a folder or a model of transformers: got Linear$"),
        ({"model": "{folder}", "processor": 5}, "^processor= goes with a model object: got the model '/.*'"),
        (
            {"model": "{folder}", "torch_dtype": torch.float16},
            "^torch_dtype is called dtype here: got torch_dtype=dtype",
        ),
        ({"model": "{folder}", "dtype": torch.int8}, "dtype must be auto, float32, .*, int4: got torch.int8"),
        ({"model": "{folder}", "dtype": 5}, "dtype must be auto, float32, .*, int4: got 5"),
        (
            {"model": "{folder}", "device": 5.5},
            r"one that torch can use here \(cpu.*\): got 5.5$",
        ),
        (
            {"model": "/no/such/folder"},
            "cannot load model '/no/such/folder': expected an embedded model .*local folder",
        ),
        ({"model": "{folder}"}, "cannot load model .*: expected"),
        ({"model": "{folder}", "dtype": "int3"}, "dtype must be auto, float32, .*, int4: got 'int3'"),
        ({"model": "{folder}", "device": "abacus"}, r"one that torch can use here \(cpu.*\): got 'abacus'$"),
        ({"model": "./smolm2"}, r"smollm2, tiny-hybrid, tiny-llava; did you mean smollm2\?\), a local folder"),
    ],
)
def test_what_cannot_be_loaded_is_named(keywords, message, tmp_path):
    with pytest.raises(UserError, match=message):
        mmspec.load(
            **{
                "drafter": None,
                **{k: v.format(folder=tmp_path) if isinstance(v, str) else v for k, v in keywords.items()},
            }
        )


ROLES = (
    "{% for m in messages %}{{ m['role'] }}:GAP{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant:"
)


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        (None, ""),
        (ROLES.replace("GAP", " ") + "{% endif %}", " "),
        (ROLES.replace("GAP", "  ") + "{% endif %}", "  "),
        (ROLES.replace("GAP", "") + "{% endif %}", ""),
        (ROLES.replace("GAP", " ") + " {% endif %}", ""),
        (ROLES.replace("GAP", "-") + "{% endif %}", ""),
        ("{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}assistant:", ""),
    ],
)
@pytest.mark.parametrize("text", ["  A B ", "A", " "])
def test_the_blank_that_a_chat_template_puts_before_an_answer_is_not_part_of_it(template, prefix, text):
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.chat_template = template
    target, processor = TransformersTarget(byte_model()), Processor(tokenizer)
    length = processor.encode([{"prompt": PROMPT}]).input_ids.shape[1]
    keywords = {"logits_processor": [Script(ids_of(text), length)], "max_new_tokens": 99, "nodes": 10}
    answer = Pipeline(target, processor).generate(PROMPT, **keywords)
    assert answer.text == ("" if prefix.startswith(text) else text.removeprefix(prefix))
    pieces = [piece.text for piece in Pipeline(target, processor).stream(PROMPT, **keywords)]
    assert "".join(pieces) == answer.text
    assert answer.token_ids[: len(ids_of(text))] == ids_of(text)


def test_a_second_pipeline_shares_the_engine_of_a_target():
    """The second pipeline never takes slots from the first; each drafts with its own drafter."""
    target, tokenizer = TransformersTarget(byte_model()), byte_tokenizer()
    first = Pipeline(target, Processor(tokenizer), Ngram(), max_num_seqs=2)
    assert first.engine.max_num_seqs == 2
    second = Pipeline(target, Processor(tokenizer), None, max_num_seqs=5)
    third = Pipeline(target, Processor(tokenizer), Recycle(), max_num_seqs=3)
    assert first.engine is second.engine is third.engine
    assert first.engine.max_num_seqs == 5
    pipes = {"first": first, "second": second, "third": third}
    expected = second.generate("abababab", max_new_tokens=12, ignore_eos=True).token_ids
    streams = {
        name: pipe.stream("abababab", max_new_tokens=12, ignore_eos=True, num_draft_tokens=4)
        for name, pipe in pipes.items()
    }
    for name, pieces in streams.items():
        *_, last = found = list(pieces)
        assert [token for piece in found for token in piece.token_ids] == expected
        assert (last.stats.num_draft_tokens > 0) == (name != "second")
    del second, third, pipes, streams, pieces, found, last
    assert first.generate("abababab", max_new_tokens=12, ignore_eos=True).token_ids == expected
