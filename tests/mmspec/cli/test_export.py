"""Drafters written for other engines: tensors and trees as before, names and fields as published."""

import json
import re
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from mmspec import plugins
from mmspec.cli import main
from mmspec.core.plan import StepPlan
from mmspec.drafters.medusa import Medusa
from mmspec.drafters.registry import make_drafter
from tests import dflash
from tests.eagle3 import DRAFT, GEMMA4, LLAMA3, PEAGLE, QWEN3_VL, cut, head_tensors, write_head
from tests.targets import prefilled, prompt_of
from tests.tiny import shared_model
from tests.tiny.drafters import tiny_drafter
from tests.tiny.models import medusa_network, text_inputs

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
EAGLE = ("3", "whole-vocabulary", "embedding", "axes")


def prepared(folder, checkpoint):
    """Saves a drafter's checkpoint as ours, for a tiny target; returns the command that exports it."""
    model, drafter = shared_model("llama"), make_drafter(str(checkpoint))
    drafter.save(folder / "saved", plugins.target_class(model.config)(model))
    model.config.save_pretrained(folder / "target")
    written = json.loads((folder / "target" / "config.json").read_text())
    (folder / "target" / "config.json").write_text(json.dumps({**written, "architectures": [type(model).__name__]}))
    named = {"--model": "target", "--drafter": "saved", "--out": "out"}
    return ["export", *(part for name, at in named.items() for part in (name, str(folder / at)))]


def made(folder, kind, tokens=None, **settings):
    """The same of a tiny drafter."""
    model, ids = shared_model("llama"), None if tokens is None else 2 * torch.arange(tokens)
    if kind == "medusa":
        drafter = Medusa(medusa_network(model, **{"head": tokens or 101, **settings}), ids)
    else:
        drafter = tiny_drafter(kind, model, tokens, **settings)
    drafter.save(folder / "given", plugins.target_class(model.config)(model))
    return prepared(folder, folder / "given")


def head(folder, config, **options):
    return prepared(folder, write_head(folder / "given", config, head_tensors(config, **options)))


def blocks(folder, config, tensors):
    return prepared(folder, dflash.write(folder / "given", config, tensors))


def published(layout="z-lab", **changes):
    return dflash.published(dflash.reference(), layout, **changes)


def tree_of(folder):
    model = shared_model("llama")
    target, drafter = plugins.target_class(model.config)(model), make_drafter(str(folder))
    drafter.top_k, drafter.depth, drafter.total_tokens = 4, 5, 24
    drafter.attach(target)
    prompt = prompt_of(text_inputs())
    drafter.begin(prompt, prefilled(target, prompt, 16, drafter.features), [[*prompt.input_ids[0].tolist(), 7]])
    return drafter.propose(torch.tensor([7]), StepPlan(24, 5))


