"""The lmms-eval adapter, with stand-ins for the names that it imports."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

import mmspec
from mmspec.errors import UserError
from mmspec.eval.adapters import manifest
from tests.model_folders import save_llava


@pytest.fixture
def framework(monkeypatch):
    """Stand-ins for lmms-eval's modules."""

    class Base:
        def __init__(self):
            self.task_dict = {}

    names = {
        "lmms_eval": {},
        "lmms_eval.api": {},
        "lmms_eval.api.model": {"lmms": Base},
        "lmms_eval.api.instance": {
            "Instance": object,
            "GenerationResult": lambda text, counts: SimpleNamespace(text=text, tokens=counts),
            "TokenCounts": lambda output_tokens: output_tokens,
        },
        "lmms_eval.models": {},
        "lmms_eval.models.registry_v2": {"ModelManifest": SimpleNamespace},
        "loguru": {"logger": SimpleNamespace(info=lambda text: None)},
    }
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mmspec.eval.adapters.lmms", raising=False)
    yield import_module("mmspec.eval.adapters.lmms")
    sys.modules.pop("mmspec.eval.adapters.lmms", None)


def test_the_manifest_names_the_class(framework):
    entry = manifest()
    assert (entry.model_id, entry.chat_class_path) == ("mmspec", f"{framework.__name__}.MmspecLMM")
    assert not framework.MmspecLMM.is_simple


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
