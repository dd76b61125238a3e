"""Drafter checkpoints, published and of mmspec: recognition, and each field and tensor that is refused, by name."""

import copy
import dataclasses
import json
import math
import re
import shutil
import time
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmspec import UserError
from mmspec.drafters import layouts
from mmspec.drafters.checkpoint import check_same_target, check_verifier
from mmspec.drafters.dflash import DFlash, DFlashConfig
from mmspec.drafters.eagle import Eagle, EagleConfig
from mmspec.drafters.eagle3 import Eagle3, Eagle3Config
from mmspec.drafters.early_exit import Kangaroo
from mmspec.drafters.layouts import LAYOUTS
from mmspec.drafters.layouts.fields import pair_halves, written_layer
from mmspec.drafters.medusa import Hydra, Medusa, MedusaConfig
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import drafter_specs, make_drafter
from mmspec.drafters.spec import RotaryShape
from mmspec.vision.drafters.msd import MSD, MSDConfig
from mmspec.vision.drafters.vispec import ViSpec
from tests import dflash, kangaroo, medusa
from tests.dflash import CONFIGS
from tests.eagle3 import DRAFT, EAGLE4, GEMMA4, GPT_OSS, LLAMA3, PEAGLE, cut, head_tensors
from tests.mmspec.drafters.test_drafters import target_of
from tests.published import LLAVA, QWEN, VICUNA, VISPEC, tensors_of, vispec_tensors, write
from tests.targets import prefilled, prompt_of
from tests.tiny import shared_model
from tests.tiny.drafters import NETWORKS, tiny_drafter
from tests.tiny.models import text_inputs

SHAPE = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "head_dim": 12, "mlp": 64}
KINDS = {kind.name: kind for kind in (Eagle, Eagle3, DFlash, Kangaroo, Medusa, Hydra, MSD, ViSpec)}
SWITCHES = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": False}
HEAD = cut(LLAMA3, [0, 1, 2], **SWITCHES)
FOUR = cut(EAGLE4, [0, 1, 2], num_candidates=9, draft_vocab_size=101)
WINDOWS = {"layer_types": ["sliding_attention"], "sliding_window": 5}
_WRONG = ("text", None, [], {}, 1.5, True, -1, 0, 10**9, 10**30, math.nan, math.inf, -math.inf, [1], {"a": 1})
_HARMLESS = [("reads", []), ("sliding", [1]), ("causal", []), ("causal", [1]), ("mask_token_id", None), ("prefix", {})]
_ROOM = 200_000_000  # bytes that a refusal may take at most
_PARTS = ("eagle", "msd", "vispec", "medusa")  # configured as FLASH and Hydra, or by fewer fields
_SAVED = [spec.name for spec in drafter_specs() if spec.weights in ("optional", "required") and spec.name not in _PARTS]
_MORE = {"flash": {"slots": 3, "visual_states": True}, "hydra": {"prefix": True}, "mamba": {"vocab": 101}}


def _blocks(layout, **heads):
    config, tensors = dflash.published(dflash.reference(), layout)
    return dflash.with_heads(config, tensors, **heads) if heads else (config, tensors)


MADE = {
    "eagle": lambda: (VICUNA, tensors_of(VICUNA)),
    "msd": lambda: (LLAVA, tensors_of(LLAVA)),
    "msd qwen": lambda: (QWEN, tensors_of(QWEN)),
    "vispec": lambda: (VISPEC["qwen2_5_vl"], vispec_tensors(VISPEC["qwen2_5_vl"])),
    "eagle3 midlayer": lambda: (HEAD, head_tensors(HEAD, "A", embedding=True)),
    "eagle3 layers": lambda: (cut(GEMMA4, [0, 1]), head_tensors(cut(GEMMA4, [0, 1]), "B")),
    "eagle3 without t2d": lambda: (cut(GPT_OSS), head_tensors(cut(GPT_OSS), "C")),
    "eagle3 4": lambda: (FOUR, head_tensors(FOUR, "C")),
    "eagle3 parallel": lambda: (cut(PEAGLE, [0, 1]), head_tensors(cut(PEAGLE, [0, 1]), "B")),
    **{
        f"dflash {layout}": lambda layout=layout: _blocks(layout) for layout in ("z-lab", "transformers", "speculators")
    },
    **{f"dflash {kind}": lambda kind=kind: _blocks("speculators", kind=kind) for kind in ("vanilla", "gated", "rnn")},
    **{
        f"{'hydra' if layout.startswith('hydra') else 'medusa'} {layout}": lambda layout=layout: medusa.published(
            layout
        )
        for layout in medusa.LAYOUTS
    },
    "kangaroo": lambda: (
        kangaroo.configuration(),
        {name: tensor for name, tensor in kangaroo.adapter().state_dict().items() if name in kangaroo.NAMES},
    ),
}
COPIES = ("embed_tokens.weight", *medusa.COPIES, "token_map", "lm_heads.0.weight", "t2d", "lm_head.weight")
"""Tensors that are optional in some of the layouts."""

