"""GGUF files of mixtures: configuration and weights, keys and tensors that are refused, blocks that are set aside."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from mmspec.drafters.registry import make_drafter
from mmspec.errors import UserError
from mmspec.quantisation.blocks import BLOCKS
from mmspec.quantisation.experts import PackedExperts
from mmspec.quantisation.formats import FORMATS
from mmspec.targets import sources
from mmspec.targets.gguf_file import GGUFFile, GGUFTensor
from mmspec.targets.gguf_models import read_config, set_aside
from mmspec.targets.packing import pack_drafter, pack_model
from tests.compiled import needs_kernels
from tests.gguf_mixtures import ROWS, blocks, build, load, package, save
from tests.mmspec.drafters.test_drafters import check_paths
from tests.mtp import appended, gain_of, mtp_model
from tests.tiny.models import text_inputs


@pytest.mark.parametrize("row", ROWS)
def test_logits_are_those_of_the_model(row: str, tmp_path: Path) -> None:
    model = save(row, tmp_path / "one.gguf")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, found = model(ids).logits, load(tmp_path / "one.gguf")(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_joined_gate_and_up_projections(tmp_path: Path) -> None:
    """Files may have them as one tensor."""
    model = build("qwen3moe")
    layers = [layer.mlp.experts.gate_up_proj.detach() for layer in model.model.layers]
    save("qwen3moe", tmp_path / "one.gguf", without=r"ffn_(gate|up)_exps", tensors=blocks("ffn_gate_up_exps", layers))
    state = load(tmp_path / "one.gguf").state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())


def test_experts_in_mxfp4_have_the_weights_of_the_package(tmp_path: Path) -> None:
    """Rows of 32 columns: a scale of 8 bits and 32 values of 4 bits."""
    kind = package.GGMLQuantizationType.MXFP4
    gate, up = np.random.default_rng(0).integers(0, 256, (2, 8, 40, 17), dtype=np.uint8)
    gate[..., 0] = up[..., 0] = 120  # scales of moderate size
    stored = {"blk.0.ffn_gate_exps.weight": (gate, kind), "blk.0.ffn_up_exps.weight": (up, kind)}
    save("gpt-oss", tmp_path / "one.gguf", tensors=stored)
    weight = load(tmp_path / "one.gguf").model.layers[0].mlp.experts.gate_up_proj
    assert weight.is_contiguous()
    for start, data in enumerate((gate, up)):
        expected = torch.from_numpy(package.dequantize(data, kind)).view(8, 40, 32)
        assert torch.equal(weight.mT[:, start::2], expected)


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ("qwen3moe", {"expert_weights_scale": 2.0}, "qwen3moe.expert_weights_scale = 2.0, which is not known"),
        ("qwen3moe", {"expert_feed_forward_length": None}, "the key qwen3moe.expert_feed_forward_length, found none"),
        ("qwen3moe", {"block_count": 4}, "block_count = 4 blocks, found 3"),
        ("ernie4_5-moe", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step = 1, got 2"),
        ("dots1", {"expert_gating_func": 1}, "dots1.expert_gating_func = 2, got 1"),
        ("minimax-m2", {"expert_gating_func": 4}, "minimax-m2.expert_gating_func = 2, got 4"),
        ("deepseek2 v3", {"expert_gating_func": 3}, "deepseek2.expert_gating_func = .*, got 3"),
        ("deepseek2 v3", {"attention.temperature_scale": 0.1}, "attention.temperature_scale = 0.1.*not known"),
        ("deepseek2 v2", {"expert_weights_norm": True}, "expert_weights_norm = False, got True"),
        ("granitemoe", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned = True, got False"),
        ("hunyuan-moe", {"expert_shared_count": 2}, "expert_shared_count = 1, got 2"),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_its_key(row: str, keys: Any, message: str, tmp_path: Path) -> None:
    save(row, tmp_path / "one.gguf", keys)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "one.gguf")


@pytest.mark.parametrize(
    ("row", "tensor"),
    [
        ("deepseek2 v2", "blk.1.exp_probs_b.bias"),
        ("qwen3moe", "blk.0.ffn_gate_shexp.weight"),
        ("llama", "blk.0.ffn_gate.0.weight"),
    ],
)
def test_tensors_without_a_place_are_refused(row: str, tensor: str, tmp_path: Path) -> None:
    save(row, tmp_path / "one.gguf", tensors={tensor: np.zeros(8, np.float32)})
    with pytest.raises(UserError, match=f"found {tensor}, which has no place"):
        load(tmp_path / "one.gguf")


def test_blocks_that_predict_further_tokens_are_set_aside(tmp_path: Path) -> None:
    """A block after the layers has tensors of a layer and of its own; files may have its count without the block."""
    names = ["blk.3.attn_q.weight", "blk.3.nextn.eh_proj.weight"]
    extra = dict.fromkeys(names, np.ones((4, 32), np.float32))
    ids, keys = torch.arange(20)[None], {"block_count": 4, "nextn_predict_layers": 1}
    for tensors in (extra, {}):
        model = save("glm4moe", tmp_path / "one.gguf", keys, tensors)
        file = GGUFFile(tmp_path / "one.gguf")
        assert set_aside(file) == list(tensors)
        assert read_config(file)[0].num_hidden_layers == 3
        with torch.no_grad():
            torch.testing.assert_close(load(file.path)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    save("glm4moe", tmp_path / "one.gguf", tensors=extra)
    with pytest.raises(UserError, match="block_count = 3 blocks, found 4"):
        load(tmp_path / "one.gguf")


@pytest.mark.parametrize(("row", "layers"), [("glm4moe", 2), ("deepseek2 v3", 1)])
def test_blocks_that_predict_further_tokens_draft(row: str, layers: int, tmp_path: Path) -> None:
    """Trees have the probabilities of transformers' layers with the weights that were written."""
    model, keys = build(row), {"block_count": 3 + layers, "nextn_predict_layers": layers}
    model.config.num_mtp_layers = layers
    built = mtp_model(model)
    copies = {
        f"blk.3.nextn.{name}.weight": np.ones((96, 32), np.float32) for name in ("embed_tokens", "shared_head_head")
    }
    save(row, tmp_path / "one.gguf", keys, copies, also=appended(built, 3))
    drafter: Any = make_drafter("mtp", str(tmp_path / "one.gguf"))
    drafter.top_k, gain = 3, partial(gain_of, built, model)
    target = load(tmp_path / "one.gguf")
    check_paths(target, text_inputs(2, 9), drafter, gain, nodes=7, depth=layers, new=6)


