"""Compiled grammars: masks against languages that are listed word by word, mistakes, and limits."""

import copy
import itertools
import json
import random
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

pytest.importorskip("llguidance")

import mmspec
from mmspec import SamplingParams, UserError, pipeline, plugins
from mmspec.drafters.recycle import Recycle
from mmspec.sampling import grammar as module
from mmspec.sampling.grammar import Grammars
from mmspec.sampling.sampler import Matcher
from mmspec.sampling.syntax import FORMATS, KINDS, LIMITS, CheckedText, GrammarTrial, shortened
from mmspec.workers import Cancellation
from tests.testkit.served import eventually
from tests.tiny import byte_ids, byte_model, byte_tokenizer

EOS, VOCAB = 2, 259
ONE, TWO = ("red", "reddish", "green"), ("", "s", "sh")
LANGUAGES = {
    "words": ("regex", "(red|reddish|green)(s|sh)?", {a + b for a, b in itertools.product(ONE, TWO)}),
    "counts": ("regex", "a{1,3}b{0,2}", {"a" * n + "b" * m for n in (1, 2, 3) for m in (0, 1, 2)}),
    "unicode": ("regex", "é|日(本)?|🙂a", {"é", "日", "日本", "🙂a"}),
    "lark": ("grammar", 'start: "x" middle "y"\nmiddle: "1" | "(" middle ")" | "12"\n', None),
    "json": (
        "json_schema",
        {"type": "object", "properties": {"a": {"enum": [1, "x"]}, "b": {"type": "boolean"}}, "required": ["a"]}
        | {"additionalProperties": False},
        {json.dumps({"a": a} | b) for a in (1, "x") for b in ({}, {"b": True}, {"b": False})},
    ),
}
LANGUAGES["lark"] = (*LANGUAGES["lark"][:2], {f"x{'(' * n}{a}{')' * n}y" for n in range(13) for a in ("1", "12")})


STATES = "[ab]*a[ab]{8}b[ab]{0,9}"
MANY_STATES = byte_ids("".join(random.Random(0).choices("ab", k=200)))
"""A path on which its lexer needs a state for nearly every token."""


def compiled(kind, text, tokenizer=None, eos=(EOS,)):
    params = SamplingParams(**{kind: text})
    return Grammars(tokenizer or byte_tokenizer(), eos).compile(*params.constraint)


def forced(kind, text, *given, **more):
    """The tokens at the beginning of all outputs."""
    grammar = compiled(kind, text, *given, **more)
    return grammar.forced(grammar.start([]))


def allowed(matcher, path=(), vocab=VOCAB):
    """The tokens that are allowed after a path."""
    return set(matcher.allowed([], tuple(path), vocab).nonzero().flatten().tolist())


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_and_forced_tokens_are_those_of_the_language(name):
    kind, text, words = LANGUAGES[name]
    grammar, spelt = compiled(kind, text), [tuple(byte_ids(word)) for word in words]
    paths = sorted({word[:n] for word in spelt for n in range(len(word) + 1) if n < 12})
    matcher, certain = Matcher(grammar, []), 0
    random.Random(0).shuffle(paths)  # jumps between branches, back and forth
    for path in paths:
        after = {word[len(path)] for word in spelt if word[: len(path)] == path and len(word) > len(path)}
        assert allowed(matcher, path) == after | ({EOS} if path in spelt else set()), byte_tokenizer().decode(path)
        state = matcher.at([], path)
        assert {token for token in range(VOCAB) if grammar.allows(state, token)} == after
        if tokens := grammar.forced(state):
            assert after == {tokens[0]}
            assert path not in spelt
            certain += len(tokens)
    assert certain


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_the_stack_size_of_other_threads_stays(size):
    """The size is global: with the compiler's size, each later thread of the process would map 256 MiB."""
    before = threading.stack_size(size)
    try:
        compiled("regex", "a+")
        with pytest.raises(UserError):
            compiled("regex", "a(")
        assert threading.stack_size() == size
    finally:
        threading.stack_size(before)


