"""LoRA adapters, chosen by request: tokens of transformers' ``generate`` with peft's wrapper of a separate model."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

import mmspec
from mmspec.core.tree import TokenTree
from mmspec.errors import UserError
from tests.device import record_captures

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # which peft asks for
    pytest.mark.filterwarnings("ignore:.*(tied layer|embedding layers):UserWarning"),
]

PROMPTS = ("Describe the image.", "Count the circles, then the squares.", "What is left of the red square?")
LAYERS = {
    "tiny-llava": ["q_proj", "v_proj", "down_proj"],
    "tiny-hybrid": ["in_proj", "o_proj", "gate_proj"],
}


def saved(folder: Path, name: str, seed: int, **config: object) -> Path:
    """A random adapter of an embedded model."""
    model = mmspec.load(name, drafter=None).model
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 16, "target_modules": LAYERS[name], "init_lora_weights": False, **config}
    peft.get_peft_model(model, peft.LoraConfig(**options)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=sorted(LAYERS))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A pipeline with two adapters and its drafter for the model without, and token ids of peft's own by adapter."""
    name = request.param
    folders = {key: saved(tmp_path_factory.mktemp(key), name, seed) for seed, key in enumerate(("one", "two"))}
    pipe = mmspec.load(name, adapters=folders, prefix_cache=1 << 26)
    expected = {None: generated(mmspec.load(name, drafter=None))}
    for key, folder in folders.items():
        plain = mmspec.load(name, drafter=None)
        peft.PeftModel.from_pretrained(plain.model, folder)
        expected[key] = generated(plain)
    return pipe, expected


def generated(pipe: mmspec.Pipeline) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        inputs = pipe.encode([{"prompt": prompt}])
        ids = pipe.model.generate(inputs.input_ids, do_sample=False, max_new_tokens=24, **inputs.inputs)
        found.append(ids[0, inputs.input_ids.shape[1] :].tolist())
    return found


def test_adapters_are_chosen_by_request(loaded) -> None:
    """One after the other, together, and again, when states of prompts are kept."""
    pipe, expected = loaded
    assert len({str(tokens) for tokens in expected.values()}) == 3
    for names in ((None, "one", "two", "one", None), ("two", "two", None)):
        for name in names:
            answers = [pipe.generate(prompt, max_new_tokens=24, temperature=0.0, adapter=name) for prompt in PROMPTS]
            assert [answer.token_ids for answer in answers] == expected[name], name
    assert any(answer.stats.num_cached_tokens for answer in answers)


def test_streams_of_several_adapters(loaded) -> None:
    """Requests that are running at once do not see each other's adapter."""
    pipe, expected = loaded
    names = [None, "one", "two"]
    streams = {
        (name, number): pipe.stream(prompt, max_new_tokens=24, temperature=0.0, adapter=name)
        for number, prompt in enumerate(PROMPTS)
        for name in names
    }
    tokens: dict = {key: [] for key in streams}
    while streams:
        for key in list(streams):
            piece = next(streams[key], None)
            if piece is None:
                del streams[key]
            else:
                tokens[key] += piece.token_ids
    assert tokens == {(name, number): expected[name][number] for name, number in tokens}


@pytest.mark.parametrize("names", [("one", "two"), (None, "two")])
def test_two_pipelines_of_a_model_at_once(loaded, names) -> None:
    """Each has a thread of its own, which chooses its adapter in every pass."""
    pipe, expected = loaded
    other = mmspec.load(pipe.model, processor=pipe.processor, drafter=None)
    options = {"max_new_tokens": 24, "temperature": 0.0}
    streams = [one.stream(PROMPTS[0], adapter=name, **options) for one, name in zip((pipe, other), names, strict=True)]
    tokens: list[list[int]] = [[], []]
    for pieces in zip_longest(*streams):
        for piece, so_far in zip(pieces, tokens, strict=True):
            so_far += piece.token_ids if piece else []
    assert tokens == [expected[name][0] for name in names]


def test_captured_passes_are_those_of_an_adapter(loaded, monkeypatch) -> None:
    prompt, tree = loaded[0].encode([{"prompt": PROMPTS[0]}]), TokenTree.root(torch.tensor([5]))

    def logits(target, name):
        target.prefill(replace(prompt, adapter=name), 8)
        found = [target.forward_tree(tree).logits.clone() for _ in range(3)]  # as it is, captured, replayed
        target.select([])
        return found

    expected = {name: logits(loaded[0].target.fork(), name)[0] for name in (None, "one", "two")}
    record_captures(monkeypatch)
    target = loaded[0].target.fork()
    for name in (None, "one", "two", "one", None):
        for found in logits(target, name):
            torch.testing.assert_close(found, expected[name], atol=1e-4, rtol=1e-4)


def test_targets_of_one_model_take_turns(loaded) -> None:
    target, prompt = loaded[0].target.fork(), loaded[0].encode([{"prompt": PROMPTS[0]}])
    target.prefill(replace(prompt, adapter="one"), 8)
    tree = TokenTree.root(torch.tensor([5]))
    expected = target.forward_tree(tree).logits
    loaded[0].target.fork().prefill(replace(prompt, adapter="two"), 8)
    torch.testing.assert_close(target.forward_tree(tree).logits, expected)


def test_a_wrapper_whose_owner_switches(tmp_path: Path) -> None:
    """States of prompts are not those of another adapter."""
    name = "tiny-llava"
    plain = mmspec.load(name, drafter=None)
    wrapped = peft.PeftModel.from_pretrained(plain.model, saved(tmp_path, name, 0))
    pipe = mmspec.load(wrapped, processor=plain.processor, drafter="recycle+ngram", prefix_cache=1 << 26)
    on = [pipe.generate(prompt, max_new_tokens=24, temperature=0.0).token_ids for prompt in PROMPTS]
    with wrapped.disable_adapter():
        off = [pipe.generate(prompt, max_new_tokens=24, temperature=0.0).token_ids for prompt in PROMPTS]
    base = mmspec.load(name, drafter=None)
    assert off == generated(base)
    assert on == generated(plain) != off


def test_mistakes(tmp_path: Path) -> None:
    folders = {"one": saved(tmp_path / "one", "tiny-llava", 0), "two": saved(tmp_path / "two", "tiny-llava", 1)}
    pipe = mmspec.load("tiny-llava", adapters=folders)
    with pytest.raises(UserError, match=r"^unknown adapter: expected one of those loaded \(one, two\), got 'three'"):
        pipe.generate("a", adapter="three")
    with pytest.raises(UserError, match=r"^unknown adapter: .*\(none are loaded\), got 'one'$"):
        mmspec.load("tiny-llava", drafter=None).generate("a", adapter="one")
    with pytest.raises(UserError, match=r"^cannot load adapter 'x' from '/nowhere'"):
        mmspec.load("tiny-llava", adapters={"x": "/nowhere"})
    folder = saved(tmp_path / "head", "tiny-llava", 0, modules_to_save=["norm"])
    with pytest.raises(UserError, match=r"expected changes of linear layers only, got modules_to_save="):
        mmspec.load("tiny-llava", adapters={"x": folder})
    folder = saved(tmp_path / "tied", "tiny-llava", 0, target_modules=["lm_head"])
    with pytest.raises(UserError, match=r"decoder's layers only, got "):
        mmspec.load("tiny-llava", adapters={"x": folder})
    with pytest.raises(UserError, match=r"^adapters need weights that are not packed: .*, got packed int8$"):
        mmspec.load("tiny-llava", dtype="int8", adapters={"x": folder})
