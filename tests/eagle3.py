"""EAGLE-3 heads as published, at small sizes, and their network as plain loops say it, without a cache."""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import save_file

from tests.draft_checks import check_drafts
from tests.targets import row_of

VOCAB, DRAFT, WIDTH, RANK = 101, 40, 48, 20
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")  # of P-EAGLE

# Published fields, with sizes cut: heads of 16 features for a width of 48.
_CUT = {
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT,
    "head_dim": 16,
}
LLAMA3 = {  # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
QWEN3 = {  # AngelSlim/Qwen3-8B_eagle3
    **{name: value for name, value in LLAMA3.items() if name not in ("pad_token_id", "transformers_version")},
    "architectures": ["Eagle3LlamaForCausalLM"],
    "target_model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "vocab_size": 151936,
}
QWEN3_VL = {  # AngelSlim/Qwen3-VL-4B-Instruct_eagle3
    **QWEN3,
    "target_model_type": "qwen3_vl",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 262144,
    "rope_scaling": {
        "type": "default",
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
    },
    "rope_theta": 5000000,
    "tie_word_embeddings": True,
}
QWEN2_5_VL = {  # of sgl-project/SpecForge
    **QWEN3,
    "architectures": ["LlamaForCausalLMEagle3"],
    "target_model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 8192,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GEMMA4 = {  # RedHatAI/gemma-4-31B-it-speculator.eagle3
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": 32000,
    "eagle_aux_hidden_state_layer_ids": [2, 30, 57],
    "embed_requires_grad": False,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": [], "name_or_path": "google/gemma-4-31B-it"},
    },
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "max_position_embeddings": 262144,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": 262144,
    },
}
GPT_OSS = {  # of sgl-project/SpecForge
    **LLAMA3,
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]},
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 17280,
    "max_position_embeddings": 4096,
    "num_attention_heads": 64,
    "vocab_size": 201088,
}
EAGLE4 = {  # as NVIDIA-NeMo/Automodel describes its export, over the fields of EAGLE-3
    **{name: value for name, value in QWEN3.items() if name not in ("draft_vocab_size", "target_model_type")},
    "architectures": ["LlamaForCausalLMEagle4"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]},
    "fc_norm": True,
    "norm_output": True,
    "sliding_window": 2048,
}
PEAGLE = {  # vllm-project/speculators, sgl-project/SpecForge
    **GEMMA4,
    "architectures": ["PEagleDraftModel"],
    "embed_requires_grad": True,
    "mask_token_id": 99,
    "speculators_model_type": "peagle",
}
PEAGLE_FLAT = {  # of vLLM
    **LLAMA3,
    "architectures": ["LlamaForCausalLMEagle3"],
    "norm_before_residual": True,
    "ptd_token_id": 98,
}


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