def test_the_matcher_follows_emitted_tokens_only():
    """Drafts that were walked and rejected leave no trace."""
    kind, text, _ = LANGUAGES["json"]
    grammar, word = compiled(kind, text), byte_ids('{"a": "x", "b": false}')
    history, matcher = [5], Matcher(grammar, [5])
    for token in word:
        wrong = next((t for t in range(3, VOCAB) if t != token and matcher.allowed(history, (), VOCAB)[t]), None)
        for path in ((token,), () if wrong is None else (wrong,), (token,)):
            matcher.at(history, path)
        history.append(token)
        assert matcher.at(history, ()).tokens == history[1:]
        fresh = Matcher(grammar, [5])
        assert torch.equal(matcher.allowed(history, (), VOCAB), fresh.allowed(history, (), VOCAB))
    assert matcher.allowed(history, (), VOCAB).nonzero().flatten().tolist() == [EOS]


def test_an_eos_token_is_never_consumed():
    """A mask after the end does not exist: an answer ends with its EOS token."""
    matcher = Matcher(compiled("regex", "a?"), [])
    with pytest.raises(UserError, match="forbids token 2 after 0 tokens of output"):
        matcher.allowed([], (EOS,), VOCAB)
    assert allowed(matcher) == {EOS, *byte_ids("a")}


@pytest.mark.parametrize("first", [True, False])
def test_an_ordinary_token_as_eos_is_allowed_where_the_grammar_may_end_only(first):
    """It ends the answer: no word contains it. It may be the lowest EOS token, which llguidance knows, or not."""
    (letter,) = byte_ids("b")
    eos = (letter,) if first else (EOS, letter)
    matcher = Matcher(compiled("regex", "a[a-c]{0,2}x?", eos=eos), [])
    for word, follow in {"": "a", "a": "acx", "aa": "acx", "acc": "x", "acx": "", "accx": ""}.items():
        assert allowed(matcher, byte_ids(word)) == {*byte_ids(follow), *(eos if word else ())}, word
    matcher = Matcher(compiled("regex", "a[a-c]{2}x", eos=eos), [])
    assert allowed(matcher, byte_ids("ac")) == set(byte_ids("ac"))
    assert forced("regex", "abc", eos=eos) == byte_ids("a")
    matcher = Matcher(compiled("regex", "a(b|bc)", eos=eos), [])
    with pytest.raises(UserError, match=r"^the regex needs an EOS token, which .*, after 1 tokens of output$"):
        allowed(matcher, byte_ids("a"))
    with pytest.raises(UserError, match=r"^the regex needs an EOS token, .* after 0 tokens of output$"):
        compiled("regex", "b", eos=eos)


@pytest.mark.parametrize("name", ["tiny-llava", "tiny-hybrid"])
def test_embedded_tokenizers_spell_every_character(name):
    tokenizer = AutoTokenizer.from_pretrained(plugins.model_path(name))
    text = "é日🙂\x7f\u0800" + "".join(map(chr, range(32, 127)))
    grammar = compiled("regex", re.escape(text), tokenizer)
    matcher, said = Matcher(grammar, []), []
    while EOS not in said:
        said.append(int(matcher.allowed(said, (), len(tokenizer)).nonzero()[-1]))
    assert tokenizer.decode(said, skip_special_tokens=True) == text


BOUNDS = [
    ({"exclusiveMinimum": 1, "maximum": 10}, ["1", "1.0", "1.0000000000000001"], ["1.000000000000001", "1.5", "10"]),
    ({"minimum": 0, "exclusiveMaximum": 1}, ["1", "1.0"], ["0", "0.999999999999999", "0.9"]),
    ({"exclusiveMinimum": 0.1, "maximum": 1}, ["0.1", "0.10000000000000001"], ["0.11", "0.5"]),
    ({"exclusiveMinimum": 2.5, "minimum": 4, "maximum": 9}, ["3", "2.6"], ["4", "8.25"]),
    ({"exclusiveMinimum": -5, "maximum": 5}, ["-5", "-5.1"], ["-4.9", "0.5"]),
    ({"exclusiveMinimum": 0, "maximum": 5}, ["0", "0.0"], ["0.0000000000000001", "0.01", "4"]),
    ({"exclusiveMinimum": 1e-12, "maximum": 1}, ["0.000000000001"], ["0.0000000000010005"]),
    ({"exclusiveMinimum": 1e14}, ["100000000000000"], ["100000000000001"]),
    ({"exclusiveMinimum": True, "minimum": 3}, ["1.5"], ["4"]),  # of the fourth draft
]


