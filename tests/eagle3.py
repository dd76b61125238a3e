"""EAGLE-3 heads as published, at small sizes, and drafting by their network without a cache."""

from __future__ import annotations

import json
import math

import torch

from mmspec.drafters.eagle3 import Eagle3, Eagle3Network
from tests.draft_checks import check_drafts, plain_pass, whole_pass
from tests.published import CONFIGS, write
from tests.targets import row_of

write_head = write
VOCAB, DRAFT, WIDTH, RANK = 101, 40, 48, 20
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")  # of P-EAGLE

# ``cut`` sets the sizes: heads of 16 features, a width of 48.
_CUT = {"hidden_size": WIDTH, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
_CUT |= {"vocab_size": VOCAB, "draft_vocab_size": DRAFT, "head_dim": 16}
LLAMA3, QWEN3, QWEN3_VL, QWEN2_5_VL, GEMMA4, GPT_OSS = (
    CONFIGS[f"eagle3 {name}"]
    for name in (
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "AngelSlim/Qwen3-8B_eagle3",
        "AngelSlim/Qwen3-VL-4B-Instruct_eagle3",
        "SpecForge/Qwen2.5-VL-7B-eagle3",
        "RedHatAI/gemma-4-31B-it-speculator.eagle3",
        "SpecForge/gpt-oss-20b-eagle3",
    )
)
EAGLE4 = {  # as NVIDIA-NeMo/Automodel describes its export, over the fields of EAGLE-3
    **{name: value for name, value in QWEN3.items() if name not in ("draft_vocab_size", "target_model_type")},
    "architectures": ["LlamaForCausalLMEagle4"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]},
    "fc_norm": True,
    "norm_output": True,
    "sliding_window": 2048,
}
# vllm-project/speculators, sgl-project/SpecForge
PEAGLE = {**GEMMA4, "architectures": ["PEagleDraftModel"], "embed_requires_grad": True}
PEAGLE |= {"mask_token_id": 99, "speculators_model_type": "peagle"}
PEAGLE_FLAT = {**LLAMA3, "norm_before_residual": True, "ptd_token_id": 98}  # of vLLM


