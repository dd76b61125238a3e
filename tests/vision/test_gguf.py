"""Vision-language models in two files of llama.cpp: the same numbers, inputs and answers as the models they are of."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.utils import is_torchvision_available

import mmspec
from mmspec import plugins
from mmspec.demos.models import ModelCache
from mmspec.ops import cpu
from mmspec.targets import gguf_file
from mmspec.vision.drafters.msd import MSD
from mmspec.vision.gguf import VisionSource
from mmspec.vision.processor import VisionProcessor, VisionTarget
from tests import projectors
from tests.commandline import runner
from tests.compiled import needs_kernels
from tests.drafting import network_for
from tests.model_folders import save_gguf

TEXTS = "{% for one in messages %}[{{ one.role }} {{ one.content }}]{% endfor %}"
ITEMS = "{% for one in messages[0].content %}{{ '<image>' if one.type == 'image' else one.text }}{% endfor %}"
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (224, 168, 3), dtype=np.uint8))
ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))


def opened(family, folder, *changes, **more):
    return VisionSource(*projectors.save(family, folder, *changes, **more))


def model_of(source, kind=torch.float32):
    made, _ = source.model(AutoModelForImageTextToText, source.config(), kind, True)
    return made.eval()


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits


def inputs(processor):
    prompt = processor.encode([{"prompt": "What is it?", "images": [PICTURE]}])
    return {"input_ids": prompt.input_ids, **prompt.inputs}


@pytest.mark.parametrize("family", projectors.FAMILIES)
def test_logits_and_inputs_are_those_of_the_model_that_was_converted(family, tmp_path):
    source, original = opened(family, tmp_path), projectors.model(family)
    if family in projectors.WITH_TORCHVISION and not is_torchvision_available():
        found = projectors.pixels(family)
        _, options, parts = source._projector._media()
        assert options.get("spatial_merge_size", 1) == getattr(original.config, "spatial_merge_size", 1)
        if family != "lfm2_vl":
            (images,), square = parts.values(), {"height": 8, "width": 8}
            assert {"patch_size": square, "size": {"longest_edge": 64}}.items() <= images.items()
            assert options["patch_size"] == 8
        with pytest.raises(mmspec.UserError, match=r"reading images with .*needs the package torchvision"):
            source.processor(VisionProcessor)
    else:
        processor = source.processor(VisionProcessor)
        found = inputs(processor)
        text = processor._render(ASKED)
        options = {} if processor.adds_special_tokens(text) else {"add_special_tokens": False}
        plain = projectors.processor(family)
        assert type(processor.plain).__name__ == type(plain).__name__
        expected = plain(text=[text], images=[PICTURE], return_tensors="pt", **options)
        assert set(found) == set(expected) - {"attention_mask"}
        if family.startswith("qwen"):
            images, videos = (source._projector._media()[2][f"Qwen2VL{kind}Processor"] for kind in ("Image", "Video"))
            assert videos == images
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name
    built, weights = model_of(source), original.state_dict()
    for name, value in built.state_dict().items():
        if "vision_tower.post_layernorm" not in name or not family.startswith("llava"):  # which has no use for it
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
    ours, theirs = logits(built, found), logits(original, found)
    assert theirs.std() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@needs_kernels
def test_the_language_models_rows_stay_as_they_are_in_the_file(tmp_path):
    source = opened("llava", tmp_path, quantise="Q8_0")
    assert source.dtype == "int8"
    exact, packed = model_of(source), model_of(source, "auto")
    rows = gguf_file.GGUFFile(tmp_path / "llava.gguf").tensors["blk.1.attn_q.weight"]
    layer = packed.model.language_model.layers[1].self_attn.q_proj
    (stored,) = layer.stored
    assert (stored.format, stored.in_file) == ("Q8_0", True)
    assert sorted(stored.places.tolist()) == rows.rows().places.tolist() != stored.places.tolist()
    assert torch.equal(stored.dense(), exact.model.language_model.layers[1].self_attn.q_proj.weight)
    assert exact.model.vision_tower.encoder.layers[0].self_attn.q_proj.weight.equal(
        packed.model.vision_tower.encoder.layers[0].self_attn.q_proj.weight
    )


@needs_kernels
@pytest.mark.parametrize("quantise", ["", "Q8_0"])
def test_towers_of_packed_models_run_in_the_kernels(quantise, tmp_path, monkeypatch):
    """And the model keeps its own attention."""
    language, projector = projectors.save("qwen2_vl", tmp_path, quantise=quantise)
    pipe = mmspec.load(str(language), None, mmproj=projector)
    patches, original, tower = [], cpu.attention, pipe.model.model.visual
    monkeypatch.setattr(cpu, "attention", lambda *given: patches.append(given[0].shape[1]) or original(*given))
    pipe.generate("What is it?", images=[PICTURE, PICTURE.crop((0, 0, 112, 112))], max_new_tokens=1)
    sizes = [12 * 16, 8 * 8] if quantise else []
    assert [count for count in patches if count in (12 * 16, 8 * 8)] == sizes * len(tower.blocks)
    assert tower.config._attn_implementation == "sdpa"


def test_llavas_own_files_without_a_token_of_images(tmp_path):
    """The oldest name no projector's type; ``<unk>``, which pads other prompts, stands for images."""
    tokens = projectors.vocabulary()["tokenizer.ggml.tokens"]
    renamed = ["<other>" if token == "<image>" else token for token in tokens]
    changes = {"tokenizer.ggml.tokens": renamed, "tokenizer.ggml.padding_token_id": tokens.index("<unk>")}
    source = opened("llava", tmp_path, ITEMS, {**changes, "clip.projector_type": None})
    processor = source.processor(VisionProcessor)
    given = processor.encode([{"prompt": text, "images": [PICTURE]} for text in ("Why?", "What is it?")])
    assert source.config().image_token_id == tokens.index("<unk>")
    assert (given.input_ids == tokens.index("<unk>")).sum(1).tolist() == [16, 16]
    assert processor._render(ASKED) == "<unk>What is it?"
    with_images = {"attention_mask": given.attention_mask, **given.inputs}
    theirs = {"input_ids": given.input_ids.where(given.input_ids != tokens.index("<unk>"), tokens.index("<image>"))}
    expected = logits(projectors.model("llava"), {**theirs, **with_images})
    found = logits(model_of(source), {"input_ids": given.input_ids, **with_images})
    torch.testing.assert_close(found[:, -5:], expected[:, -5:], rtol=0, atol=1e-4)


