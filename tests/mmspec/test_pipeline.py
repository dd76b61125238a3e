"""The front door: answers, batches, streams and mistakes, with a model of bytes that emits a script."""

import threading
from copy import deepcopy

import numpy as np
import pytest
import torch

import mmspec
from mmspec import Generation, Piece, Pipeline, SamplingParams, UserError
from mmspec.checking.oracle import Oracle
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.engine.policy import AdaptivePolicy
from mmspec.loading import pick_device
from mmspec.targets.packing import pack_model
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import Script, byte_ids, byte_model, byte_tokenizer

PROMPT = "Say: "
TEXT = "Größe: 3 €, 日本語 und 🙂! EN ENDE and END."
DTYPE = "dtype must be auto, float32, .*, int4: got "
ROLES = (
    "{% for m in messages %}{{ m['role'] }}:GAP{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant:"
)


def pipeline(drafter=None):
    return Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), drafter)


def scripted(text=TEXT, prompt=PROMPT):
    return {"logits_processor": [Script(byte_ids(text), len(byte_ids(prompt)))], "max_new_tokens": 99, "nodes": 10}


def oracle(text=TEXT, seed=0):
    return Oracle([[*byte_ids(text), 2]], vocab=90, seed=seed)


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
    assert (answer.text, answer.token_ids, answer.finish_reason) == (TEXT, [*byte_ids(TEXT), 2], "stop")
    assert answer.stats.num_generated_tokens == len(answer.token_ids)
    going_on = scripted() | {"max_new_tokens": len(answer.token_ids) + 2, "ignore_eos": True}
    longer = pipeline(DRAFTERS[name]()).generate(PROMPT, **going_on)
    assert (longer.token_ids, longer.finish_reason) == ([*answer.token_ids, 2, 2], "length")
    pieces = list(pipeline(DRAFTERS[name]()).stream(PROMPT, **scripted(), trace=True))
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert [t for piece in pieces for t in piece.token_ids] == [*byte_ids(TEXT), 2]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert [piece.stats is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert {piece.num_prompt_tokens for piece in pieces} == {len(byte_ids(PROMPT))}
    for so_far in ([len(piece.trees) for piece in pieces], [piece.seconds for piece in pieces]):
        assert so_far[0] < so_far[-1]
        assert so_far == sorted(so_far)
    stats = pieces[-1].stats
    assert (len(pieces[-1].trees), pieces[-1].seconds) == (stats.num_spec_steps, stats.wall_seconds)


@pytest.mark.parametrize("name", ["none", "oracle"])
def test_a_piece_arrives_before_the_answer_is_complete(name):
    """The model waits with the third token until the first piece is there."""
    received = threading.Event()
    before = len(byte_ids(PROMPT))

    class Waiting(Script):
        def __call__(self, ids, scores):
            if ids.shape[1] > before + 1:
                assert received.wait(120)
            return super().__call__(ids, scores)

    processor = Waiting(byte_ids(TEXT), before)
    pieces = []
    for piece in pipeline(DRAFTERS[name]()).stream(PROMPT, **{**scripted(), "logits_processor": [processor]}):
        pieces.append(piece)
        received.set()
    assert len(pieces) > 1


def test_what_a_limit_cuts_off_is_shown_at_the_end():
    cut = len("Größe: 3 ".encode()) + 1  # one byte of the euro sign
    pieces = list(pipeline().stream(PROMPT, **{**scripted(), "max_new_tokens": cut}))
    assert "".join(piece.text for piece in pieces) == "Größe: 3 \N{REPLACEMENT CHARACTER}"
    parts = [text for piece in pieces for _, text in piece.parts]  # of each byte, and at the end
    assert parts == [*"Gr", "", "ö", "", "ß", *"e: 3 ", "", "\N{REPLACEMENT CHARACTER}"]


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
    for length, options in ((20, {"context_limit": 20}), (128, {})):
        message = f"^the prompt must be shorter than the model's context of {length} tokens: got {length}$"
        with pytest.raises(UserError, match=message):
            pipe.generate("x" * length, **options)


def test_a_checkpoint_folder(tmp_path):
    byte_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    pipe = mmspec.load(str(tmp_path), drafter="ngram", device="cpu")
    expected = pipeline().generate(PROMPT, max_new_tokens=10)
    assert pipe.generate(PROMPT, max_new_tokens=10, nodes=4).token_ids == expected.token_ids
    for dtype in ("bfloat16", torch.bfloat16):
        assert mmspec.load(tmp_path, drafter=None, dtype=dtype, device="cpu").model.dtype == torch.bfloat16


def test_chat_messages():
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    processor, items = Processor(tokenizer), [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}
    for prompt, text in (
        ("hi", "user: hi\nA:"),
        ([system, user], "system: be brief\nuser: hi\nA:"),
        ([{**user, "content": items}], "user: a\nb\nA:"),
    ):
        assert processor.encode([{"prompt": prompt}]).input_ids[0].tolist() == byte_ids(text)
    with pytest.raises(UserError, match=r"^the model reads text only: got an item of type image_url$"):
        processor.encode([{"prompt": [{**user, "content": [*items, {"type": "image_url"}]}]}])


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


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"model": byte_model()},
            "^a model object needs processor=, its tokenizer or processor: got LlamaForCausalLM$",
        ),
        (
            {"model": byte_model(), "processor": byte_tokenizer(), "dtype": "bfloat16", "revision": "main"},
            "^a model object stays on its device and in its dtype: got dtype='bfloat16', revision='main'$",
        ),
        ({"model": 5}, "^model must be a name, a folder or a model of transformers: got 5$"),
        ({"model": torch.nn.Linear(2, 2)}, "^model must be a name, a folder or a model of transformers: got Linear$"),
        ({"model": "{folder}", "processor": 5}, "^processor= goes with a model object: got the model '/.*'"),
        (
            {"model": "{folder}", "torch_dtype": torch.float16},
            "^torch_dtype is called dtype here: got torch_dtype=dtype",
        ),
        ({"model": "{folder}", "dtype": torch.int8}, DTYPE + "torch.int8"),
        ({"model": "{folder}", "dtype": 5}, DTYPE + "5"),
        ({"model": "{folder}", "dtype": "int3"}, DTYPE + "'int3'"),
        ({"model": "{folder}", "device": 5.5}, r"one that torch can use here \(cpu.*\): got 5.5$"),
        *(({"model": "{folder}", "device": device}, f"device must .*'{device}'") for device in ("toaster", "meta")),
        # torch raises an AssertionError for devices that it was built without.
        ({"model": "{folder}", "device": "xpu"}, r"^device must be auto or one that torch can use here .*: got 'xpu'$"),
        ({"model": "{folder}"}, "cannot load model .*: expected"),
        ({"model": "./smolm2"}, r"smollm2, tiny-hybrid, tiny-llava; did you mean smollm2\?\), a local folder"),
    ],
)
def test_what_cannot_be_loaded_is_named(keywords, message, tmp_path):
    given = {k: v.format(folder=tmp_path) if isinstance(v, str) else v for k, v in keywords.items()}
    with pytest.raises(UserError, match=message):
        mmspec.load(**{"drafter": None, **given})


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
    keywords = {"logits_processor": [Script(byte_ids(text), length)], "max_new_tokens": 99, "nodes": 10}
    answer = Pipeline(target, processor).generate(PROMPT, **keywords)
    assert answer.text == ("" if prefix.startswith(text) else text.removeprefix(prefix))
    pieces = [piece.text for piece in Pipeline(target, processor).stream(PROMPT, **keywords)]
    assert "".join(pieces) == answer.text
    assert answer.token_ids[: len(byte_ids(text))] == byte_ids(text)


