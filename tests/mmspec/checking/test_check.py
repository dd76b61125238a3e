"""``mmspec check`` of embedded models: its report, and how it goes on; outcomes; tests of samples."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import mmspec
from mmspec.checking import cases
from mmspec.checking.cases import CASES, OTHER, Case, Outcomes
from mmspec.checking.sides import Answer, LocalSide, Question, SkippedError
from mmspec.checking.statistics import ALPHA, _root, against_logprobs, against_probabilities, two_samples
from mmspec.checking.trial import Record
from mmspec.drafters.ngram import Ngram
from mmspec.files import alone
from tests.checking import trial_of
from tests.commandline import assert_user_error, runner
from tests.process import ROOT
from tests.tiny import byte_tokenizer
from tests.tiny.configs import HYBRID_CONFIGS, TEXT_CONFIGS, TINY_SIZES
from tests.tiny.models import text_model

FAST = "prose,copy,logprobs,min-tokens,stop-string"
PICTURE = ("--media", str(ROOT / "vision/embedded/samples/scene.png"))


@pytest.fixture
def check(capfd):
    return runner(capfd, "check")


@pytest.mark.parametrize("model", ["tiny-llava", "tiny-hybrid"])
def test_the_report(model, check):
    status, out, err = check(model, "--only", FAST, "--json")
    found = json.loads(out)
    assert status == 0
    assert "prose" in err
    assert list(found) == ["model", "drafter", "versions", "cases"]
    assert (found["model"], found["drafter"]) == (model, "flash")
    assert {"mmspec", "torch", "transformers", "dtype", "device"} <= found["versions"].keys()
    assert [one["name"] for one in found["cases"]] == FAST.split(",")
    for one in found["cases"]:
        assert one["outcome"] == "equal", one
        assert one["tokens"] > 10
        assert one["accepted"] > 5
        assert one["power"] == {}


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llava", "tiny-hybrid"])
def test_all_cases(model, check, tmp_path):
    status, out, _ = check(model, "--out", str(tmp_path / "report.json"))
    assert status == 0, out
    cases = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert [one["name"] for one in cases] == list(CASES)
    images = ("image-large", "images-two", "image-turns") if model == "tiny-hybrid" else ()
    skipped = {"markers", "adapters", *images}
    assert {one["name"] for one in cases if one["outcome"] != "equal"} == skipped
    for one in (one for one in cases if one["name"] not in skipped):
        assert one["tokens"] > 15
        assert (one["accepted"] or 0) + one["rehearsed"] > 10
    power = {one["name"]: one["power"] for one in cases if one["power"]}
    assert list(power) == ["choices", "temperature", "sampling"]
    assert power["temperature"]["temperature 0.9 for 1"] >= 0.95
    assert list(power["sampling"].values()) == [0.95]
    assert sum(one["seconds"] for one in cases) < 240


def test_the_table_and_the_same_command_again(check, tmp_path, monkeypatch):
    out, ran = tmp_path / "report.json", []
    run_case = cases.run_case

    def counting(trial, name):
        assert len(json.loads(out.read_text())["cases"]) == len(ran) if ran else not out.exists()
        ran.append(name)
        if name == "adapters":
            raise KeyboardInterrupt
        return run_case(trial, name)

    monkeypatch.setattr(cases, "run_case", counting)
    names = ("--only", "prose,markers,adapters", "--out", str(out))
    assert check("tiny-llava", *names)[0] == 130
    assert ran == ["prose", "markers", "adapters"]
    monkeypatch.setattr(cases, "run_case", lambda trial, name: ran.append(name) or run_case(trial, name))
    monkeypatch.setattr(cases, "CASES", {name: CASES[name] for name in ("prose", "markers", "adapters")})
    status, table, _ = check("tiny-llava", "--out", str(out))
    assert status == 0
    assert ran[3:] == ["adapters"]
    rows = [line for line in table.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in rows] == ["prose", "markers", "adapters"]
    assert "markers: the chat template has no markers of reasoning or of tool calls" in table
    assert table.splitlines()[-1].startswith("1 equal, 2 skipped: ")
    check("tiny-llava", "--out", str(out), "--only", "prose")
    assert ran[4:] == ["prose"]
    out.write_text(out.read_text().replace('"equal"', '"failed"').replace('"power"', '"older"'))
    assert check("tiny-llava", "--out", str(out))[0] == 0
    assert ran[5:] == ["prose"]
    for other, name in ((("--drafter", "none"), "drafter"), (("--tie", "1"), '"tie": 1.0'), (PICTURE, '"media": ["')):
        assert_user_error(check("tiny-llava", *other, "--out", str(out)), name, "choose another --out")
    with alone(tmp_path / ".report.json.lock", out):
        assert_user_error(check("tiny-llava", "--out", str(out)), "report.json: expected an output of this run alone")


def test_what_plain_decoding_refuses_is_skipped():
    pipe = mmspec.load("tiny-llava", device="cpu", dtype="float32")
    found = cases.run_case(trial_of(pipe).limited(9), "prose")
    assert found["outcome"] == "skipped"
    assert "the prompt must be shorter than the model's context of 9 tokens" in found["reason"]


def test_a_difference_shows_special_tokens():
    pipe = mmspec.load("tiny-llava", None, device="cpu", dtype="float32")
    side, question, end = LocalSide(pipe), Question.user("List four.", max_tokens=4), pipe.target.eos_token_ids[0]
    ((own,),) = side.ask(question)
    assert own.tokens is not None
    found = side.difference(question, Answer("", "stop", (*own.tokens[:2], end)), own)
    assert found is not None
    assert (found.position, found.found) == (2, pipe.processor.tokenizer.convert_ids_to_tokens(end))


def test_equal_choices_of_a_model_that_is_certain():
    plain = mmspec.load("tiny-llava", None, device="cpu", dtype="float32")
    plain.model.get_output_embeddings().weight.data *= 1000
    pipe = mmspec.load(plain.model, processor=plain.processor, drafter="ngram")
    found = cases.run_case(trial_of(pipe), "choices")
    assert (found["outcome"], found["power"]) == ("equal", {"choices all the same": 0.0}), found


def test_samples_follow_the_penalties_of_the_model(monkeypatch):
    monkeypatch.setattr(cases, "_DRAWS", 512)
    plain = mmspec.load("tiny-llava", None, device="cpu", dtype="float32")
    plain.model.generation_config.repetition_penalty = 1.5
    pipe = mmspec.load(plain.model, processor=plain.processor, drafter="ngram")
    found = cases.run_case(trial_of(pipe), "sampling")
    assert found["outcome"] == "equal", found
    assert found["tokens"] >= 4 * 256


@pytest.mark.drafter_fails
def test_a_drafter_that_fails_is_noted(monkeypatch):
    pipe = mmspec.load("tiny-llava", "ngram", device="cpu", dtype="float32")
    monkeypatch.setattr(Ngram, "propose", lambda self, *rest: 1 / 0)
    found = cases.run_case(trial_of(pipe), "prose")
    assert (found["outcome"], found["accepted"]) == ("equal", 0)
    assert found["notes"] == ["drafting stopped: Ngram: ZeroDivisionError: division by zero"]


def test_a_difference_is_exit_status_1(check, monkeypatch):
    difference = {"question": "Q", "against": "plain decoding", "position": 3, "margin": 2.0}
    difference |= {"found": "a", "expected": "b"}
    changed = {"name": "prose", "outcome": "different", "reason": "", "tokens": 3, "accepted": 0, "rehearsed": 0}
    changed |= {"seconds": 0.1, "differences": [difference], "notes": [], "power": {"variation 0.1": 0.954}}
    limits, equal = [], changed | {"outcome": "equal", "differences": [], "power": {}, "seconds": 12.06}
    found = {
        "prose": changed,
        "copy": equal | {"accepted": None, "tokens": 7, "reason": "why", "notes": ["one", "two"]},
        "logprobs": equal | {"accepted": None, "rehearsed": 5},
        "sampling": equal | {"accepted": 2, "rehearsed": 4},
    }

    def record(trial, name):
        limits.append((trial.bound, len(trial.images)))
        return found[name] | {"name": name}

    monkeypatch.setattr(cases, "run_case", record)
    status, out, _ = check("tiny-llava", "--only", ",".join(found), "--tie", "0", *PICTURE)
    assert (status, limits) == (1, [(0, 1)] * 4)
    rows = {line.split()[1]: line.split()[3:10:2] for line in out.splitlines() if line.startswith("│")}
    assert rows.pop("prose") == ["different", "3", "0", "0.1"]
    shown = {"copy": ("7", "?"), "logprobs": ("3", "5"), "sampling": ("3", "6")}
    assert rows == {name: ["equal", *one, "12.1"] for name, one in shown.items()}
    assert [line for line in out.splitlines() if line.startswith("copy:")] == ["copy: why", "copy: one", "copy: two"]
    assert "prose: 'Q' differs from plain decoding at token 3, logit margin 2: 'a' against 'b'" in out
    heading, row = (out.splitlines()[line].replace("┃", "│").split("│") for line in (1, 3))
    assert (heading[-2].strip(), row[-2].strip()) == ("power", "variation 0.1: 95%")
    never = "the drafter's drafts were never accepted, which proves little about them"
    assert cases.summary([changed]).endswith(never)


def test_the_list(check):
    status, out, _ = check("--list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == list(CASES)


def test_mistakes(check, tmp_path):
    (tmp_path / "notes.txt").touch()
    for given in ("--url", "--against"):
        message = f"--url and --against go together: got {given} alone"
        assert_user_error(check(given, "http://127.0.0.1:1", "--only", "prose"), message)
    assert_user_error(check("--only", "prose,prse"), "cases must be of prose", "got prse")
    assert_user_error(check("--media", str(tmp_path / "notes.txt")), "--media: expected images", "notes.txt")
    assert_user_error(check("--url", "http://127.0.0.1:1", "--against", "http://127.0.0.1:1"), "expected a server")


@pytest.mark.parametrize(
    ("margins", "outcome"),
    [([], "equal"), ([1e-5, 9e-5], "tie"), ([1e-5, 2e-4], "different"), ([1e-5, None], "different")],
)
def test_outcomes(margins, outcome):
    assert Record([{"margin": margin} for margin in margins]).outcome(1e-4) == outcome


def test_probabilities_of_answers(monkeypatch):
    """Against a pass of the model over each answer, without a cache."""
    pipe = mmspec.load("tiny-hybrid", None, device="cpu", dtype="float32")
    question = Question.user("List four.", max_tokens=3, temperature=1.5, top_k=2)
    request = LocalSide(pipe).request(question)
    outcomes = Outcomes(pipe, question, bound=0.0)
    found = outcomes.probs
    assert sum(found.values()) == pytest.approx(1)
    assert all(outcomes.of(answer) == answer for answer in found)
    prompt = pipe.encode([request]).input_ids
    for answer, probability in found.items():
        ids = torch.cat([prompt, torch.tensor([answer])], dim=1)
        with torch.no_grad():
            logits = pipe.model(ids).logits[0, prompt.shape[1] - 1 : -1].double()
        own = 1.0
        for row, token in zip(logits, answer, strict=True):
            two = row.topk(2)
            own *= float((two.values / 1.5).softmax(0)[two.indices.tolist().index(token)])
        assert own == pytest.approx(probability, rel=1e-3)
    with torch.no_grad():
        first, second, third = pipe.model(prompt).logits[0, -1].topk(3).indices.tolist()
    merged = Outcomes(pipe, question, bound=100.0)
    assert sum(merged.probs.values()) == pytest.approx(1)
    begun = sum(probability for answer, probability in found.items() if answer[0] == second)
    assert merged.probs[OTHER,] == pytest.approx(begun)
    for token in (second, third):
        assert merged.of((token, 5, 5)) == (OTHER,)
    assert merged.of((first, third, 5)) == (first, OTHER)
    assert outcomes.of((first, third, 5)) == (first, third, 5)
    assert (first, third, 5) not in found
    monkeypatch.setattr(type(pipe.target), "eos_token_ids", [second])
    ended = Outcomes(pipe, question, bound=0.0).probs
    assert ended[second,] == pytest.approx(begun)
    assert all(ended[one] == probability for one, probability in found.items() if second not in one)


PROBS = {number: (number + 1) / 55 for number in range(10)}


def drawn(rng, count, probs):
    return rng.choices(list(probs), list(probs.values()), k=count)


def test_chi_square():
    """Tables of the distribution: 9 degrees of freedom, 21.666 for 0.01; 1 degree, 3.841 for 0.05."""
    fair = dict.fromkeys(range(10), 0.1)
    counts = dict.fromkeys(range(10), 100) | {0: 100 + 32.913, 1: 100 - 32.913}  # 2 * 32.913**2 / 100 = 21.666
    assert against_probabilities(counts, fair)[0] == pytest.approx(0.01, rel=1e-3)
    shift = (3.841 * 25) ** 0.5
    assert against_probabilities({0: 50 + shift, 1: 50 - shift}, {0: 0.5, 1: 0.5})[0] == pytest.approx(0.05, rel=1e-3)
    assert against_probabilities({0: 99, 7: 1}, {0: 1.0, 7: 0.0})[0] == 0
    # Three rare outcomes are one: 11.5 are expected.
    shift = (3.841 * 11.5 * 0.885) ** 0.5
    counts = {0: 3, 1: 4, 2: 4.5 + shift, 3: 88.5 - shift}
    rare = {0: 0.03, 1: 0.04, 2: 0.045, 3: 0.885}
    assert against_probabilities(counts, rare)[0] == pytest.approx(0.05, rel=1e-3)


def test_what_the_tests_find():
    """At least about 95 % of samples at the stated distance are rejected; samples of equal distributions are not."""
    rng = random.Random(7)
    p, distance = against_probabilities(Counter(drawn(rng, 1000, PROBS)), PROBS)
    assert p > ALPHA
    assert 0.05 < distance < 0.2
    # The direction that is hardest to find: d in proportion to p, with signs.
    signs = [1 if number in (9, 6, 4, 2, 1) else -1 for number in range(10)]
    up = sum(PROBS[number] for number in range(10) if signs[number] > 0)
    other = {
        number: value * (1 + distance / up if signs[number] > 0 else 1 - distance / (1 - up))
        for number, value in PROBS.items()
    }
    assert sum(abs(other[number] - PROBS[number]) for number in PROBS) / 2 == pytest.approx(distance)
    runs = [against_probabilities(Counter(drawn(rng, 1000, other)), PROBS)[0] < ALPHA for _ in range(400)]
    assert 0.92 < sum(runs) / 400 < 0.99
    assert sum(against_probabilities(Counter(drawn(rng, 1000, PROBS)), PROBS)[0] < 0.01 for _ in range(1000)) < 25


def test_a_temperature_is_found_as_often_as_stated():
    """At 0.9, in samples of any size; at 1, rarely."""
    torch.manual_seed(5)
    logits = 2 * torch.randn(2400, 20, dtype=torch.double)
    for count in (600, 1200, 2400):
        shares = {}
        for temperature in (1.0, 0.9):
            draws = torch.distributions.Categorical(logits=logits[:count] / temperature).sample((400,))
            tops = logits[:count].tolist()
            found = [
                against_logprobs(list(zip(logits[range(count), one].tolist(), tops, strict=True))) for one in draws
            ]
            shares[temperature] = [p for p, _ in found]
        power = found[0][1]
        assert sum(p < ALPHA for p in shares[0.9]) / 400 == pytest.approx(power, abs=0.07)
        assert 0 < sum(p < 0.05 for p in shares[1.0]) / 400 < 0.1
    assert power > 0.9
    assert against_logprobs([(0.0, [0.0, -torch.inf])] * 2) == (1.0, 0.0)
    assert [_root(lambda x, at=at: x - at) for at in (1e-5, 9e3)] == [pytest.approx(at) for at in (1e-5, 9e3)]


def test_two_samples():
    rng = random.Random(3)
    equal = [two_samples(drawn(rng, 200, PROBS), drawn(rng, 200, PROBS))[0] for _ in range(12)]
    assert min(equal) > 1e-3
    assert sum(equal) / 12 > 0.25
    fair = dict.fromkeys(range(10), 0.1)
    p, distance = two_samples(drawn(rng, 300, PROBS), drawn(rng, 300, fair))
    assert p < ALPHA
    assert 0.1 < distance < 0.35


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # which peft asks for
@pytest.mark.filterwarnings("ignore:.*(tied layer|embedding layers):UserWarning")
def test_adapters(check, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    model = mmspec.load("tiny-hybrid", None, device="cpu").model
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["in_proj", "o_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    options = ("tiny-hybrid", "--adapter", f"law={tmp_path}", "--only", "adapters", "--json")
    status, out, _ = check(*options)
    (found,) = json.loads(out)["cases"]
    assert (status, found["outcome"]) == (0, "equal"), found
    assert found["tokens"] > 60
    monkeypatch.setattr("mmspec.targets.lora.Adapters.key", lambda self, name: None)
    assert check(*options)[0] == 1


@pytest.mark.parametrize("error", ["skipped", "failed"])
def test_a_difference_counts_although_the_case_ends_early(error, monkeypatch):
    def wrong(trial):
        found = [[Answer("", "stop", accepted=accepted)] for accepted in (None, 2, 3)]
        trial.ask(Question.user("Q", n=2), *2 * [Question.user("R")], side=SimpleNamespace(ask=lambda *_: found))
        raise SkippedError("no more") if error == "skipped" else RuntimeError("no more")

    monkeypatch.setattr(cases, "CASES", {"wrong": Case("wrong", "", wrong)})
    found = cases.run_case(trial_of(mmspec.load("tiny-llava", "ngram", device="cpu", dtype="float32")), "wrong")
    assert (found["outcome"], found["accepted"], found["rehearsed"]) == ("different", 5, 0)
    difference = ["Q", "the rule", None, "1 choices, 2 are expected", "", None]
    assert [list(one.values()) for one in found["differences"]] == [difference]
    assert "no more" in found["reason"]


FAMILIES = TEXT_CONFIGS.keys() | HYBRID_CONFIGS.keys()
STATES = ("rehearsed", "now-and-then", "prefix", "sessions", "abort", "batch")


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mamba2",
        *(pytest.param(name, marks=pytest.mark.long) for name in sorted(FAMILIES - {"llama", "mamba2"})),
    ],
)
def test_cases_about_states_in_every_family(family, monkeypatch):
    monkeypatch.setitem(TINY_SIZES, "vocab_size", len(byte_tokenizer()))
    monkeypatch.setitem(TINY_SIZES, "max_position_embeddings", 1024)
    pipe = mmspec.load(text_model(family), "ngram", processor=byte_tokenizer())
    trial = trial_of(pipe)
    found = {name: cases.run_case(trial, name) for name in STATES}
    assert [one for one in found.values() if one["outcome"] != "equal"] == []
    assert found["rehearsed"]["rehearsed"] > 20 > found["now-and-then"]["rehearsed"] == 0