WHOLE = "(a whole number|>= [01]|> 0|1: got)"
every_checkpoint = pytest.mark.parametrize("name", MADE)


@cache
def checkpoint(name):
    """The class that reads a checkpoint, its configuration and its tensors."""
    return KINDS[name.split()[0]], *MADE[name]()


def refusal(kind, config, tensors):
    with pytest.raises(UserError) as caught:
        kind.convert(config, tensors, "here")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@every_checkpoint
def test_every_tensor_missing_further_misshapen_or_of_another_type_is_named(name):
    kind, config, tensors = checkpoint(name)
    kind.convert(config, {**tensors, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, "here")
    for tensor, value in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != tensor}
        assert f"unknown {tensor}.more" in refusal(kind, config, {**tensors, f"{tensor}.more": value})
        if tensor not in COPIES:
            assert f"missing {tensor}" in refusal(kind, config, rest)
        if tensor != "token_map":
            wrong = torch.cat([value, value[..., :1]], dim=-1)
            line = refusal(kind, config, {**rest, tensor: wrong})
            assert re.fullmatch(rf"here: {tensor} must be \(.*\) by config.json: got \(.*\)", line)
            other = value.int() if value.is_floating_point() else value.float()
            assert f"{tensor} must be a" in refusal(kind, config, {**rest, tensor: other})


RULES = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"), WHOLE),
    **dict.fromkeys(("num_hidden_layers", "draft_vocab_size", "block_size", "sliding_window"), WHOLE),
    "vocab_size": WHOLE,
    "rms_norm_eps": "(a number|> 0)",
    "rope_theta": "(a number|> 0)",
    "hidden_act": "'silu'",
    **dict.fromkeys(("mask_token_id", "markov_rank", "conv_kernel_size"), WHOLE),
    **dict.fromkeys(("num_heads", "medusa_num_heads", "medusa_num_layers", "hydra_num_layers"), WHOLE),
    **dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "target_layer_ids"), "a list"),
    **dict.fromkeys(("attention_bias", "mlp_bias"), "unset or false"),
    **dict.fromkeys(("rope_is_neox_style", "sample_from_anchor", "sliding_window_non_causal"), "true or false"),
    **dict.fromkeys(("grounded_heads", "original_lm_head", "medusa_fc_bias"), "true or false"),
}
"""Rules of fields, by published name."""


@every_checkpoint
def test_every_field_that_breaks_its_rule_is_named(name):
    kind, config, tensors = checkpoint(name)
    ignored = {"medusa": ("vocab_size", "hidden_size"), "kangaroo": ("rope_theta",)}.get(kind.name, ())
    count = 0
    for place in (None, *(key for key, value in config.items() if isinstance(value, dict))):
        inside = config if place is None else config[place]
        overridden = config.get("transformer_layer_config", {}) if place is None else ()
        for field in RULES.keys() & inside.keys() - {*ignored, *overridden}:
            for value in ("text", {"a": 1}, -1):
                changed = {**inside, field: value}
                line = refusal(kind, changed if place is None else {**config, place: changed}, tensors)
                assert re.search(f"{field.removeprefix(f'{kind.name}_')} must be {RULES[field]}", line), (line, value)
                count += 1
    assert count > 5


@every_checkpoint
def test_folders_are_recognised_and_read_by_their_own_drafter_alone(name, tmp_path):
    kind, config, tensors = checkpoint(name)
    folder = write(tmp_path, config, {key: value.contiguous() for key, value in tensors.items()}, "bin")
    assert layouts.recognise(folder) == kind.name
    assert layouts.read(folder, kind)[0] == kind.convert(config, tensors, "here")[0]
    for other in KINDS.values():
        if kind.name not in (other.name, *LAYOUTS[other.name].like):
            with pytest.raises(UserError) as caught:
                layouts.read(folder, other)
            title = LAYOUTS[kind.name].title
            assert str(caught.value).endswith(f", received {title}: use {kind.name}:{folder}")


@pytest.mark.parametrize("name", ["eagle3 midlayer", "eagle3 without t2d", "msd"])
def test_weights_are_read_in_their_own_dtype(name, tmp_path):
    kind, config, tensors = checkpoint(name)
    half = {key: value.half() if value.is_floating_point() else value for key, value in tensors.items()}
    found = layouts.read(Path(write(tmp_path, config, half)), kind)[1]
    assert {value.dtype for value in found.values()} == {torch.float16}


def _in_layer(**changes):
    config = cut(GEMMA4, [0, 1])
    return {"transformer_layer_config": {**config["transformer_layer_config"], **changes}}


