"""Python code that the folder of a model, tokenizer or processor brings along."""

import json
import re
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

import mmspec
from mmspec import UserError
from mmspec.cli import main
from mmspec.drafters.registry import make_drafter
from mmspec.targets.checkpoints import from_pretrained
from tests.model_folders import save_llava, save_text_model

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


def test_a_model_of_a_known_type_takes_the_class_of_transformers(tmp_path, ran):
    folder = save_text_model(tmp_path / "model")
    (folder / "own.py").write_text(_CODE.format(ran=str(ran)))
    _edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "own.Model"})
    assert type(mmspec.load(str(folder), drafter=None).model).__module__.startswith("transformers.models.llama")
    assert not ran.exists()


def test_code_runs_when_it_is_trusted(tmp_path, ran, capsys):
    plain = str(save_text_model(tmp_path / "plain"))
    folder = _with_code(save_text_model(tmp_path / "model"), "model", ran)
    keywords = dict(max_new_tokens=8)
    expected = mmspec.load(plain, drafter=None).generate("Describe", **keywords)
    pipe = mmspec.load(folder, drafter=f"small:{folder}@0.25", trust_remote_code=True)
    assert pipe.drafter._visual.share == 0.25
    assert pipe.generate("Describe", **keywords).token_ids == expected.token_ids
    assert type(pipe.model).__name__ == type(pipe.drafter.model).__name__ == "Model"
    assert ran.exists()
    options = ["--model", folder, "--drafter", "none", "--max-new-tokens", "8", "--json", "--trust-remote-code"]
    assert main(["generate", "Describe", *options]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected.token_ids


def test_other_errors_stay_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="Unrecognized model"):
        from_pretrained(AutoConfig, tmp_path)


def test_nothing_else_reads_what_may_hold_code():
    root = Path(mmspec.__file__).parents[1]
    files = [
        file for package in ("mmspec", "vision", "ssm", "eval", "demos") for file in (root / package).rglob("*.py")
    ]
    direct = re.compile(r"\bAuto\w+\.from_pretrained\(|torch\.hub\.|trust_remote_code=True\)")
    assert not [str(file) for file in files if direct.search(file.read_text())]
