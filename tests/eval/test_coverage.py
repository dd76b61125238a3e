"""Small models of any class: cuts of configurations, and outcomes of each kind."""

import json
import os

import pytest
import transformers
from click.testing import CliRunner
from transformers import CONFIG_MAPPING, FalconConfig, JambaConfig, LlamaConfig, LlavaNextConfig, Qwen2VLConfig

from mmspec.eval import coverage
from mmspec.eval.coverage import EQUAL, TEXT, VISION, Model, check, check_apart, main, models
from mmspec.eval.harness.small_configs import VOCAB, published_config, small_config
from mmspec.ops import kernels

_TEXTS, _IMAGES = ("prompt", "long prompt", "batch"), ("image", "batch with images")


def test_a_cut_keeps_the_fields_and_every_kind_of_layer():
    for config_class in (LlamaConfig, JambaConfig, Qwen2VLConfig):
        assert vars(small_config(config_class)).keys() == vars(config_class()).keys()
    assert set(small_config(JambaConfig).layers_block_type) == set(JambaConfig().layers_block_type)
    assert small_config(LlamaConfig).num_hidden_layers == 4
    part, default = small_config(LlavaNextConfig).vision_config, LlavaNextConfig().vision_config
    assert (part.image_size, part.patch_size) == (default.image_size, default.patch_size)  # as the whole sets them
    assert part.hidden_size < default.hidden_size
    with pytest.raises(TypeError, match="LlamaConfig has no layers"):
        small_config(LlamaConfig, layers=1)


@pytest.fixture
def published(tmp_path):
    """The file of a configuration with fields of published configurations."""
    content = small_config(LlamaConfig).to_dict() | {"hidden_size": 96, "num_hidden_layers": 30, "vocab_size": 50000}
    content |= {"quantization_config": {"quant_method": "fp8"}, "eos_token_id": [49999, 7], "bos_token_id": 49998}
    file = tmp_path / "org--model.json"
    file.write_text(json.dumps(content | {"time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in file.read_text()
    return file


def test_a_published_configuration_keeps_its_widths(published):
    config = published_config(published)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (96, 4, VOCAB)
    assert not hasattr(config, "quantization_config")
    assert 0 <= config.bos_token_id < VOCAB
    assert all(0 <= token < VOCAB for token in config.eos_token_id)
    kinds = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]}
    published.write_text(json.dumps({**kinds, "hybrid_override_pattern": "M-M*-M-M-M-M*-M-"}))
    config = published_config(published)  # whose layers are listed, but not counted
    assert config.layers_block_type == ["linear_attention", "mlp", "linear_attention", "full_attention"]
    assert config.num_hidden_layers == 4


@pytest.mark.filterwarnings("ignore")
def test_each_prompt_of_a_batch_has_the_tokens_of_one_image():
    network = Model(VISION, "gemma3").build()
    one, two = (coverage.image_inputs(network, lengths)["input_ids"] for lengths in ([4], [4, 7]))
    count = int((one == network.config.image_token_id).sum())
    assert count > 0
    assert (two == network.config.image_token_id).sum(1).tolist() == [count, count]


def test_every_class_is_listed_once():
    found = models()
    assert len(found) == len(set(found)) > 150
    names = {kind: {model.name for model in found if model.kind == kind} for kind in (TEXT, VISION)}
    assert {"llama", "gpt_neox", "mamba"} <= names[TEXT]
    assert {"llava", "gemma3"} <= names[VISION]
    assert not {"bert", "bart", "gemma3", "t5gemma2"} & names[TEXT]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name", "outcome", "inputs"),
    [
        (TEXT, "deepseek_v3", EQUAL, _TEXTS),  # keys and values of different widths
        (TEXT, "deepseek_v32", EQUAL, _TEXTS),  # sparse attention
        (TEXT, "bloom", EQUAL, _TEXTS),  # ALiBi
        (TEXT, "modernbert-decoder", EQUAL, _TEXTS),  # a module before the output layer
        (TEXT, "gemma4_text", EQUAL, _TEXTS),  # layers of different shapes, and layers that share keys and values
        (TEXT, "llama4_text", EQUAL, _TEXTS),  # chunked attention
        (TEXT, "doge", EQUAL, _TEXTS),  # masks of its own
        (TEXT, "gpt_neo", EQUAL, _TEXTS),  # windows of its own
        (VISION, "cohere2_vision", EQUAL, _TEXTS),  # logits that are not scaled as the text model's
        (VISION, "gemma3", EQUAL, _TEXTS + _IMAGES),  # a prompt whose images are attended both ways
        (VISION, "janus", EQUAL, _TEXTS + _IMAGES),  # a generate of its own
        (VISION, "qwen2_vl", EQUAL, _TEXTS + _IMAGES),
        (VISION, "minicpm_ocr", EQUAL, _TEXTS),  # logits of all positions only
        (VISION, "nemotron_h_omni", EQUAL, _TEXTS),  # an output layer inside the language model
        (TEXT, "bert", coverage.REFUSED, ("prompt",)),
        (TEXT, "rwkv", coverage.REFUSED, ("prompt",)),
        (VISION, "blip-2", coverage.NOT_GENERATED, ()),
        (TEXT, "dbrx", coverage.NOT_BUILT, ()),
    ],
)
def test_outcomes(kind, name, outcome, inputs):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    found = check(Model(kind, name))
    compared = found.inputs[:3] if name == "nemotron_h_omni" else found.inputs  # whose images require torchvision
    assert (found.outcome, compared) == (outcome, inputs)
    assert len(found.reason.splitlines()) == (outcome != EQUAL)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "doge", "gemma4_text", "llama4_text"])