TYPES = "layer_types must be 2 of sliding_attention and full_attention"
IDS = "must (be a list|name 1 to 64 layers of the target, from 0 on)"
REFUSALS = [
    ("kangaroo", {"num_attention_heads": 96}, "head_dim must be >= 2: got 0"),
    ("msd", {"vocab_size": 95}, r"embed_tokens.weight must be \(95, 48\) by config.json: got \(96, 48\)"),
    ("msd", {"num_hidden_layers": 32}, "expected one layer with plain rotary positions, received 32 with"),
    ("msd", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "received 1 with rope scaling 'linear'"),
    ("msd", {"rope_parameters": {"rope_type": "yarn"}}, "received 1 with rope scaling 'yarn'"),
    ("eagle3 midlayer", {"draft_vocab_size": 41}, r"d2t must be \(41,\) by config.json: got \(40,\)"),
    ("eagle3 midlayer", {"rope_scaling": {"type": "dynamic"}}, "rotary positions must be default, .*'dynamic'"),
    ("eagle3 midlayer", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "received partial_rotary_factor 0.5: remove"),
    ("eagle3 midlayer", {"rope_scaling": {"rope_type": "llama3"}}, "rotary positions must be valid: got .*"),
    ("eagle3 midlayer", {"eagle_aux_hidden_state_layer_ids": "1,2"}, "must be a list: got '1,2'"),
    ("eagle3 midlayer", {"eagle_aux_hidden_state_layer_ids": [1, "2"]}, r"ids\[1\] must be a whole number: got '2'"),
    ("eagle3 midlayer", {"aux_hidden_state_layer_ids": [1, 2]}, r"unknown fc_norm.2.weight"),
    ("eagle3 4", {"num_candidates": 0}, "num_candidates must be > 0: got 0"),
    ("eagle3 4", {"sliding_window": 0}, "sliding_window must be > 0: got 0"),
    ("eagle3 4", {**WINDOWS, "sliding_window": None}, "sliding_window must be a whole number: got None"),
    (
        "eagle3 layers",
        _in_layer(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
        r"layer_types must be all sliding_attention or none: got \['sliding_attention', 'full_attention'\]",
    ),
    ("eagle3 parallel", {"mask_token_id": None}, "mask_token_id must be a whole number: got None"),
    ("dflash z-lab", {"dflash_config": {"mask_token_id": 99, "target_layer_ids": []}}, f"target_layer_ids {IDS}"),
    ("dflash transformers", {"target_layer_ids": [1, -3]}, f"target_layer_ids {IDS}"),
    *(
        ("dflash transformers", {"layer_types": kinds}, TYPES)
        for kinds in (["full_attention"], {"full_attention": 1, "sliding_attention": 2})
    ),
    ("dflash transformers", {"layer_types": ["full_attention", "chunked"]}, TYPES),
    ("dflash transformers", {"sliding_window": None}, "sliding_window must be a whole number: got None"),
    ("dflash transformers", {"attention_mode": "mla"}, "attention_mode must be 'gqa': got 'mla'"),
    ("dflash transformers", {"projector_type": "domino"}, "projector_type must be 'dflash' or 'dspark': got 'domino'"),
    ("dflash transformers", {"logit_scale": 0.5}, "a DFlash drafter whose fields are known, received logit_scale 0.5"),
    ("dflash transformers", {"use_swa": True}, "use_swa must be unset or false: got True"),
    ("dflash speculators", {"causal_head": 1}, "causal_head must be true or false: got 1"),
    ("dflash vanilla", {"markov_head_type": "lstm"}, "head_type must be 'vanilla', 'gated' or 'rnn': got 'lstm'"),
    ("dflash vanilla", {"markov_head_type": "gated"}, "missing markov_head.gate_proj.bias, markov_head.gate_proj.w"),
    ("dflash rnn", {"markov_rank": 0, "confidence_head_with_markov": False}, "markov_head.joint_proj.weight"),
    ("dflash vanilla", {"markov_rank": 7}, r"head.proj.weight must be \(1, 55\) by config.json: got \(1, 54"),
    ("dflash vanilla", {"enable_confidence_head": False}, "unknown confidence_head.proj.bias, confidence_head.proj.w"),
    ("dflash vanilla", {"enable_confidence_head": "yes"}, "enable_confidence_head must be true or false: got 'yes'"),
    ("dflash vanilla", {"confidence_head_with_markov": False}, r"proj.weight must be \(1, 48\) by config.json"),
    ("medusa medusa", {"medusa_num_heads": 4}, r"missing 3\.0\.linear\.bias"),
    ("medusa medusa", {"medusa_num_layers": 3}, r"missing 0\.2\.linear\.bias"),
    ("medusa vllm", {"medusa_fc_bias": True}, r"missing blocks\.0\.layers\.0\.bias"),
    ("medusa vllm", {"logit_scale": 2.0}, "logit_scale must be <= 1: got 2"),
    ("medusa vllm-map", {"vocab_size": None}, "token_map must be a 1D integer tensor of distinct tokens below 0"),
    ("hydra hydra", {"grounded_heads": False}, r"unknown hydra_mlp\.0\.0\.res_connection\.bias"),
]


@pytest.mark.parametrize(("name", "changes", "said"), REFUSALS, ids=lambda value: str(value)[:40])
def test_configurations_that_cannot_be_are_refused(name, changes, said):
    kind, config, tensors = checkpoint(name)
    with pytest.raises(UserError, match=said) as caught:
        kind.convert({**config, **changes}, tensors, "here")
    assert "\n" not in str(caught.value)


NUMBERS = {
    "logit_scale": 0.5,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 256,
    "residual_multiplier": 0.22,
    "output_multiplier": 0.2,
    "input_embedding_scale": 0.5,
    "hidden_activation": "gelu_pytorch_tanh",
    "partial_rotary_factor": 0.25,
    "confidence_temperatures": [1.5, 0.9],
    "attention_chunk_size": 8192,
    "use_mtp_layernorm": True,
    "dspark_bonus_anchor": True,
    "mla_config": {"rank": 2},
}


def test_drafters_of_gemma_4s_own_layers_are_refused_by_name():
    config, tensors = CONFIGS["refused deepseek-ai/dspark_gemma4_12b_block7"], checkpoint("dflash vanilla")[2]
    said = refusal(DFlash, config, tensors)
    assert "final_logit_softcapping 30.0, global_head_dim 512, hidden_activation 'gelu_pytorch_tanh'" in said


@pytest.mark.parametrize("name", [name for name in (*CONFIGS, *MADE) if not name.startswith("refused")])
def test_fields_that_may_change_numbers_are_refused_by_name_wherever_they_are(name):
    kind = KINDS[name.split()[0]]
    config, tensors = (CONFIGS[name], {}) if name in CONFIGS else checkpoint(name)[1:]
    config = {**config, "mask_token_id": config.get("mask_token_id") or 9}
    nested = ("transformer_layer_config", "dflash_config", "eagle_config", "rope_parameters", "rope_scaling")
    for place, (field, value) in product((None, *nested), NUMBERS.items()):
        read = field == "confidence_temperatures" or (field == "logit_scale" and kind in (Medusa, Hydra))
        if read or not isinstance(config.get(place, {} if place is None else None), dict):
            continue

        def said(value, place=place, field=field):
            changed = {**config, **({field: value} if place is None else {place: {**config[place], field: value}})}
            try:
                kind.convert(changed, tensors, "here")
            except UserError as error:
                return str(error)
            return ""

        assert not [one for one in (None, False, 0, 1.0, [], "") if "are known" in said(one)]
        known = f"expected {LAYOUTS[kind.name].title} whose fields are known, received {field} {value!r}:"
        assert said(value).startswith(f"here/config.json: {known}")


def test_heads_of_one_layer_may_leave_out_its_number():
    kind, config, tensors = checkpoint("eagle3 midlayer")
    del config["num_hidden_layers"]
    assert kind.convert(config, tensors, "here")[0].layers == 1


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("eagle3 midlayer", {"d2t": torch.full((DRAFT,), 102 - DRAFT)}, r"d2t\[i\] must be distinct tokens below 101"),
        ("eagle3 midlayer", {"d2t": torch.zeros(DRAFT).long() - 1}, "distinct tokens below 101"),
        ("eagle3 midlayer", {"d2t": torch.arange(DRAFT) * -1}, "distinct tokens below 101"),
        ("eagle3 midlayer", {"t2d": torch.ones(101).bool()}, r"mark exactly the tokens i \+ d2t\[i\]: it marks 101"),
        ("eagle3 midlayer", {"t2d": torch.arange(101) >= 101 - DRAFT}, "t2d must mark exactly .*: it marks 40"),
        ("medusa vllm-map", {"token_map": medusa.MAP[:1].repeat(2)}, "token_map must be"),
        ("medusa vllm-map", {"token_map": medusa.MAP + 90}, "token_map must be"),
        ("msd", {"layers.0.self_attn.q_proj.bias": torch.zeros(48)}, "missing layers.0.self_attn.k_proj.bias, layers"),
        (
            "eagle3 4",
            {f"efficient_lm_head.{part}": torch.zeros(1) for part in ("g_idx", "qweight", "qzeros", "scales")},
            "unknown efficient_lm_head.g_idx, efficient_lm_head.qweight, efficient_lm_head.qzeros, efficient_lm_head",
        ),
    ],
)
def test_tensors_that_cannot_be_are_refused(name, changes, said):
    kind, config, tensors = checkpoint(name)
    with pytest.raises(UserError, match=said):
        kind.convert(config, {**tensors, **changes}, "here")


