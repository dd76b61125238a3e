"""The model whose output is kept exact, as the engine sees it, and the adapter that makes any decoder-only model of
transformers one, unmodified.

A target absorbs the prompt, checks trees and keeps accepted paths. Its caches are its own; the engine sees logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mmspec.budget import CostTable
from mmspec.cache import TreeCache
from mmspec.errors import UserError
from mmspec.tree import TokenTree
from mmspec.verify import Verdict


@dataclass
class Prompt:
    """What generation starts from.

    Attributes:
        input_ids: (batch, length) int64, left-padded.
        attention_mask: (batch, length), 0 at padding; None when there is none.
    inputs: what else the model's forward takes at the prompt (``pixel_values``, ``image_sizes``, ...).
    padding_in_history: show logits processors the padding too, as transformers' ``generate`` does.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    padding_in_history: bool = False

    def histories(self) -> list[list[int]]:
        """The token ids that each row starts from."""
        rows = self.input_ids.tolist()
        if self.attention_mask is None or self.padding_in_history:
            return rows
        keep = self.attention_mask.tolist()
        return [[t for t, k in zip(row, mask, strict=True) if k] for row, mask in zip(rows, keep, strict=True)]


@dataclass
class Step:
    """What one pass of the target gives.

    Attributes:
        logits: (batch, nodes, vocab), raw; after a prefill, nodes = 1: the last position of the prompt.
        hidden: (batch, nodes, hidden), last hidden states after the final norm; after a prefill, of the whole prompt.
        visual: (batch, length) bool, prefill only: positions that carry image or video features.
        embeds: (batch, length, hidden), prefill only: the input embeddings that the language model was fed.
    """

    logits: Tensor
    hidden: Tensor
    visual: Tensor | None = None
    embeds: Tensor | None = None


class Target(Protocol):
    """What the engine needs of a target."""

    def prefill(self, prompt: Prompt, room: int) -> Step:
        """Forget everything and absorb the prompt; ``room`` is the number of tokens that may follow it."""

    def forward_tree(self, tree: TokenTree) -> Step:
        """Logits and hidden states at every node; absorbs nothing yet."""

    def commit(self, verdict: Verdict) -> None:
        """Absorb the accepted path of the last tree. A row whose path is empty absorbs nothing."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings, (...) int64 -> (..., hidden)."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of last hidden states, (..., hidden) -> (..., vocab)."""


