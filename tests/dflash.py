"""DFlash checkpoints in every layout, and transformers' implementation of the network as the reference."""

from __future__ import annotations

import math

import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from tests.draft_checks import check_drafts, plain_pass
from tests.published import CONFIGS, write  # noqa: F401, for tests of these checkpoints
from tests.targets import CACHE, row_of
from tests.tiny.configs import VOCAB

BLOCK, MASK, WIDTH = 5, 99, 48
_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def reference(seed=0, **changes):
    """A random network of transformers: two layers, the second with a window."""
    torch.manual_seed(seed)
    shape = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    settings = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [1, 0], "sliding_window": 3}
    kinds = ["full_attention", "sliding_attention"]
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    model = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{**shape, **settings, "intermediate_size": 40, "num_hidden_layers": 2, "layer_types": kinds}
            | {"rope_parameters": rope, "pad_token_id": None, **changes}
        )
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model.eval()


def published(model, layout, **changes):
    """Contents of a checkpoint's files: configuration and tensors."""
    tensors, config = dict(model.state_dict()), model.config.to_dict()
    if layout == "transformers":
        return {**config, "architectures": ["MuseGlimmerAssistantModel"], **changes}, tensors
    for theirs, name in _NAMES.items():
        tensors = {key.replace(theirs, name): value for key, value in tensors.items()}
    shape = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    shape += ("num_hidden_layers", "layer_types", "sliding_window", "rms_norm_eps", "hidden_act")
    layer = {name: config[name] for name in shape} | {"vocab_size": VOCAB}
    ids, theta = config["target_layer_ids"], config["rope_parameters"]["rope_theta"]
    if layout == "z-lab":
        own = {"target_layer_ids": ids, "mask_token_id": config["mask_token_id"]}
        named = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_target_layers": 2}
        named["is_causal"] = False
        return {**layer, "rope_theta": theta, "block_size": BLOCK, "dflash_config": own, **named, **changes}, tensors
    layer["rope_parameters"] = config["rope_parameters"]
    own = {"aux_hidden_state_layer_ids": [one + 1 for one in ids], "mask_token_id": config["mask_token_id"]}
    named = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "block_size": BLOCK}
    named["sliding_window_non_causal"] = True
    return {**named, **own, **changes}, tensors


def cut(config):
    """A published configuration at the reference's sizes, without further fields."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "intermediate_size": 40, "vocab_size": VOCAB, "block_size": BLOCK, "markov_rank": 6}
    sizes |= {"mask_token_id": MASK, "target_layer_ids": [1, 0], "layer_types": ["full_attention"] * 2}
    return {name: cut(value) if name == "dflash_config" else sizes.get(name, value) for name, value in config.items()}


def with_heads(config, tensors, rank=6, confidence="markov", outputs=VOCAB, seed=3, kind="vanilla", from_anchor=True):
    """A checkpoint with the heads of DSpark, as speculators and DeepSpec write them."""
    g = torch.Generator().manual_seed(seed)
    own = {"sample_from_anchor": from_anchor, "markov_rank": rank, "enable_confidence_head": confidence != "none"}
    own |= {"confidence_head_with_markov": confidence == "markov", "markov_head_type": kind}
    named = {"speculators_model_type": "dspark"} if "speculators_model_type" in config else {}
    made = {**config, "architectures": ["DSparkDraftModel"], **named, **own}
    shapes = {}
    if kind == "xpress":
        made |= {"architectures": ["XPressSpeculator"], "xpress_rank": made.pop("markov_rank")}
        del made["markov_head_type"]
        names = {
            "token_embed": (VOCAB, rank),
            "down_h": (rank, WIDTH),
            "down_g": (rank, WIDTH),
            "readout": (outputs, rank),
        }
        names |= {"in_proj": (rank, 3 * rank), "mlp_down": (rank, 2 * rank)}
        names |= dict.fromkeys(("mlp_gate", "mlp_up"), (2 * rank, rank))
        shapes |= {f"refiner_head.{name}.weight": shape for name, shape in names.items()}
        shapes["refiner_head.mix_l"] = (rank, BLOCK, BLOCK)
    elif rank:
        shapes |= {f"markov_head.markov_{one}.weight": (n, rank) for one, n in (("w1", VOCAB), ("w2", outputs))}
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, WIDTH + rank), "markov_head.gate_proj.bias": (rank,)}
    if kind == "rnn":
        read = 2 * rank + WIDTH
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, read), "markov_head.joint_proj.bias": (3 * rank,)}
    if confidence != "none":
        read = WIDTH + rank * (confidence == "markov")
        shapes |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    return made, {**tensors, **{name: torch.randn(shape, generator=g) for name, shape in shapes.items()}}


@torch.no_grad()
def block_states(model, target, states, positions, last, causal=()):
    """The reference's states of a block, (block, hidden): one pass over whole context and block.

    Args:
        causal: kinds of layers that do not attend to later positions.
    """
    cache, length, size = DFlashCache(config=model.config), len(positions), model.config.block_size
    cache.set_previous_accepted_tokens(length)
    tokens = torch.tensor([[last, *[model.config.mask_token_id] * (size - 1)]])
    mask = None
    if causal:
        before = (length + torch.arange(size))[:, None] - torch.arange(length + size)
        near = before.abs() <= model.config.sliding_window
        mask = {"full_attention": torch.ones_like(near), "sliding_attention": near}
        mask = {kind: one & (before >= 0) if kind in causal else one for kind, one in mask.items()}
        mask = {kind: torch.zeros(one.shape).masked_fill(~one, -math.inf)[None, None] for kind, one in mask.items()}
    return model(
        noise_embeds=target.model.get_input_embeddings()(tokens),
        context_hidden_states=torch.cat(states, dim=-1)[None],
        attention_mask=mask,
        position_ids=torch.cat([positions, positions.max() + 1 + torch.arange(size)])[None],
        **{CACHE: cache},
    ).last_hidden_state[0]


def refined_logits(tensors, states, tokens, mean):
    """XPress' correction, as ``markov_logits``; ``mean`` is that of all states of the block."""
    own = {name.split(".")[1]: tensor for name, tensor in tensors.items() if "refiner_head." in name}
    found = [
        own["in_proj"] @ torch.cat([own["down_h"] @ state, own["down_g"] @ mean, own["token_embed"][token]])
        for state, token in zip(states, tokens, strict=True)
    ]
    last = len(found) - 1
    mixed = found[last] + sum(own["mix_l"][:, last, place] * one for place, one in enumerate(found))
    gate = own["mlp_gate"] @ mixed
    return own["readout"] @ (mixed + own["mlp_down"] @ (gate / (1 + (-gate).exp()) * (own["mlp_up"] @ mixed)))