@pytest.mark.parametrize(("bounds", "outside", "inside"), BOUNDS)
def test_exclusive_bounds_hold_for_numbers_as_doubles(bounds, outside, inside):
    number = {"type": "number", **bounds}
    for schema in (number, {"$defs": {"it": number}, "$ref": "#/$defs/it"}, {"anyOf": [number]}):
        for text in outside + inside:
            assert spells(schema, text) == (text in inside), text


def test_exclusive_bounds_of_integers_and_in_values_stay():
    assert spells({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 4}, "2")
    assert not spells({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 4}, "1")
    value = {"exclusiveMinimum": 1}
    assert spells({"const": value}, json.dumps(value))
    assert spells(
        {"properties": {"exclusiveMinimum": {"type": "null"}}, "type": "object"}, '{"exclusiveMinimum": null}'
    )


@pytest.mark.parametrize("name", ["password", "path", "byte", "uri-reference", "regex"])
def test_unknown_formats_are_annotations(name):
    text = {"type": "string", "format": name}
    for schema in (text, {"$defs": {"it": text}, "$ref": "#/$defs/it"}):
        assert spells(schema, '"anything"')
    assert spells({"const": text}, json.dumps(text))
    assert spells({"type": "object", "properties": {"format": text}}, '{"format": "a"}')


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_known_formats_hold(name):
    assert not spells({"type": "string", "format": name}, '"!"')


def spells(schema, text):
    """Whether the masks of a schema allow a text, and its end."""
    matcher, path = Matcher(compiled("json_schema", schema), []), (*byte_ids(text), EOS)
    return all(matcher.allowed([], path[:n], VOCAB)[path[n]] for n in range(len(path)))


def test_layout():
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}, "minItems": 2}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    assert forced("json_schema", schema) == byte_ids('{"a": [1, 1')
    assert forced("json_schema", schema | {"x-guidance": {"whitespace_flexible": True}}) == byte_ids("{")


# ---------------------------------------------------------------------- mistakes


WIDE = [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(8)]} for i in range(8)]


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_states_of_a_trigger():
    """Of tokens of several bytes: a long one, one whose rest the grammar rejects, and those after it."""

    def advance(state, token):
        if not chr(token).isdigit():
            raise UserError("a digit is expected")
        state.append(token)

    digits = SimpleNamespace(kind="", only_ends=None, eos=(), start=lambda _: [], advance=advance)
    texts = [b"a##" + b"1" * (module._LONGEST + 9), b"##x", b"##1", b"#", b"c"]
    spelt = SimpleNamespace(decode_bytes=lambda ids: texts[ids[0]], tokenize_bytes=list)
    triggered = module.TriggeredGrammar(digits, "##", None, spelt)
    start = triggered.start([])
    assert triggered.advance(start, 0).inner == list(texts[0][3:])
    assert triggered.advance(triggered.advance(start, 3), 3).inner == []  # the trigger is in two tokens
    over = triggered.advance(start, 1)
    assert (over.over, over.inner, triggered.advance(over, 2)) == (True, None, over)
    special = module.TriggeredGrammar(digits, "##", 4, spelt)
    assert special.advance(start, 2) == special.read(start, b"##1") == start
    assert special.advance(start, 4).inner == []


