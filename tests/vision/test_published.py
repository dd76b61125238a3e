"""Published drafters: each layout as its authors save it, against layers of transformers that hold the same weights."""

import json
import pickle

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import mmspec
from mmspec import UserError, plugins
from mmspec.core.plan import StepPlan
from mmspec.drafters import layouts as published
from mmspec.drafters.checkpoint import load_network
from mmspec.drafters.eagle import Eagle, EagleNetwork
from mmspec.drafters.eagle3 import Eagle3
from mmspec.drafters.registry import make_drafter
from mmspec.vision.drafters.msd import MSD, MSDNetwork
from tests import dflash, eagle3, gemma4
from tests.draft_checks import whole_pass
from tests.published import LLAMA3, LLAVA, QWEN, QWEN2, TINY, VICUNA, WIDE, layer_of, tensors_of, vispec_tensors, write
from tests.targets import prefilled, prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import VISION_CONFIGS
from tests.tiny.models import generate, text_inputs, vision_inputs

LAYOUTS = {"msd-7b": LLAVA, "msd-13b": WIDE, "msd-qwen": QWEN, "vicuna": VICUNA, "llama3": LLAMA3, "qwen2": QWEN2}

# The published sizes, from the configurations of the three MSD drafters.
FULL_7B = {**LLAVA, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
FULL_7B |= {"num_key_value_heads": 32, "vocab_size": 32000}
FULL_13B = {**FULL_7B, "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40}
FULL_13B |= {"num_key_value_heads": 40}
FULL_QWEN = {**QWEN, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
FULL_QWEN |= {"num_key_value_heads": 4, "vocab_size": 152064}


def read_msd(folder, drafter=MSD):
    return published.read(folder, drafter)


def test_a_folder_of_something_else_is_not_recognised(tmp_path):
    assert published.recognise(tmp_path / "nowhere") is None
    (tmp_path / "config.json").write_text("[1]")
    assert published.recognise(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(LLAVA))
    assert published.recognise(tmp_path) is None
    others = {"model.embed_tokens.weight": torch.zeros(2, 2)}
    assert published.recognise(write(tmp_path / "others", LLAVA, others)) is None
    assert published.recognise(write(tmp_path / "own", {**LLAVA, "mmspec_drafter": "msd"})) is None


def test_a_head_of_one_tensor_less_is_still_recognised(tmp_path):
    """So that what is missing can be named."""
    tensors = tensors_of(LLAVA)
    for name in tensors:
        rest = {other: value for other, value in tensors.items() if other != name}
        assert published.recognise(write(tmp_path, LLAVA, rest)) == "msd"


@pytest.mark.parametrize("kind", ["safetensors", "bin", "old bin", "shards", "bin shards"])
def test_files_of_every_kind_say_the_same(kind, tmp_path):
    tensors = tensors_of(QWEN, dtype=torch.float16)
    expected = MSD.convert(QWEN, tensors, "here")
    network, ours, _, settings = read_msd(write(tmp_path, QWEN, tensors, kind))
    assert (network, settings) == (expected[0], expected[3])
    assert ours.keys() == expected[1].keys()
    for name, value in ours.items():
        assert value.dtype == torch.float16
        assert torch.equal(value, expected[1][name]), name


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_the_network_computes_what_the_published_layer_does(name, tmp_path):
    """Text, a visual stretch and text again, on the layer of transformers with the published tensors."""
    config = LAYOUTS[name]
    tensors = tensors_of(config)
    folder = write(tmp_path, config, tensors)
    is_msd = name.startswith("msd")
    kind, drafter = (MSDNetwork, MSD) if is_msd else (EagleNetwork, Eagle)
    network = load_network(kind, *read_msd(folder, drafter)[:2], tmp_path)
    made, layer = layer_of(config)
    prefix = "layers.0."
    layer.load_state_dict({key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)})

    g = torch.Generator().manual_seed(1)
    length, width = 9, config["hidden_size"]
    embeds, hidden = (torch.randn(2, length, width, generator=g) for _ in range(2))
    visual = torch.zeros(2, length, dtype=torch.bool)
    visual[:, 2:6] = True
    inputs = F.linear(torch.cat([embeds, hidden], dim=-1), tensors["fc.weight"], tensors.get("fc.bias"))
    if is_msd:
        inputs[:, 2:6] = embeds[:, 2:6]
    turn = LlamaRotaryEmbedding(made)(inputs, torch.arange(length)[None])
    causal = torch.full((length, length), -torch.inf).triu(1)[None, None]
    expected = layer(inputs, attention_mask=causal, position_embeddings=turn)

    combined = network.combine(embeds, hidden, *([visual] if is_msd else []))
    result = torch.stack([whole_pass(network, row, torch.arange(length)) for row in combined])
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_rotary_and_norm_settings_come_from_the_configuration():
    tensors = tensors_of(LLAVA)

    def read(**changes):
        network = MSD.convert({**LLAVA, **changes}, tensors, "here")[0]
        return network.rope_theta, network.norm_eps

    assert read() == (10000.0, 1e-5)
    assert read(rope_theta=5e5, rms_norm_eps=None) == (5e5, 1e-6)
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 7}) == (7.0, 1e-5)
    qwen = {name: value for name, value in QWEN.items() if name != "rope_theta"}
    assert MSD.convert(qwen, tensors_of(QWEN), "here")[0].rope_theta == 1e6