def test_gemmas_files_without_a_token_of_images(tmp_path):
    tokens = projectors.vocabulary()["tokenizer.ggml.tokens"]
    renamed = ["<unused0>" if token == "<image_soft_token>" else token for token in tokens]
    source = opened("gemma3", tmp_path, metadata={"tokenizer.ggml.tokens": renamed})
    given = inputs(source.processor(VisionProcessor))
    assert (given["input_ids"] == source.config().image_token_id).sum() == 4
    torch.testing.assert_close(
        logits(model_of(source), given), logits(projectors.model("gemma3"), given), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    ("family", "template", "expected"),
    [
        ("llava", TEXTS, "[user <image>\nWhat is it?]"),
        ("llava", ITEMS, "<image>What is it?"),
        ("llava", None, "USER: <image>\nWhat is it? ASSISTANT:"),
        ("idefics3", None, "<s>User:<image>What is it?<end_of_utterance>\nAssistant:"),
        ("gemma3", None, "<s><start_of_turn>user\n<start_of_image>What is it?<end_of_turn>\n<start_of_turn>model\n"),
        ("internvl", TEXTS, "[user <IMG_CONTEXT>\nWhat is it?]"),
        ("qwen2_vl", TEXTS, "[user <|vision_start|><|image_pad|><|vision_end|>What is it?]"),
    ],
)
def test_images_have_a_place_in_every_chat_template(family, template, expected, tmp_path):
    """Of the language model's file, for items or texts alone; else the family's."""
    processor = opened(family, tmp_path, template=template).processor(VisionProcessor)
    assert processor._render(ASKED) == expected
    texts = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    if template == TEXTS:
        assert processor._render(texts) == "[user Hi][assistant Yes]"