def check_same(folder, tensors):
    """The written drafter drafts as before, with the tensors of published ones; returns its configuration."""
    out = load_file(folder / "out" / "model.safetensors")
    assert out.keys() == tensors.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in tensors.items())
    before, after = tree_of(folder / "saved"), tree_of(folder / "out")
    for name in ("tokens", "parents", "log_probs"):
        assert torch.equal(getattr(before, name), getattr(after, name))
    return json.loads((folder / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, "speculators") for name in CASES), *((name, "eagle") for name in EAGLE)]
)
def test_a_head_in_a_published_format_is_the_same_head(name, layout, tmp_path):
    config, options = CASES[name]
    assert main([*head(tmp_path, config, **options), "--format", layout]) == 0
    names = ("midlayer.", "layers.0.") if layout == "speculators" else ("layers.0.", "midlayer.")
    given = load_file(tmp_path / "given" / "model.safetensors")
    written = check_same(tmp_path, {key.replace(*names): tensor for key, tensor in given.items()})
    if layout == "eagle":
        assert written["architectures"] == ["LlamaForCausalLMEagle3"]
        assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 1]
        assert written["target_model_type"] == "llama"
        axes = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
        assert written["rope_scaling"] == (axes if name == "axes" else None)
        assert written["rope_theta"] == (5e6 if name == "axes" else 1e4)
    elif name == "3":  # whose layers it leaves to the target
        assert written["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


def test_fields_are_those_of_a_published_speculator(tmp_path):
    args = head(tmp_path, cut(GEMMA4, [0, 1, 2]), layout="B")
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


@pytest.mark.parametrize("layout", ["z-lab", "transformers"])
def test_blocks_in_z_labs_format_are_the_same(layout, tmp_path):
    config, tensors = published()
    assert main([*blocks(tmp_path, *published(layout)), "--format", "z-lab"]) == 0
    written = check_same(tmp_path, tensors)
    assert {name: written[name] for name in config} == config


@pytest.mark.parametrize("kind", ["dflash", "vanilla", "gated", "rnn", "causal", "vocabulary"])
def test_blocks_in_speculators_format_are_the_same(kind, tmp_path):
    config, tensors = published("speculators")
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
    assert main(blocks(tmp_path, config, tensors)) == 0
    written, layer = check_same(tmp_path, tensors), config.pop("transformer_layer_config")
    assert {name: written[name] for name in config} == config
    assert {name: written["transformer_layer_config"][name] for name in layer} == layer
    before, after = (make_drafter(str(tmp_path / at)) for at in ("saved", "out"))
    assert after.network.config == before.network.config


def test_a_causal_head_in_z_labs_format_is_the_same(tmp_path):
    config, tensors = published()
    config["dflash_config"]["causal_head"] = True
    command = blocks(tmp_path, config, tensors)
    assert main([*command, "--format", "z-lab"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dflash_config"]["causal_head"] is True
    assert main(command) == 2


DFLASH2 = {"conv_kernel_size": 2, "selector_rank": 6, "selector_top_k": 7, "selector_tokens": 101}
OTHERS = [  # drafter, its draft tokens, settings of its network, format
    ("dflash", None, DFLASH2, "z-lab"),
    ("eagle", None, {}, "eagle"),
    ("msd", None, {"decoupled": False}, "eagle"),
    ("medusa", 20, {}, "vllm"),
    ("medusa", None, {"layers": 2}, "vllm"),
    ("medusa", None, {"layers": 2}, "medusa"),
]


def eagle_shapes(c):
    """A decoder layer whose queries, keys and values the loader stacks, as it does gate and up, and the projection."""
    hidden, size, inner = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    rows = {"q": c["num_attention_heads"] * size, **dict.fromkeys("kv", c["num_key_value_heads"] * size)}
    layer = {f"self_attn.{part}_proj": (count, hidden) for part, count in rows.items()}
    layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    layer |= {"self_attn.o_proj": (hidden, rows["q"]), "post_attention_layernorm": (hidden,)}
    names = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    return names | {"fc.weight": (hidden, 2 * hidden)}, {"fc.bias": (hidden,)}


def medusa_shapes(c):
    hidden, tokens = c["hidden_size"], c["truncated_vocab_size"]
    heads = {f"lm_heads.{head}.weight": (tokens, hidden) for head in range(c["num_heads"])}
    for head, layer in product(range(c["num_heads"]), range(c["num_hidden_layers"])):
        heads |= {f"blocks.{head}.layers.{layer}.weight": (hidden, hidden)}
        heads |= {f"blocks.{head}.layers.{layer}.bias": (hidden,)} if c["medusa_fc_bias"] else {}
    return heads | ({"token_map": (tokens,)} if tokens < c["vocab_size"] else {}), {}


LOADERS = {
    # vllm-project/vllm, vllm/model_executor/models/llama_eagle.py, EagleLlamaForCausalLM.load_weights, which leaves
    # fc.bias out
    "eagle": eagle_shapes,
    # vllm/model_executor/models/medusa.py, Medusa.load_weights
    "vllm": medusa_shapes,
}
"""By format: names and shapes that the loaders of engines take, from a configuration; those that they need, and others.
Formats of EAGLE-3 and DFlash are compared with published checkpoints."""


@pytest.mark.parametrize(("kind", "tokens", "settings", "layout"), OTHERS, ids=str)
def test_other_drafters_are_the_same(kind, tokens, settings, layout, tmp_path):
    assert main([*made(tmp_path, kind, tokens, **settings), "--format", layout]) == 0
    before, after = tree_of(tmp_path / "saved"), tree_of(tmp_path / "out")
    for name in ("tokens", "parents", "log_probs"):
        assert torch.equal(getattr(before, name), getattr(after, name))
    if layout in LOADERS:
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        written = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        needed, others = LOADERS[layout](json.loads((tmp_path / "out" / "config.json").read_text()))
        assert needed.items() <= written.items() <= (needed | others).items()


class Residual(nn.Module):
    """Of FasterDecoding/Medusa, medusa/model/medusa_model.py."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.silu(self.linear(x))


@torch.no_grad()
def test_medusa_heads_are_those_of_the_authors_modules(tmp_path):
    """In float32, logits of all heads by the modules that load exactly these tensors."""
    assert main([*made(tmp_path, "medusa", None, layers=2), "--format", "medusa"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    heads = nn.ModuleList(
        nn.Sequential(*(Residual(48) for _ in range(config["medusa_num_layers"])), nn.Linear(48, 101, bias=False))
        for _ in range(config["medusa_num_heads"])
    )
    heads.load_state_dict(load_file(tmp_path / "out" / "medusa_lm_head.safetensors"))
    network, x = make_drafter(str(tmp_path / "saved")).network, torch.randn(3, 48)
    states = [chain(x)[:, None] for chain in network.heads]
    ours = network.scores(0, states, None)
    torch.testing.assert_close(ours, torch.stack([head(x) for head in heads], dim=1))


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (
            lambda at: head(at, cut(LLAMA3)),
            "--format z-lab",
            "format z-lab is for DFlash, the drafter is of kind eagle3",
        ),
        (
            lambda at: head(at, cut(LLAMA3)),
            "--model tiny-llava",
            "trained for .*hidden_size 48.*: got .*llava with .*192",
        ),
        (lambda at: head(at, cut(LLAMA3)), "--model nowhere/at/all", "cannot load model 'nowhere/at/all': expected an"),
        (
            lambda at: head(at, cut(LLAMA3)),
            f"--drafter {plugins.find('models', 'tiny-llava')()}/drafter",
            "there are formats for EAGLE-3 and EAGLE and MSD and Medusa and DFlash, the drafter is of kind flash",
        ),
        (lambda at: blocks(at, *published()), "--format eagle", "format eagle is for EAGLE-3 and .* of kind dflash"),
        (lambda at: made(at, "medusa", 20), "--format medusa", "of all the target's tokens: got a draft vocabulary"),
    ],
)
def test_what_cannot_be_written_is_one_line(make, more, message, tmp_path, capfd):
    command = [*make(tmp_path), *more.split()]
    capfd.readouterr()
    assert main(command) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_heads_of_layers_that_the_target_lacks_are_not_written(tmp_path, capfd):
    command = head(tmp_path, cut(LLAMA3))
    file = tmp_path / "saved" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "network": config["network"] | {"reads": [0, 1, 7]}}))
    capfd.readouterr()
    assert main(command) == 2
    assert "the drafter reads inputs of layers 0, 1, 7: the target has 2 layers" in capfd.readouterr().err