def test_an_eagle_head_may_leave_out_what_the_target_has():
    tensors = tensors_of(VICUNA)
    del tensors["embed_tokens.weight"]
    assert Eagle.convert(VICUNA, tensors, "here")[3]["vocab_size"] == 96
    with pytest.raises(UserError, match=r"vocab_size must be a whole number: got None"):
        Eagle.convert({**VICUNA, "vocab_size": None}, tensors, "here")
    rows = Eagle.convert({**VICUNA, "vocab_size": None}, tensors_of(VICUNA), "here")[3]
    assert rows["vocab_size"] == 96


@pytest.mark.parametrize(
    ("config", "parameters"), [(FULL_7B, 235_937_792), (FULL_13B, 369_633_280), (FULL_QWEN, 258_751_488)]
)
def test_drafters_of_full_size_have_the_expected_shapes(config, parameters):
    tensors = tensors_of(config, device="meta")
    network, ours, _, settings = MSD.convert(config, tensors, "here")
    with torch.device("meta"):
        expected = {name: value.shape for name, value in MSDNetwork(network).state_dict().items()}
    assert {name: value.shape for name, value in ours.items()} == expected
    assert network.head_dim == 128
    assert settings["vocab_size"] == config["vocab_size"]
    assert sum(value.numel() for value in ours.values()) == parameters


def _small_eagle3(config, layout):
    small = eagle3.cut(config, [0, 1, 2])
    return small, eagle3.head_tensors(small, layout)


def _small_blocks(config):
    small, tensors = dflash.cut(config), dflash.published(dflash.reference(), "z-lab")[1]
    small["layer_types"] = config["layer_types"][-2:]
    if "selector_rank" in config["dflash_config"]:
        small["dflash_config"] |= {"selector_rank": 6, "selector_top_k": 7}
        tensors |= {name: 0.2 * tensor for name, tensor in dflash.selector_tensors().items()}
    return small, tensors


def _small_head(config, tensors):
    sizes = {**TINY, "num_key_value_heads": 2, "rope_scaling": config.get("rope_scaling")}
    if sizes["rope_scaling"]:
        sizes["rope_scaling"] = {**sizes["rope_scaling"], "mrope_section": [2, 2, 2]}
    small = {name: sizes.get(name, value) for name, value in config.items()}
    if "num_key_value_heads" not in small or "qkv_bias" in small or config["model_type"] == "llava_next":
        small["num_key_value_heads"] = 4
    return small, tensors(small)


