"""Any decoder-only model of transformers as a target, its code and weights unmodified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mmspec import attention, kernels
from mmspec.budget import CostTable
from mmspec.cache import TreeCache
from mmspec.errors import UserError
from mmspec.graphs import Graphed
from mmspec.layers import tree_layers
from mmspec.masks import tail_mask, tree_mask
from mmspec.support import (
    cache_argument,
    from_pretrained,
    logit_scaling,
    read_whole,
    refuse_rope_switch,
    refuse_unsupported,
)
from mmspec.target import Prompt, Step
from mmspec.transfer import on_device
from mmspec.tree import TokenTree
from mmspec.user_text import UserText
from mmspec.verify import Verdict


class TransformersTarget:
    """A decoder-only model of transformers as a target; the model's code and weights stay as they are.

    Trees enter the decoder as a 4D attention mask over (prefix, tree) with ``position_ids = prefix + depth`` and a
    ``TreeCache``. Sliding windows go into the mask, so that no layer drops the tree. Layers other than attention are
    served by plug-ins (``mmspec/layers.py``).

    Args:
        model: any causal language model; subclasses take multimodal ones.
        processor: its tokenizer or processor, for text in and out.

    Attributes:
        attention: what the model's passes run with.
        layers: what serves the model's layers other than attention; None where it has no such.
        cost: measured time of a pass; where it is known, trees are padded to a width at which the pass is cheapest.

    Raises:
        UserError: the model has an architecture part that trees cannot pass through exactly.
    """

    def __init__(self, model: PreTrainedModel, processor: Any = None) -> None:
        self.model = model
        self.processor = processor
        self.config = model.config.get_text_config()
        self.layers = tree_layers(model, self.config)
        refuse_unsupported(model, self.config, self.layers)
        self.attention = attention.PassAttention(model)
        self.decoder = model.get_decoder()
        self._cache_argument = cache_argument(self.decoder)
        self._embedding: Any = model.get_input_embeddings()
        self._output: Any = model.get_output_embeddings()
        self._scale_logits = logit_scaling(self.config)
        self.cost: CostTable | None = None
        self._head_checked = False
        self._cache: TreeCache | None = None
        self._position: Tensor | None = None  # (batch,) the position of the next token
        self._last_position: Tensor | None = None  # () the greatest position that a kept token can have
        self._tail_depth: Tensor | None = None  # (batch, offset) depths of nodes behind the committed prefix
        self._check = Graphed(self._pass)
        self._keep = Graphed(self.absorb)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "layers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.layers = tree_layers(self.model, self.config)  # prepares the modelling module of this process

    @classmethod
    def supports(cls, config: Any) -> bool:
        """Whether this class is the adapter for models of this configuration."""
        own_code = getattr(config, "auto_map", None) or {}  # of the folder; read only where it is trusted
        return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code

    @classmethod
    def read(cls, name: str, config: Any, **options: Any) -> tuple[PreTrainedModel, Any]:
        """Model and processor from a local folder or hub id, with the weights' own dtype, on the CPU."""
        model = read_whole(AutoModelForCausalLM, name, config=config, **options)
        return model, from_pretrained(AutoTokenizer, name, **options)

    @property
    def device(self) -> torch.device:
        return self.model.device

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
        text = self._user_text.mark(prompt)
        if template:
            messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if self._user_text.is_marked(text):
            ids = self._user_text.encode(text, add_special_tokens=not template)
        else:
            ids = tokenizer(text, add_special_tokens=not template)["input_ids"]
        if not ids:
            raise UserError("the prompt must not be empty")
        return ids

    @cached_property
    def _user_text(self) -> UserText:
        return UserText(
            self.tokenizer, [getattr(self.processor, name, None) for name in ("image_token", "video_token")]
        )

    def decode(self, token_ids: list[int]) -> str:
        """Text of an answer's tokens, without special tokens and without the blank of the chat template before it."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return "" if self._answer_prefix.startswith(text) else text.removeprefix(self._answer_prefix)

    @cached_property
    def _answer_prefix(self) -> str:
        """Blanks between the chat template's generation prompt and an answer.

        A template that ends a prompt with "ASSISTANT:" and writes earlier answers as "ASSISTANT: answer" lets the model
        generate the blank. It is the template's: as content of a later turn, the answer must not contain it.
        """
        if not getattr(self.processor, "chat_template", None):
            return ""
        plain = self.processor is self.tokenizer  # a processor's template takes lists of items
        asked, answered = (
            {"role": role, "content": text if plain else [{"type": "text", "text": text}]}
            for role, text in (("user", "question"), ("assistant", "answer"))
        )
        try:
            prompt = self.processor.apply_chat_template([asked], add_generation_prompt=True, tokenize=False)
            whole = self.processor.apply_chat_template([asked, answered], tokenize=False)
        except Exception:  # a template is a program of the checkpoint's, and may raise anything
            return ""
        between, found, _ = whole.removeprefix(prompt).partition("answer")
        return between if found and whole.startswith(prompt) and between.isspace() else ""

    @property
    def context_limit(self) -> int | None:
        """Tokens of prompt and output that the model was made for; None where its config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def cache(self) -> TreeCache:
        """Of the latest prompt."""
        assert self._cache is not None, "prefill comes first"
        return self._cache

    @property
    def length(self) -> int:
        """Committed tokens of the longest row."""
        return self._cache.length if self._cache is not None else 0

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, room: int | Sequence[int]) -> Step:
        ids, mask = prompt.input_ids, prompt.attention_mask
        batch, length = ids.shape
        longest = room if isinstance(room, int) else max(room)
        refuse_rope_switch(self.config, length, longest if batch == 1 else 2 * longest)
        self._cache = self._cache_for(batch, length + min(longest, 4096) + 64, mask)
        positions = prompt.inputs.get("position_ids")
        if positions is None:
            positions = self._prompt_positions(ids, mask)
        inputs = {k: v for k, v in prompt.inputs.items() if k not in ("position_ids", "use_cache", "logits_to_keep")}
        seen: dict[str, Any] = {}
        cache = self._cache

        def note(_: Any, args: Any, inputs: dict[str, Any], out: Any = None) -> None:
            # Another thread's pass through the same decoder has another cache.
            if inputs.get(self._cache_argument) is cache:
                seen.update(inputs) if out is None else seen.update(hidden=self._in_dtype(out[0]))

        with self.attention.applied():
            handles = [
                self.decoder.register_forward_pre_hook(note, with_kwargs=True),
                self.decoder.register_forward_hook(note, with_kwargs=True),
                self._output.register_forward_pre_hook(_compact),
            ]
            try:
                out = self.model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **{self._cache_argument: self._cache},
                    **inputs,
                )
            finally:
                for handle in handles:
                    handle.remove()
        self._cache.commit_prompt(length, mask, batch, ids.device)
        # A decoder without attention is not given any.
        given = seen.get("position_ids") if self._cache.attending else positions
        position = self._next_position(prompt, given)
        last = (position + on_device(room, ids.device) - 1).amax().clamp(min=(self.context_limit or 0) - 1)
        if self._position is None or self._last_position is None or len(self._position) != batch:
            self._position, self._last_position = position.clone(), last
        else:  # where passes were captured to look for them
            self._position.copy_(position)
            self._last_position.copy_(last)
        self._tail_depth = None
        logits = out.logits[:, -1:]
        self._check_head(seen["hidden"][:, -1:], logits)
        return Step(logits, seen["hidden"], self._visual(prompt), seen.get("inputs_embeds"))

    @torch.inference_mode()
    def forward_tree(self, tree: TokenTree) -> Step:
        nodes, batch = tree.nodes, tree.batch
        width = nodes if self.cost is None else self.cost.width(nodes, batch)
        if self._cache is not None and self._cache.in_place:
            width = bucket(width)
            self._cache.make_room(width)
            logits, hidden = self._check(*_padded(tree, width), version=self._cache.version)
            return Step(logits[:, :nodes], hidden[:, :nodes])
        if width == nodes:
            hidden = self.forward_nodes(tree.tokens, None if nodes == 1 else tree.depth, tree.ancestors)
        else:
            hidden = self.forward_nodes(*_padded(tree, width))[:, :nodes]
        return Step(self.head(hidden), hidden)

    def _pass(self, tokens: Tensor, depth: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """A whole tree's logits and last hidden states, at the same addresses every time."""
        hidden = self.forward_nodes(tokens, depth, reach)
        return self.head(hidden), hidden

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        rows = [path for path, _ in verdict.host]
        self.commit_nodes(verdict.path, rows)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self._scale_logits(_by_rows(self._output, hidden))

    def narrow_head(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        layer = self._output
        ids = token_ids.to(layer.weight.device)
        # The first tokens of the vocabulary need no copy of their rows.
        first = torch.equal(ids, torch.arange(len(ids), device=ids.device))
        rows = slice(len(ids)) if first else ids
        weight = layer.weight.detach()[rows]
        bias = layer.bias.detach()[rows] if getattr(layer, "bias", None) is not None else None
        return _NarrowHead(weight, bias, self._scale_logits)

    def forward_nodes(self, tokens: Tensor, depth: Tensor | None, reach: Tensor) -> Tensor:
        """Last hidden states of new nodes behind the committed prefix and the nodes already forwarded.

        Args:
            tokens: (batch, nodes) int64.
            depth: (batch, nodes) int64, distance of each node to the end of the prefix; None means all are 0.
            reach: (batch, nodes, earlier + nodes) bool, which nodes behind the prefix each node attends to.
        """
        with self.attention.applied():
            return self._forward_nodes(tokens, depth, reach)

    def _forward_nodes(self, tokens: Tensor, depth: Tensor | None, reach: Tensor) -> Tensor:
        assert self._cache is not None, "prefill comes first"
        assert self._position is not None
        assert self._last_position is not None
        position = self._position[:, None]
        position = position.expand_as(tokens) if depth is None else position + depth
        # In a batch, drafts of a row ahead of the others may lie beyond its end, where a model may have no position.
        position = torch.minimum(position, self._last_position)
        cache, inputs = self._cache, self._cache.arguments(reach)
        if not cache.in_place:
            mask = tree_mask(self.config, cache, depth, self._tail_depth, reach, self.model.dtype)
        else:
            depth = torch.zeros_like(tokens) if depth is None else depth
            cache.make_room(tokens.shape[1])
            cache.enter(tokens.shape[1])
            mask = tail_mask(self.config, depth, self._tail_depth, reach) if cache.attending else None
            if cache.attending:
                assert cache.ends is not None
                inputs[attention.PASS] = attention.TreePass(self.config, cache.ends, depth)
        out = self.decoder(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            **{self._cache_argument: cache},
            **inputs,
        )
        return self._in_dtype(out[0])

    def keep_nodes(self, depth: Tensor) -> None:
        """Let the nodes of the last ``forward_nodes`` stand, uncommitted, for further nodes to attend to."""
        assert self._cache is not None
        self._tail_depth = depth if self._tail_depth is None else torch.cat([self._tail_depth, depth], dim=1)
        self._cache.offset = self._tail_depth.shape[1]

    def forget_nodes(self) -> None:
        """Forget all nodes since the last commit."""
        self.cache.offset, self._tail_depth = 0, None

    def commit_nodes(self, path: Tensor, rows: list[list[int]]) -> None:
        """Absorb one path of nodes per row, (batch, depth) padded with -1 and as lists; forget all other nodes."""
        assert self._cache is not None
        assert self._position is not None
        self._tail_depth = None
        grown = [len(row) for row in rows]
        if self._cache.in_place:
            self._keep(path, version=self._cache.version)
            self._cache.count(grown)
            return
        self._cache.commit(path, rows)
        self._position += grown[0] if len(set(grown)) == 1 else on_device(grown, self._position.device)

    def absorb(self, path: Tensor) -> tuple[Tensor, ...]:
        """``commit_nodes`` as far as the device is concerned, where the cache stays in place."""
        assert self._cache is not None
        assert self._position is not None
        self._cache.keep(path)
        self._position += (path >= 0).sum(1)
        return ()

    def _in_dtype(self, hidden: Tensor) -> Tensor:
        """Last hidden states in the precision of the weights: Mamba-2 keeps them in float32."""
        return hidden.to(self._embedding.weight.dtype)

    def _cache_for(self, batch: int, reserve: int, mask: Tensor | None) -> TreeCache:
        """An empty cache for a prompt. One that stays in place serves further prompts, and what was captured of it."""
        kept, weight = self._cache, self._embedding.weight
        served = self.attention.name == attention.NAME or (self.layers and not self.layers.attends)
        if not (kernels.fixed_shapes(weight.device) and served):
            return self._new_cache(reserve, False)
        if mask is not None and not bool((mask.long().diff(dim=1) >= 0).all()):
            return self._new_cache(reserve, False)  # padding elsewhere than on the left
        if kept is None or not kept.serves(batch, reserve, weight):
            return self._new_cache(reserve, True)
        kept.reset()
        return kept

    def _new_cache(self, reserve: int, in_place: bool) -> TreeCache:
        self._position = self._last_position = None
        if self.layers is not None:
            return self.layers.cache(reserve, in_place)
        return TreeCache(self.config.num_hidden_layers, reserve=reserve, in_place=in_place)

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

    def _check_head(self, hidden: Tensor, logits: Tensor) -> None:
        """Once per model: the head as applied to trees must give the logits that the model itself gives."""
        if self._head_checked:
            return
        tolerance = 1e-3 if logits.dtype == torch.float32 else 0.1
        fits = self._output.weight.shape[-1] == hidden.shape[-1]  # other widths: a projection before the output layer
        if not fits or not torch.allclose(self.head(hidden).float(), logits.float(), atol=tolerance, rtol=tolerance):
            raise UserError(
                f"{type(self.model).__name__} changes its logits after the output layer in a way that is not known "
                "here: expected head(hidden) to equal the model's logits"
            )
        self._head_checked = True


class _NarrowHead:
    """The rows of an output layer that belong to some tokens."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Callable[[Tensor], Tensor]) -> None:
        self._weight, self._bias, self._scale = weight, bias, scale

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._scale(_by_rows(lambda rows: F.linear(rows, self._weight, self._bias), hidden))

    def __deepcopy__(self, memo: dict[int, Any]) -> _NarrowHead:
        return self  # copies of a drafter share weights


def bucket(nodes: int) -> int:
    """The width that a pass of fixed shapes has: a power of two, beyond 64 a multiple of it."""
    return 1 << (nodes - 1).bit_length() if nodes <= 64 else -(-nodes // 64) * 64


def _compact(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a model gives its head, without the gaps of a slice; see ``_by_rows``."""
    return inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:]


def _by_rows(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A linear layer of (..., features), seen as a matrix: for a slice of few nodes torch would make a product in
    batches, and copy the whole weight for it."""
    y = layer(x.reshape(-1, x.shape[-1]))
    return y.view(*x.shape[:-1], y.shape[-1])


def _padded(tree: TokenTree, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, depths and reach of a tree among nodes that attend to themselves alone."""
    extra = (0, width - tree.nodes)
    if width == tree.nodes:
        return tree.tokens, tree.depth, tree.ancestors
    reach = torch.nn.functional.pad(tree.ancestors, extra + extra)
    reach = reach | torch.eye(width, dtype=torch.bool, device=reach.device)
    return torch.nn.functional.pad(tree.tokens, extra), torch.nn.functional.pad(tree.depth, extra), reach