def test_static_shapes(name, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    assert check(Model(TEXT, name)).outcome == EQUAL


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_falcon_with_alibi(attention, monkeypatch):
    changed = small_config(FalconConfig, alibi=True)
    changed._attn_implementation = attention
    monkeypatch.setattr(Model, "config", lambda model: changed)
    outcome = check(Model(TEXT, "falcon"))
    assert (outcome.outcome, outcome.inputs) == (EQUAL, _TEXTS)


def test_a_published_configuration_is_decoded_if_memory_holds_it(published, monkeypatch):
    assert check(Model(coverage.PUBLISHED, str(published))).outcome == EQUAL
    monkeypatch.setattr(coverage, "_MOST_BYTES", 1 << 10)
    assert check(Model(coverage.PUBLISHED, str(published))).reason == "ValueError: too large: 0.0 GiB"


def test_differences_and_crashes_are_faulty(monkeypatch):
    decode = coverage.mmspec.generate

    def other_token(*args, **options):
        tokens = decode(*args, **options)
        if len(tokens) > 1:  # the first place is in a later row
            tokens[0, -2] += 1
            tokens[1, -5] += 1
        return tokens

    monkeypatch.setattr(coverage.mmspec, "generate", other_token)
    found = check(Model(TEXT, "llama"))
    assert found.outcome == coverage.FAULTY
    assert found.reason.startswith(
        "batch: other tokens from new token 19 on (row 1); without a cache, generate agrees with"
    )

    def crash(*args, **options):
        raise IndexError("out of range\nof 3")

    monkeypatch.setattr(coverage.mmspec, "generate", crash)
    found = check(Model(TEXT, "llama"))
    assert found.outcome == coverage.FAULTY
    assert found.reason.startswith("IndexError: out of range of 3 (test_coverage.py:")


class _Abrupt(Model):
    def build(self):
        os._exit(3)


@pytest.mark.parametrize(
    ("model", "limit", "reason"),
    [(_Abrupt(TEXT, "llama"), 60, "the process ended with status 3"), (Model(TEXT, "llama"), 0, "no answer in 0 s")],
)
def test_a_process_that_ends_or_takes_too_long_is_an_outcome(model, limit, reason):
    assert check_apart(model, limit) == coverage.Outcome(coverage.NOT_BUILT, reason)


def test_a_sweep_writes_its_page_and_resumes(tmp_path, monkeypatch):
    found = [Model(TEXT, "llama"), Model(VISION, "blip")]
    monkeypatch.setattr("mmspec.eval.coverage.models", lambda configs: found)
    paths = [tmp_path / name for name in ("log.jsonl", "models.md", "out.json")]
    options = ["--log", paths[0], "--docs", paths[1], "--out", paths[2]]
    assert CliRunner().invoke(main, [*map(str, options), "--limit", "0"]).exit_code == 0
    llama, blip = paths[0].read_text().splitlines()
    log = f"{llama}\n{blip.replace(transformers.__version__, '5.0.0')}\n"
    paths[0].write_text(log)
    monkeypatch.setattr("mmspec.eval.coverage.check_apart", lambda *_: pytest.fail("these are done"))
    assert CliRunner().invoke(main, [*map(str, options)]).exit_code == 0
    assert paths[0].read_text() == log
    row = dict.fromkeys(coverage.OUTCOMES, 0) | {coverage.NOT_BUILT: 1}
    assert json.loads(paths[2].read_text())["counts"] == {TEXT: row, VISION: row}
    page = paths[1].read_text()
    assert "| llama |  | not built | no answer in 0 s |" in page
    assert "| blip |  | not built | no answer in 0 s; with transformers 5.0.0 |" in page


@pytest.mark.slow
def test_every_class_is_equal_or_refused():
    outcomes = {model: check_apart(model, 300) for model in models()}
    assert not {model.label: found.reason for model, found in outcomes.items() if found.outcome == coverage.FAULTY}
    assert sum(found.outcome == EQUAL for found in outcomes.values()) > len(outcomes) / 3
