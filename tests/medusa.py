"""Published Medusa and Hydra heads, and plain loops over their tensors."""

from __future__ import annotations

import copy

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaModel

from tests import published as published_files
from tests.draft_checks import check_drafts, plain_pass
from tests.targets import row_of
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB

WIDTH, HEADS, LAYERS = 48, 3, 2
MAP = torch.arange(4, 80, 2)
COPIES = ("input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight")  # of the target's embedding
LAYOUTS = ["medusa", "tgi", "vllm", "vllm-map", "vllm-narrow", "vllm-shared", "hydra", "hydra-free", "hydra-prefix"]


def parts(layout, head, layer):
    """Names of a residual layer, its projection and the head's output layer."""
    if layout.startswith("hydra"):
        number = 2 * layer + 1 if layout == "hydra-prefix" else layer
        output = f"hydra_lm_head.{head}" + ".1" * (layout == "hydra-prefix")
        return f"hydra_mlp.{head}.{number}.linear", f"hydra_mlp.{head}.{number}.res_connection", output
    if layout.startswith("vllm"):
        return f"blocks.{head}.layers.{layer}", "", f"lm_heads.{head}"
    return f"{head}.{layer}.linear", "", f"{head}.{LAYERS}"


def published(layout, heads=HEADS, full=None):
    """Contents of a checkpoint's files: configuration and tensors.

    Args:
        full: configuration of a target of full size, for tensors without contents.
    """
    g = torch.Generator().manual_seed(0)
    width, vocab = (WIDTH, VOCAB) if full is None else (full.hidden_size, full.vocab_size)

    def random(*shape):
        return torch.empty(shape, device="meta") if full else torch.randn(shape, generator=g) * 0.25

    grounded, tensors = layout in ("hydra", "hydra-prefix"), {}
    for head in range(heads):
        for layer in range(LAYERS):
            read = width * (head + 2 if grounded and not layer else 1)
            linear, projection, output = parts(layout, head, layer)
            for name in (linear, projection) if grounded and not layer else (linear,):
                tensors[f"{name}.weight"] = random(width, read)
                if layout not in ("vllm", "vllm-narrow", "vllm-shared"):
                    tensors[f"{name}.bias"] = random(width)
        if layout not in ("tgi", "vllm-shared"):
            tensors[f"{output}.weight"] = random(len(MAP) if layout == "vllm-narrow" else vocab, width)
        if layout.startswith("hydra"):
            tensors[f"{output}.bias"] = random(vocab)
    if layout.startswith("hydra"):
        tensors["input_embed_fn.weight"] = random(vocab, width)  # a copy of the target's, which is not read
    if layout == "hydra-prefix":
        tensors |= {f"prefix_embeding_layer.{name}": value for name, value in prefix(full).state_dict().items()}
    if layout in ("vllm-map", "vllm-narrow"):
        tensors["token_map"] = MAP
    if layout == "vllm-shared":
        tensors["lm_heads.0.weight"] = shared_model("llama").get_output_embeddings().weight.detach().clone()
    return configuration(layout, heads), tensors


def configuration(layout, heads):
    if layout.startswith("hydra"):
        own = {"hydra_head_arch": "prefix-mlp" if layout == "hydra-prefix" else "mlp", "hidden_state_offset": 0}
        own |= {"hydra_num_heads": heads, "hydra_num_layers": LAYERS, "grounded_heads": layout != "hydra-free"}
        return {**own, "base_model_name_or_path": "base"}
    if layout.startswith("vllm"):
        own = {"model_type": "medusa", "num_heads": heads, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
        shared = {"original_lm_head": layout == "vllm-shared", "medusa_fc_bias": layout == "vllm-map"}
        return {**own, **shared, "hidden_size": WIDTH, "architectures": ["MedusaModel"]}
    return {"medusa_num_heads": heads, "medusa_num_layers": LAYERS, "base_model_name_or_path": "base"}


def prefix(full=None):
    """The decoder layer of Hydra++, of transformers' Llama."""
    config = copy.deepcopy(full or shared_model("llama").config)
    config.num_hidden_layers = 1
    torch.manual_seed(5)
    with torch.device("meta" if full else "cpu"):
        model = LlamaModel(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model.eval()


def write(folder, layout, config, tensors):
    """A folder as it lies on the hub."""
    if layout.startswith("vllm"):
        return published_files.write(folder, config, tensors)
    published_files.write(folder, config, {"lm_head.weight": torch.zeros(2, 2)})  # the target and its heads
    if layout == "tgi":
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    else:
        torch.save(tensors, folder / ("hydra_lm_head.pt" if layout.startswith("hydra") else "medusa_lm_head.pt"))
    return folder


@torch.no_grad()
def logits(layout, tensors, head, state, embeds, output):
    """Logits of a head from what it reads, (hidden,), and the embeddings of the tokens after that.

    Args:
        output: the target's output layer.
    """
    x = torch.cat([state, *embeds]) if layout in ("hydra", "hydra-prefix") else state
    for layer in range(LAYERS):
        linear, projection, own = parts(layout, head, layer)

        def apply(name, x=x):
            return tensors[f"{name}.weight"] @ x + tensors.get(f"{name}.bias", 0)

        x = (apply(projection) if f"{projection}.weight" in tensors else x) + F.silu(apply(linear))
    if layout in ("tgi", "vllm-shared"):
        return output(x)
    scores = tensors[f"{own}.weight"] @ x + tensors.get(f"{own}.bias", 0)
    return scores[MAP] if layout == "vllm-map" else scores


def check_heads(layout, tensors, model, inputs, drafter, **asked):
    """Decode; every node must have the probability of the plain loop, and every output token be right."""
    index = {int(token): number for number, token in enumerate(MAP)}

    @torch.no_grad()
    def gains(target, b, said, paths):
        state = plain_pass(model, row_of(inputs, b), said[:-1]).last
        if layout == "hydra-prefix":  # heads read the states after a decoder layer
            state = prefix()(inputs_embeds=state[None]).last_hidden_state[0]
        found = []
        for path in paths:
            gain = 1.0
            for head, token in enumerate(path):
                embeds = target.embed(torch.tensor([said[-1], *path[:head]]))
                probs = logits(layout, tensors, head, state[-1], embeds, target.head).softmax(-1)
                gain *= float(probs[index[token] if "token_map" in tensors else token])
            found.append(gain)
        return found

    return check_drafts(model, inputs, drafter, gains, **asked)