def test_a_second_pipeline_shares_the_engine_of_a_target():
    target, tokenizer = TransformersTarget(byte_model()), byte_tokenizer()
    first = Pipeline(target, Processor(tokenizer), Ngram(), max_num_seqs=2)
    assert first.engine.max_num_seqs == 2
    second = Pipeline(target, Processor(tokenizer), None, max_num_seqs=5)
    third = Pipeline(target, Processor(tokenizer), Recycle(), max_num_seqs=3)
    assert first.engine is second.engine is third.engine
    assert first.engine.max_num_seqs == 5
    options = {"max_new_tokens": 12, "ignore_eos": True}
    expected = second.generate("abababab", **options).token_ids
    streams = [pipe.stream("abababab", **options, num_draft_tokens=4) for pipe in (first, second, third)]
    for pieces, drafts in zip(streams, (True, False, True), strict=True):
        *_, last = found = list(pieces)
        assert [token for piece in found for token in piece.token_ids] == expected
        assert (last.stats.num_draft_tokens > 0) == drafts
    del second, third, streams, pieces, found, last
    assert first.generate("abababab", **options).token_ids == expected


LONG = SamplingParams(max_new_tokens=20)
WRONG = {
    "key": ({"prompt": "a", "image": 1}, "a request's keys are"),
    "prompt": ({"prompt": [5.5]}, "must be an object: got 5.5"),
    "media": ({"prompt": "a", "images": ["a.png"]}, "the model reads text only: images or videos were given"),
    "length": ({"prompt": "a" * 500}, "must be shorter than the model's context"),
    "empty": ({"prompt": ""}, "the prompt must not be empty"),
    "grammar": ({"prompt": "a", "params": SamplingParams(regex="[^\\x00-\\x{10FFFF}]")}, "allows no token"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_a_request_leave_the_others_of_its_batch_alone(name):
    pytest.importorskip("llguidance")
    wrong, message = WRONG[name]
    good = [{"prompt": "Say: "}, {"prompt": "What?", "params": LONG}]
    pipe = pipeline(Ngram())
    alone = [pipe.generate_batch([one], max_new_tokens=12, nodes=6)[0].token_ids for one in good]
    first, failed, last = pipe.generate_batch([good[0], wrong, good[1]], max_new_tokens=12, nodes=6, on_error="return")
    assert isinstance(failed, UserError)
    assert message in str(failed)
    assert [first.token_ids, last.token_ids] == alone
    with pytest.raises(UserError, match=message):
        pipe.generate_batch([good[0], wrong, good[1]], max_new_tokens=12, nodes=6)
    assert pipe.generate("Say: ", max_new_tokens=12, nodes=6).token_ids == alone[0]  # no request is left over
    assert pipe.generate_batch([]) == []


def test_an_error_while_decoding_is_the_requests_own():
    class Fails:
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > len("Say: ") + 3:
                raise UserError("no more")
            return scores

    keywords = {"logits_processor": [Fails()], "max_new_tokens": 9, "nodes": 4, "on_error": "return"}
    ended, failed = pipeline(Ngram()).generate_batch(
        [{"prompt": "S", "params": SamplingParams(max_new_tokens=3)}, {"prompt": "Say: "}], **keywords
    )
    assert isinstance(ended, Generation)
    assert str(failed) == "no more"


def test_a_broken_image_in_a_batch(tmp_path):
    (broken := tmp_path / "broken.png").write_bytes(b"no image")
    pipe = mmspec.load("tiny-llava", None, device="cpu")
    image = np.full((32, 32, 3), 200, dtype=np.uint8)
    requests = [{"prompt": "Describe the image.", "images": one} for one in (image, str(broken), image)]
    alone = pipe.generate(**requests[0], max_new_tokens=8)
    first, failed, last = pipe.generate_batch(requests, max_new_tokens=8, on_error="return")
    assert isinstance(failed, UserError)
    assert str(broken) in str(failed)
    assert [getattr(one, "token_ids", None) for one in (first, last)] == [alone.token_ids] * 2


def test_keywords_of_a_batch_are_checked():
    with pytest.raises(UserError, match=r"^temperature must be"):
        pipeline(Ngram()).generate_batch([{"prompt": "a"}], temperature=-1, on_error="return")
    with pytest.raises(UserError, match=r"^on_error must be 'raise' or 'return': got 'skip'$"):
        pipeline(Ngram()).generate_batch([{"prompt": "a"}], on_error="skip")