BASES = {
    "eagle3": Eagle3Config(**SHAPE, head=40, layers=1),
    "eagle": EagleConfig(**SHAPE),
    "msd": MSDConfig(**SHAPE, decoupled=False),
    "medusa": MedusaConfig(hidden_size=48, heads=3, head=40),
    "dflash": DFlashConfig(
        **SHAPE, layers=3, block_size=5, mask_token_id=9, target_layer_ids=[0, 3], sliding=[1], window=7, causal=[1]
    ),
}
MARKOV = {"markov_rank": 3, "markov_inputs": 50, "markov_outputs": 40}
XPRESS = {**MARKOV, "markov_type": "xpress"}
SELECTS = {"selector_rank": 6, "selector_tokens": 50, "selector_top_k": 9}
TWO_PARTS = "requires convolutions and a selector, or neither: the drafter has"
FURTHER = ("input_norm", "qkv_bias", "norm_output", "confidence", "decoupled", "visual_states", "hide_visual")
UNWRITTEN = {  # by layout and format: settings of a network, and the end of the error; empty without an error
    "eagle3 speculators": [
        *(({name: True}, "") for name in layouts.families.SWITCHES),
        ({"layers": 2, "mask_token_id": 0}, ""),
        ({"head": 0}, "requires a head with an output layer of its own: it uses the target's"),
        ({"outputs": True, "reads": [0, 2, 1]}, "layers whose inputs are read: the head reads outputs [0, 2, 1]"),
        ({"window": 5}, "the head has a sliding window"),
        ({"head_rank": 2, "candidates": 5}, "the head has a low-rank output layer"),
    ],
    "eagle3 eagle": [
        *(({name: True}, f"the head has {name}") for name in layouts.families.SWITCHES),
        ({"layers": 2}, "the head has 2 layers"),
        ({"mask_token_id": 0}, "the head has mask_hidden"),
        ({"window": 5}, "the head has a sliding window"),
    ],
    "eagle eagle": [({"slots": 2}, "the drafter has slots")],
    "msd eagle": [
        *(({name: True}, f"requires a layer of EAGLE-1: the drafter has {name}") for name in FURTHER),
        *(({name: value}, f"the drafter has {name}") for name, value in (("reads", [1]), ("latents", 2), ("slots", 2))),
    ],
    "medusa vllm": [({"bias": False}, ""), ({"head": 0}, "the heads' own: they use the target's")],
    "medusa medusa": [({"bias": False}, "heads with biases: they have none"), ({"head": 0}, "they use the target's")],
    "dflash z-lab": [
        *(({"causal": layers}, "") for layers in ([], [0, 1, 2])),
        ({"causal": [0]}, "or none, or those with a window: got [0]"),
        *(
            ({name: 50}, "the target's output layer and embedding: the drafter has its own")
            for name in ("head", "embedding")
        ),
        *((has, "of DSpark: use speculators") for has in (MARKOV, {"confidence": "state"}, {"from_anchor": True})),
        ({**SELECTS, "conv_kernel_size": 2}, ""),
        (SELECTS, f"format z-lab {TWO_PARTS} a selector only"),
        ({"conv_kernel_size": 2}, f"{TWO_PARTS} convolutions only"),
    ],
    "dflash speculators": [
        *((has, "") for has in ({"causal": []}, {"head": 50}, {**MARKOV, "confidence": "markov"}, XPRESS)),
        *(({**XPRESS, "confidence": reads}, "without a confidence head") for reads in ("state", "markov")),
        *(({"causal": layers}, f"to be causal, or none: got {layers}") for layers in ([0], [0, 1, 2])),
        (SELECTS, f"format speculators {TWO_PARTS} a selector only"),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [(name, *case) for name, cases in UNWRITTEN.items() for case in (({}, ""), *cases)],
    ids=str,
)
def test_networks_that_a_format_does_not_describe(name, changes, said):
    layout, form = name.split()
    network = dataclasses.replace(BASES[layout], **changes)
    with pytest.raises(UserError, match=f"{re.escape(said)}$") if said else nullcontext():
        layouts.FORMATS[layout][form](network, shared_model("llama").config, 3)


@pytest.mark.parametrize(("positions", "layers"), [({"max_position_embeddings": 77}, 3), ({}, 1)])
def test_fields_of_a_written_layer(positions, layers):
    """ALiBi has no limit of positions; EAGLE's layer is single."""
    network = dataclasses.replace(BASES["dflash" if layers > 1 else "eagle"], norm_eps=1e-3)
    decoder = SimpleNamespace(vocab_size=101, **positions)
    assert written_layer(network, SimpleNamespace(get_text_config=lambda: decoder), "qwen3") == {
        **{"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
        **{"intermediate_size": 64, "rms_norm_eps": 1e-3, "num_hidden_layers": layers, "vocab_size": 101},
        **{"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "model_type": "qwen3"},
        **positions,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"vocab_size": size}, "") for size in (101, 51, None)),
        *(({"vocab_size": size}, f"(vocab_size {size}): got LLAVA vocab_size 101") for size in (102, 50)),
        ({"hidden_size": 47}, "(hidden_size 47): got LLAVA hidden_size 48"),
        (
            {"hidden_size": 47, "vocab_size": 50},
            "(hidden_size 47, vocab_size 50): got LLAVA hidden_size 48, vocab_size 101",
        ),
        ({"hidden_size": None, "vocab_size": None}, ""),
        *(({"model_type": kind}, "") for kind in ("llama", "llava", None)),
        ({"model_type": "qwen3"}, "(model_type qwen3): got LLAVA model_type ['llama', 'llava']"),
        *(({"architectures": names}, "") for names in (["A", "LlavaForConditionalGeneration"], [], None)),
        (
            {"architectures": ["A", "LlamaForCausalLM"]},
            "(architectures ['A', 'LlamaForCausalLM']): got LLAVA architectures ['LlavaForConditionalGeneration']",
        ),
    ],
    ids=str,
)
def test_targets_of_published_drafters(changes, said):
    target = target_of("llava")
    known = {"hidden_size": 48, "vocab_size": 101, "name_or_path": "some/llava", "model_type": None} | changes
    said = said.replace("LLAVA", "LlavaForConditionalGeneration with")
    message = f"^the drafter was trained for {re.escape(f'some/llava {said}')}$"
    with pytest.raises(UserError, match=message) if said else nullcontext():
        check_verifier(known, target)