def test_the_line_of_an_error():
    lines = [shortened(reason) for reason in ("a\nerror: b\nc", " \n c\nd", "", "e" * 201)]
    assert lines == ["b", "c", "unknown error", "e" * 200 + "..."]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"json_schema": {"type": "thing"}}, "json_schema must be a JSON schema .* follow: Invalid type: thing"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema must be .*: Pointer '/nowhere' does not exist"),
        ({"json_schema": {"not": {"type": "string"}}}, r'json_schema must be .*: Unimplemented keys: \["not"\]'),
        ({"json_schema": {"const": float("nan")}}, "json_schema must be a JSON schema"),
        ({"regex": "("}, "regex must be a regular expression that llguidance can follow: unclosed group"),
        ({"regex": "(?=a)b"}, "regex must be .*: look-around, .* is not supported"),
        ({"grammar": "start: foo"}, r'grammar must be a Lark grammar that .*: at 1\(8\): unknown name: "foo"'),
        ({"regex": "a", "grammar": 'start: "a"'}, "only one of json_schema, regex, grammar .*: got regex, grammar"),
        ({"grammar_trigger": "a"}, "grammar_trigger goes with one of json_schema, regex, grammar: got none of them"),
        (
            {"regex": "a", "grammar_trigger": "/(/"},
            r"grammar_trigger must be text that is not empty, or /PATTERN/ of Python's re: got '/\(/'",
        ),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos does not go with regex: the end of a grammar is the output's"),
        ({"regex": "a" * 200_000}, "regex must have at most 131072 bytes: got 200000"),
        ({"grammar": 'start: "é"\n' * 20_000}, "grammar must have at most 131072 bytes: got"),
        ({"grammar": "start: " + "(" * 50_000}, "grammar must be a Lark grammar .*: .*nested"),
        ({"json_schema": '{"items":' * 400 + "{}" + "}" * 400}, "json_schema must be .*recursion limit"),
        ({"json_schema": nested(5000)}, "json_schema must be a JSON schema, as a dict or as text: got dict$"),
        ({"json_schema": {"allOf": WIDE}}, ""),
    ],
)
def test_mistakes_are_one_line(keywords, message):
    with pytest.raises(UserError, match=f"^{message}") as error:
        SamplingParams(**keywords)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 320


def test_added_tokens_that_are_not_special_are_text():
    """Such as Qwen's ``<tool_call>``: a grammar's text is this token, or its bytes. Special tokens are not text."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_tokens([AddedToken("<call>", normalized=False), AddedToken("<eat>", normalized=False, special=True)])
    call, (less, c, e, a, x) = VOCAB, byte_ids("<ceax")
    matcher = Matcher(compiled("regex", "(<call>|<eat>)a?", tokenizer), [])
    for path, after in (((), {less, call}), ((less,), {c, e}), ((call,), {a, EOS}), ((call, a), {EOS})):
        assert allowed(matcher, path, VOCAB + 2) == after
    assert forced("regex", "x<call>a", tokenizer) == [x, call, a]


def test_a_grammar_that_no_output_satisfies():
    with pytest.raises(UserError, match=r"^the regex allows no token of the model's vocabulary after 0 tokens of out"):
        compiled("regex", r"[^\s\S]")


def test_a_vocabulary_that_cannot_spell_the_grammar():
    small = Tokenizer(models.BPE(vocab={"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, merges=[]))
    small.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small, eos_token="</s>")
    with pytest.raises(UserError, match=r"^the json_schema allows no token of the model's vocabulary after 0 tokens"):
        compiled("json_schema", {"type": "object"}, tokenizer)
    matcher = Matcher(compiled("regex", "a[bc]?d", tokenizer), [])
    with pytest.raises(UserError, match=r"^the regex allows no token of the model's vocabulary after 2 tokens of outp"):
        matcher.allowed([3, 4], (), 5)


def test_tokenizers_that_do_not_serve():
    with pytest.raises(
        UserError, match=r"^structured output needs a tokenizer of the library tokenizers: got NoneType"
    ):
        Grammars(None, [EOS])
    with pytest.raises(UserError, match=r"^structured output needs an end-of-sequence token: the model has none$"):
        Grammars(byte_tokenizer(), [])


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    SamplingParams()
    with pytest.raises(UserError, match=r"^structured output needs the package llguidance, .*\[structured\]' in"):
        SamplingParams(regex="a")


def test_a_grammar_is_compiled_once(monkeypatch):
    """For its choices and later requests, by concurrent threads; the most recent grammars are kept."""
    calls, slowly = [], module.compiled

    def compiled_slowly(kind, tokenizer, form):
        calls.append(form)
        time.sleep(0.05)
        return slowly(kind, tokenizer, form)

    monkeypatch.setattr(module, "compiled", compiled_slowly)
    grammars = Grammars(byte_tokenizer(), [EOS])
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: grammars.compile("regex", f"{n % 2}a?"), range(8)))
    assert len(calls) == len(set(map(id, found))) == 2
    assert grammars.compile("regex", "0a?") is found[0]
    for n in range(module._KEPT - 1):
        grammars.compile("regex", f"b{n}")
    assert grammars.compile("regex", "0a?") is found[0]
    assert grammars.compile("regex", "1a?") is not found[1]
    assert len(grammars._entries) == module._KEPT


def test_a_grammar_that_compiles_slowly_is_not_compiled_in_a_step(monkeypatch):
    """Where its lexer reaches a limit, the sequence ends, and the next request has a new lexer."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 60)
    monkeypatch.setattr(module, "_QUICK", 0.0)
    grammars = Grammars(byte_tokenizer(), [EOS])
    first = grammars.compile("regex", STATES)
    assert grammars.compile("regex", STATES) is first
    monkeypatch.setattr(module, "compiled", lambda *_: pytest.fail("compiled"))
    with pytest.raises(UserError, match=r"too complex after \d+ tokens of output: lexer error: too"):
        allowed(Matcher(first, []), MANY_STATES)
    monkeypatch.undo()
    assert grammars.compile("regex", STATES) is not first