PUBLISHED = [
    ("eagle3 AngelSlim/Qwen3-8B_eagle3", "qwen3", lambda c: _small_eagle3(c, "A")),
    ("eagle3 AngelSlim/Qwen3-VL-4B-Instruct_eagle3", "qwen3_vl", lambda c: _small_eagle3(c, "A")),
    ("eagle3 SpecForge/Qwen2.5-VL-7B-eagle3", "qwen2_5_vl", lambda c: _small_eagle3(c, "A")),
    ("eagle3 SpecForge/gpt-oss-20b-eagle3", "llama", lambda c: _small_eagle3(c, "C")),
    ("eagle3 SpecForge/DeepSeek-V3-671B-eagle3", "llama", lambda c: _small_eagle3(c, "A")),
    ("eagle3 yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "llama", lambda c: _small_eagle3(c, "A")),
    ("eagle3 RedHatAI/gemma-4-31B-it-speculator.eagle3", "gemma4", lambda c: _small_eagle3(c, "B")),
    ("dflash z-lab/Qwen3-8B-DFlash-b16", "qwen3", _small_blocks),
    ("dflash z-lab/Qwen3.5-4B-DFlash", "qwen3_5", _small_blocks),
    ("dflash z-lab/Qwen3.8-27B-DFlash2", "qwen3_5", _small_blocks),
    ("msd lucylyn/MSD-LLaVA1.5-7B", "llava", lambda c: _small_head(c, tensors_of)),
    ("msd lucylyn/MSD-Qwen2VL-7B-Instruct", "qwen2_vl", lambda c: _small_head(c, tensors_of)),
    ("vispec JLKang/ViSpec-llava-v1.6-vicuna-7b-hf", "llava_next", lambda c: _small_head(c, vispec_tensors)),
    ("vispec JLKang/ViSpec-Qwen2.5-VL-3B-Instruct", "qwen2_5_vl", lambda c: _small_head(c, vispec_tensors)),
    ("eagle yuhuili/EAGLE-llama2-chat-7B", "llama", lambda c: _small_head(c, tensors_of)),
    ("eagle yuhuili/EAGLE-Vicuna-7B-v1.3", "llama", lambda c: _small_head(c, tensors_of)),
]


@pytest.mark.parametrize(("name", "target", "small"), PUBLISHED)
def test_published_configurations_are_read_and_draft_beside_their_targets(name, target, small, tmp_path):
    """With all their fields; DSpark's: ``test_dflash``."""
    model = gemma4.target_model() if target == "gemma4" else shared_model(target)
    inputs = vision_inputs(target, 2) if target in VISION_CONFIGS else text_inputs(2)
    drafter = make_drafter(str(write(tmp_path, *small(dflash.CONFIGS[name]))))
    assert drafter.name == name.split()[0]
    options = dict(do_sample=False, eos_token_id=None, max_new_tokens=9)
    found = mmspec.generate(model, drafter=drafter, return_dict_in_generate=True, nodes=9, **inputs, **options)
    assert torch.equal(found.sequences, generate(model, 2, **inputs, **options))
    assert found.stats[0].num_draft_tokens > 0


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({**VICUNA, "architectures": ["DominoDraftModel"], "dflash_config": {}}, "a Domino drafter"),
        ({**VICUNA, "architectures": ["LiLiCorrDraftModel"]}, "a LiLiCorr drafter"),
        ({"speculators_model_type": "domino", "transformer_layer_config": VICUNA}, "a Domino drafter"),
    ],
)
def test_drafters_of_other_methods_are_refused_by_name(config, name, tmp_path):
    tensors = {"midlayer.hidden_norm.weight": torch.ones(48), "fc.weight": torch.zeros(48, 144)}
    folder = write(tmp_path, config, tensors, "bin")
    for drafter in (MSD, Eagle3):
        with pytest.raises(UserError, match=rf"received {name}.*: use an MSD or EAGLE checkpoint"):
            read_msd(folder, drafter)
    with pytest.raises(UserError, match=name):
        make_drafter(str(folder))


