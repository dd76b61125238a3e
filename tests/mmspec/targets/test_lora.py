"""LoRA adapters, chosen by request: tokens of transformers' ``generate`` with peft's wrapper of a separate model."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmspec
from mmspec.core.tree import TokenTree
from mmspec.errors import UserError
from mmspec.targets.lora import add_adapters
from mmspec.targets.support import base_model
from tests.device import record_captures
from tests.targets import prefilled
from tests.tiny import byte_tokenizer
from tests.tiny.models import text_inputs, text_model

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # which peft asks for
    pytest.mark.filterwarnings("ignore:.*(tied layer|embedding layers):UserWarning"),
]

PROMPTS = ("Describe the image.", "Count the circles, then the squares.", "What is left of the red square?")
LAYERS = {"tiny-llava": ["q_proj", "v_proj", "down_proj"], "tiny-hybrid": ["in_proj", "o_proj", "gate_proj"]}


def saved(folder: Path, name: str, seed: int, **config: object) -> Path:
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
    pipe, expected = loaded
    assert len({str(tokens) for tokens in expected.values()}) == 3
    for names in ((None, "one", "two", "one", None), ("two", "two", None)):
        for name in names:
            answers = [pipe.generate(prompt, max_new_tokens=24, temperature=0.0, adapter=name) for prompt in PROMPTS]
            assert [answer.token_ids for answer in answers] == expected[name], name
    assert any(answer.stats.num_cached_tokens for answer in answers)


def at_once(requests: Iterable[tuple[mmspec.Pipeline, str, str | None]]) -> list[list[int]]:
    """Tokens of streams that run together: pipeline, prompt and adapter of each."""
    options = {"max_new_tokens": 24, "temperature": 0.0}
    streams = [pipe.stream(prompt, adapter=name, **options) for pipe, prompt, name in requests]
    tokens: list[list[int]] = [[] for _ in streams]
    for pieces in zip_longest(*streams):
        for piece, so_far in zip(pieces, tokens, strict=True):
            so_far += piece.token_ids if piece else []
    return tokens


def test_streams_of_several_adapters_and_of_two_pipelines_of_a_model(loaded) -> None:
    """Running requests do not see each other's adapter: each pipeline's thread chooses its own in every pass."""
    pipe, expected = loaded
    other = mmspec.load(pipe.model, processor=pipe.processor, drafter=None)
    alone = [(pipe, number, name) for number in range(len(PROMPTS)) for name in (None, "one", "two")]
    for keys in (alone, [(pipe, 0, "one"), (other, 0, "two")], [(pipe, 0, None), (other, 0, "two")]):
        found = at_once((one, PROMPTS[number], name) for one, number, name in keys)
        assert found == [expected[name][number] for _, number, name in keys]


def test_captured_passes_are_those_of_an_adapter(loaded, monkeypatch) -> None:
    prompt, tree = loaded[0].encode([{"prompt": PROMPTS[0]}]), TokenTree.root(torch.tensor([5]))

    def logits(target, name):
        prefilled(target, replace(prompt, adapter=name), 8)
        found = [target.verify(tree).logits.clone() for _ in range(3)]  # as it is, captured, replayed
        target.keep([])
        return found

    expected = {name: logits(loaded[0].target.fork(), name)[0] for name in (None, "one", "two")}
    record_captures(monkeypatch)
    target = loaded[0].target.fork()
    for name in (None, "one", "two", "one", None):
        for found in logits(target, name):
            torch.testing.assert_close(found, expected[name], atol=1e-4, rtol=1e-4)


def test_a_wrapper_whose_owner_changes_it(tmp_path: Path) -> None:
    """Cached states are never reused with another adapter, a merged adapter, or no adapter."""
    name = "tiny-llava"
    one, two = (saved(tmp_path / str(seed), name, seed) for seed in range(2))
    plain = mmspec.load(name, drafter=None)
    base = generated(plain)
    pipe = mmspec.load(plain.model, processor=plain.processor, drafter="recycle+ngram", prefix_cache=1 << 26)

    def answers() -> list[list[int]]:
        return [pipe.generate(prompt, max_new_tokens=24, temperature=0.0).token_ids for prompt in PROMPTS]

    assert answers() == base
    wrapped = peft.PeftModel.from_pretrained(plain.model, one)
    first = generated(plain)
    assert answers() == first != base
    with wrapped.disable_adapter():
        assert answers() == base
    wrapped.load_adapter(two, "other")
    wrapped.set_adapter("other")
    second = generated(plain)
    assert answers() == second not in (base, first)
    wrapped.unload()
    assert answers() == base
    wrapped = peft.PeftModel.from_pretrained(plain.model, two)  # has the name of the first adapter
    assert answers() == second
    wrapped.unload()
    wrapped = peft.PeftModel.from_pretrained(plain.model, one)  # has an equal configuration, too
    assert answers() == first
    wrapped.load_adapter(two, "other")
    wrapped.merge_adapter(["other"])  # in place of the one that is chosen
    assert answers() == second


def test_wrappers_are_taken_off_where_adapters_are_in_the_layers() -> None:
    model, virtual = text_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert base_model(model) is model
    with pytest.raises(UserError, match=r"^adapters of peft must be .* like LoRA: got learned prompts, PROMPT_TUNING$"):
        base_model(peft.get_peft_model(model, virtual))
    assert base_model(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))) is model


OPTIONS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "lora_alpha": 8},
    "patterns": {"rank_pattern": {"v_proj": 7}, "alpha_pattern": {"layers.1.mlp.down_proj": 64}},
    "bias of lora_B": {"lora_bias": True},
    "some layers": {"layers_to_transform": [1], "exclude_modules": ["v_proj"]},
    "dropout": {"lora_dropout": 0.5, "task_type": "FEATURE_EXTRACTION"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "eva": {"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=1.0)},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "converted": {"corda_config": {"corda_method": "kpm"}},
}
LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "init_lora_weights": False,
}
GREEDY = {"max_new_tokens": 16, "do_sample": False}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}


def trained(folder: Path, model: str, **options: Any) -> Path:
    """A folder of peft whose weights are all random, as after training; of ``TEXT_CONFIGS`` or ``HYBRID_CONFIGS``."""
    wrapped = peft.get_peft_model(text_model(model), peft.LoraConfig(**{**LORA, **options}))
    torch.manual_seed(1)
    for name, weight in wrapped.named_parameters():
        if weight.requires_grad or "lora_" in name:
            weight.data += torch.randn_like(weight) * 0.3
    wrapped.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning")  # of options that only matter to training
@pytest.mark.parametrize(("model", "key"), [*(("qwen2", key) for key in OPTIONS), ("minimax", "experts")])
def test_an_adapter_is_that_of_peft(model: str, key: str, tmp_path: Path) -> None:
    """In both orders with an adapter of other layers, whose name is a prefix; the model's weights do not change.
    Unknown fields that are false are ignored."""
    options = OPTIONS.get(key, EXPERTS)
    folder = changed(trained(tmp_path / "one", model, **options), kept, lora_of_2031=False)
    other = trained(tmp_path / "other", model, target_modules=["k_proj"], r=2)
    inputs = text_inputs(1, 9)
    prompt = inputs["input_ids"][0].tolist()

    def reference(folder: Path | None) -> list[int]:
        plain = text_model(model)
        if folder is not None:
            plain = peft.PeftModel.from_pretrained(plain, folder).get_base_model().eval()
        return plain.generate(**inputs, **GREEDY)[0, 9:].tolist()

    expected = {None: reference(None), "one": reference(folder), "on": reference(other)}
    assert len({str(tokens) for tokens in expected.values()}) == 3
    for folders in ({"one": folder, "on": other}, {"on": other, "one": folder}):
        loaded = text_model(model)
        before = {name: weight.clone() for name, weight in loaded.state_dict().items()}
        add_adapters(loaded, folders)
        pipe = mmspec.load(loaded.eval(), processor=byte_tokenizer(), drafter="ngram")
        for name in ("one", None, "on", "one", None):
            answer = pipe.generate(prompt, max_new_tokens=16, temperature=0.0, adapter=name)
            assert answer.token_ids == expected[name], (name, list(folders))
        after = {name.replace(".base_layer", ""): weight for name, weight in loaded.state_dict().items()}
        assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def changed(folder: Path, change: Callable[[str], str | None], **fields: Any) -> Path:
    """An adapter whose tensors have other names, or none, and its configuration other fields."""
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = {change(name): weight for name, weight in load_file(file).items()}
    save_file({name: weight for name, weight in tensors.items() if name}, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


def kept(name: str) -> str:
    return name


PREFIX, LAST = "base_model.model.", "model.layers.1.mlp.down_proj.lora_B.weight"
REFUSED: dict[str, tuple[dict[str, Any], Callable[[str], str | None], dict[str, Any], str]] = {
    "bias": ({"bias": "all"}, kept, {}, "bias='all'"),
    "bias of its layers": ({"bias": "lora_only"}, kept, {}, "bias='lora_only'"),
    "pissa": ({"init_lora_weights": "pissa"}, kept, {}, "init_lora_weights='pissa'"),
    "pissa by iteration": ({"init_lora_weights": "pissa_niter_2"}, kept, {}, "init_lora_weights='pissa_niter_2'"),
    "olora": ({"init_lora_weights": "olora"}, kept, {}, "init_lora_weights='olora'"),
    "corda": ({}, kept, {"init_lora_weights": "corda"}, "init_lora_weights='corda'"),
    "loftq": ({}, kept, {"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
    "lora-ga": ({}, kept, {"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga'"),
    "kasa": ({}, kept, {"kasa_config": {"beta": 1e-4}}, "kasa_config={'beta': 0.0001}"),
    "more layers": ({}, kept, {"layer_replication": [[0, 2], [1, 2]]}, "layer_replication=[[0, 2], [1, 2]]"),
    "modules": ({"modules_to_save": ["norm"]}, kept, {}, "modules_to_save=['norm']"),
    "tokens": ({}, kept, {"trainable_token_indices": [3]}, "trainable_token_indices=[3]"),
    "a late start": ({}, kept, {"alora_invocation_tokens": [3, 4]}, "alora_invocation_tokens=[3, 4]"),
    "two fields": ({}, kept, {"use_qalora": True, "lora_of_2031": 2}, "lora_of_2031=2, use_qalora=True"),
    "another kind": ({}, kept, {"peft_type": "VERA"}, "expected LoRA, got VERA"),
    "output layer": ({"target_modules": ["lm_head"]}, kept, {}, "lm_head"),
    "embeddings": ({"target_modules": ["embed_tokens"]}, kept, {}, "embed_tokens"),
    "a part": ({}, lambda name: None if name.endswith(LAST) else name, {}, f"missing {PREFIX}{LAST}"),
    "another size": ({}, kept, {"r": 5}, "layers.0.mlp.down_proj.lora_A.weight"),
    "more": ({}, lambda name: name.replace("layers.1", "layers.7"), {}, "layers.7.mlp.down_proj.lora_A"),
    "prefix": ({}, lambda name: PREFIX + name, {}, "got base_model.model.base_model.model.model.layers.0.mlp"),
    "the model's own": ({}, lambda name: name.replace("lora_B", "base_layer"), {}, "layers.0.mlp.down_proj.base_layer"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_an_adapter_is_loaded_whole_or_refused(key: str, tmp_path: Path) -> None:
    options, change, fields, named = REFUSED[key]
    folder = changed(trained(tmp_path / "x", "qwen2", **options), change, **fields)
    with pytest.raises(UserError) as error:
        add_adapters(text_model("qwen2"), {"x": folder})
    message = str(error.value)
    assert message.startswith(f"cannot load adapter 'x' from '{folder}': expected ")
    assert named in message
    assert "\n" not in message
    assert len(message) < 500


def test_mistakes(tmp_path: Path) -> None:
    folders = {"one": saved(tmp_path / "one", "tiny-llava", 0), "two": saved(tmp_path / "two", "tiny-llava", 1)}
    pipe = mmspec.load("tiny-llava", adapters=folders)
    with pytest.raises(UserError, match=r"^unknown adapter: expected one of those loaded \(one, two\), got 'three'"):
        pipe.generate("a", adapter="three")
    with pytest.raises(UserError, match=r"^unknown adapter: .*\(none are loaded\), got 'one'$"):
        mmspec.load("tiny-llava", drafter=None).generate("a", adapter="one")
    with pytest.raises(UserError, match=r"^cannot load adapter 'x' from '/nowhere'"):
        mmspec.load("tiny-llava", adapters={"x": "/nowhere"})
    with pytest.raises(UserError, match=r"^adapters need weights that are not packed: .*, got packed int8$"):
        mmspec.load("tiny-llava", dtype="int8", adapters={"x": folders["one"]})
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folders["one"] / name).write_text("[")
        with pytest.raises(UserError, match=r"one(/adapter_config.json)?'?: "):
            mmspec.load("tiny-llava", adapters={"x": folders["one"]})