# ---------------------------------------------------------------------- limits


def test_long_chains_of_rules_do_not_overflow_the_stack():
    """On a stack of 8 MiB, 4,000 rules end the process."""
    chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9000)) + 'r9000: "a"\n'
    assert forced("grammar", chain) == byte_ids("a")


def test_a_limit_reached_within_an_output(monkeypatch):
    """It ends the request with one line, at the same token whatever is drafted; the next request is served."""
    pipe = mmspec.load(byte_model(), None, processor=byte_tokenizer())
    text = 'start: (/[a-c]{1,9}/ | /[b-e]{2,9}/ | s){2,900}\ns: "(" start start ")"'
    keywords = {"grammar": text, "temperature": 1.0, "seed": 1, "max_new_tokens": 40}
    full = pipe.generate("a", **keywords)
    monkeypatch.setitem(LIMITS, "step_max_items", 5)
    pipeline._GRAMMARS.clear()
    errors = set()
    for drafter in (None, Recycle()):
        one = mmspec.Pipeline(pipe.target, pipe.processor, drafter)
        with pytest.raises(
            UserError, match=r"^the grammar is too complex after [1-9]\d* tokens of output: \w+"
        ) as error:
            one.generate("a", **keywords)
        errors.add(str(error.value))
    assert len(errors) == 1
    monkeypatch.undo()
    pipeline._GRAMMARS.clear()  # those that were compiled under the limit
    assert one.generate("a", **keywords).token_ids == full.token_ids


def test_a_vocabulary_is_read_once_for_all_drafters(monkeypatch):
    pipe, read = mmspec.load(byte_model(), None, processor=byte_tokenizer()), []
    monkeypatch.setattr(pipeline, "Grammars", lambda *given: read.append(given) or Grammars(*given))
    pipeline._GRAMMARS.clear()
    for drafter in (None, Recycle()):
        assert mmspec.Pipeline(pipe.target, pipe.processor, drafter).generate("a", regex="b{3}").text == "bbb"
    assert len(read) == 1


