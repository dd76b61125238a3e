"""The lm-evaluation-harness adapter, with a stand-in for the harness's base class and in the harness itself."""

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import mmspec
from mmspec.engine.stats import Stats
from tests.model_folders import save_text_model

PROMPTS = ["A red circle is", "Describe a star", "The small blue square; the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_text_model(tmp_path_factory.mktemp("models") / "text")
    config = json.loads((folder / "generation_config.json").read_text())
    # Many models set a limit; the harness's must take precedence.
    (folder / "generation_config.json").write_text(json.dumps({**config, "max_new_tokens": 5}))
    return str(folder)


class Base:
    """The parts of the harness's ``HFLM`` that the adapter uses: padded batches for transformers' ``generate``."""

    def __init__(self, pretrained, tokenizer, batch_size=1):
        self.model, self.tokenizer, self.batch_size = pretrained, tokenizer, batch_size

    def generate_until(self, requests):
        answers = []
        for request in requests:
            contexts, until, length = request.args
            batch = self.tokenizer(contexts, padding=True, padding_side="left", return_tensors="pt")
            ids, mask = batch["input_ids"], batch["attention_mask"]
            out = self._model_generate(context=ids, attention_mask=mask, stop=until, max_length=ids.shape[1] + length)
            answers += [
                cut(self.tokenizer.decode(row, skip_special_tokens=True), until) for row in out[:, ids.shape[1] :]
            ]
        return answers

    def _model_generate(self, context, max_length, stop, **options):
        assert not stop, "the harness's stopping criterion needs all rows of a batch in every call"
        return self.model.generate(input_ids=context, max_length=max_length, do_sample=False, **options)


def cut(text, until):
    return min((text.split(stop)[0] for stop in until if stop), key=len, default=text)


def adapter(monkeypatch, base=None):
    """The adapter's class, derived from ``base`` or from the harness's own class."""
    if base is not None:
        for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules["lm_eval.models.huggingface"], "HFLM", base, raising=False)
    monkeypatch.delitem(sys.modules, "mmspec.eval.adapters.lm_eval_model", raising=False)
    from mmspec.eval.adapters.lm_eval_model import MmspecLM

    monkeypatch.delitem(sys.modules, "mmspec.eval.adapters.lm_eval_model")
    return MmspecLM


def test_answers_equal_plain_decoding_up_to_the_stop_text(folder, monkeypatch):
    plain = mmspec.load(folder, drafter=None)
    whole = [plain.generate(prompt, max_new_tokens=24).text for prompt in PROMPTS]
    # One text stops the first answer in its middle; the other text is in the prompts, where it must stop nothing.
    until = [whole[0][4:7], "e"]
    assert until[0] in whole[0]
    contexts = [prompt + until[1] for prompt in PROMPTS]
    wanted = [cut(plain.generate(context, max_new_tokens=24).text, until) for context in contexts]
    model = adapter(monkeypatch, Base)(folder, "recycle", device="cuda:0", nodes="6", batch_size=3)
    assert model.generate_until([SimpleNamespace(args=(contexts, until, 24))]) == wanted
    assert any(wanted)
    longest = model.generate_until([SimpleNamespace(args=(PROMPTS, [""], 24))])
    assert longest == whole
    assert len(model.tokenizer(longest[0])["input_ids"]) > 5
    assert len(model.stats) == 6
    assert Stats.combined(model.stats).mean_acceptance_length > 1


def test_the_harness_finds_the_adapter_by_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["lm_eval.models"] == {"mmspec": "mmspec.eval.adapters.lm_eval_model:MmspecLM"}


needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness: pip install 'lm_eval[hf]'"
)


@needs_lm_eval
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("drafter", ["recycle", "none"])
def test_the_harness_gets_the_same_answers_as_from_its_own_model(folder, monkeypatch, tmp_path, drafter):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    task = {"task": "lines", "output_type": "generate_until", "dataset_path": "json", "test_split": "test"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path / "cache")}}
    task |= {"doc_to_text": "{{text}}", "doc_to_target": "{{text}}"}
    task |= {"generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 20}}
    plain = mmspec.load(folder, drafter=None)
    plain.model.generation_config.max_new_tokens = None
    ours = adapter(monkeypatch)(folder, drafter, batch_size=2)

    def answers(model):
        found = lm_eval.simple_evaluate(
            model=model, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
        )
        return [answer for row in found["samples"]["lines"] for (answer,) in row["resps"]]

    theirs = answers(HFLM(pretrained=plain.model, tokenizer=plain.processor.tokenizer, batch_size=2))
    assert any(len(answer) > 5 for answer in theirs)
    assert answers(ours) == theirs
    assert (Stats.combined(ours.stats).mean_acceptance_length > 1) == (drafter != "none")
