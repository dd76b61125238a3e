"""Mixtures of experts in packed weights: products against dense experts, bits of rows, models that decode with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import mmspec
from mmspec.core.target import Prompt
from mmspec.ops import compiler, cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, place_together
from mmspec.quantisation.experts import PackedExperts, pack_experts, reproduced_experts
from mmspec.quantisation.formats import FORMATS, StoredRows, stored_layer
from mmspec.targets import sources
from mmspec.targets.packing import pack_model
from mmspec.targets.recognise import router_of
from mmspec.targets.sublayers import SublayerStack
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.gguf_rows import dequantised, random_rows
from tests.mmspec.quantisation.test_formats import BUILDS
from tests.targets import prefilled

pytestmark = needs_kernels
COUNT, USED = 5, 3


def layer_of(kind: str, rows: int, columns: int) -> tuple[Any, Tensor]:
    """A layer of all experts' rows, and its weight, (experts, rows, columns)."""
    if kind in FORMATS:
        data = random_rows(
            kind, (COUNT * rows, columns), scale=columns**-0.5 / {"Q6_K": 2048, "Q8_0": 64}.get(kind, 16)
        )
        weight = dequantised(kind, data)
        layer: Any = stored_layer(StoredRows.of(kind, torch.from_numpy(data), columns), None)
    else:
        layer = BLOCKS[kind](torch.randn(COUNT * rows, columns) / columns**0.5, None)
        weight = layer.weight.float()
    return layer, weight.unflatten(0, (COUNT, rows))


def experts_of(kind: str, gelu: bool, fused: bool = True) -> tuple[PackedExperts, Tensor, Tensor]:
    """Packed experts, and their dense weights as transformers has them."""
    torch.manual_seed(0)
    hidden, features = (512, 256) if kind in FORMATS else (96, 64)
    down, down_weight = layer_of(kind, hidden, features)
    layers, weights = zip(*(layer_of(kind, features * (1 + fused), hidden) for _ in range(2 - fused)), strict=True)
    return PackedExperts(layers, down, COUNT, {"gelu": gelu}), torch.cat(weights, 1), down_weight


def inputs_of(experts: PackedExperts, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, experts.down.out_features // COUNT)
    return x, torch.stack([torch.randperm(COUNT)[:USED] for _ in range(rows)]), torch.rand(rows, USED)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [*BLOCKS, *FORMATS])
def test_outputs_are_those_of_dense_experts(kind: str, fused: bool, gelu: bool) -> None:
    experts, gate_up, down = experts_of(kind, gelu, fused)
    x, chosen, factors = inputs_of(experts, 19)
    gate, up = torch.einsum("rh,rcfh->rcf", x, gate_up[chosen]).chunk(2, -1)
    gated = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    expected = torch.einsum("rcf,rchf,rc->rh", gated, down[chosen], factors)
    error = (experts(x, chosen, factors) - expected).norm() / expected.norm()
    assert error < {"float32": 2e-6, "bfloat16": 5e-3}.get(kind, 2e-2)


@pytest.mark.parametrize("kind", [*BLOCKS, *FORMATS])
def test_rows_have_the_same_bits_for_any_number_of_rows_and_threads(kind: str) -> None:
    experts, *_ = experts_of(kind, gelu=False)
    x, chosen, factors = inputs_of(experts, 1400)  # more slots than a pass has
    whole = experts(x, chosen, factors)
    place_together([*experts.gate_up, experts.down])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(experts(x, chosen, factors), whole)
        for count in range(1, 18):
            part = slice(count, 2 * count)
            assert torch.equal(experts(x[part], chosen[part], factors[part]), whole[part])


def test_experts_out_of_range_are_skipped() -> None:
    experts, *_ = experts_of("float32", gelu=False)
    x, chosen, factors = inputs_of(experts, 4)
    chosen[1:, 0], none = COUNT, factors.clone()
    none[1:, 0] = 0
    skipped = experts(x, chosen, factors)
    assert torch.equal(skipped, experts(x, chosen.clamp(max=COUNT - 1), none))


BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": False},
    "mixtral": {"intermediate_size": 32, "num_local_experts": 8},
    "granitemoehybrid": {
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
        "num_local_experts": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.22,
        **MAMBA,
    },
    "qwen3_5_moe_text": {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "head_dim": 32,
        **DELTA,
    },
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 8},
    "lfm2_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "glm4_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.0,
        "use_qk_norm": True,
    },
}
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 16},
    "qwen3_moe": {"num_experts": 16, "norm_topk_prob": False},
    "gpt_oss": {"num_local_experts": 16},
    "granitemoe": {"num_local_experts": 16},
    "lfm2_moe": {"num_experts": 16, "routed_scaling_factor": 1.5},
    "glm4_moe": {"n_routed_experts": 16, "routed_scaling_factor": 2.0, "norm_topk_prob": False},
    "deepseek_v3": {"n_routed_experts": 32, "n_group": 8, "topk_group": 3},
    "deepseek_v2": {"n_routed_experts": 32, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "minimax_m2": {"num_local_experts": 16},
    "ernie4_5_moe": {"moe_num_experts": 16},
}
"""Softmax and sigmoid, normalised or not, with corrections of the router, its block and its child, in groups."""


GPT_OSS = {"intermediate_size": 32, "num_local_experts": 8, "sliding_window": 4}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**BASE | {**CONFIGS, "gpt_oss": GPT_OSS}[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for key, weight in model.named_parameters():
        if weight.ndim == 3 or key.endswith(("gate.weight", "router.weight")) or "shared" in key:
            torch.nn.init.normal_(weight, std=0.3)  # outputs and logits apart
    for key, buffer in model.named_buffers():
        if key.endswith("bias"):
            torch.nn.init.normal_(buffer, std=0.1)  # corrections of scores
    return model


def block_of(name: str, **fields: Any) -> tuple[Any, Any]:
    """A block with experts of a model with one layer, with random weights, and its router."""
    torch.manual_seed(0)
    base = {**BASE, "num_hidden_layers": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 0, "num_dense_layers": 0}
    width = {"intermediate_size": 32, "moe_intermediate_size": 32, "moe_layer_start_index": 0}
    if name == "lfm2_moe":
        width["layer_types"] = ["full_attention"]
    model = transformers.AutoModel.from_config(transformers.CONFIG_MAPPING[name](**{**base, **width, **fields}))
    block: Any = next(block for block in model.modules() if hasattr(block, "experts"))
    for tensor in (*block.parameters(), *block.buffers()):
        torch.nn.init.normal_(tensor, std=0.3)
    return block.float(), getattr(block, "gate", None) or block.router


@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_routers_choose_as_those_of_models(name: str) -> None:
    block, router = block_of(name, **ROUTERS[name])
    found, weights = router_of(block, block.experts.num_experts)
    assert found is router
    x = torch.randn(50, 64) * torch.logspace(-2, 1, 50)[:, None] - 1
    correction = getattr(block, "expert_bias", getattr(block, "e_score_correction_bias", None))
    logits, factors, chosen = router(x, *([] if correction is None else [correction]))
    places, computed = cpu.chosen_experts(weights, logits)
    order, other = chosen.argsort(1), places.argsort(1)
    assert torch.equal(places.gather(1, other), chosen.gather(1, order))
    torch.testing.assert_close(computed.gather(1, other), factors.gather(1, order), rtol=2e-5, atol=0)


def test_routers_that_compute_something_else_are_refused() -> None:
    block, _ = block_of("phimoe", num_local_experts=8, num_experts_per_tok=2)
    with pytest.raises(ValueError, match="do not reproduce PhimoeTopKRouter"):
        router_of(block, 8)
    with pytest.raises(ValueError, match="expected a router with one weight for 9 experts"):
        router_of(block, 9)


def decoded(model: Any, drafter: Any) -> Tensor:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None)
    return mmspec.generate(model, drafter=drafter, input_ids=ids, **options)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", [*CONFIGS, "gpt_oss"])
