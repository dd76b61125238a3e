"""Decoder-only models of transformers as targets; their code and weights stay unmodified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from mmspec.cache.prefix_cache import Prefix, PrefixCache, at_text
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.budget import CostTable
from mmspec.core.target import Feature, Prompt, Step
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device
from mmspec.sampling.defaults import ModelDefaults
from mmspec.targets.attention import NAME, PassAttention
from mmspec.targets.decoder import Decoder
from mmspec.targets.head import Head
from mmspec.targets.kept import KeptStates
from mmspec.targets.layers import TreeLayers
from mmspec.targets.processor import Processor
from mmspec.targets.runner import EagerRunner, Runner, StaticRunner
from mmspec.targets.support import refuse_inner_padding, refuse_rope_switch, rope_side, without_output_capture


class TransformersTarget:
    """A decoder-only model of transformers as a target.

    A tree is verified with a 4D attention mask over (prefix, tree), ``position_ids = prefix + depth`` and a
    ``TreeCache``. Sliding windows are part of the mask. Layers other than attention need a plug-in
    (``mmspec/targets/layers.py``).

    Args:
        model: any causal language model; subclasses take multimodal ones.

    Attributes:
        auto_class: the class of transformers that loads these models.
        processor_class: the ``Processor`` of these models.
        decoder: the stack of layers.
        runner: runs the verify passes; of another class where the model moves to a device with other shapes.
        cost: measured verify times; if known, trees are padded to the width with the fastest pass.
        prefix_cache: keeps the states of prompts for later ones that begin alike; None computes every prompt.

    Raises:
        UserError: a part of the architecture cannot verify trees exactly.
    """

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    processor_class: ClassVar[type[Processor]] = Processor

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.decoder = Decoder(model)
        self._embedding: Any = model.get_input_embeddings()
        self._head = Head(model)
        self.cost: CostTable | None = None
        self.prefix_cache: PrefixCache | None = None
        self.features: Sequence[Feature] = ("last",)
        self._verified: dict[Feature, Tensor] = {}  # of the last tree
        self._kept = KeptStates(self)
        self.runner = self._new_runner()

    @classmethod
    def supports(cls, config: Any) -> bool:
        """Whether models of this configuration are loaded as this class."""
        own_code = getattr(config, "auto_map", None) or {}  # of the folder; run only with trust_remote_code
        return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code

    def fork(self) -> TransformersTarget:
        """The same weights and measured cost, without sequences."""
        fork = type(self)(self.model)
        fork.cost = self.cost
        return fork

    def __reduce__(self) -> tuple[Any, ...]:
        """For ``pickle``: the model and its measured cost; sequences and kept prefixes are left out."""
        with self.attention.idle():
            model = without_output_capture(self.model)
        return _target_of, (type(self), model, self.cost, self.prefix_cache)

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersTarget:
        with self.attention.idle():
            model = copy.deepcopy(self.model, memo)
        return _target_of(type(self), model, self.cost, copy.deepcopy(self.prefix_cache, memo))

    @property
    def attention(self) -> PassAttention:
        """Attention implementation of the passes."""
        return self.decoder.attention

    @property
    def layers(self) -> TreeLayers | None:
        """Plug-in for layers other than attention; None for a model without any."""
        return self.decoder.layers

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an answer, according to the generation config."""
        eos = self.model.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def defaults(self) -> ModelDefaults:
        """Sampling defaults, according to the generation config."""
        return ModelDefaults(self.model)

    @property
    def context_limit(self) -> int | None:
        """Most tokens of prompt and output; None if the config has no limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def cache(self) -> TreeCache:
        """KV and recurrent states of the sequences."""
        return self.runner.cache

    @property
    def rows(self) -> int:
        """Number of sequences in the cache."""
        return self.runner.rows

    def prefill(self, prompt: Prompt, room: int | Sequence[int]) -> Step:
        *_, step = self.prefill_chunks(prompt, room, None)
        assert step is not None
        return step

    @torch.inference_mode()
    def prefill_chunks(self, prompt: Prompt, room: int | Sequence[int], chunk: int | None) -> Iterator[Step | None]:
        ids, mask = prompt.input_ids, prompt.attention_mask
        length = ids.shape[1]
        longest = room if isinstance(room, int) else max(room)
        shortest = length if mask is None else int(mask.sum(1).min())
        refuse_rope_switch(self.config, shortest, length - shortest + longest)
        if mask is not None:
            refuse_inner_padding(self.config, mask, longest)
        reserve = length + min(longest, 4096) + 64
        # Rows that are copied to another cache need no slots for the answer.
        if self.runner.static_shapes != self.static_shapes:  # the model moved to another device
            self.runner = self._new_runner()
        copies = not self.runner.adopts or self._kept.looks_up(prompt)
        cache = self.decoder.new_cache(length + 1 if copies else reserve, False)
        resumed = self._kept.resume(prompt, cache)
        if resumed is not None:
            step = yield from self._prefill_rest(prompt, *resumed, chunk, cache)
        else:
            step = yield from self._prefill_whole(prompt, chunk, cache)
        position = self._next_position(prompt, step.positions)
        last_position = (position + on_device(room, ids.device) - 1).clamp(min=(self.context_limit or 0) - 1)
        self.runner.join(cache, reserve, copies, position, last_position)
        self._kept.start(prompt, step, cache)
        yield step

    def _prefill_whole(self, prompt: Prompt, chunk: int | None, cache: TreeCache) -> Generator[None, None, Step]:
        """Prefill into an empty cache; yields between passes."""
        ids, mask = prompt.input_ids, prompt.attention_mask
        batch, length = ids.shape
        positions = prompt.inputs.get("position_ids")
        if positions is None:
            positions = self._prompt_positions(ids, mask)
        call = {**prompt.inputs, "input_ids": ids, "attention_mask": mask, "position_ids": positions}
        splits = chunk is not None and batch == 1 and length > chunk and mask is None
        given = self.decoder.chunk_inputs(call, cache) if splits else None
        if given is not None:
            found, logits = yield from self._prefill_passes(given, 0, length, chunk, cache)
        else:
            logits, given, found = self.decoder.prefill(call, cache, self.features)
            cache.commit_prompt(length, mask, batch)
            self._head.check(found["last"][:, -1:], logits)
        features = {name: found[name] for name in self.features}
        # Decoders without attention, or with ALiBi, have no position_ids.
        known = given.get("position_ids") if self.decoder.takes_positions else positions
        return Step(logits, features, self.visual(prompt), given.get("inputs_embeds"), known)

    def _prefill_rest(
        self, prompt: Prompt, given: dict[str, Any], prefix: Prefix, first: int, chunk: int | None, cache: TreeCache
    ) -> Generator[None, None, Step]:
        """Prefill what follows the ``first`` tokens, whose states are in the cache; yields between passes."""
        ids = prompt.input_ids
        length = ids.shape[1]
        if first == length:
            assert prefix.logits is not None
            logits, features = prefix.logits, prefix.features
        else:
            rest, logits = yield from self._prefill_passes(given, first, length, chunk, cache)
            features = {name: torch.cat([prefix.features[name][:, :first], rest[name]], 1) for name in self.features}
        features = {name: features[name] for name in self.features}
        embeds = prefix.embeds
        if embeds is not None:
            embeds = torch.cat([embeds[:, :first], self.embed(ids[:, first:])], dim=1)
        positions = given["position_ids"]
        return Step(logits, features, self.visual(prompt), embeds, positions, first)

    def _prefill_passes(
        self, given: dict[str, Any], first: int, length: int, chunk: int | None, cache: TreeCache
    ) -> Generator[None, None, tuple[dict[Feature, Tensor], Tensor]]:
        """Features and last logits of the tokens ``first`` to ``length``, in passes over ``chunk`` of them."""
        passes = []
        for start in range(first, length, chunk or length):
            if start > first:
                yield
            part = slice(start, min(start + (chunk or length), length))
            passes.append(self.decoder.prefill_chunk(given, part, cache, self.features))
        last = passes[-1]["last"][:, -1:]
        logits = self.head(last)
        self._head.check(last, logits)
        return {name: torch.cat([one[name] for one in passes], dim=1) for name in self.features}, logits

    def resumes(self, prompt: Prompt, others: Sequence[Prompt]) -> bool:
        return self._kept.resumes(prompt, others)

    @torch.inference_mode()
    def retain(self, rows: Sequence[int], histories: Sequence[list[int]]) -> None:
        self._kept.retain(rows, histories)

    def kind(self, prompt: Prompt) -> Hashable:
        return rope_side(self.config, prompt.input_ids.shape[1])

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        self._kept.select(rows)
        self.runner.select(rows)

    @torch.inference_mode()
    def forward_tree(self, tree: TokenTree) -> Step:
        nodes, batch = tree.nodes, tree.batch
        width = nodes if self.cost is None else self.cost.width(nodes, batch)
        step = self.runner.forward_tree(tree, width, self.features)
        self._verified = step.features
        return step

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        self._kept.commit(verdict, self._verified)
        self.runner.commit_nodes(verdict.path, [path for path, _ in verdict.host])

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def narrow_head(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        return self._head.narrow(token_ids.to(self.device))

    @property
    def version(self) -> tuple[Hashable, ...]:
        """Changes when a buffer that captured graphs read has been reallocated."""
        return self.runner.version

    @property
    def static_shapes(self) -> bool:
        """Whether passes have static shapes."""
        kinds = getattr(self.config, "layer_types", None) or ()
        supported = self.attention.name == NAME and "chunked_attention" not in kinds
        supported = supported or (self.layers is not None and not self.layers.attends)
        supported = supported and (self.layers is None or self.layers.static)
        return supported and kernels.fixed_shapes(self.device)

    def _new_runner(self) -> Runner:
        """A runner without sequences, for the model's device."""
        runner = StaticRunner if self.static_shapes else EagerRunner
        return runner(self.config, self.decoder, self._head)

    def _prompt_positions(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """``position_ids`` of the prompt, (batch, length); None if the model must compute them."""
        if mask is None:
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)

    def _next_position(self, prompt: Prompt, positions: Tensor | None) -> Tensor:
        """(batch,) position of the first new token, from the decoder's ``position_ids`` of the prompt."""
        if positions is None:
            raise UserError(f"the decoder must be given position_ids: that of {type(self.model).__name__} is not")
        if not at_text(positions, -1):
            raise UserError("a prompt with several position axes must end on text: got an image or video token")
        if positions.ndim == 3:
            # Text after a video may have lower positions than its last frames.
            return positions[-1, :, -1] + 1
        return positions[:, -1].expand(prompt.input_ids.shape[0]) + 1

    def visual(self, prompt: Prompt) -> Tensor | None:
        """(batch, length) bool, positions of image or video features; None for text models."""
        return None


def _target_of(
    kind: type[TransformersTarget], model: PreTrainedModel, cost: CostTable | None, prefix_cache: PrefixCache | None
) -> TransformersTarget:
    target = kind(model)
    target.cost, target.prefix_cache = cost, prefix_cache
    return target