@needs_kernels
def test_quantised_rows_of_such_blocks_are_kept(tmp_path: Path) -> None:
    model = build("glm4moe")
    model.config.num_mtp_layers = 1
    also = appended(mtp_model(model), 3)
    form = package.GGMLQuantizationType.Q4_0
    data = package.quantize(also["model.layers.3.self_attn.o_proj.weight"].numpy(), form)
    keys = {"block_count": 4, "nextn_predict_layers": 1}
    save("glm4moe", tmp_path / "one.gguf", keys, {"blk.3.attn_output.weight": (data, form)}, also=also)
    network = make_drafter("mtp", str(tmp_path / "one.gguf")).network  # type: ignore[union-attr]
    attention = network.layers[0].mtp_block.self_attn
    dense = torch.from_numpy(package.dequantize(data, form))
    torch.testing.assert_close(attention.o_proj.weight, dense, rtol=0, atol=0)
    pack_drafter(network, torch.zeros(1, dtype=torch.bfloat16), "int8")
    assert isinstance(attention.o_proj, FORMATS["Q4_0"])
    assert isinstance(attention.q_proj, BLOCKS["int8"])


def test_weights_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one weight's tensors are in memory besides the model."""
    save("gpt-oss", tmp_path / "one.gguf")
    alive, most, plain = weakref.WeakSet[Any](), [], GGUFTensor.__getitem__

    def read(tensor: GGUFTensor, index: Any) -> Tensor:
        found = plain(tensor, index).clone()
        alive.add(found)
        most.append(len(alive))
        return found

    monkeypatch.setattr(GGUFTensor, "__getitem__", read)
    path = str(tmp_path / "one.gguf")
    source = sources.find(path)
    source.model(transformers.AutoModelForCausalLM, source.config(), torch.bfloat16, True)
    assert max(most) == 2  # gate and up projections


@needs_kernels
def test_experts_are_not_read_in_float32_beside_packed_layers(tmp_path: Path) -> None:
    model = save("qwen3moe", tmp_path / "one.gguf")
    source = sources.find(str(tmp_path / "one.gguf"))
    found, kind = source.model(transformers.AutoModelForCausalLM, source.config(), "int8", True)
    layer, expected = found.model.layers[0], model.model.layers[0]
    assert kind == "int8"
    assert layer.self_attn.q_proj.stored
    assert torch.equal(layer.mlp.experts.down_proj, expected.mlp.experts.down_proj.bfloat16())
    assert layer.mlp.gate.weight.dtype == torch.float32


@needs_kernels
@pytest.mark.parametrize("row", ["qwen3moe", "llama", "granitemoe", "gpt-oss"])
def test_experts_are_packed_as_they_are_in_the_file(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates, ups and downs in three formats, without dense experts."""
    kind, name, fields, keys = ROWS[row]
    width = "moe_intermediate_size" if row == "qwen3moe" else "intermediate_size"
    length = "expert_feed_forward_length" if row in ("qwen3moe", "gpt-oss") else "feed_forward_length"
    monkeypatch.setitem(ROWS, row, (kind, name, {**fields, width: 32}, {**keys, length: 32}))
    forms, dense = {"gate": "MXFP4" if row == "gpt-oss" else "Q4_0", "up": "Q5_1", "down": "Q8_0"}, {}
    for part, form in forms.items():
        weight = np.random.default_rng(len(part)).standard_normal((8, 32, 32), dtype=np.float32)
        dense[part] = package.quantize(weight, package.GGMLQuantizationType[form]), package.GGMLQuantizationType[form]
    tensors = {f"blk.{layer}.ffn_{part}_exps.weight": one for layer in range(3) for part, one in dense.items()}
    save(row, tmp_path / "one.gguf", tensors=tensors)
    source = sources.find(str(tmp_path / "one.gguf"))
    model, dtype = source.model(transformers.AutoModelForCausalLM, source.config(), "auto", True)
    assert not [one for one in model.parameters() if one.ndim == 3 and not one.is_meta]
    pack_model(model, dtype)
    experts = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(experts) == 3
    for one in experts:
        for layer, (data, form) in zip((*one.gate_up, one.down), dense.values(), strict=True):
            assert isinstance(layer, FORMATS[form.name])
            expected = torch.from_numpy(package.dequantize(data, form)).flatten(0, 1)
            torch.testing.assert_close(layer.weight.float(), expected, rtol=1e-2, atol=1e-2)
    ids, plain = torch.arange(20)[None], load(tmp_path / "one.gguf")
    with torch.no_grad():
        expected, found = plain(ids).logits, model(ids).logits
    assert (found - expected).norm(dim=-1).median() < 0.1 * expected.norm(dim=-1).median()  # some use other experts
