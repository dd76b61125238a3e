"""Checkpoints: exact weights, code that a folder brings along, hub ids without a network, and dispatched models."""

import json
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import mmspec
from mmspec import UserError
from mmspec.cli import main
from mmspec.drafters.registry import make_drafter
from mmspec.drafters.small import Small
from mmspec.targets import sources
from mmspec.targets.checkpoints import from_pretrained, is_on_hub
from mmspec.targets.support import computing_devices, input_device, is_split
from tests.model_folders import save_llava, save_text_model
from tests.split_models import PROMPTS, answers


@pytest.fixture
def folder(tmp_path):
    return save_text_model(tmp_path / "model")


def _change(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w.update({"extra.weight": torch.zeros(2)}), "but extra.weight is not one of them$"),
        (lambda w: w.update({f"extra.{i}": torch.zeros(2) for i in range(9)}), r"but extra.0 is not .* and 6 more$"),
        (lambda w: w.pop("model.norm.weight"), "but model.norm.weight is missing$"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"but model.norm.weight has shape \(3,\), not"),
    ],
)
def test_weights_too_many_too_few_and_of_other_shapes(folder, change, expected):
    _change(folder, change)
    for load in (lambda: mmspec.load(str(folder), None), lambda: mmspec.load(drafter=f"small:{folder}")):
        with pytest.raises(UserError, match=expected):
            load()


def test_weights_that_transformers_knows_to_ignore(folder):
    _change(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}))
    assert mmspec.load(str(folder), None).generate("Describe", max_new_tokens=2).token_ids


def test_a_state_spaces_checkpoint_in_its_own_format(tmp_path):
    """As state-spaces/mamba2-130m is published: no model type, and other names."""
    own = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}, "rms_norm": True}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(UserError, match=r"^cannot load model .*expected the folder of a supported model") as raised:
        mmspec.load(str(tmp_path), None)
    assert "\n" not in str(raised.value)


_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, LlavaProcessor, PreTrainedTokenizerFast
Path({ran!r}).touch()
class Config(LlamaConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
class Words(PreTrainedTokenizerFast):
    pass
class Both(LlavaProcessor):
    pass
"""
_REFUSED = r"needs Python code that it brings along.*trust_remote_code=True \(--trust-remote-code"


def _edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file that the folder's code creates when it runs; every question on standard input is answered yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", sys.path[:])
    return tmp_path / "ran"


def _with_code(folder, part, ran):
    """Let one part of a model's folder ask for the folder's own code."""
    (folder / "own.py").write_text(_CODE.format(ran=str(ran)))
    if part == "model":
        own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
        _edit(folder / "config.json", model_type="own", auto_map=own)
    elif part == "tokenizer":
        own = {"AutoTokenizer": [None, "own.Words"]}
        _edit(folder / "tokenizer_config.json", tokenizer_class="Words", auto_map=own)
    else:
        own = {"AutoProcessor": "own.Both"}
        _edit(folder / "processor_config.json", processor_class="Both", auto_map=own)
    return str(folder)


@pytest.mark.parametrize("part", ["model", "tokenizer", "processor"])
def test_code_does_not_run_unasked(part, tmp_path, ran):
    save = save_llava if part == "processor" else save_text_model
    folder = _with_code(save(tmp_path / "model"), part, ran)
    with pytest.raises(UserError, match=_REFUSED):
        mmspec.load(folder, drafter=None)
    if part == "model":
        with pytest.raises(UserError, match=_REFUSED):
            make_drafter(f"small:{folder}")
    assert not ran.exists()


def test_a_model_of_a_known_type_takes_the_class_of_transformers(folder, ran):
    (folder / "own.py").write_text(_CODE.format(ran=str(ran)))
    _edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "own.Model"})
    assert type(mmspec.load(str(folder), drafter=None).model).__module__.startswith("transformers.models.llama")
    assert not ran.exists()


def test_code_runs_when_it_is_trusted(tmp_path, ran, capsys):
    plain = str(save_text_model(tmp_path / "plain"))
    folder = _with_code(save_text_model(tmp_path / "model"), "model", ran)
    expected = mmspec.load(plain, drafter=None).generate("Describe", max_new_tokens=8)
    pipe = mmspec.load(folder, drafter=f"small:{folder}@0.25", trust_remote_code=True)
    assert pipe.drafter._visual.share == 0.25
    assert pipe.generate("Describe", max_new_tokens=8).token_ids == expected.token_ids
    assert type(pipe.model).__name__ == type(pipe.drafter.model).__name__ == "Model"
    assert ran.exists()
    options = ["--model", folder, "--drafter", "none", "--max-new-tokens", "8", "--json", "--trust-remote-code"]
    assert main(["generate", "Describe", *options]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected.token_ids


def test_other_errors_stay_as_they_are(folder, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="Unrecognized model"):
        from_pretrained(AutoConfig, tmp_path)
    for message in ("expected another type", "f() got an unexpected keyword argument 'depth'"):  # of no option

        def fails(*given, message=message, **options):
            raise TypeError(message)

        monkeypatch.setattr(sources.Source, "model", fails)
        with pytest.raises(TypeError, match=re.escape(message)):
            mmspec.load(str(folder), drafter=None, revision="main")


def test_nothing_else_reads_what_may_hold_code():
    root = Path(mmspec.__file__).parents[1]
    files = [
        file for package in ("mmspec", "vision", "ssm", "eval", "demos") for file in (root / package).rglob("*.py")
    ]
    direct = re.compile(r"\bAuto\w+\.from_pretrained\(|torch\.hub\.|trust_remote_code=True\)")
    assert not [str(file) for file in files if direct.search(file.read_text())]


# One of mmspec, one of huggingface_hub per process, without retries. A retried load makes dozens.
CONNECTIONS = 2


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No network: every connection is noted and refused."""
    seen: list[Any] = []

    def refuse(address: Any, *_: Any, **__: Any) -> Any:
        seen.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return seen


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        ("model", lambda: mmspec.load("nobody/nothing")),
        ("drafter", lambda: mmspec.load("tiny-llava", drafter="nobody/nothing")),
        ("drafter", lambda: Small("nobody/nothing")),
    ],
)
def test_an_unreachable_hub_is_one_line_without_retries(attempts: list[Any], kind: str, load: Any) -> None:
    with pytest.raises(UserError) as caught:
        load()
    message = str(caught.value)
    assert message.startswith(f"cannot load {kind} 'nobody/nothing': expected an embedded model (gemma3-270m, ")
    assert message.endswith(f"the network or the hub ({constants.ENDPOINT}) cannot be reached")
    assert "\n" not in message
    assert "HF_HUB_OFFLINE" not in message
    assert 1 <= len(attempts) <= CONNECTIONS
    assert not constants.HF_HUB_OFFLINE  # the network may come back


