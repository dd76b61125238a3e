"""Drafters in GGUF files, with keys and tensors as llama.cpp's converter writes them, are the published drafters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmspec import UserError
from mmspec.drafters.registry import make_drafter, registered_name
from tests.dflash import BLOCK, published, reference, with_heads
from tests.eagle3 import DRAFT, LLAMA3, VOCAB, cut, head_tensors
from tests.gemma4 import WINDOW, assistant_of, target_model
from tests.mmspec.drafters.test_drafters import assert_equal
from tests.model_folders import write_gguf
from tests.published import write
from tests.tiny.models import text_inputs

EPS, BASE, CONVOLUTION = 2.0**-17, 5000.0, {"attention": "attn", "mlp": "ffn", "base": "base", "kernel": "proj"}
NAMES = {
    r"model\.": "",
    r"midlayer": "layers.0",
    r"hidden_norm\.weight": "enc.output_norm.weight",
    r"norm\.": "output_norm.",
    r"layers\.": "blk.",
    r"(.*)\.hidden_norm": r"\1.attn_norm_2",
    r"(.*)input_layernorm": r"\1attn_norm",
    r"(.*)self_attn\.o_proj": r"\1attn_output",
    r"(.*)self_attn\.(._norm)": r"\1attn_\2",
    r"(.*)self_attn\.([qkv])_proj": r"\1attn_\2",
    r"(.*)mlp\.(gate|up|down)_proj": r"\1ffn_\2",
    r"(.*)(attention|mlp)_conv\.(base|kernel)_(kernel|projection)": lambda found: (
        f"{found[1]}{CONVOLUTION[found[2]]}_conv_{CONVOLUTION[found[3]]}"
    ),
    r"lm_head": "output",
    r"embed_tokens": "token_embd",
    r"markov_head\.": "",
    r"confidence_head\.proj": "conf_proj",
    r"candidate_selector\.(\w+)_codebook": r"selector_\1.weight",
    r"candidate_selector\.hidden_projection": "selector_hidden",
    r"(.*)pre_feedforward_layernorm": r"\1ffn_norm",
    r"(.*)post_feedforward_layernorm": r"\1post_ffw_norm",
    r"(.*)layer_scalar": r"\1layer_output_scale.weight",
    r"(pre|post)_projection": r"nextn.\1_projection",
}
"""Beginnings of published names, and of those in files."""


def renamed(name: str, of_gemma4: bool) -> str:
    for begin, other in NAMES.items():
        name = re.sub(f"^{begin}", other, name)
    return name.replace("post_attention_layernorm", "post_attention_norm" if of_gemma4 else "ffn_norm")


def keys_of(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of sizes, of heads of 16 features."""
    keys = {"embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"]}
    keys |= {"block_count": config["num_hidden_layers"], "attention.head_count": config["num_attention_heads"]}
    keys |= {"attention.head_count_kv": config["num_key_value_heads"], "rope.freq_base": BASE}
    keys |= {"attention.key_length": 16, "attention.value_length": 16, "attention.layer_norm_rms_epsilon": EPS}
    return keys


def save(path: Any, architecture: str, keys: dict[str, Any], tensors: dict[str, Any], **more: Any) -> str:
    """``more`` tensors have their names in the file."""
    stored = {renamed(name, architecture.startswith("gemma4")): value for name, value in tensors.items()} | more
    metadata = {name if name.startswith("tokenizer.") else f"{architecture}.{name}": one for name, one in keys.items()}
    arrays = {name: value.numpy() for name, value in stored.items()}
    write_gguf(path, {"general.architecture": architecture, **metadata}, arrays)
    return str(path)


Made = tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]
"""Published configuration and tensors, and keys and tensors of the file."""


