"""Target for decoder-only transformers models, whose code and weights stay unmodified."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from mmspec.cache.tree_cache import TreeCache
from mmspec.core.target import (
    BLOCK,
    Feature,
    KeysValues,
    Prompt,
    State,
    Stop,
    Target,
    TargetOutput,
    at_text,
    spaced,
)
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.errors import UserError
from mmspec.ops.transfer import on_device
from mmspec.progress import PART
from mmspec.sampling.defaults import ModelDefaults
from mmspec.targets.decoder import Decoder, Head, VerifyRunner, new_runner
from mmspec.targets.lora import Adapters
from mmspec.targets.processor import Processor
from mmspec.targets.sublayers import MAX_ROWS
from mmspec.targets.support import (
    fingerprint,
    input_device,
    is_sharded,
    refuse_inner_padding,
    refuse_switch,
    rope_side,
    without_output_capture,
)

_log = logging.getLogger("mmspec.prefill")
RESERVED_NODES = 64
"""KV slots reserved for a tree, after prompt and answer."""


class TransformersTarget:
    """Target for a decoder-only transformers model.

    A tree is verified with a 4D attention mask over (prefix, tree), ``position_ids = prefix + depth`` and a
    ``TreeCache``. Sliding windows are part of the mask. Layers other than attention need a plug-in
    (``mmspec/targets/tree_layers.py``).

    Args:
        model: any causal language model; subclasses support multimodal models.
        exact: whether to reject prompts whose trees cannot be verified exactly; False for draft models.
        kv_cache_dtype: as for ``mmspec.load``.

    Attributes:
        auto_class: the class of transformers that loads these models.
        architecture: name of the model's class.
        model_config, config: configurations of the model and of its text model.
        runner: runs the verify passes; replaced if the model moves to a device that requires another runner class.
        adapters: LoRA adapters in the model's layers.

    Raises:
        UserError: a part of the architecture cannot verify trees exactly.
    """

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    processor_class: ClassVar[type[Processor]] = Processor

    def __init__(self, model: PreTrainedModel, exact: bool = True, kv_cache_dtype: str = "auto") -> None:
        self.model, self._exact, self._kv_cache_dtype = model, exact, kv_cache_dtype
        self.architecture, self.model_config = type(model).__name__, model.config
        self.config = model.config.get_text_config()
        self.context_limit = getattr(self.config, "max_position_embeddings", None)
        self.adapters = Adapters(model)
        # Set in each pass, as other targets of this model choose other adapters.
        prepare = lambda: self.adapters.use(self.adapters.chosen)  # noqa: E731
        self.decoder = Decoder(model, prepare=prepare, kv_cache_dtype=kv_cache_dtype)
        self.embedding: Any = model.get_input_embeddings()
        self._head = Head(model)
        self.runner = new_runner(self.decoder, self._head)

    @classmethod
    def supports(cls, config: Any) -> bool:
        """Whether models of this configuration are loaded as this class."""
        own_code = getattr(config, "auto_map", None) or {}  # of the folder; run only with trust_remote_code
        return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code

    def fork(self) -> TransformersTarget:
        """The same weights, without sequences."""
        return type(self)(self.model, self._exact, self._kv_cache_dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model, without sequences."""
        with self.decoder.attention.lock:
            model = without_output_capture(self.model)
        return type(self), (model, self._exact, self._kv_cache_dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersTarget:
        with self.decoder.attention.lock:
            model = copy.deepcopy(self.model, memo)
        return type(self)(model, self._exact, self._kv_cache_dtype)

    @property
    def device(self) -> torch.device:
        return input_device(self.model)

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
    def version(self) -> tuple[Hashable, ...]:
        """Changes when a buffer that captured graphs read has been reallocated."""
        return (self.adapters.key(self.adapters.chosen), *self.runner.version)

    def prefill(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: Sequence[int],
        reads: Sequence[Feature] = (),
        chunk: int | None = None,
    ) -> Iterator[TargetOutput | None]:
        return self._prefill(Prompt.stack(prompts), max_new_tokens, reads, chunk, None)

    def restore(
        self, state: State, prompt: Prompt, max_new_tokens: int, reads: Sequence[Feature] = (), chunk: int | None = None
    ) -> Iterator[TargetOutput | None]:
        chunk = chunk if self.decoder.layers is None else min(chunk or BLOCK, BLOCK)
        return self._prefill(prompt, [max_new_tokens], reads, chunk, state)

    @torch.inference_mode()
    def _prefill(
        self, prompt: Prompt, new: Sequence[int], reads: Sequence[Feature], chunk: int | None, state: State | None
    ) -> Iterator[TargetOutput | None]:
        if self.model.training and any(getattr(part, "gradient_checkpointing", False) for part in self.model.modules()):
            raise UserError("gradient checkpointing keeps no keys and values in training mode: call model.eval() first")
        self.adapters.chosen = prompt.adapter
        ids, mask = prompt.input_ids, prompt.attention_mask
        length = ids.shape[1]
        if self._exact:
            refuse_switch(self.config, [length] * len(ids) if mask is None else mask.sum(1).tolist(), length, new)
            if mask is not None:
                refuse_inner_padding(self.config, mask, new)
        reserve = length + min(max(new), 4096) + RESERVED_NODES
        if self.runner.static_shapes != self.decoder.static_shapes:  # the model moved to another device
            self.runner = new_runner(self.decoder, self._head)
        # Rows to be copied to another cache need no slots for the answer.
        cache = self.decoder.new_cache(reserve if self.runner.adopts else length + 1, False)
        if state is not None and state.length:
            cache.append(state.cache, length + 1)
            cache.truncate(state.length, () if state.cuts else state.stops[state.length].recurrent)
        output = yield from self._passes(prompt, reads, chunk, cache, state)
        position = next_position(output.positions, len(ids), self.architecture)
        last_position = (position + on_device(new, ids.device) - 1).clamp(min=(self.context_limit or 0) - 1)
        self.runner.join(cache, reserve, position, last_position)
        yield output

    def _passes(
        self, prompt: Prompt, reads: Sequence[Feature], chunk: int | None, cache: TreeCache, state: State | None
    ) -> Generator[None, None, TargetOutput]:
        """Prefill the tokens after ``state``, whose tokens are in ``cache``; yields between passes."""
        decoder, ids, mask = self.decoder, prompt.input_ids, prompt.attention_mask
        batch, length = ids.shape
        visual = self.visual(prompt)
        positions = self._positions(prompt, visual)
        tokens = {} if "inputs_embeds" in prompt.inputs else {"input_ids": ids}
        call = {**prompt.inputs, **tokens, "attention_mask": mask, "position_ids": positions}
        # Longrope's rotations depend on the last position of a pass.
        divisible = prompt.prefill_mask is None and not any(rope_side(self.config, length))
        native = prompt.prefill_mask is None and decoder.prompts_natively(cache)
        before: Any = state
        first, keeps = state.length if state else 0, bool(state) and divisible and decoder.layers is not None
        if (native or keeps) and not self._head.checked:
            few = {"input_ids": torch.arange(1, 5)[None], "attention_mask": None, "position_ids": torch.arange(4)[None]}
            few_logits, _, last = decoder.prefill(few, decoder.new_cache(4, False), ())
            self._head.check(last["last"][:, -1:], few_logits)
        chunk = (MAX_ROWS if native and chunk is None else chunk) if divisible else None
        splits = self._head.checked and chunk is not None and batch == 1 and length > chunk and mask is None
        inputs: dict[str, Any] | None = None
        stops: dict[int, Stop] = {}
        if prompt.prefill_mask is not None:
            features, logits, inputs = self._prefill_kept(call, prompt.prefill_mask, reads, cache)
        elif (splits or native or first) and (inputs := decoder.chunk_inputs(call, cache)) is not None:
            passes: list[dict[Feature, Tensor]] = []
            size = chunk or length
            if native and divisible:
                size = min(size, MAX_ROWS // batch or 1)
            end = first
            while end < length:
                if passes:
                    _log.log(PART, "reading the prompt: %d of %d tokens", end, length)
                    yield
                start, end = end, min(end + size - end % size, length)  # at multiples, as stops are
                passes.append(decoder.prefill_chunk(inputs, slice(start, end), cache, reads))
                if keeps and end % BLOCK == 0:
                    stops = spaced({**stops, end: Stop(cache.row_states(0))})
            features = {name: torch.cat([one[name] for one in passes], dim=1) for name in reads if passes}
            # Without a pass, all tokens are in the cache.
            logits = self._head(passes[-1]["last"][:, -1:]) if passes else before.logits
        else:
            logits, inputs, features = decoder.prefill(call, cache, reads)
            cache.commit_prompt(length, mask, batch)
            self._head.check(features["last"][:, -1:], logits)
        # Decoders without attention, or with ALiBi, have no position_ids.
        if decoder.takes_positions or prompt.prefill_mask is not None:
            positions = inputs.get("position_ids")
        read = {name: features[name] for name in reads if features}
        return TargetOutput(logits, read, visual, inputs.get("inputs_embeds"), positions, prompt=prompt, stops=stops)

    def _prefill_kept(
        self, call: dict[str, Any], kept: Tensor, reads: Sequence[Feature], cache: TreeCache
    ) -> tuple[dict[Feature, Tensor], Tensor, dict[str, Any]]:
        """Prefill only the kept positions; dropped positions have no states.

        Returns:
            Left-padded features, last logits, and the decoder's left-padded inputs.

        Raises:
            UserError: the decoder's inputs cannot be split by position.
        """
        inputs = self.decoder.chunk_inputs(call, cache)
        if inputs is None:
            raise UserError(
                "visual tokens can be left out where attention is causal and each token's inputs are its own"
            )
        embeds = self.embed(call["input_ids"]) if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        # A stable sort moves kept tokens to the right.
        order = kept.long().sort(dim=1, stable=True).indices[:, -int(kept.sum(1).max()) :]
        chosen = kept.gather(1, order)
        mask = None if bool(chosen.all()) else chosen.long()
        part = {"inputs_embeds": embeds.gather(1, order[:, :, None].expand(-1, -1, embeds.shape[2]))}
        positions = None
        if (given := inputs.get("position_ids")) is not None:
            positions = given.gather(-1, order.expand(given.shape[:-1] + order.shape[-1:]))
        if self.decoder.takes_positions:
            part["position_ids"] = positions
        if (visual := inputs.get("visual_pos_masks")) is not None:
            part["visual_pos_masks"] = visual.gather(1, order) & chosen
            seen = kept[visual]
            part["deepstack_visual_embeds"] = [layer[seen] for layer in inputs["deepstack_visual_embeds"]]
        features = self.decoder.forward({**part, "attention_mask": mask}, cache, reads)
        cache.commit_prompt(order.shape[1], mask, len(order))
        return features, self._head(features["last"][:, -1:]), {**part, "position_ids": positions}

    def _positions(self, prompt: Prompt, visual: Tensor | None) -> Tensor | None:
        """``position_ids`` of a prompt, (batch, length) or (axes, batch, length); None if the model computes them."""
        if (positions := prompt.inputs.get("position_ids")) is not None:
            return positions
        # Models with several position axes (Qwen-VL) compute positions of visual tokens from the prompt.
        if self.decoder.has_position_axes and visual is not None and bool(visual.any()):
            return None
        ids, mask = prompt.input_ids, prompt.attention_mask
        if mask is None:
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)

    @torch.inference_mode()
    def snapshot(self, row: int) -> State | None:
        if not self.decoder.continues:
            return None
        running = self.runner.cache
        length = running.lengths[row]
        cache = self.decoder.new_cache(length + 1, False)
        cache.append(running, length + 1, [row])
        size, stops = sum(buffer.nbytes for buffer in cache.kv.tensors), {length: Stop(cache.row_states(0))}
        return State(cache, length, size, self.decoder.layers is None, stops)

    def loaded(self, layout: Any, parts: Sequence[Tensor], recurrent: tuple[Tensor, ...], length: int) -> TreeCache:
        cache = self.decoder.new_cache(length + 1, False)
        cache.load(layout, parts, recurrent, length)
        return cache

    def identity(self) -> str:
        return f"{fingerprint(self.model)} {self._kv_cache_dtype}"

    def batch_key(self, prompt: Prompt) -> Hashable:
        return rope_side(self.config, prompt.input_ids.shape[1]), self.adapters.key(prompt.adapter)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        self.runner.select(rows)

    @torch.inference_mode()
    def verify(self, tree: TokenTree, reads: Sequence[Feature] = ()) -> TargetOutput:
        return self.runner.forward_tree(tree, reads, self.adapters.key(self.adapters.chosen))

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        self.runner.commit_nodes(verdict.path, lambda: [path for path, _ in verdict.host])

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding(token_ids).to(self.device)

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def narrow_head(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        return self._head.narrow(token_ids.to(self.device))

    def keys_values(self, layer: int, rows: int) -> KeysValues:
        return self.runner.cache.keys_values(layer, rows).to(self.device)

    def visual(self, prompt: Prompt) -> Tensor | None:
        """(batch, length) bool, positions of image or video features; None for text models."""
        return None


def next_position(positions: Tensor | None, batch: int, name: str) -> Tensor:
    """(batch,) position of the first new token, from the decoder's ``position_ids`` of the prompt.

    Args:
        name: name of the model's class, for the error.

    Raises:
        UserError: the decoder has no ``position_ids``, or a prompt with several position axes does not end on text.
    """
    if positions is None:
        raise UserError(f"the decoder must be given position_ids: that of {name} is not")
    if not at_text(positions, -1):
        raise UserError("a prompt with several position axes must end on text: got an image or video token")
    if positions.ndim == 3:
        # Text after a video may have lower positions than the video's last frames.
        return positions[-1, :, -1] + 1
    return positions[:, -1].expand(batch) + 1


class FirstLayers:
    """A target's first ``count`` layers, final norm and output layer, run with the target's cache.

    Attributes:
        recurrent: whether the target has recurrent layers, which keep no uncommitted nodes.
        head: see ``Target.head``.

    Raises:
        UserError: the target is not a transformers model of one decoder with more than ``count`` layers.
    """

    def __init__(self, target: Target, count: int) -> None:
        if not isinstance(target, TransformersTarget):
            raise UserError("an early exit requires a target that is a model of transformers: this one is not")
        self._target, self._count = target, count
        self._decoder: Decoder | None = Decoder(target.model, count)
        self.recurrent, self.head = target.decoder.layers is not None, target.head

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_decoder": None}  # a view of the target's modules

    @property
    def runner(self) -> VerifyRunner:
        """Runs trees of uncommitted nodes."""
        if self._decoder is None:
            self._decoder = Decoder(self._target.model, self._count)
        return self._target.runner.through(self._decoder)

    @property
    def version(self) -> tuple[Hashable, ...]:
        return self._target.version


def sharded(target: Target) -> bool:
    """Whether a target's weights are sharded over the ranks of a job."""
    return isinstance(target, TransformersTarget) and is_sharded(target.model)