@pytest.mark.parametrize("family", ["gemma3", "internvl", "qwen2_vl"])
def test_files_of_older_converters_and_other_tools(family, tmp_path, monkeypatch):
    """Some swapped the products of layers and left out their width, some drop axes of length 1 or reorder tensors."""
    plain = opened(family, tmp_path)
    given = inputs(plain.processor(VisionProcessor))
    expected = logits(model_of(plain), given)
    write = projectors._write

    def changed(file, metadata, tensors):
        if metadata["general.architecture"] == "clip":
            names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if family == "gemma3" else {}
            swap = lambda name: re.sub("ffn_up|ffn_down", lambda found: names.get(found[0], found[0]), name)  # noqa: E731
            tensors = {swap(name): value.squeeze() for name, value in reversed(tensors.items())}
        write(file, metadata, tensors)

    monkeypatch.setattr(projectors, "_write", changed)
    source = opened(family, tmp_path, metadata={"clip.vision.feed_forward_length": 0})
    assert torch.equal(logits(model_of(source), given), expected)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"clip.projector_type": "ldp"}, r"projector of type mlp, idefics3, .*internvl, .*found type ldp$"),
        ({"clip.vision.image_mean": None}, r"expected the key clip\.vision\.image_mean, found none"),
        (
            {"clip.vision.sink_count": 5},
            r"keys of a internvl projector, found clip\.vision\.sink_count = 5, which is not",
        ),
        ({"clip.has_vision_encoder": False}, r"keys of a internvl projector, found clip\.has_vision_encoder = False"),
        ({"clip.vision.block_count": 5}, "layer.4.* is missing"),
        ({"clip.projector_type": "mlp"}, r"metadata and tensors of a mlp projector: 'mm\.2\.weight'"),
        ({"tokenizer.ggml.tokens": ["<s>"] * 352}, "expected the token <IMG_CONTEXT> in its vocabulary, found none"),
    ],
)
def test_files_that_do_not_belong_together_are_one_line(metadata, expected, tmp_path):
    with pytest.raises(mmspec.UserError, match=expected) as caught:  # noqa: PT012
        source = opened("internvl", tmp_path, metadata=metadata)
        model_of(source)
        source.processor(VisionProcessor)
    assert "\n" not in str(caught.value)
    assert "internvl.gguf" in str(caught.value)


def test_a_projector_of_another_language_model_is_named(tmp_path):
    language, projector = projectors.save("llava", tmp_path)
    with pytest.raises(mmspec.UserError, match=r"expected the mmproj file of .* found a file of llama without one$"):
        VisionSource(language, language)
    with pytest.raises(mmspec.UserError, match=r"features, found one to 64$"):
        VisionSource(save_gguf(tmp_path / "wide.gguf", embedding_length=128), projector)
    other, _ = projectors.save("idefics3", tmp_path)
    (tmp_path / "mmproj-other.gguf").write_bytes(projector.read_bytes().replace(b"v.pre_ln", b"v.pro_ln"))
    with pytest.raises(mmspec.UserError, match=r"expected tensors of a clip model, found v\.pro_ln\.weight, which has"):
        model_of(VisionSource(other, tmp_path / "mmproj-other.gguf"))