def test_a_drafter_is_written_for_a_target_of_as_many_tokens():
    """Not for a target of more tokens, beside which it drafts."""
    received = {"hidden_size": 48, "vocab_size": 101, "name_or_path": "other", "architectures": None}
    check_same_target({"vocab_size": None, "architectures": ["A"]}, received)
    with pytest.raises(UserError, match=r"^the drafter was .* another target \(vocab_size 51\): got other with vocab"):
        check_same_target({"vocab_size": 51}, received)


def _recycle(target):
    drafter = Recycle(top_k=3)
    output = prefilled(target, prompt_of(text_inputs(1, 9)), 8)
    drafter.begin(prompt_of(text_inputs(1, 9)), output, [[5]])
    return drafter


@pytest.fixture(scope="module", params=_SAVED)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    target = target_of("llama")
    kind, made = request.param, _recycle(target)
    if kind != "recycle":
        made = tiny_drafter(kind, target.model, 20, **_MORE.get(kind, {}))
    made.save(folder, target)
    return folder


def _paths(config):
    """Every field, nested ones too, as the keys that lead to it."""
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in _paths(value))


def _changed(config, path, change):
    config = json.loads(json.dumps(config))
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return config


def _refused(folder, read=make_drafter):
    """The line with which a checkpoint is refused, or nothing where it is accepted."""
    try:
        read(folder)
    except UserError as error:
        return str(error)
    return ""