def markov_logits(tensors, states, tokens):
    """The Markov head's correction at the last of a block's first positions, given the token before each of them."""
    own = {name.removeprefix("markov_head."): tensor for name, tensor in tensors.items() if "markov_head." in name}
    memory = torch.zeros(own["markov_w1.weight"].shape[1])
    for state, token in zip(states, tokens, strict=True):
        embed = latent = own["markov_w1.weight"][token]
        if "gate_proj.weight" in own:
            read = own["gate_proj.weight"] @ torch.cat([state, embed]) + own["gate_proj.bias"]
            latent = embed / (1 + (-read).exp())
        if "joint_proj.weight" in own:
            read = own["joint_proj.weight"] @ torch.cat([memory, embed, state]) + own["joint_proj.bias"]
            gate, candidate, out = read.chunk(3)
            kept = 1 / (1 + (-gate).exp())
            memory, latent = kept * memory + (1 - kept) * candidate.tanh(), out.tanh()
    return own["markov_w2.weight"] @ latent


@torch.no_grad()
def path_gain(block, scores, tensors, last, path, index, first):
    """Probability of a path of tokens, slot by slot, with the heads of DSpark that ``tensors`` has.

    Args:
        block: the network's states.
        scores: of each slot, the output layer's.
        index: the row of the output layer of each token.
        first: position of the first slot in the block.
    """
    gain, heads = 1.0, {name: tensor for name, tensor in tensors.items() if "_head." in name}
    for slot, token in enumerate(path):
        logits, at = scores[slot], first + slot
        read, before = block[at], [*[last] * first, last, *path[:slot]]
        if "markov_head.markov_w1.weight" in heads:
            logits = logits + markov_logits(heads, block[: at + 1], before)
        if "confidence_head.proj.weight" in heads:
            weight = heads["confidence_head.proj.weight"][0]
            if len(weight) > WIDTH:
                read = torch.cat([read, heads["markov_head.markov_w1.weight"][before[-1]]])
            gain *= float((weight @ read + heads["confidence_head.proj.bias"][0]).sigmoid())
        gain *= float(logits.softmax(0)[index[token]])
    return gain


def check_blocks(model, inputs, drafter, plain, *, tensors=None, causal=(), ids=None, head=None, **asked):
    """Decode; every node must have the probability of the reference, and every output token be right.

    Args:
        tensors: of a checkpoint with the heads of DSpark.
    """
    first = drafter.network.config.first
    last = len(model.get_decoder().layers) - 1

    def gains(target, b, said, paths):
        seen = plain_pass(model, row_of(inputs, b), said[:-1])
        # The last layer's output is read after its norm.
        read = [seen.last if layer == last else seen.outputs[layer] for layer in plain.config.target_layer_ids]
        block = block_states(plain, target, read, seen.positions.amax(0), said[-1], causal)
        with torch.no_grad():
            scores = (target.head if head is None else head)(block[first:])
        index = {token: number for number, token in enumerate(range(scores.shape[1]) if ids is None else ids)}
        return [path_gain(block, scores, tensors or {}, said[-1], path, index, first) for path in paths]

    return check_drafts(model, inputs, drafter, gains, **asked)


def selector_tensors():
    """Random tensors of DFlash2's selector of rank 6 and its convolutions of 2 tokens in groups of 16 features."""
    generator = torch.Generator().manual_seed(5)
    shapes = {f"candidate_selector.{at}_codebook": (VOCAB, 6) for at in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (6, WIDTH)
    for place in (f"layers.{layer}.{part}_conv" for layer in range(2) for part in ("attention", "mlp")):
        shapes |= {f"{place}.base_kernel": (2, 2, WIDTH), f"{place}.kernel_projection.weight": (12, WIDTH)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
