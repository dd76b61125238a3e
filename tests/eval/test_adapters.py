"""Adapters to lm-evaluation-harness (in the harness itself, too) and lmms-eval, with stand-ins for what they import."""

import importlib.util
import json
import sys
import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import mmspec
from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.eval import lm_eval_model
from mmspec.eval.adapters import manifest
from tests.model_folders import save_llava, save_text_model

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
            texts = self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
            answers += [cut(text, until) for text in texts]
        return answers

    def _model_generate(self, context, max_length, stop, **options):
        assert not stop, "the harness's stopping criterion needs all rows of a batch in every call"
        return self.model.generate(input_ids=context, max_length=max_length, do_sample=False, **options)


def cut(text, until):
    return min((text.split(stop)[0] for stop in until if stop), key=len, default=text)


def adapter(monkeypatch, base=None):
    """The adapter's class, derived from ``base`` or from the harness's own class."""
    if base is not None:
        monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", SimpleNamespace(HFLM=base))
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


def test_a_row_stops_at_a_text_of_its_own_answer(folder, monkeypatch):
    tokenizer = mmspec.load(folder, drafter=None).processor.tokenizer
    prompts, answers = ([tokenizer(text)["input_ids"] for text in texts] for texts in (("xx", "yy"), ("xyz", "xyy")))
    rows = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    criterion = adapter(monkeypatch, Base)._model_generate.__globals__["_StopTexts"](tokenizer, ["", "yy", "xx"], 2)
    met = [criterion(rows[:, :length], None).tolist() for length in (2, 3, 4, 5)]
    assert met == [[False, False]] * 3 + [[False, True]]


def test_the_harness_finds_the_adapter_by_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["lm_eval.models"] == {"mmspec": "mmspec.eval.adapters.lm_eval_model:MmspecLM"}


def test_the_command_registers_the_adapter_and_hands_the_arguments_on(monkeypatch):
    made, run = {}, []
    registry = SimpleNamespace(register_model=lambda name: partial(made.__setitem__, name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", registry)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", SimpleNamespace(cli_evaluate=lambda: run.append(sys.argv)))
    monkeypatch.setattr(sys, "argv", ["python", "lm_eval_model", "--help"])
    adapter(monkeypatch, Base)
    assert CliRunner().invoke(lm_eval_model.main, ["run", "--model", "mmspec"]).exit_code == 0
    assert (run, made["mmspec"].__name__) == ([["python", "run", "--model", "mmspec"]], "MmspecLM")


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


# ------------------------------------------------------------------ lmms-eval


@pytest.fixture
def framework(monkeypatch):
    """Stand-ins for lmms-eval's modules."""

    class Base:
        def __init__(self):
            self.task_dict = {}

    names = {
        "lmms_eval.api.model": {"lmms": Base},
        "lmms_eval.api.instance": {
            "Instance": object,
            "GenerationResult": lambda text, counts: SimpleNamespace(text=text, tokens=counts),
            "TokenCounts": lambda output_tokens: output_tokens,
        },
        "lmms_eval.models.registry_v2": {"ModelManifest": SimpleNamespace},
        "loguru": {"logger": SimpleNamespace(info=lambda text: None)},
    }
    for name, content in names.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    monkeypatch.delitem(sys.modules, "mmspec.eval.adapters.lmms", raising=False)
    yield import_module("mmspec.eval.adapters.lmms")
    sys.modules.pop("mmspec.eval.adapters.lmms", None)


def test_the_manifest_names_the_class(framework):
    entry = manifest()
    assert (entry.model_id, entry.chat_class_path) == ("mmspec", f"{framework.__name__}.MmspecLMM")
    assert not framework.MmspecLMM.is_simple


def test_arguments_of_the_model_reach_it(framework, tmp_path):
    model = framework.MmspecLMM(str(save_llava(tmp_path / "llava")), "recycle", "cpu", "bfloat16")
    assert repr(model.pipe).endswith("drafter='recycle', device='cpu', dtype='bfloat16')")


def test_answers_are_in_request_order_and_equal_plain_decoding(framework, tmp_path):
    folder = str(save_llava(tmp_path / "llava"))
    pictures = [Image.new("RGB", (9, 9), (50 * k, 9, 9)) for k in range(5)]
    docs = [{"question": f"Picture {k}", "image": picture} for k, picture in enumerate(pictures)]

    def messages(doc):
        content = [{"type": "image", "url": doc["image"]}, {"type": "text", "text": doc["question"]}]
        return [{"role": "user", "content": content}]

    options = [{"max_new_tokens": 6 + k % 2, "until": ["\n\n"]} for k in range(5)]
    requests = [SimpleNamespace(args=("", messages, options[k], k, "task", "test")) for k in range(5)]
    model = framework.MmspecLMM(pretrained=folder, drafter="recycle", nodes="4", batch_size="2", device=None)
    model.task_dict = {"task": {"test": docs}}
    results = model.generate_until(requests)
    plain = mmspec.load(folder, drafter=None)
    for k, result in enumerate(results):
        alone = plain.generate(f"Picture {k}", images=[pictures[k]], max_new_tokens=6 + k % 2)
        assert (result.text, result.tokens) == (alone.text.strip(), len(alone.token_ids))
    assert len(model.stats) == 5
    assert all(one.mean_acceptance_length > 1 for one in model.stats)
    with pytest.raises(NotImplementedError):
        model.loglikelihood([])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"max_new_tokens": 1024, "temperature": 0.0, "stop": []}),
        (
            {"max_new_tokens": 16, "temperature": 0, "do_sample": False, "num_beams": 1, "until": ["\n\n", "ASK"]},
            {"max_new_tokens": 16, "temperature": 0.0, "stop": ["ASK"]},
        ),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": None, "until": "X"},
            {"max_new_tokens": 1024, "temperature": 0.7, "top_p": 0.9, "stop": ["X"]},
        ),
        ({"temperature": 0.7, "do_sample": False}, {"max_new_tokens": 1024, "temperature": 0.0, "stop": []}),
    ],
)
def test_generation_options_are_translated(framework, given, wanted):
    assert framework.generation_keywords(given) == wanted


def test_messages_are_translated_to_a_request(framework):
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "video", "url": "v.mp4"}, {"type": "image", "url": "i.png"}]},
        {"role": "assistant", "content": "Yes."},
    ]
    assert framework.messages_to_request(messages) == {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "video"}, {"type": "image"}]},
            {"role": "assistant", "content": "Yes."},
        ],
        "images": ["i.png"],
        "videos": ["v.mp4"],
    }
    with pytest.raises(UserError, match="messages may contain text, images and videos: got 'audio'"):
        framework.messages_to_request([{"role": "user", "content": [{"type": "audio", "url": "a.wav"}]}])
    with pytest.raises(UserError, match=r"num_beams must be 1: .* got 4"):
        framework.generation_keywords({"num_beams": 4})