def _cases(config):
    for path in _paths(config):
        yield path, "missing", _changed(config, path, lambda inner, key: inner.pop(key))
        yield (*path[:-1], "extra"), "extra", _changed(config, path, lambda inner, key: inner.update(extra=1))
        for value in _WRONG:
            yield path, value, _changed(config, path, lambda inner, key, value=value: inner.update({key: value}))


def test_every_field_with_every_wrong_value(saved, tmp_path):
    """One line, at once, with hardly any memory; what is accepted is a value of the field's type."""
    folder = Path(shutil.copytree(saved, tmp_path / "drafter"))
    config = json.loads((folder / "config.json").read_text())
    assert _refused(folder) == ""
    read = type(make_drafter(folder)).from_checkpoint
    before, began = psutil.Process().memory_info().rss, time.process_time()
    count = 0
    for path, value, changed in _cases(config):
        (folder / "config.json").write_text(json.dumps(changed))
        if path == ("mmspec_drafter",):
            continue
        line = _refused(folder, read)
        assert len(line.splitlines()) <= 1
        optional = path[0] == "network" and path[-1] not in ("hidden_size", "heads", "kv_heads", "head_dim", "mlp")
        named = re.search(rf"{path[-1]} is required|expected a {path[-1]}, received none", line)
        assert value != "missing" or path[0] == "network" or not line or named, line
        harmless = (value == "missing" and optional) or type(value) in (bool, int, float, str)
        harmless = harmless or (path[-1], value) in _HARMLESS
        harmless = harmless or (path[-1] == "rope" and isinstance(value, dict))  # transformers ignores unknown keys
        assert line or harmless, (path, value)
        huge = type(value) in (int, float) and not abs(value) < 2**30
        assert line or not huge or path[-1] == "rope_theta", (path, value)
        count += 1
    assert count > 50
    assert psutil.Process().memory_info().rss - before < _ROOM
    assert time.process_time() - began < 0.5 * count


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([5, 101]),
        torch.tensor([-1, 5]),
        torch.tensor([5, 5]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([[1, 2]]),
        torch.tensor(3),
        torch.tensor([], dtype=torch.long),
    ],
)
def test_draft_ids_that_are_no_tokens(saved, tmp_path, ids):
    folder = Path(shutil.copytree(saved, tmp_path / "drafter"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"draft_ids": ids}, folder / "model.safetensors")
    assert "draft_ids" in _refused(folder)