class TransformersTarget:
    """A decoder-only model of transformers as a target; the model's code and weights stay as they are.

    Trees enter the decoder as a 4D attention mask over (prefix, tree) with ``position_ids = prefix + depth`` and a
    ``TreeCache``. Sliding windows go into the mask, so that no layer drops the tree.

    Args:
        model: any causal language model; subclasses take multimodal ones.
        processor: its tokenizer or processor, for text in and out.

    Attributes:
        cost: measured time of a pass; where it is known, trees are padded to a width at which the pass is cheapest.

    Raises:
        UserError: the model has an architecture part that trees cannot pass through exactly.
    """

    def __init__(self, model: PreTrainedModel, processor: Any = None) -> None:
        self.model = model
        self.processor = processor
        self.config = model.config.get_text_config()
        _refuse_unsupported(model, self.config)
        self.decoder = model.get_decoder()
        self._scale_logits = _logit_scaling(self.config)
        self._additive_masks = self.config._attn_implementation == "eager"
        self.cost: CostTable | None = None
        self._head_checked = False
        self._cache: TreeCache | None = None
        self._position: Tensor | None = None  # (batch,) the position of the next token
        self._last_position: Tensor | None = None  # () the greatest position that a kept token can have
        self._tail_depth: Tensor | None = None  # (batch, offset) depths of nodes behind the committed prefix

    @classmethod
    def supports(cls, config: Any) -> bool:
        """Whether this class is the adapter for models of this configuration."""
        return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING

    @classmethod
    def read(cls, name: str, config: Any, **options: Any) -> tuple[PreTrainedModel, Any]:
        """Model and processor from a local folder or hub id, with the weights' own dtype, on the CPU."""
        model = read_whole(AutoModelForCausalLM, name, config, **options)
        return model, AutoTokenizer.from_pretrained(name, **options)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an answer, from the generation config."""
        eos = self.model.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def encode(self, requests: Sequence[Mapping[str, Any]], **inputs: Any) -> Prompt:
        """Turn requests into a left-padded batch.

        Args:
            requests: ``{"prompt": text or chat messages, "images": ..., "videos": ...}`` each.
            **inputs: options of the adapter (none for text).

        Raises:
            UserError: images or videos for a text model, unknown options, or an empty prompt.
        """
        if inputs:
            raise UserError(f"unknown option for a text model: got {', '.join(inputs)}")
        if any(request.get("images") or request.get("videos") for request in requests):
            raise UserError(f"{type(self.model).__name__} reads text only: images or videos were given")
        rows = [self._token_ids(request["prompt"]) for request in requests]
        longest = max(map(len, rows))
        pads = [longest - len(row) for row in rows]
        device = self.model.device
        ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, rows, strict=True)], device=device)
        mask = torch.tensor([[0] * pad + [1] * len(row) for pad, row in zip(pads, rows, strict=True)], device=device)
        return Prompt(ids, mask if any(pads) else None)

    def _token_ids(self, prompt: Any) -> list[int]:
        tokenizer = self.tokenizer
        template = getattr(tokenizer, "chat_template", None)
        if not prompt:
            raise UserError("the prompt must not be empty")
        if not isinstance(prompt, str) and not template:
            raise UserError("chat messages need a chat template: the tokenizer has none")
        if not template:
            ids = tokenizer(prompt)["input_ids"]
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise UserError("the prompt must not be empty")
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of generated tokens, special tokens left out."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    @property
    def context_limit(self) -> int | None:
        """Tokens of prompt and output that the model was made for; None where its config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def length(self) -> int:
        """Committed tokens of the longest row."""
        return self._cache.length if self._cache is not None else 0

    # ------------------------------------------------------------------ the engine's side

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, room: int) -> Step:
        ids, mask = prompt.input_ids, prompt.attention_mask
        batch, length = ids.shape
        _refuse_rope_switch(self.config, length, room if batch == 1 else 2 * room)
        self._cache = TreeCache(self.config.num_hidden_layers, reserve=length + min(room, 4096) + 64)
        positions = prompt.inputs.get("position_ids")
        if positions is None:
            positions = self._prompt_positions(ids, mask)
        inputs = {k: v for k, v in prompt.inputs.items() if k not in ("position_ids", "use_cache", "logits_to_keep")}
        seen: dict[str, Any] = {}
        handles = [
            self.decoder.register_forward_pre_hook(lambda _, a, kw: seen.update(kw), with_kwargs=True),
            self.decoder.register_forward_hook(lambda _, a, out: seen.update(hidden=out[0])),
        ]
        try:
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
                **inputs,
            )
        finally:
            for handle in handles:
                handle.remove()
        self._cache.commit_prompt(length, mask, batch, ids.device)
        self._position = self._next_position(prompt, seen.get("position_ids"))
        self._last_position = (self._position.amax() + room - 1).clamp(min=(self.context_limit or 0) - 1)
        self._tail_depth = None
        logits = out.logits[:, -1:]
        self._check_head(seen["hidden"][:, -1:], logits)
        return Step(logits, seen["hidden"], self._visual(prompt), seen.get("inputs_embeds"))

    @torch.inference_mode()
    def forward_tree(self, tree: TokenTree) -> Step:
        nodes, batch = tree.nodes, tree.batch
        width = nodes if self.cost is None else self.cost.width(nodes, batch)
        if width == nodes:
            hidden = self.forward_nodes(tree.tokens, None if nodes == 1 else tree.depth, tree.ancestors)
        else:
            extra = (0, width - nodes)
            reach = torch.nn.functional.pad(tree.ancestors, extra + extra)
            reach = reach | torch.eye(width, dtype=torch.bool, device=reach.device)
            tokens, depth = (torch.nn.functional.pad(x, extra) for x in (tree.tokens, tree.depth))
            hidden = self.forward_nodes(tokens, depth, reach)[:, :nodes]
        return Step(self.head(hidden), hidden)

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        rows = [path for path, _ in verdict.host]
        self.commit_nodes(verdict.path, rows)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(token_ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self._scale_logits(self.model.get_output_embeddings()(hidden))

    # ------------------------------------------------------------------ for drafters that grow a tree level by level

    def forward_nodes(self, tokens: Tensor, depth: Tensor | None, reach: Tensor) -> Tensor:
        """Last hidden states of new nodes behind the committed prefix and the nodes already forwarded.

        Args:
            tokens: (batch, nodes) int64.
            depth: (batch, nodes) int64, distance of each node to the end of the prefix; None means all are 0.
            reach: (batch, nodes, earlier + nodes) bool, which nodes behind the prefix each node attends to.
        """
        assert self._cache is not None, "prefill comes first"
        assert self._position is not None
        assert self._last_position is not None
        position = self._position[:, None]
        position = position.expand_as(tokens) if depth is None else position + depth
        # In a batch, drafts of a row ahead of the others may lie beyond its end, where a model may have no position.
        position = torch.minimum(position, self._last_position)
        out = self.decoder(
            input_ids=tokens,
            attention_mask=self._masks(tokens, depth, reach),
            position_ids=position,
            past_key_values=self._cache,
            use_cache=True,
        )
        return out[0]

    def keep_nodes(self, depth: Tensor) -> None:
        """Let the nodes of the last ``forward_nodes`` stand, uncommitted, for further nodes to attend to."""
        assert self._cache is not None
        self._tail_depth = depth if self._tail_depth is None else torch.cat([self._tail_depth, depth], dim=1)
        self._cache.offset = self._tail_depth.shape[1]

    def commit_nodes(self, path: Tensor, rows: list[list[int]]) -> None:
        """Absorb one path of nodes per row, (batch, depth) padded with -1 and as lists; forget all other nodes."""
        assert self._cache is not None
        assert self._position is not None
        self._cache.commit(path, rows)
        self._tail_depth = None
        grown = [len(row) for row in rows]
        if len(set(grown)) == 1:
            self._position = self._position + grown[0]
        else:
            self._position = self._position + torch.tensor(grown, device=self._position.device)

    # ------------------------------------------------------------------ what subclasses adapt

    def _prompt_positions(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """``position_ids`` of the prompt, (batch, length); None lets the model compute its own."""
        if mask is None:
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)

    def _next_position(self, prompt: Prompt, positions: Tensor | None) -> Tensor:
        """(batch,) the position of the first new token, from what the decoder was given for the prompt."""
        if positions is None:
            raise UserError(f"the decoder must be given position_ids: that of {type(self.model).__name__} is not")
        if positions.ndim == 3:
            # Qwen-VL: what follows an image stands behind its largest coordinate; a fourth axis, in front, counts.
            return positions[-3:].amax((0, 2)) + 1
        return positions[:, -1].expand(prompt.input_ids.shape[0]) + 1

    def _visual(self, prompt: Prompt) -> Tensor | None:
        return None

    # ------------------------------------------------------------------ masks

    def _masks(self, tokens: Tensor, depth: Tensor | None, reach: Tensor) -> Any:
        cache = self._cache
        assert cache is not None
        batch, nodes = tokens.shape
        if nodes == 1 and cache.offset == 0 and not cache.padded:
            return None
        if cache.padded:
            prefix = cache.attended[:, None, :].expand(batch, nodes, cache.length)
        else:
            prefix = reach.new_ones(1, 1, 1).expand(batch, nodes, cache.length)
        full = torch.cat([prefix, reach.expand(batch, -1, -1)], dim=-1)[:, None]
        kinds = getattr(self.config, "layer_types", None) or []
        window = getattr(self.config, "sliding_window", None)
        if window is None or (kinds and "sliding_attention" not in kinds):
            return self._as_mask(full)
        slid = self._as_mask(full & self._within(window, depth if depth is not None else torch.zeros_like(tokens)))
        return {"full_attention": self._as_mask(full), "sliding_attention": slid} if kinds else slid

    def _within(self, window: int, depth: Tensor) -> Tensor:
        """(batch, 1, nodes, slots) bool: slots less than ``window`` tokens before a node."""
        cache = self._cache
        assert cache is not None
        ends = torch.tensor(cache.lengths, device=depth.device)[:, None]
        tail = depth if self._tail_depth is None else torch.cat([self._tail_depth, depth], dim=1)
        slots = torch.arange(cache.length, device=depth.device).expand(depth.shape[0], -1)
        key = torch.cat([slots, ends + tail], dim=1)
        return ((ends + depth)[:, :, None] - key[:, None, :] < window)[:, None]

    def _as_mask(self, allowed: Tensor) -> Tensor:
        if not self._additive_masks:
            return allowed
        # Eager attention adds the mask to the scores: a bool mask would be misread without a word.
        dtype = self.model.dtype
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(
            ~allowed, torch.finfo(dtype).min
        )

    def _check_head(self, hidden: Tensor, logits: Tensor) -> None:
        """Once per model: the head as applied to trees must give the logits that the model itself gives."""
        if self._head_checked:
            return
        ours = self.head(hidden)
        tolerance = 1e-3 if logits.dtype == torch.float32 else 0.1
        if not torch.allclose(ours.float(), logits.float(), atol=tolerance, rtol=tolerance):
            raise UserError(
                f"{type(self.model).__name__} changes its logits after the output layer in a way that is not known "
                "here: expected head(hidden) to equal the model's logits"
            )
        self._head_checked = True


def read_whole(auto_class: Any, name: str, config: Any, **options: Any) -> PreTrainedModel:
    """A model whose every weight comes from the checkpoint, in the checkpoint's dtype.

    Raises:
        UserError: the checkpoint lacks weights or has them in other shapes. transformers would draw them at random and
            merely warn.
    """
    model, report = auto_class.from_pretrained(
        name, config=config, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    problems = [f"{key} is missing" for key in sorted(report["missing_keys"])]
    problems += [f"{key} has shape {tuple(got)}, not {tuple(want)}" for key, got, want in report["mismatched_keys"]]
    if problems:
        shown = "; ".join(problems[:3]) + (f" and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise UserError(f"cannot load model {name!r}: expected all weights of {type(model).__name__}, but {shown}")
    return model


def _refuse_unsupported(model: PreTrainedModel, config: Any) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UserError(f"the target must be a decoder-only model: {name} is an encoder-decoder")
    kinds: Sequence[str] = getattr(config, "layer_types", None) or []
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other:
        raise UserError(f"layers must be full or sliding-window attention: {name} has {', '.join(other)}")
    for part, needed in ((model, {"logits_to_keep"}), (model.get_decoder(), {"position_ids", "past_key_values"})):
        accepted = signature(part.forward).parameters
        if lacking := sorted(needed - accepted.keys()):
            raise UserError(f"forward must take {', '.join(lacking)}: that of {type(part).__name__} in {name} does not")
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        # FlashAttention takes 2D masks only, and a dense 4D mask makes flex attention abort.
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


def _refuse_rope_switch(config: Any, length: int, room: int) -> None:
    """Rotary frequencies that depend on the length are one set per pass, yet the paths of a tree differ in length.

    Harmless as long as prompt and answer stay on one side of the length at which longrope changes them.
    """
    given = getattr(config, "rope_parameters", None) or {}
    for rope in [part for part in given.values() if isinstance(part, dict)] or [given]:
        kind = rope.get("rope_type", "default")
        switch = config.max_position_embeddings
        if kind == "longrope":
            switch = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", switch
            )
        if (kind == "dynamic" and length + room > switch) or (kind == "longrope" and length <= switch < length + room):
            raise UserError(
                f"{kind} rotary embeddings change at {switch} tokens: prompt and answer must "
                f"{'fit below' if kind == 'dynamic' else 'stay on one side'}, got {length} and up to {room} more"
            )


def _logit_scaling(config: Any) -> Any:
    """What a model does to its logits behind the output layer (Gemma 2/3, Cohere, Granite)."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        return lambda logits: torch.tanh(logits / cap) * cap
    if scale := getattr(config, "logit_scale", None):
        return lambda logits: logits * scale
    if scale := getattr(config, "logits_scaling", None):
        return lambda logits: logits / scale
    return lambda logits: logits