def cut(config, reads=None, **changes):
    """A published configuration with the sizes of the tiny targets; ``changes`` to fields of the layer or the head."""
    made = json.loads(json.dumps(config))
    if "transformer_layer_config" in made:
        layer = made["transformer_layer_config"]
        layer.update({name: value for name, value in _CUT.items() if name in layer})
        made["draft_vocab_size"] = DRAFT
        if reads is not None:
            made["eagle_aux_hidden_state_layer_ids"] = reads
    else:
        layer = made
        made.update(_CUT)
        if reads is not None:
            made["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in reads]}
    if (layer.get("rope_scaling") or {}).get("mrope_section"):
        interleaved = layer["rope_scaling"].get("mrope_interleaved")
        layer["rope_scaling"]["mrope_section"] = [4, 2, 2] if interleaved else [2, 3, 3]
    for name, value in changes.items():
        (layer if name in layer else made)[name] = value
    return made


def head_tensors(config, layout="A", *, embedding=False, device="cpu", seed=0):
    """A checkpoint's tensors in one of the three layouts, by the published code's own shapes."""
    g = torch.Generator().manual_seed(seed)
    layer = {**config, **config.get("transformer_layer_config", {})}
    width, mlp, vocab, draft = (
        layer[n] for n in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    )
    head_dim = layer.get("head_dim") or width // layer["num_attention_heads"]
    inner, keys = layer["num_attention_heads"] * head_dim, layer["num_key_value_heads"] * head_dim
    source = config.get("target_hidden_size") or width
    ids = config.get("eagle_aux_hidden_state_layer_ids") or (config.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    states = len(ids or "123")
    shapes = {"fc.weight": (width, states * source), "norm.weight": (width,), "lm_head.weight": (draft, width)}
    if "LlamaForCausalLMEagle4" in config["architectures"]:
        shapes["efficient_lm_head_down_proj.weight"] = (RANK, width)
        shapes["efficient_lm_head.weight"] = (draft, RANK)
    for number in range(layer.get("num_hidden_layers", 1)):
        at = "midlayer" if layout == "A" else f"layers.{number}"
        read = width if number else 2 * width
        shapes |= {
            f"{at}.self_attn.{n}_proj.weight": (rows, read) for n, rows in zip("qkv", (inner, keys, keys), strict=True)
        }
        shapes[f"{at}.self_attn.o_proj.weight"] = (width, inner)
        shapes |= {f"{at}.mlp.{n}_proj.weight": (mlp, width) for n in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (width, mlp)
        norms = ("input_layernorm", "post_attention_layernorm", *([] if number else ["hidden_norm"]))
        shapes |= {f"{at}.{n}.weight": (width,) for n in norms}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (states * source,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (source,) for i in range(states)}
    if any(name in config for name in MASKS):
        shapes["mask_hidden"] = (1, 1, states * source)
    if embedding:
        shapes["embed_tokens.weight"] = (vocab, width)
    if device == "meta":
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    else:
        tensors = {name: torch.randn(shape, generator=g) * 0.25 for name, shape in shapes.items()}
        for name, value in tensors.items():
            if "norm" in name:
                value += 1.0
    chosen = torch.randperm(vocab, generator=g)[:draft].sort().values
    if layout != "C" or draft != vocab:
        tensors["d2t"] = chosen - torch.arange(draft)
    if layout != "C":
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


class PlainHead:
    """A head that computes the whole sequence at every call, in float32.

    Args:
        config, tensors: of the checkpoint.
        embed: the target's embedding, for a checkpoint without one.
    """

    def __init__(self, config, tensors, embed):
        shape, ours, draft_ids, _ = Eagle3.convert(config, tensors, "here")
        self.network, self.t, self.shape = Eagle3Network(shape), tensors, shape
        for name, tensor in ours.items():  # as it is, so that gradients reach the published tensors
            module, _, leaf = name.rpartition(".")
            owner = self.network.get_submodule(module)
            del owner._parameters[leaf]
            setattr(owner, leaf, tensor)
        self.embed = self.network.embed_tokens if shape.embedding else embed
        self.ids = torch.arange(shape.head) if draft_ids is None else draft_ids

    def logits(self, normed):
        """Over the draft vocabulary, (draft,), from the last entry's normed state; of EAGLE-4, of the candidates."""
        exact = torch.stack([row @ normed for row in self.t["lm_head.weight"]])
        if self.shape.candidates:
            low = self.t["efficient_lm_head_down_proj.weight"] @ normed
            order = sorted(range(len(exact)), key=lambda token: -float(self.t["efficient_lm_head.weight"][token] @ low))
            exact[order[self.shape.candidates :]] = -math.inf
        return exact

    def levels(self, tokens, states, positions, path):
        """Logits over the draft vocabulary before each token of ``path``, and after its last, (draft,) each.

        Args:
            tokens: those of the entries, (length,): one ahead of their states.
            states: the target's, a list of (length, hidden).
            positions: (3, length).
            path: drafted tokens, ids of the target.
        """
        network, shape, found = self.network, self.shape, []
        fed = network.project(torch.cat(states, dim=-1))
        for token in [*path, None]:
            x = network.combine(self.embed(tokens), fed)
            axes = positions if "mrope_section" in shape.rope else positions.amax(0)
            last = whole_pass(network, x, axes, shape.window)[-1]
            found.append(self.logits(network.norm(last)))
            if token is not None:
                feedback = network.norm(last) if shape.norm_output else last
                if shape.parallel:  # the same whatever was drafted
                    token, feedback = shape.mask_token_id, network.project(network.mask_hidden)[0, 0]
                tokens, fed = torch.cat([tokens, torch.tensor([token])]), torch.cat([fed, feedback[None]])
                positions = torch.cat([positions, positions[:, -1:].amax(0, keepdim=True).expand(3, 1) + 1], dim=1)
        return found

    @torch.no_grad()
    def gain(self, tokens, states, positions, path):
        """Path probability of drafted tokens."""
        place = {int(token): row for row, token in enumerate(self.ids)}
        levels = self.levels(tokens, states, positions, path[:-1])
        shares = [float(logits.softmax(-1)[place[token]]) for logits, token in zip(levels, path, strict=True)]
        return math.prod(shares)


def states_read(model, row, said, reads, outputs=False):
    """Inputs (or outputs) of layers at a row's prompt and answer, a list of (length, hidden), and the positions,
    (3, length), by the plain model."""
    seen = plain_pass(model, row, said)
    found = seen.outputs if outputs else [*seen.inputs, seen.outputs[-1]]
    return [found[layer] for layer in reads], seen.positions


def check_head(model, inputs, drafter, config, tensors, reads, outputs=False, **asked):
    """Decode; every tree's every node must have the probability of the plain loop, and every output token be right."""
    plain = PlainHead(config, tensors, model.get_input_embeddings())

    def gains(target, b, said, paths):
        states, positions = states_read(model, row_of(inputs, b), said, reads, outputs)
        if "mrope_section" not in plain.shape.rope:  # plain positions count tokens
            positions = torch.arange(positions.shape[1]).expand(3, -1)
        tokens = torch.cat([row_of(inputs, b)["input_ids"][0], torch.tensor(said)])
        # The next drafted entry has the position of the last emitted token.
        entries = [state[:-1] for state in states]
        return [plain.gain(tokens[1:], entries, positions[:, :-1], path) for path in paths]

    return check_drafts(model, inputs, drafter, gains, **asked)