def test_every_tensor_missing_of_another_shape_or_type(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "drafter"))
    tensors = load_file(folder / "model.safetensors")
    read = type(make_drafter(folder)).from_checkpoint
    for name, tensor in tensors.items():
        if name == "draft_ids":
            continue
        other = tensor.int() if tensor.is_floating_point() else tensor.float()
        for instead in ({}, {name: tensor[:-1].clone()}, {name: other}, {name: tensor, "more": tensor.clone()}):
            rest = {key: value for key, value in tensors.items() if key != name}
            save_file(rest | instead, folder / "model.safetensors")
            line = _refused(folder, read)
            assert len(line.splitlines()) == 1, (name, list(instead))
            assert ("more" if "more" in instead else name) in line, line


@pytest.mark.parametrize("text", ["", "[]", "3", '"text"', "null", "{", "[" * 100_000, '{"a":' * 100_000, "\x00"])
@pytest.mark.parametrize("name", ["msd", "mamba", "recycle", "flash", "eagle"])
def test_files_that_are_no_json_objects(tmp_path, name, text):
    (tmp_path / "config.json").write_text(text)
    for drafter in (str(tmp_path), f"{name}:{tmp_path}"):
        with pytest.raises(UserError) as raised:
            make_drafter(drafter)
        assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["ngram", "small", 5, ["msd"], "nobody"])
def test_names_of_drafters_that_have_no_checkpoint(saved, tmp_path, name):
    folder = Path(shutil.copytree(saved, tmp_path / "drafter"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mmspec_drafter": name}))
    assert len(_refused(folder).splitlines()) == 1


def test_features_of_adjacent_pairs_are_moved_to_halves():
    """Of queries, keys, their biases and norms; two heads of four features."""
    rows, halves = torch.arange(8.0), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    moved = [f"0.self_attn.{part}" for part in ("q_proj.weight", "k_proj.bias", "q_norm.weight")]
    kept = ["0.self_attn.v_proj.weight", "0.self_attn.o_proj.bias", "0.q_proj.weight"]
    found = pair_halves(dict.fromkeys((*moved, *kept), rows) | {"0.self_attn.k_proj.weight": rows[:6]}, 4)
    assert all(found[name].tolist() == halves for name in moved)
    assert all(found[name].tolist() == rows.tolist() for name in kept)
    assert len(found["0.self_attn.k_proj.weight"]) == 6  # of heads of another size


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"gemma4", "hydra", "mamba", "medusa", "mtp"}))
def test_every_norm_has_the_targets_epsilon(name):
    config = copy.deepcopy(shared_model("llama").config)
    config.rms_norm_eps = 0.25
    parts = NETWORKS[name](SimpleNamespace(config=config)).modules()
    assert {part.eps for part in parts if isinstance(part, torch.nn.RMSNorm | torch.nn.LayerNorm)} == {0.25}