def test_models_decode_with_drafts_as_without(name: str, kind: str) -> None:
    model = model_of(name)
    ids = torch.arange(24).view(2, 12) * 5 % 96
    with torch.no_grad():
        expected = model(ids).logits
        pack_model(model, kind)
        assert not any(weight.ndim == 3 and len(weight) == 8 for weight in model.parameters())
        if kind == "bfloat16":
            errors = (model(ids).logits - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert errors.median() < 0.04  # a few rows may choose other experts
    if name in CONFIGS:  # GPT-OSS has attention sinks
        decoder = TransformersTarget(model).decoder
        SublayerStack(decoder._module, () if decoder.layers is None else decoder.layers.mixers)  # reproduces all layers
    assert torch.equal(decoded(model, "recycle"), decoded(model, None))
    ids = torch.randint(96, (3, 60))  # two rows in the first 128
    together, alone = (prefilled(TransformersTarget(model), Prompt(part), 4).logits[-1] for part in (ids, ids[2:]))
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "granitemoehybrid", "gpt_oss"])
def test_experts_are_quantised_while_they_are_read(name: str, kind: str, tmp_path: Path) -> None:
    whole = model_of(name).bfloat16()
    whole.save_pretrained(tmp_path)
    source = sources.find(str(tmp_path))
    model, _ = source.model(transformers.AutoModelForCausalLM, source.config(), kind, True)
    assert all(one.down_proj.is_meta for _, _, one, _ in reproduced_experts(model))
    pack_model(model, kind)
    pack_model(whole, kind)
    ids = torch.arange(24).view(2, 12) * 5 % 96
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole(ids).logits)


def test_experts_with_biases_and_limited_gates_are_those_of_the_model() -> None:
    experts = model_of("gpt_oss").model.layers[0].mlp.experts
    holder = torch.nn.ModuleDict({"experts": experts})
    for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
        torch.nn.init.normal_(bias, std=4)  # many gates and ups beyond the limit
    with torch.no_grad():
        x, chosen, factors = torch.randn(9, 64) * 4, torch.randint(8, (9, 2)), torch.rand(9, 2)
        expected = experts(x, chosen, factors)
        pack_experts(holder)
        for parent in (holder["experts"].gate_up, holder["experts"]):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, torch.nn.Linear):
                    setattr(parent, name, BLOCKS["float32"](layer.weight, layer.bias))
        torch.testing.assert_close(holder["experts"](x, chosen, factors), expected, rtol=1e-4, atol=1e-3)


def test_other_experts_stay() -> None:
    """Experts with biases, and others whose forward computes something else."""
    config = transformers.MixtralConfig(**BASE | CONFIGS["mixtral"])
    model = transformers.MixtralForCausalLM(config)
    assert len(list(reproduced_experts(model))) == 4
    for layer in model.model.layers[:2]:
        layer.mlp.experts.act_fn = torch.nn.ReLU()
    assert len(list(reproduced_experts(model))) == 2
    model.model.layers[2].mlp.experts.bias = torch.nn.Parameter(torch.zeros(1))
    assert len(list(reproduced_experts(model))) == 1
    model.model.layers[3].mlp.experts.act_fn = None
    assert not list(reproduced_experts(model))


@pytest.mark.long
@pytest.mark.parametrize(("build", "features", "flags"), BUILDS)
def test_other_builds_give_the_same_bits(
    build: str, features: frozenset[str], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not features <= set(compiler.processor().split()):
        pytest.skip(f"needs a processor with {', '.join(features)}")
    library = cpu_library.compiled(flags)
    assert not isinstance(library, str), library
    if library.instructions().decode() != build:
        pytest.skip(f"needs a processor with {build}")
    for kind in (*BLOCKS, *FORMATS):
        experts, *_ = experts_of(kind, gelu=False)
        inputs = inputs_of(experts, 9)
        expected = experts(*inputs)
        with monkeypatch.context() as patched:
            patched.setattr(cpu_library, "functions", lambda: library)
            found = experts(*inputs)
        tolerance = 1e-2 if kind == "bfloat16" else 0.0  # which sums in another order
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