def eagle3(**more: Any) -> Made:
    """The converter makes the features of a rotated pair adjacent, and writes tokens for their offsets."""
    config = {**cut(LLAMA3, [1, 2, 3]), "rope_scaling": None, "rope_theta": BASE, "rms_norm_eps": EPS}
    tensors = head_tensors(config)
    stored = {name: value for name, value in tensors.items() if name != "t2d"}
    for name in ("q_proj", "k_proj"):
        weight = stored[at := f"midlayer.self_attn.{name}.weight"]
        stored[at] = weight.view(-1, 2, 8, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    stored["d2t"] = tensors["d2t"] + torch.arange(DRAFT)
    keys = {**keys_of(config), "context_length": 64, "vocab_size": VOCAB, "target_layers": [1, 2, 3]}
    keys |= {"target_hidden_size": 48, "norm_before_residual": False, "norm_before_fc": False}
    return config, tensors, {**keys, **more}, stored


def dflash(change: Callable[..., Any] = lambda config, tensors: (config, tensors), **more: Any) -> Made:
    """The second layer has a window; it is causal unless the configuration says otherwise."""
    plain = reference(rms_norm_eps=EPS, target_layer_ids=[1, 0])
    config, tensors = change(*published(plain, "z-lab"))
    keys = {**keys_of(config), "block_size": BLOCK, "target_layers": [2, 1], "attention.sliding_window": 3}
    keys |= {"attention.sliding_window_pattern": [False, True], "tokenizer.ggml.mask_token_id": 99}
    keys |= {"tokenizer.ggml.tokens": list(map(str, range(VOCAB))), "attention.causal": config.get("is_causal")}
    stored = dict(tensors)
    if "d2t" in tensors:
        stored["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    stored.pop("t2d", None)
    return config, tensors, {name: one for name, one in {**keys, **more}.items() if one is not None}, stored


def windows_by_default(config: Any, tensors: Any) -> Any:
    return {name: one for name, one in config.items() if name != "is_causal"}, tensors


def with_selector(config: Any, tensors: Any) -> Any:
    g, config = torch.Generator().manual_seed(5), {**config, "architectures": ["DFlash2DraftModel"]}
    config["dflash_config"] = {**config["dflash_config"], **SELECTOR}
    shapes = {f"candidate_selector.{one}_codebook": (VOCAB, 6) for one in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (6, 48)
    for place in ("layers.0.attention_conv", "layers.0.mlp_conv", "layers.1.attention_conv", "layers.1.mlp_conv"):
        shapes |= {f"{place}.base_kernel": (2, 2, 48), f"{place}.kernel_projection.weight": (12, 48)}
    return config, tensors | {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 5}


def with_draft_vocabulary(config: Any, tensors: Any) -> Any:
    config, tensors = with_heads(config, tensors, outputs=40)
    chosen = torch.arange(0, 80, 2)
    own = {"lm_head.weight": torch.randn(40, 48), "d2t": chosen - torch.arange(40)}
    own |= {"t2d": torch.zeros(VOCAB).bool().index_fill(0, chosen, True), "embed_tokens.weight": torch.randn(VOCAB, 48)}
    return {**config, "draft_vocab_size": 40}, {**tensors, **own}


DSPARK = {"sample_from_anchor": True, "has_confidence_head": True}
CASES: dict[str, tuple[str, Made]] = {
    "eagle3": ("eagle3", eagle3()),
    "dflash": ("dflash", dflash()),
    "dflash, of a target with three axes": ("dflash", dflash(**{"rope.dimension_sections": [8, 0, 0, 0]})),
    "dflash, of Gemma": ("dflash", dflash(embedding_scale=48**0.5)),
    "dflash, windows by default": ("dflash", dflash(windows_by_default)),
    "dflash, causal": ("dflash", dflash(lambda config, tensors: ({**config, "is_causal": True}, tensors))),
    "dflash2": ("dflash", dflash(with_selector, **SELECTOR)),
    "dspark": ("dflash", dflash(with_heads, **DSPARK)),
    "dspark, windows by default": ("dflash", dflash(lambda *given: with_heads(*windows_by_default(*given)), **DSPARK)),
    "dspark, without confidence": (
        "dflash",
        dflash(
            lambda *given: with_heads(*given, confidence="none", from_anchor=False),
            sample_from_anchor=False,
            has_confidence_head=False,
        ),
    ),
    "dspark, of some tokens": ("dflash", dflash(with_draft_vocabulary, **DSPARK)),
}


@pytest.mark.parametrize("name", CASES)
def test_files_have_the_published_drafters(name: str, tmp_path: Any) -> None:
    kind, (config, tensors, keys, stored) = CASES[name]
    hub: Any = make_drafter(str(write(tmp_path / "hub", config, tensors)))
    file = save(tmp_path / "a.gguf", kind, keys, stored)
    for spec in (file, f"{kind}:{file}"):
        found: Any = make_drafter(spec)
        assert found.network.config == hub.network.config
        assert (found.verifier or {}).get("vocab_size") == (hub.verifier or {}).get("vocab_size") == VOCAB
        assert found.draft_ids is hub.draft_ids is None or torch.equal(found.draft_ids, hub.draft_ids)
        weights = found.network.state_dict()
        assert all(torch.equal(weights[key], weight) for key, weight in hub.network.state_dict().items())


def gemma4(full: int = 2) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """An assistant, and keys and tensors of its file; ``full`` is the number of key heads of full attention."""
    split = {} if full == 2 else {"attention_k_eq_v": True, "num_global_key_value_heads": full}
    assistant = assistant_of(target_model(), rms_norm_eps=EPS, **split)
    for layer in assistant.model.layers:
        layer.layer_scalar.fill_(0.7)
    keys = {"block_count": 2, "nextn_predict_layers": 2, "context_length": 131072, "embedding_length": 32}
    keys |= {"embedding_length_out": 48, "embedding_length_per_layer_input": 0, "feed_forward_length": 40}
    keys |= {"attention.head_count": 4, "attention.shared_kv_layers": 2, "attention.layer_norm_rms_epsilon": EPS}
    keys |= {"attention.head_count_kv": 2 if full == 2 else [2, full], "attention.sliding_window": WINDOW}
    keys |= {"attention.sliding_window_pattern": [True, False], "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
    heads = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    keys |= dict.fromkeys(heads, 24) | {f"{name}_swa": 12 for name in heads}
    tensors = {name: value for name, value in assistant.state_dict().items() if name != "lm_head.weight"}
    return assistant, keys, {**tensors, "rope_freqs.weight": torch.tensor([1.0] * 3 + [1e30] * 9)}


@pytest.mark.parametrize("full", [2, 1])
def test_files_have_the_published_assistants(full: int, tmp_path: Any) -> None:
    """All layers are prediction layers."""
    assistant, keys, tensors = gemma4(full)
    file = save(tmp_path / "a.gguf", "gemma4-assistant", keys, tensors)
    for spec in (file, f"gemma4:{file}"):
        found: Any = make_drafter(spec)
        assert registered_name(found) == "gemma4"
        weights, buffers = found.network.state_dict(), dict(found.network.named_buffers())
        assert all(torch.equal(weights[key], weight) for key, weight in assistant.state_dict().items())
        assert all(torch.equal(buffers[key], value) for key, value in assistant.named_buffers())
        read, written = (one.config.text_config.to_dict() for one in (found.network, assistant))
        other = {key for key in written if read[key] != written[key]}
        assert other <= {"dtype", "eos_token_id", "bos_token_id", "pad_token_id"}
    if full == 2:
        assert_equal(target_model(), found, text_inputs(2, 9), num_draft_tokens=8)


ONES, KINDS = torch.ones(VOCAB, 48), "attention.sliding_window_pattern"
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    r"expected the architecture dflash or eagle3, found 'llama'": ("llama", {}, {}),
    r"received an EAGLE-3 head: use eagle3:": ("eagle3", {}, {}),
    r"found rope_freqs\.weight, which has no place": ("eagle3", {}, {"rope_freqs.weight": ONES}),
    r"expected dflash\.hidden_act = silu, got 'gelu'": ("dflash", {"hidden_act": "gelu"}, {}),
    r"found dflash\.final_logit_softcapping = 5\.0, which": ("dflash", {"final_logit_softcapping": 5.0}, {}),
    r"found blk\.0\.attn_sinks\.weight, which": ("dflash", {}, {"blk.0.attn_sinks.weight": ONES}),
    r"_scale = 1\.0, got 6\.9": ("dflash", {"embedding_scale": 48**0.5}, {"token_embd.weight": ONES}),
    r"sections = \[8, 0, 0, 0\], got": ("dflash", {"rope.dimension_sections": [3, 3, 2, 0]}, {}),
    r"found masked_embd_centroids\.weight, which": ("gemma4-assistant", {}, {"masked_embd_centroids.weight": ONES}),
    r"expected the architecture gemma4-assistant, found 'gemma4'": ("gemma4", {}, {}),
    r"block_count = 3 blocks, found 2": (
        "gemma4-assistant",
        {"block_count": 3, "nextn_predict_layers": 3, KINDS: [True, False, False]},
        {},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_files_are_one_line(message: str, tmp_path: Any) -> None:
    kind, keys, tensors = REFUSED[message]
    *_, own, stored = gemma4() if kind.startswith("gemma4") else eagle3() if kind == "eagle3" else dflash()
    written = save(tmp_path / "a.gguf", kind, {**own, **keys}, stored, **tensors)
    with pytest.raises(UserError, match=message) as caught:
        make_drafter(f"{'gemma4' if kind.startswith('gemma4') else 'dflash'}:{written}")
    assert "\n" not in str(caught.value)