def test_both_files_are_loaded_by_every_way(tmp_path, capfd, monkeypatch):
    """By an option, and in a folder without; a command; the demo, whose other models have none."""
    language, projector = projectors.save("llava", tmp_path)
    PICTURE.save(tmp_path / "picture.png")
    ask = {"images": [PICTURE], "max_new_tokens": 6, "temperature": 0.0}
    expected = mmspec.load(model_of(VisionSource(language, projector)), None, processor=_processor(language, projector))
    answer = expected.generate("What is it?", **ask)
    assert expected.target.eos_token_ids == [2, 7, 9, 11]  # those of all chat templates are in the vocabulary
    for name, options in ((str(language), {"mmproj": projector}), (str(tmp_path), {})):
        pipe = mmspec.load(name, "ngram", dtype="float32", **options)
        assert pipe.generate("What is it?", **ask).token_ids == answer.token_ids
    words = ["caption", str(tmp_path / "picture.png"), "--model", str(language), "--mmproj", str(projector)]
    words += ["--prompt", "What is it?", "--max-new-tokens", "6", "--dtype", "float32", "--temperature", "0", "--json"]
    status, out, _ = runner(capfd)(*words)
    assert (status, json.loads(out)["token_ids"]) == (0, answer.token_ids)
    cache, found = ModelCache(dtype="float32", mmproj=projector), plugins.model_path
    monkeypatch.setattr(plugins, "model_path", lambda name: str(language) if name == "registered" else found(name))
    for name in ("registered", "tiny-llava"):
        assert cache.get(name).target.model.config.model_type == "llava"


def test_a_file_given_takes_precedence_over_the_folders(tmp_path):
    for name, mean in (("a", 0.5), ("b", 0.25)):
        (tmp_path / name).mkdir()
        projectors.save("llava", tmp_path / name, metadata={"clip.vision.image_mean": [mean] * 3})
    pipe = mmspec.load(str(tmp_path / "a"), None, mmproj=tmp_path / "b" / "mmproj-llava.gguf")
    assert list(pipe.hf_processor.image_processor.image_mean) == [0.25] * 3


def test_what_files_state_of_the_language_model(tmp_path):
    metadata = {"attention.value_length": 32, "attention.key_length": 32, "rope.freq_base_swa": 5e3}
    metadata = {f"gemma3.{name}": value for name, value in metadata.items()}
    text = opened("gemma3", tmp_path, metadata=metadata).config().text_config
    assert (text.query_pre_attn_scalar, text.head_dim) == (32, 32)
    assert text.rope_parameters["sliding_attention"]["rope_theta"] == 5e3


def test_what_files_state_of_images(tmp_path):
    """LLaVA's features of several layers, InternVL's numbers of tiles, Pixtral's base, MiniCPM-V's factor."""
    source = opened("llava", tmp_path, metadata={"clip.vision.feature_layer": [1, 2]})
    assert source.config().vision_feature_layer == [1, 2]
    metadata = {"clip.vision.preproc_min_tiles": 2, "clip.vision.preproc_max_tiles": 4}
    images = opened("internvl", tmp_path, metadata=metadata).processor(VisionProcessor).plain.image_processor
    assert (images.min_patches, images.max_patches) == (2, 4)
    vision = opened("pixtral", tmp_path, metadata={"clip.rope.freq_base": 500.0}).config().vision_config
    assert vision.rope_parameters["rope_theta"] == 500
    with pytest.raises(mmspec.UserError, match=r"expected clip\.vision\.projector\.scale_factor = 4, got 2"):
        opened("minicpmv4_6", tmp_path, metadata={"clip.vision.projector.scale_factor": 2}).config()


@pytest.mark.parametrize(("family", "expected"), [("gemma3", 4), ("idefics3", 16), ("internvl", 16)])
def test_tokens_of_an_image_without_the_files_scale(family, expected, tmp_path):
    """Of 8 by 8 patches; the published models of a family merge as many of them."""
    metadata = {f"clip.vision.{name}": None for name in ("projector.scale_factor", "preproc_image_size")}
    metadata |= {"clip.vision.image_size": 64}
    source = opened(family, tmp_path, metadata=metadata)
    assert source._projector.length() == expected
    if family == "idefics3":
        images = source.processor(VisionProcessor).plain.image_processor
        assert (images.size["longest_edge"], images.max_image_size["longest_edge"]) == (256, 64)