EAGLE3 = {**SHAPE, "layers": 3, "head": 40, "states": 2, "reads": [0, 5]}
BLOCKS = {**SHAPE, "layers": 2, "block_size": 5, "mask_token_id": 9, "target_layer_ids": [0, 3]}
SHAPES = {
    "layer": (RotaryShape, SHAPE),
    "head": (Eagle3Config, EAGLE3),
    "msd": (MSDConfig, SHAPE),
    "medusa": (MedusaConfig, {"hidden_size": 48, "heads": 3, "prefix": SHAPE}),
    "blocks": (DFlashConfig, BLOCKS),
    "window": (DFlashConfig, {**BLOCKS, "sliding": [1], "window": 7, "causal": [0]}),
    "markov": (DFlashConfig, {**BLOCKS, "markov_rank": 3, "markov_inputs": 50, "markov_outputs": 40}),
    "dflash2": (
        DFlashConfig,
        {**BLOCKS, "selector_rank": 6, "selector_tokens": 50, "selector_top_k": 49, "conv_kernel_size": 4},
    ),
}
CONTRADICTIONS = {
    "kv_heads must divide heads: got 3 for 4": [("layer", {"kv_heads": 3})],
    "head_dim must be even, as rotary positions turn pairs: got 13": [("layer", {"head_dim": 13})],
    "rotary positions must be default, linear, llama3, yarn: got 'dynamic'": [
        ("layer", {"rope": {"rope_type": "dynamic"}})
    ],
    "rotary positions must turn whole heads: got a partial": [("layer", {"rope": {"partial_rotary_factor": 0.5}})],
    "mrope_section must be three sections of 6 frequencies in all: got ": [
        ("layer", {"rope": {"mrope_section": sections}})
        for sections in ((4, 0, 2), [4, 0.0, 2], [-1, 4, 3], [2, 4], [1, 2, 2], [1, 2, 4])
    ],
    "reads must name 3 layers, from 0 on: got [0, 5]": [("head", {"states": 3})],
    "reads must name 2 layers, from 0 on: got [5, -1]": [("head", {"reads": [5, -1]})],
    "reads must name the 2 layers that the drafter was trained on: got none": [("head", {"reads": []})],
    "candidates must be given with head_rank only, and at most the 40 tokens": [
        ("head", changes) for changes in ({"head_rank": 2, "candidates": 41}, {"head_rank": 2}, {"candidates": 5})
    ],
    "one of norm_before_fc and fc_norm must be false": [("head", {"norm_before_fc": True, "fc_norm": True})],
    "one of hide_visual and latents must be off: got both, 2": [("msd", {"hide_visual": True, "latents": 2})],
    "reads must name layers, from 0 on: got [3, -1]": [("msd", {"reads": [3, -1]})],
    "rank and head must both be 0 or neither: got ": [
        ("msd", changes) for changes in ({"rank": 2, "slots": 3}, {"head": 9, "slots": 3})
    ],
    "rank must be 0 with one slot per pass: got 2": [("msd", {"rank": 2, "head": 9})],
    "prefix must have hidden_size 36: got 48": [("medusa", {"hidden_size": 36})],
    "target_layer_ids must name 1 to 64 layers of the target, from 0 on: got ": [
        ("blocks", {"target_layer_ids": ids}) for ids in ([], list(range(65)), [3, -1])
    ],
    "sliding must name layers below 2: got [0, ": [("window", {"sliding": [0, at]}) for at in (-1, 2)],
    "causal must name layers below 2: got [0, ": [("window", {"causal": [0, at]}) for at in (-1, 2)],
    "window must be given with sliding layers only: got ": [("window", {"window": 0}), ("window", {"sliding": []})],
    "markov_inputs and markov_outputs must be given with markov_rank only: got ": [
        ("markov", {name: 0}) for name in ("markov_rank", "markov_inputs", "markov_outputs")
    ],
    "markov_outputs must be the 39 rows of the head: got 40": [("markov", {"head": 39})],
    "markov_rank must be positive for a rnn Markov head: got 0": [("blocks", {"markov_type": "rnn"})],
    "markov_rank must be positive for a confidence head": [("blocks", {"confidence": "markov"})],
    "selector_top_k must be at most 50: got 51": [("dflash2", {"selector_top_k": 51})],
    "selector_tokens must be given with selector_rank only: got ": [
        ("dflash2", {name: 0}) for name in ("selector_rank", "selector_tokens")
    ],
    "selector_rank requires the target's output layer, and no heads of DSpark": [
        ("dflash2", changes) for changes in ({"head": 50}, {"confidence": "state"})
    ],
    "conv_kernel_size must be at most 5: got 6": [("dflash2", {"conv_kernel_size": 6})],
    "conv_group_size must divide 48: got 7": [("dflash2", {"conv_group_size": 7})],
    "": [  # accepted
        *((name, {}) for name in SHAPES),
        ("layer", {"kv_heads": 4, "rope": {"rope_type": "linear", "partial_rotary_factor": 1.0}}),
        ("layer", {"rope": {"mrope_section": [4, 0, 2]}}),
        ("head", {"reads": [], "states": 3}),
        ("head", {"head_rank": 2, "candidates": 40}),
        *(("head", {name: True}) for name in ("norm_before_fc", "fc_norm")),
        *(("msd", changes) for changes in ({"hide_visual": True}, {"latents": 2}, {"reads": [3, 0]})),
        ("msd", {"rank": 2, "head": 9, "slots": 2}),
        ("blocks", {"target_layer_ids": list(range(64)), "conv_group_size": 7}),
        ("blocks", {"head": 39, "confidence": "state"}),
        ("window", {"sliding": [0, 1], "causal": [1, 0], "target_layer_ids": [7]}),
        ("markov", {"confidence": "markov", "markov_type": "rnn", "head": 40}),
        ("dflash2", {"conv_kernel_size": 5, "selector_top_k": 50}),
    ],
}


@pytest.mark.parametrize(
    ("message", "name", "changes"),
    [(message, *case) for message, cases in CONTRADICTIONS.items() for case in cases],
    ids=str,
)
def test_settings_that_contradict_each_other(message, name, changes):
    kind, base = SHAPES[name]
    with pytest.raises(UserError, match=f"^{re.escape(message)}") if message else nullcontext():
        kind(**(base | changes))


def test_settings_of_a_caller_are_checked_too():
    target = target_of("llama")
    for settings in ({"top_k": 10**9}, {"depth": 0}, {"total_tokens": "many"}, {"depth": 2.5}, {"top_k": True}):
        for name in NETWORKS:
            with pytest.raises(UserError, match=r" must be (>= 1|<= \d+|a whole number): got "):
                tiny_drafter(name, target.model, **settings)
