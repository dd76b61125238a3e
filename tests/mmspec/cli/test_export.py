"""Drafters written for other engines: tensors and trees as before, names and fields as published."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from mmspec import plugins
from mmspec.cli import main
from mmspec.core.budget import Budget
from mmspec.drafters.registry import make_drafter
from tests import dflash
from tests.eagle3 import DRAFT, EAGLE4, GEMMA4, LLAMA3, PEAGLE, PEAGLE_FLAT, QWEN3_VL, cut, head_tensors, write_head
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.models import text_inputs

NEW = {"fc_norm": True, "norm_output": True}  # EAGLE-3.1, as `mmspec train eagle3` makes them
PUBLISHED_METHOD = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
CASES = {
    "3": (cut(LLAMA3), {}),
    "3.1": (cut(LLAMA3, [2, 0, 1], **NEW), {}),
    "normed-residual": (cut(GEMMA4, [0, 1, 2]), {"layout": "B"}),
    "two-layers": (cut(GEMMA4, [0, 1], norm_before_fc=True, num_hidden_layers=2), {"layout": "B"}),
    "whole-vocabulary": (cut(LLAMA3, draft_vocab_size=101), {"layout": "C"}),
    "embedding": (cut(LLAMA3), {"embedding": True}),
    "parallel": (cut(PEAGLE, [0, 1, 2]), {"layout": "B", "embedding": True}),
    "axes": (cut(QWEN3_VL, [0, 1, 2], target_model_type="llama"), {}),
}


def saved_head(folder, config, name="llama", **options):
    """A checkpoint of ours for a tiny target, whose configuration lies beside it."""
    model = shared_model(name)
    target = plugins.target_class(model.config)(model)
    drafter = make_drafter(str(write_head(folder / "given", config, head_tensors(config, **options))))
    drafter.save(folder / "saved", target)
    model.config.save_pretrained(folder / "target")
    written = json.loads((folder / "target" / "config.json").read_text())
    (folder / "target" / "config.json").write_text(json.dumps({**written, "architectures": [type(model).__name__]}))
    return [
        "export",
        "--model",
        str(folder / "target"),
        "--drafter",
        str(folder / "saved"),
        "--out",
        str(folder / "out"),
    ]


def tree_of(folder):
    """What a head drafts for a prompt."""
    model = shared_model("llama")
    target, drafter = plugins.target_class(model.config)(model), make_drafter(str(folder))
    drafter.top_k = 4
    drafter.attach(target)
    prompt = prompt_of(text_inputs())
    target.features = drafter.features
    drafter.begin(prompt, target.prefill(prompt, 16), [[*prompt.input_ids[0].tolist(), 7]])
    return drafter.propose(torch.tensor([7]), Budget(24, 5))


@pytest.mark.parametrize("name", CASES)
def test_a_head_in_speculators_format_is_the_same_head(name, tmp_path):
    config, options = CASES[name]
    assert main(saved_head(tmp_path, config, **options)) == 0
    given, out = load_file(tmp_path / "given" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == {key.replace("midlayer.", "layers.0.") for key in given}
    for key, tensor in given.items():
        assert torch.equal(tensor, out[key.replace("midlayer.", "layers.0.")])
    before, after = tree_of(tmp_path / "saved"), tree_of(tmp_path / "out")
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.parents, after.parents)
    assert torch.equal(before.log_probs, after.log_probs)
    assert before.nodes == 25


def test_fields_are_those_of_a_published_speculator(tmp_path):
    args = saved_head(tmp_path, cut(GEMMA4, [0, 1, 2]), layout="B")
    assert main(args) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    published = {**GEMMA4, "dtype": "bfloat16"}
    assert written.keys() == published.keys() | NEW.keys()  # the switches of 3.1 are younger than this checkpoint
    assert not written["fc_norm"]
    assert not written["norm_output"]
    assert written["dtype"] == "float32"
    same = published.keys() - {"dtype", "transformer_layer_config", "speculators_config", "draft_vocab_size"}
    assert {key: written[key] for key in same} == {
        **{key: published[key] for key in same},
        **{"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    layer, theirs = written["transformer_layer_config"], cut(GEMMA4)["transformer_layer_config"]
    assert layer == {**theirs, "max_position_embeddings": shared_model("llama").config.max_position_embeddings}
    assert written["draft_vocab_size"] == DRAFT
    made = written["speculators_config"]
    assert made.keys() == published["speculators_config"].keys()
    assert (made["algorithm"], made["default_proposal_method"]) == ("eagle3", "greedy")
    assert made["proposal_methods"] == [PUBLISHED_METHOD]
    assert made["verifier"] == {"architectures": ["LlamaForCausalLM"], "name_or_path": str(tmp_path / "target")}
    assert main([*args, "--tokens", "5"]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5


def test_layers_that_the_head_leaves_to_the_target_are_named(tmp_path):
    assert main(saved_head(tmp_path, cut(LLAMA3))) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


@pytest.mark.parametrize("name", ["3", "whole-vocabulary", "embedding", "axes"])
def test_a_head_in_eagles_format_is_the_same_head(name, tmp_path):
    config, options = CASES[name]
    assert main([*saved_head(tmp_path, config, **options), "--format", "eagle"]) == 0
    given, out = load_file(tmp_path / "given" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == {key.replace("layers.0.", "midlayer.") for key in given}
    assert torch.equal(tree_of(tmp_path / "saved").log_probs, tree_of(tmp_path / "out").log_probs)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 1]
    assert written["target_model_type"] == "llama"
    axes = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    assert written["rope_scaling"] == (axes if name == "axes" else None)
    assert written["rope_theta"] == (5e6 if name == "axes" else 1e4)


@pytest.mark.parametrize(
    ("config", "options", "more", "message"),
    [
        (
            cut(LLAMA3, **NEW),
            {},
            ["--format", "eagle"],
            "format eagle requires one layer without further norms: the head has fc_norm, norm_output",
        ),
        (cut(LLAMA3, num_hidden_layers=2), {"layout": "C"}, ["--format", "eagle"], "the head has 2 layers"),
        (cut(PEAGLE_FLAT, norm_before_residual=False), {}, ["--format", "eagle"], "the head has mask_hidden"),
        (cut(EAGLE4, draft_vocab_size=101), {"layout": "C"}, [], "a head of EAGLE-3: the head has a sliding window"),
        (
            cut(EAGLE4, draft_vocab_size=101, sliding_window=None),
            {"layout": "C"},
            ["--format", "eagle"],
            "a head of EAGLE-3: the head has a low-rank output layer",
        ),
        (cut(LLAMA3), {}, ["--model", "tiny-llava"], "trained for .* with hidden_size 48: got .* with 192"),
        (
            cut(LLAMA3),
            {},
            ["--model", "nowhere/at/all"],
            "cannot load model 'nowhere/at/all': expected an embedded model",
        ),
    ],
)
def test_what_cannot_be_written_is_one_line(config, options, more, message, tmp_path, capfd):
    args = saved_head(tmp_path, config, **options)
    capfd.readouterr()
    assert main([*args, *more]) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_heads_that_no_format_describes_are_one_line(tmp_path, capfd):
    args = saved_head(tmp_path, cut(LLAMA3))
    file = tmp_path / "saved" / "config.json"
    config = json.loads(file.read_text())
    for changes, message in (
        ({"reads": [0, 1, 0], "outputs": True}, "names layers whose inputs are read: the head reads outputs [0, 1, 0]"),
        ({"reads": [0, 1, 7]}, "the drafter reads inputs of layers 0, 1, 7: the target has 2 layers"),
    ):
        file.write_text(json.dumps({**config, "network": config["network"] | changes}))
        capfd.readouterr()
        assert main(args) == 2
        assert message in capfd.readouterr().err
    other = config["verifier"] | {"architectures": ["Qwen3ForCausalLM"]}
    file.write_text(json.dumps({**config, "verifier": other}))
    assert main(args) == 2
    assert "for a target of class Qwen3ForCausalLM: got" in capfd.readouterr().err
    embedded = str(plugins.find("models", "tiny-llava")()) + "/drafter"
    assert main([*args, "--drafter", embedded]) == 2
    assert "is for EAGLE-3 and DFlash, the drafter is of kind flash" in capfd.readouterr().err


# ---------------------------------------------------------------------- DFlash


def saved_blocks(folder, layout="z-lab", **changes):
    """As ``saved_head``, of a DFlash drafter."""
    drafter = make_drafter(
        str(dflash.write(folder / "given", *dflash.published(dflash.reference(), layout, **changes)))
    )
    model = shared_model("llama")
    drafter.save(folder / "saved", plugins.target_class(model.config)(model))
    model.config.save_pretrained(folder / "target")
    named = {"--model": "target", "--drafter": "saved", "--out": "out"}
    return ["export", "--format", "z-lab", *(part for name, at in named.items() for part in (name, str(folder / at)))]


@pytest.mark.parametrize("layout", ["z-lab", "transformers"])
def test_blocks_in_z_labs_format_are_the_same(layout, tmp_path):
    assert main(saved_blocks(tmp_path, layout)) == 0
    config, tensors = dflash.published(dflash.reference(), "z-lab")
    out, written = (
        load_file(tmp_path / "out" / "model.safetensors"),
        json.loads((tmp_path / "out/config.json").read_text()),
    )
    assert out.keys() == tensors.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in tensors.items())
    assert {name: written[name] for name in config} == config
    before, after = tree_of(tmp_path / "saved"), tree_of(tmp_path / "out")
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.log_probs, after.log_probs)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--format", "eagle"], "format eagle is for EAGLE-3, the drafter is of kind dflash"),
        (["--model", "tiny-llava"], "trained for .* with hidden_size 48: got .* with 192"),
    ],
)
def test_blocks_that_cannot_be_written_are_refused(more, message, tmp_path, capsys):
    assert main([*saved_blocks(tmp_path), *more]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def exported(folder, config, tensors, *more):
    """Write a published DFlash drafter, save it, and export it; the exit code."""
    drafter, model = make_drafter(str(dflash.write(folder / "given", config, tensors))), shared_model("llama")
    drafter.save(folder / "saved", plugins.target_class(model.config)(model))
    model.config.save_pretrained(folder / "target")
    named = {"--model": "target", "--drafter": "saved", "--out": "out"}
    return main(["export", *(part for name, at in named.items() for part in (name, str(folder / at))), *more])


@pytest.mark.parametrize("kind", ["dflash", "vanilla", "gated", "rnn", "causal", "vocabulary"])
def test_blocks_in_speculators_format_are_the_same(kind, tmp_path):
    """With an output layer and embedding of their own, too."""
    config, tensors = dflash.published(dflash.reference(), "speculators")
    if kind == "vocabulary":
        ids = torch.arange(4, 80, 2)
        config["draft_vocab_size"], tensors["d2t"] = len(ids), ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(101, dtype=torch.bool).index_fill(0, ids, True)
        tensors["lm_head.weight"] = torch.randn(len(ids), dflash.WIDTH)
        tensors["embed_tokens.weight"] = torch.randn(101, dflash.WIDTH)
    if kind not in ("dflash", "causal"):
        outputs, named = config.get("draft_vocab_size", 101), {} if kind == "vocabulary" else {"kind": kind}
        config, tensors = dflash.with_heads(config, tensors, outputs=outputs, **named)
    config["sliding_window_non_causal"] = kind != "causal"
    assert exported(tmp_path, config, tensors) == 0
    out = load_file(tmp_path / "out" / "model.safetensors")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert out.keys() == tensors.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in tensors.items())
    layer = config.pop("transformer_layer_config")
    assert {name: written[name] for name in config} == config
    assert {name: written["transformer_layer_config"][name] for name in layer} == layer
    before, after = (make_drafter(str(tmp_path / at)) for at in ("saved", "out"))
    assert after.network.config == before.network.config
    before, after = tree_of(tmp_path / "saved"), tree_of(tmp_path / "out")
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.log_probs, after.log_probs)


def test_a_causal_head_in_z_labs_format_is_the_same(tmp_path):
    config, tensors = dflash.published(dflash.reference(), "z-lab")
    config["dflash_config"]["causal_head"] = True
    assert exported(tmp_path, config, tensors, "--format", "z-lab") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dflash_config"]["causal_head"] is True
    assert exported(tmp_path, config, tensors) == 2


@pytest.mark.parametrize("confidence", ["markov", "none"])
def test_heads_that_z_labs_format_does_not_have_are_refused(confidence, tmp_path, capsys):
    config, tensors = dflash.with_heads(*dflash.published(dflash.reference(), "z-lab"), confidence=confidence)
    assert exported(tmp_path, config, tensors, "--format", "z-lab") == 2
    assert "format z-lab requires a drafter without the heads and positions of DSpark" in capsys.readouterr().err


def test_blocks_with_an_output_layer_of_their_own_are_refused(tmp_path, capsys):
    config, tensors = dflash.published(dflash.reference(), "speculators", draft_vocab_size=101)
    dflash.write(tmp_path / "head", config, tensors | {"lm_head.weight": torch.zeros(101, dflash.WIDTH)})
    assert main([*saved_blocks(tmp_path), "--drafter", str(tmp_path / "head")]) == 2
    assert "requires the target's output layer and embedding: the drafter has its own" in capsys.readouterr().err


def test_a_head_is_not_written_as_blocks(tmp_path, capsys):
    assert main([*saved_head(tmp_path, cut(LLAMA3)), "--format", "z-lab"]) == 2
    assert "format z-lab is for DFlash, the drafter is of kind eagle3" in capsys.readouterr().err