def write_head(folder, config, tensors, kind="safetensors"):
    """A folder as it lies on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


class PlainHead:
    """A head by loops over its published tensors, in float32; every call computes the whole sequence.

    Args:
        config, tensors: of the checkpoint.
        embed: the target's embedding, for a checkpoint without one.
    """

    def __init__(self, config, tensors, embed):
        self.layer = {**config, **config.get("transformer_layer_config", {})}
        self.config, self.t, self.embed = config, tensors, embed
        if "embed_tokens.weight" in tensors:
            self.embed = lambda ids: tensors["embed_tokens.weight"][ids]
        self.ids = torch.arange(len(tensors["lm_head.weight"])) + tensors.get("d2t", 0)
        self.heads, self.kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        self.head_dim = self.layer["head_dim"]

    def norm(self, x, name):
        eps = self.layer["rms_norm_eps"]
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.t[f"{name}.weight"]

    def fuse(self, states):
        """A list of the target's states, (length, hidden) each, as one."""
        if self.config.get("fc_norm"):
            states = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)]
        whole = torch.cat(states, dim=-1)
        if self.config.get("norm_before_fc"):
            whole = self.norm(whole, "input_norm")
        return whole @ self.t["fc.weight"].T

    def turn(self, x, positions):
        """(length, heads, head_dim) by positions (3, length)."""
        rope = {**(self.layer.get("rope_scaling") or {}), **(self.layer.get("rope_parameters") or {})}
        theta = self.layer.get("rope_theta") or rope.get("rope_theta") or 10000.0
        half, section = self.head_dim // 2, rope.get("mrope_section")
        angles = torch.empty(x.shape[0], half)
        for i in range(half):
            axis = 0
            if section and rope.get("mrope_interleaved"):
                axis = next((a for a in (1, 2) if i % 3 == a and i < 3 * section[a]), 0)
            elif section:
                axis = 0 if i < section[0] else 1 if i < section[0] + section[1] else 2
            angles[:, i] = positions[axis] * theta ** (-i / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    def attention(self, x, at, positions):
        q, k, v = ((x @ self.t[f"{at}.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, self.head_dim)) for n in "qkv")
        q, k, read = self.turn(q, positions), self.turn(k, positions), []
        for head in range(self.heads):
            own = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, own].T / math.sqrt(self.head_dim)
            for i in range(len(x)):
                for j in range(len(x)):
                    if j > i or i - j >= (self.layer.get("sliding_window") or len(x)):
                        scores[i, j] = -math.inf
            read.append(scores.softmax(-1) @ v[:, own])
        return torch.cat(read, dim=-1) @ self.t[f"{at}.self_attn.o_proj.weight"].T

    def outputs(self, tokens, states, positions):
        """The last layer's output at every entry, (length, hidden)."""
        x = None
        for number in range(self.layer.get("num_hidden_layers", 1)):
            at = "midlayer" if "midlayer.hidden_norm.weight" in self.t else f"layers.{number}"
            if number == 0:
                normed = self.norm(states, f"{at}.hidden_norm")
                read = torch.cat([self.norm(self.embed(tokens), f"{at}.input_layernorm"), normed], dim=-1)
                residual = normed if self.config.get("norm_before_residual") else states
            else:
                read, residual = self.norm(x, f"{at}.input_layernorm"), x
            x = residual + self.attention(read, at, positions)
            inner = self.norm(x, f"{at}.post_attention_layernorm")
            gate = inner @ self.t[f"{at}.mlp.gate_proj.weight"].T
            up = inner @ self.t[f"{at}.mlp.up_proj.weight"].T
            x = x + (gate * gate.sigmoid() * up) @ self.t[f"{at}.mlp.down_proj.weight"].T
        return x

    def logits(self, normed):
        """Over the draft vocabulary, (draft,), from the last entry's normed state; of EAGLE-4, of the candidates."""
        exact = torch.stack([row @ normed for row in self.t["lm_head.weight"]])
        if "efficient_lm_head.weight" not in self.t:
            return exact
        low = self.t["efficient_lm_head_down_proj.weight"] @ normed
        order = sorted(range(len(exact)), key=lambda token: -float(self.t["efficient_lm_head.weight"][token] @ low))
        for token in order[self.config["num_candidates"] :]:
            exact[token] = -math.inf
        return exact

    def levels(self, tokens, states, positions, path):
        """Logits over the draft vocabulary before each token of ``path``, and after its last, (draft,) each.

        Args:
            tokens: those of the entries, (length,): one ahead of their states.
            states: the target's, a list of (length, hidden).
            positions: (3, length).
            path: drafted tokens, ids of the target.
        """
        fed, found = self.fuse(states), []
        masked = "mask_hidden" in self.t
        for token in [*path, None]:
            last = self.outputs(tokens, fed, positions)[-1]
            normed = self.norm(last, "norm")
            found.append(self.logits(normed))
            if token is not None:
                feedback = normed if self.config.get("norm_output") else last
                if masked:  # P-EAGLE feeds the same whatever was drafted
                    parts = self.t["mask_hidden"][0].chunk(len(states), dim=-1)
                    token = next(self.config[name] for name in MASKS if name in self.config)
                    feedback = self.fuse(list(parts))[0]
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
    """Inputs (or outputs) of layers at a row's prompt and what was said, and the positions, by the plain model.

    Returns:
        A list of (length, hidden), and (3, length).
    """
    extended = dict(row)
    extended["input_ids"] = torch.cat([row["input_ids"], torch.tensor([said], dtype=torch.long)], dim=1)
    if "mm_token_type_ids" in row:
        extended["mm_token_type_ids"] = torch.nn.functional.pad(row["mm_token_type_ids"], (0, len(said)))
    decoder, seen, given = model.get_decoder(), {}, {}
    layers = decoder.layers

    def before(number):
        return lambda _, args, kwargs: seen.update({number: args[0] if args else kwargs["hidden_states"]})

    def after(number):
        return lambda _, args, out: seen.update({number: out[0] if isinstance(out, tuple) else out})

    hooks = [decoder.register_forward_pre_hook(lambda _, a, kw: given.update(kw), with_kwargs=True)]
    for layer in reads:
        if outputs:
            hooks.append(layers[layer].register_forward_hook(after(layer)))
        elif layer == len(layers):
            hooks.append(layers[-1].register_forward_hook(after(layer)))
        else:
            hooks.append(layers[layer].register_forward_pre_hook(before(layer), with_kwargs=True))
    with torch.no_grad():
        model(**extended, use_cache=False)
    for hook in hooks:
        hook.remove()
    length = extended["input_ids"].shape[1]
    positions = given.get("position_ids")
    if positions is None or positions.ndim < 3:
        positions = torch.arange(length).expand(3, 1, length)
    return [seen[layer][0] for layer in reads], positions[-3:, 0]


def check_head(model, inputs, drafter, config, tensors, reads, outputs=False, **asked):
    """Decode; every tree's every node must have the probability of the plain loop, and every output token be right."""
    rows = [row_of(inputs, b) for b in range(inputs["input_ids"].shape[0])]
    plain = PlainHead(config, tensors, model.get_input_embeddings())

    def gains(target, b, said, paths):
        states, positions = states_read(model, rows[b], said, reads, outputs)
        if not (plain.layer.get("rope_scaling") or {}).get("mrope_section"):  # plain positions count tokens
            positions = torch.arange(positions.shape[1]).expand(3, -1)
        tokens = torch.cat([rows[b]["input_ids"][0], torch.tensor(said)])
        # The next drafted entry stands at the position of the last token said.
        entries = [state[:-1] for state in states]
        return [plain.gain(tokens[1:], entries, positions[:, :-1], path) for path in paths]

    return check_drafts(model, inputs, drafter, gains, **asked)