def test_a_limit_depends_on_the_tokens_alone(monkeypatch):
    """A matcher whose drafts needed more states than the limit continues and ends like a new matcher.

    Numbers of states vary by compilation: a short path needs far fewer states than the limit, all paths far more.
    """
    monkeypatch.setitem(LIMITS, "max_lexer_states", 60)
    grammar = compiled("regex", STATES)
    first, used, other = grammar._first, Matcher(grammar, []), Matcher(grammar, [])
    other.at([], byte_ids("abbabaab"))
    for letters in itertools.product("ab", repeat=7):
        assert allowed(used, byte_ids("".join(letters))) == set(byte_ids("ab"))
    assert grammar._first is not first  # it was compiled again
    for matcher in (used, Matcher(compiled("regex", STATES), [])):
        with pytest.raises(UserError, match=r"too complex after \d+ tokens of output: lexer error: too"):
            allowed(matcher, MANY_STATES)
        assert allowed(matcher, byte_ids("ab")) == set(byte_ids("ab"))
    assert other.at([], byte_ids("abbabaab")).tokens == byte_ids("abbabaab")


# ---------------------------------------------------------------------- checks in worker processes

SLOW = json.dumps({"type": "string", "pattern": "(?i)" + r"\p{Lu}\p{Ll}" * 7500})
"""90 KB that compile in 3 s and 300 MiB."""


OTHERS: set[int] = set()
"""Processes that other tests' servers have left in this process."""


@pytest.fixture
def trial():
    OTHERS.update(one.pid for one in psutil.Process().children())
    found = GrammarTrial()
    yield found
    found.close()


def workers():
    own = [one for one in psutil.Process().children() if one.pid not in OTHERS]
    return [one for one in own if "mmspec.sampling.syntax" in " ".join(one.cmdline())]


def test_what_passes_is_not_checked_again(trial, monkeypatch):
    schema = json.dumps({"type": "object"})
    checked = [trial.check("json_schema", schema), trial.check("regex", "a|é"), trial.check("grammar", 'start: "a"')]
    monkeypatch.setattr("mmspec.sampling.syntax.compiled", lambda *_: pytest.fail("compiled"))
    assert all(isinstance(text, CheckedText) for text in checked)
    for kind, text in zip(KINDS, checked, strict=True):
        given = SamplingParams(**{kind: text})
        assert isinstance(given.constraint[1], CheckedText)
    assert len(workers()) == 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", "("), ("json_schema", '{"type": "thing"}'), ("grammar", "start: foo"), ("regex", "a" * 200_000)],
)
def test_errors_are_those_of_the_check_here(trial, kind, text):
    with pytest.raises(UserError) as ours:
        SamplingParams(**{kind: text})
    with pytest.raises(UserError) as received:
        trial.check(kind, text)
    assert str(received.value) == str(ours.value)


def test_time_limit(trial):
    trial.seconds = 0.3
    with pytest.raises(UserError, match=r"^json_schema must compile within 0.3 s: got one that takes longer$"):
        trial.check("json_schema", SLOW)
    trial.seconds = 60
    assert trial.check("regex", "a") == "a"


def test_memory_limit():
    trial = GrammarTrial(memory=64 << 20, seconds=60)
    with pytest.raises(UserError, match=r"^json_schema must compile in 64 MiB: got one that needs more$"):
        trial.check("json_schema", SLOW)
    assert trial.check("regex", "a") == "a"
    trial.close()


def test_a_stopped_check_ends_its_worker(trial):
    trial.seconds = 600
    stop = Cancellation()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trial.check, "json_schema", SLOW, stop=stop)
        assert eventually(lambda: any(one.cpu_times().user > 0.2 for one in workers()))
        stop()
        with pytest.raises(UserError, match=r"^json_schema was not checked to the end: stopped$"):
            waiting.result()
    assert workers() == []
    with pytest.raises(UserError, match="stopped"):
        trial.check("regex", "a", stop=stop)
    assert trial.check("regex", "a") == "a"


def test_workers_do_not_load_torch(trial):
    trial.check("regex", "a")
    (worker,) = workers()
    assert not any("torch" in region.path for region in worker.memory_maps())