def test_offline_mode_is_named_where_it_is_set(attempts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the local cache of the hub lacks it, and HF_HUB_OFFLINE is set"):
        mmspec.load("nobody/nothing")
    assert not attempts


def test_a_cached_model_loads_without_a_network(attempts: list[Any], tmp_path: Path) -> None:
    cached = tmp_path / "models--nobody--something"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    folder = save_text_model(tmp_path / "model")
    shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    assert [is_on_hub(name) for name in ("nobody/nothing", "tiny-llava", str(tmp_path))] == [True, False, False]
    pipe = mmspec.load("nobody/something", drafter=None, cache_dir=tmp_path)
    assert 1 <= len(attempts) <= CONNECTIONS
    expected = mmspec.load(str(folder), drafter=None).generate("A", max_new_tokens=5)
    assert pipe.generate("A", max_new_tokens=5).token_ids == expected.token_ids


PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", *(f"model.layers.{i}" for i in range(4)))
MAPS = {
    "layers": {part: "disk" if part in ("model.layers.1", "model.layers.3") else "cpu" for part in PARTS},
    "ends": {part: "disk" if part in ("model.embed_tokens", "lm_head") else "cpu" for part in PARTS},
    "all": {"": "disk"},
}


@pytest.mark.parametrize("name", MAPS)
def test_a_dispatched_model_gives_the_same_tokens(name: str, split_model: Path, split_head: Path) -> None:
    for drafter in ("recycle", str(split_head)):
        plain = mmspec.load(split_model, drafter, "cpu", "float32")
        pipe = mmspec.load(split_model, drafter, dtype="float32", device_map=MAPS[name])
        assert is_split(pipe.model)
        assert any(weight.is_meta for weight in pipe.model.parameters()), "nothing was offloaded"
        assert answers(pipe) == answers(plain)


def test_a_dispatched_model_object_gives_the_tokens_of_generate(split_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(split_model, device_map=MAPS["layers"])
    words = mmspec.load(split_model, None, "cpu", "float32").hf_processor
    pipe = mmspec.load(model, "recycle", processor=words)
    ids = words(PROMPTS[0], return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert pipe.generate(PROMPTS[0], max_new_tokens=12, num_draft_tokens=7).token_ids == expected.tolist()


def test_auto_on_one_device_leaves_the_model_whole(split_model: Path) -> None:
    pipe = mmspec.load(split_model, None, dtype="float32", device_map="auto")
    assert not is_split(pipe.model)
    assert computing_devices(pipe.model) == {str(input_device(pipe.model))}


def test_where_a_dispatched_model_computes(split_model: Path) -> None:
    model = mmspec.load(split_model, None, device_map=MAPS["all"]).model
    assert model.device.type == "meta"
    assert input_device(model) == torch.device("cpu")
    assert computing_devices(model) == {"cpu"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8", "device_map": "auto"}, "packed weights .* stay on one device: .* got 'int8'"),
        ({"device": "cpu", "device_map": "auto"}, "device_map places the model: expected device 'auto'"),
        ({"device_map": "auto", "tp_plan": "auto"}, "either dispatched or sharded"),
        ({"device_map": "balance"}, "device_map must be .*: got 'balance'"),
        ({"tp_plan": "auto"}, "over the ranks of a job: .*, got 1 rank"),
    ],
)
def test_refusals(split_model: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(mmspec.UserError, match=message):
        mmspec.load(split_model, None, **options)