def test_damaged_files_are_named(tmp_path):
    folder = write(tmp_path / "a", LLAVA)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"model\.safetensors: expected a safetensors file: "):
        published.recognise(folder)
    with pytest.raises(UserError, match=r"model\.safetensors: expected a safetensors file: "):
        read_msd(folder)

    file = write(tmp_path / "b", LLAVA, kind="bin") / "pytorch_model.bin"
    whole = file.read_bytes()
    for content in (whole[:5000], b"", b"no pickle"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"pytorch_model\.bin: expected tensors and nothing else, received \w+$"):
            read_msd(tmp_path / "b")
    for content, received in (([torch.zeros(1)], "list"), ({"fc.weight": 1}, "'fc.weight' of type int")):
        torch.save(content, file)
        with pytest.raises(UserError, match=f"expected named tensors, received {received}"):
            read_msd(tmp_path / "b")

    (tmp_path / "b" / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="tensors of an MSD or EAGLE-1/2 drafter, received no weights"):
        read_msd(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: expected a JSON object"):
        read_msd(tmp_path / "b")


class Code:
    """Runs when it is unpickled."""

    ran = False

    def __reduce__(self):
        return setattr, (Code, "ran", True)


def test_pickled_code_is_never_run(tmp_path):
    folder = write(tmp_path, LLAVA, tensors_of(LLAVA) | {"fc.bias": Code()}, "bin")
    plain = pickle.dumps({"fc.bias": Code()})
    for content in (None, plain):
        if content:
            (folder / "pytorch_model.bin").write_bytes(content)
        for read in (published.recognise, read_msd):
            with pytest.raises(UserError, match=r"pytorch_model\.bin: expected tensors and nothing else"):
                read(folder)
    assert not Code.ran
    pickle.loads(plain)
    assert Code.ran, "the test must be able to fail"


@pytest.mark.parametrize("shard", ["../model-1.safetensors", "/etc/model-1.safetensors", "model-9.safetensors"])
def test_an_index_leads_nowhere_else(shard, tmp_path):
    folder = write(tmp_path / "here", LLAVA, kind="shards")
    index = folder / "model.safetensors.index.json"
    (tmp_path / "model-1.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": {"fc.weight": shard}}))
    with pytest.raises(UserError, match=rf"index\.json: expected files in the same folder, received '{shard}'"):
        read_msd(folder)
    for content in ({}, {"weight_map": {"fc.weight": 3}}):
        index.write_text(json.dumps(content))
        with pytest.raises(UserError, match="expected a weight_map"):
            read_msd(folder)


@pytest.mark.parametrize("config", [LLAVA, QWEN, VICUNA])
def test_a_name_before_the_folder_decides_what_it_is(config, tmp_path):
    folder = write(tmp_path, config, kind="bin")
    for prefix, decoupled in {"": config is not VICUNA, "msd:": True, "eagle:": False}.items():
        assert isinstance(make_drafter(f"{prefix}{folder}"), MSD) is decoupled


@torch.no_grad()
def test_tokens_that_the_checkpoint_lacks_are_never_drafted(tmp_path):
    model = shared_model("llava")
    target = plugins.target_class(model.config)(model)
    few = {**LLAVA, "vocab_size": 60}
    drafter = make_drafter(str(write(tmp_path, few)))
    drafter.attach(target)
    inputs = vision_inputs("llava")
    prompt = prompt_of(inputs)
    output = prefilled(target, prompt, 16)
    drafter.begin(prompt, output, [[*inputs["input_ids"][0].tolist(), 5]])
    assert bool((target.head(drafter.network.begin(drafter._output.data)[0]).topk(10).indices >= 60).any())
    tree = drafter.propose(torch.tensor([5]), StepPlan(30, 3))
    assert tree.nodes > 20
    assert int(tree.tokens.max()) < 60


def test_a_drafter_of_another_target_is_refused(tmp_path):
    target = plugins.target_class(shared_model("llava").config)(shared_model("llava"))
    with pytest.raises(UserError, match=r"\(hidden_size 60\): got LlavaForConditionalGeneration with hidden_size 48"):
        make_drafter(str(write(tmp_path / "other", WIDE))).attach(target)
    drafter = make_drafter(str(write(tmp_path / "own", {**LLAVA, "vocab_size": 101})))
    drafter.attach(target)
    assert drafter.draft_ids is None