def test_the_large_internvit_has_norms_of_its_own(tmp_path, monkeypatch):
    """Of queries and keys, by the tensors; RMS norms, by its size, which llama.cpp knows it by."""
    made = projectors.config("internvl")
    made.vision_config.use_qk_norm = True
    torch.manual_seed(0)
    original = AutoModelForImageTextToText.from_config(made).eval()
    for name, value in original.state_dict().items():
        if re.search("[qk]_norm", name):
            value.normal_(1, 0.3)
    plain = projectors.model
    monkeypatch.setattr(projectors, "model", lambda family: original if family == "internvl" else plain(family))
    source = opened("internvl", tmp_path)
    built, weights = model_of(source).state_dict(), original.state_dict()
    norms = [name for name in weights if re.search("[qk]_norm", name)]
    assert norms
    assert all(torch.equal(built[name], weights[name]) for name in norms)
    large = {"clip.vision.embedding_length": 3200, "clip.vision.block_count": 45}
    assert source._projector.row.vision(source._projector)["norm_type"] == "layer_norm"
    source._projector._file.metadata.update(large)
    assert source._projector.row.vision(source._projector)["norm_type"] == "rms_norm"


def _processor(language, projector):
    return VisionSource(language, projector).processor(VisionProcessor).plain


def test_projectors_go_with_a_language_models_file(tmp_path):
    language, projector = projectors.save("llava", tmp_path)
    with pytest.raises(mmspec.UserError, match="mmproj goes with the GGUF file of a language model: got the model"):
        mmspec.load("tiny-llava", mmproj=projector)
    with pytest.raises(mmspec.UserError, match=r"expected the mmproj file of a projector .* found a file of llama"):
        mmspec.load(str(language), mmproj=language)
    (tmp_path / "another-mmproj.gguf").touch()
    with pytest.raises(mmspec.UserError, match="expected one mmproj file, found 2; name one of them"):
        mmspec.load(str(tmp_path))
    with pytest.raises(mmspec.UserError, match="stays on its device and in its dtype: got mmproj="):
        mmspec.load(projectors.model("llava"), mmproj=projector, processor=_processor(language, projector))


@needs_kernels
@pytest.mark.parametrize("quantise", ["", "Q8_0"])
def test_drafters_for_the_original_draft_for_its_files(quantise, tmp_path):
    """With the same acceptance where the weights are the same, and plain decoding's tokens where they are quantised."""
    original = projectors.model("llava")
    target = VisionTarget(original)
    drafter = MSD(network_for(original), top_k=3, depth=3)
    drafter.attach(target)
    (tmp_path / "files").mkdir()
    drafter.save(tmp_path / "drafter", target)
    language, projector = projectors.save("llava", tmp_path / "files", quantise=quantise)
    options: dict[str, Any] = {"mmproj": projector, "dtype": "auto" if quantise else "float32"}
    ask = {"images": [PICTURE], "max_new_tokens": 16, "temperature": 0.0, "num_draft_tokens": 8}
    found = mmspec.load(str(language), str(tmp_path / "drafter"), **options).generate("What is it?", **ask)
    plain = mmspec.load(str(language), None, **options).generate("What is it?", **ask)
    assert found.token_ids == plain.token_ids
    if not quantise:
        processor = _processor(language, projector)
        same = mmspec.load(original, str(tmp_path / "drafter"), processor=processor).generate("What is it?", **ask)
        assert found.token_ids == same.token_ids
        assert found.stats.mean_acceptance_length == same.stats.mean_acceptance_length
