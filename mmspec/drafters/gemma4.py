"""Drafter with a Gemma-4 assistant of transformers (``Gemma4AssistantForCausalLM`` and its unified form).

The assistant's layers compute queries only: they attend to the keys and values of the target's last layer of the same
kind. All nodes use the position of the last token, whatever their depth. Inputs are a token's embedding and the
previous state: first the target's last hidden state, then the assistant's output, projected to the target's width.
Nodes of a tree do not attend to each other; a node depends on its ancestors through the state only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, Gemma4AssistantConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, KeysValues, Prompt, SharesKeysValues, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import RowState, TreeDrafter, write_last
from mmspec.drafters.checkpoint import load_stored, read_config
from mmspec.drafters.growth import grow_tree
from mmspec.drafters.layer import take
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError, explained
from mmspec.ops import kernels
from mmspec.targets import gguf_models
from mmspec.targets.attention import set_attention
from mmspec.targets.checkpoints import read_whole
from mmspec.targets.gguf_file import GGUFFile, opened
from mmspec.targets.gguf_keys import Keys
from mmspec.targets.packing import drafter_kind, pack_drafter
from mmspec.targets.support import without_output_capture
from mmspec.targets.transformers_target import sharded
from mmspec.targets.tree_layers import replaced

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


_ATTENTION = "mmspec_shared"


def shared_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function with transformers' signature, without dropout.

    Args:
        key, value: (batch, kv_heads, slots, head_dim), not repeated.
        attention_mask: (batch, 1, nodes, slots) bool.

    Returns:
        (batch, nodes, heads, head_dim), and None instead of weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.unflatten(1, (key.shape[1], -1)) @ key[:, :, None].transpose(-1, -2) * scale
    weights = scores.float().masked_fill(~attention_mask[:, None], -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, shared_attention)


class Gemma4(TreeDrafter):
    """Gemma-4 assistant drafter.

    Args:
        model: the assistant; its weights are shared, and moved to the target's device and dtype.

    Raises:
        UserError: the model is not a Gemma-4 assistant.
    """

    name: ClassVar[str] = "gemma4"
    features: Sequence[Feature] = ("last",)

    def __init__(self, model: PreTrainedModel, **tree: int) -> None:
        if model.config.model_type not in MODEL_TYPES:
            raise UserError(f"gemma4 takes a model of type {', '.join(MODEL_TYPES)}: got {model.config.model_type}")
        network: Any = without_output_capture(model).eval()
        set_attention(network, _ATTENTION)
        self._text = network.config.get_text_config()
        self._sources: dict[str, int] = {}  # target layer per kind of layer
        super().__init__(network, **tree)

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Self:
        """Load an assistant's folder or GGUF file; raises ``UserError`` if it is invalid."""
        with sharing_allowed():
            stored = opened(folder)
            return cls(read_stored(stored) if stored else read_whole(AutoModelForCausalLM, str(folder)))

    def place(self, target: Target, probe: Tensor) -> None:
        self._sources = self._checked_sources(target)
        network = self.network
        rotary, like = network.model.rotary_emb, probe.new_empty(0)
        frequencies = dict(rotary.named_buffers())  # frequencies must stay float32
        if network.masked_embedding is None:
            pack_drafter(network, like, drafter_kind(target, like))
        else:  # gathers rows of its output layer
            network.to(like)
            pack_drafter(network.model, like, drafter_kind(target, like))
        for name, value in frequencies.items():
            setattr(rotary, name, value.to(like.device))

    def _checked_sources(self, target: Target) -> dict[str, int]:
        """Target layer whose keys and values each kind of layer reads. Raises ``UserError``: the assistant does not
        match the target."""
        config: Any = getattr(target, "config", None)
        width, vocab = self.network.backbone_hidden_size, self._text.vocab_size
        if not isinstance(target, SharesKeysValues) or config is None:
            raise UserError("gemma4 requires a target that shares its keys and values: this one does not")
        if sharded(target):
            raise UserError("gemma4 reads the keys and values of all heads: got a target that is sharded over ranks")
        fits = (width, vocab) == (config.hidden_size, config.vocab_size)
        expected = [f"hidden size {width} and {vocab} tokens"]
        received = [f"hidden size {config.hidden_size} and {config.vocab_size} tokens"]
        own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * own
        sources = {kind: number for number, kind in enumerate(kinds[:own])}  # the last layer of each kind
        for number, kind in enumerate(self._text.layer_types):
            wanted, found = _shape(self._text, number), None
            if kind in sources:
                found = _shape(config, sources[kind])
            if wanted != found and fits:
                fits = False
                expected.append(f"{kind} with (kv_heads, head_dim) {wanted}")
                received.append(f"{kind} with {found}" if found else f"no {kind}")
        if not fits:
            raise UserError(
                f"the assistant was trained for a target of {', '.join(expected)}: got {config.model_type} with "
                f"{', '.join(received)}"
            )
        return {kind: sources[kind] for kind in self._text.layer_types}

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        self._state = RowTensor(static_shapes)  # (rows, hidden), target state at each row's second-to-last token

    @property
    def parts(self) -> tuple[RowState, ...]:
        return (self._state,)

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self.join(len(history), kernels.static_shapes(prompt.input_ids.device))
        self._state.append(output.features["last"][:, -1])

    @property
    def _version(self) -> tuple[Any, ...]:
        source = next(iter(self._sources.values()))
        return *super()._version, self._shared.keys_values(source, 1).version

    @property
    def _shared(self) -> SharesKeysValues:
        assert isinstance(self._target, SharesKeysValues), "attach comes first"
        return self._target

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the target's hidden states on the accepted path."""
        self.queue((take(output.features["last"], verdict.path.clamp(min=0)),), verdict)

    def update(self, states: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Store the last target state of the accepted path, from (batch, width, hidden)."""
        write_last(self._state, states, length)

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        shared = {kind: self._shared.keys_values(layer, len(token)) for kind, layer in self._sources.items()}
        masks = {kind: self._mask(kind, states) for kind, states in shared.items()}
        any_of = next(iter(shared.values()))

        def read(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
            """Run the assistant: hidden states of nodes, (batch, nodes, any)."""
            x = torch.cat([self.target.embed(tokens).to(states.dtype), states], dim=-1)
            hidden = self.network.model(
                inputs_embeds=self.network.pre_projection(x),
                attention_mask={kind: mask.expand(-1, -1, x.shape[1], -1) for kind, mask in masks.items()},
                position_ids=any_of.lengths[:, None].expand(tokens.shape),
                shared_kv_states={kind: (one.keys, one.values) for kind, one in shared.items()},
                use_cache=False,
                logits_to_keep=slice(None),  # an integer drops nodes, and fails without per-layer embeddings
            ).last_hidden_state
            return hidden, self.network.post_projection(hidden)

        states = self._state.data[: len(token), None]

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal states
            hidden, states = read(beam, take(states, origin))
            return self._children(hidden)

        return grow_tree(token, None, extend, plan, self.top_k, depth=self.depth, nodes=self.total_tokens)

    def _mask(self, kind: str, shared: KeysValues) -> Tensor:
        """The target's slots that every node attends to, (batch, 1, 1, slots) bool."""
        slots = torch.arange(shared.keys.shape[2], device=shared.keys.device)
        lengths = shared.lengths[:, None]
        allowed = slots < lengths
        if kind == "sliding_attention":  # the last slot and the window before it, like transformers
            allowed = allowed & (slots >= lengths - 1 - self._text.sliding_window)
        # Idle rows attend to slot 0: a fully masked row would be NaN.
        return (allowed | ((lengths == 0) & (slots == 0)))[:, None, None]

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k tokens and log probabilities of hidden states, among the nearest centroids of a masked embedding."""
        centroids = self.network.masked_embedding
        if centroids is None:
            return ops.top_log_probs(self.network.lm_head(hidden), self.top_k)
        nearest = centroids.centroids(hidden).topk(centroids.centroid_intermediate_top_k, dim=-1).indices
        ids = centroids.token_ordering.long().view(centroids.num_centroids, -1)[nearest].flatten(-2)
        logits = (self.network.lm_head.weight[ids] @ hidden[..., None])[..., 0]
        at, log_probs = ops.top_log_probs(logits, self.top_k)
        return ids.gather(-1, at), log_probs


class _AllShared(property):
    """``kv_sharing_modes`` that lets all layers of a text model share keys and values."""

    def __init__(self, original: Any) -> None:
        self.__wrapped__ = original
        super().__init__(self._modes)

    def _modes(self, config: Any) -> list[str | None]:
        layers = config.num_hidden_layers
        modes: list[str | None] = self.__wrapped__.fget(config) if config.num_kv_shared_layers < layers else []
        return modes or ["reuse"] * layers


def sharing_allowed() -> AbstractContextManager[None]:
    """Patch for assistants: transformers 5.23 rejects text models whose layers all share keys and values."""
    kinds = [getattr(transformers, name, None) for name in ("Gemma4TextConfig", "Gemma4UnifiedTextConfig")]
    return replaced({(kind, "kv_sharing_modes"): _AllShared for kind in kinds if hasattr(kind, "kv_sharing_modes")})


_STORED = "gemma4-assistant"  # llama.cpp's architecture


def read_stored(file: GGUFFile) -> PreTrainedModel:
    """The assistant in a GGUF file of llama.cpp's converter, which leaves out centroids. Raises ``UserError``: another
    architecture, or keys or tensors that no such assistant has, or lacks."""
    if (name := file.architecture()) != _STORED:
        raise UserError(f"cannot load drafter {str(file.path)!r}: expected the architecture {_STORED}, found {name!r}")
    target = gguf_models.ARCHITECTURES["gemma4"]

    def more(keys: Keys) -> dict[str, Any]:
        found = {**target.more(keys), "vocab_size_per_layer_input": 0}
        found["attention_k_eq_v"] = found["num_key_value_heads"] != found["num_global_key_value_heads"]
        return {**found, "backbone_hidden_size": keys("embedding_length_out")}

    names = {f"nextn.{name}_projection": f"{name}_projection" for name in ("pre", "post")}
    row = replace(target, more=more, outer={**target.outer, **names})
    text = gguf_models.read_config(file, row)[0]
    own = {name: getattr(text, name) for name in ("backbone_hidden_size", "tie_word_embeddings")}
    with explained(f"cannot load drafter {str(file.path)!r}", ValueError), no_init_weights():
        model = AutoModelForCausalLM.from_config(Gemma4AssistantConfig(text_config=text, **own))
    load_stored(model, gguf_models.read_weights(file, model, row), model.all_tied_weights_keys, "an assistant", file)
    model.tie_weights()
    return model


def _shape(config: Any, layer: int) -> tuple[int, int]:
    """Number and size of a layer's key heads, according to a configuration."""
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, size


def recognises(folder: Path) -> bool:
    """Whether a folder or GGUF file has an assistant."""
    stored = opened(folder)
    return stored.architecture() == _STORED if stored else (read_config(folder) or {}).get("model_type") in MODEL_TYPES


SPEC = DrafterSpec(
    "gemma4",
    "Gemma-4 assistant",
    "a few layers that attend to the target's own keys and values, published with Gemma 4",
    Gemma4,
    weights="published",
    recognises=recognises,
)
