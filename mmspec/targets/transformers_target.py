"""Target for decoder-only transformers models, whose code and weights stay unmodified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from mmspec.cache.prefix_cache import Prefix, PrefixCache, RunningStates, at_text, common, continued, media_key
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.target import Feature, KeysValues, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.errors import UserError
from mmspec.ops.transfer import on_device
from mmspec.sampling.defaults import ModelDefaults
from mmspec.targets.decoder import Decoder
from mmspec.targets.head import Head
from mmspec.targets.lora import Adapters
from mmspec.targets.placement import input_device, is_sharded
from mmspec.targets.processor import Processor
from mmspec.targets.runner import Prefill, new_runner, next_position
from mmspec.targets.support import refuse_inner_padding, refuse_switch, rope_side, without_output_capture

RESERVED_NODES = 64
"""KV slots reserved for a tree, after prompt and answer."""


class TransformersTarget:
    """Target for a decoder-only transformers model.

    A tree is verified with a 4D attention mask over (prefix, tree), ``position_ids = prefix + depth`` and a
    ``TreeCache``. Sliding windows are part of the mask. Layers other than attention need a plug-in
    (``mmspec/targets/layers.py``).

    Args:
        model: any causal language model; subclasses support multimodal models.

    Attributes:
        auto_class: the class of transformers that loads these models.
        processor_class: the ``Processor`` of these models.
        runner: runs the verify passes; replaced if the model moves to a device that requires another runner class.
        prefix_cache: reuses states of prompts with a common prefix; None computes every prompt in full.
        adapters: LoRA adapters in the model's layers.
        exact: whether to reject prompts whose trees cannot be verified exactly; False for draft models.

    Raises:
        UserError: a part of the architecture cannot verify trees exactly.
    """

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    processor_class: ClassVar[type[Processor]] = Processor
    exact = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.context_limit = getattr(self.config, "max_position_embeddings", None)
        self.decoder = Decoder(model)
        self.adapters = adapters = Adapters(model)
        # Set in each pass, as other targets of this model choose other adapters.
        self.decoder.attention.prepare = lambda: adapters.use(adapters.chosen)
        self._embedding: Any = model.get_input_embeddings()
        self._head = Head(model)
        self.prefix_cache: PrefixCache | None = None
        self.features: Sequence[Feature] = ("last",)
        self._verified: dict[Feature, Tensor] = {}  # features of the last verified tree
        self._reuse = PrefixReuse(self)
        self.runner = new_runner(self.decoder, self._head)

    @classmethod
    def supports(cls, config: Any) -> bool:
        """Whether models of this configuration are loaded as this class."""
        own_code = getattr(config, "auto_map", None) or {}  # of the folder; run only with trust_remote_code
        return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code

    def fork(self) -> TransformersTarget:
        """The same weights, without sequences."""
        return type(self)(self.model)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model, without sequences and cached prefixes."""
        with self.decoder.attention.idle():
            model = without_output_capture(self.model)
        return _target_of, (type(self), model, self.prefix_cache)

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersTarget:
        with self.decoder.attention.idle():
            model = copy.deepcopy(self.model, memo)
        return _target_of(type(self), model, copy.deepcopy(self.prefix_cache, memo))

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

    def prefill(self, prompt: Prompt, max_new_tokens: int | Sequence[int]) -> TargetOutput:
        *_, step = self.prefill_chunks(prompt, max_new_tokens, None)
        assert step is not None
        return step

    @torch.inference_mode()
    def prefill_chunks(
        self, prompt: Prompt, max_new_tokens: int | Sequence[int], chunk: int | None
    ) -> Iterator[TargetOutput | None]:
        if self.model.training and any(getattr(part, "gradient_checkpointing", False) for part in self.model.modules()):
            raise UserError("gradient checkpointing keeps no keys and values in training mode: call model.eval() first")
        self.adapters.chosen = prompt.adapter
        ids, mask = prompt.input_ids, prompt.attention_mask
        length = ids.shape[1]
        longest = max_new_tokens if isinstance(max_new_tokens, int) else max(max_new_tokens)
        new = [longest] * len(ids) if isinstance(max_new_tokens, int) else max_new_tokens
        if self.exact:
            refuse_switch(self.config, [length] * len(ids) if mask is None else mask.sum(1).tolist(), length, new)
            if mask is not None:
                refuse_inner_padding(self.config, mask, new)
        reserve = length + min(longest, 4096) + RESERVED_NODES
        # Rows to be copied to another cache need no slots for the answer.
        if self.runner.static_shapes != self.decoder.static_shapes:  # the model moved to another device
            self.runner = new_runner(self.decoder, self._head)
        copies = not self.runner.adopts or self._reuse.looks_up(prompt)
        cache = self.decoder.new_cache(length + 1 if copies else reserve, False)
        resumed = self._reuse.resume(prompt, cache)
        prefill = Prefill(
            prompt, self.visual(prompt), self.features, chunk, cache, self.decoder, self._head, self.embed
        )
        if resumed is not None:
            output = yield from prefill.rest(*resumed)
        else:
            output = yield from prefill.whole()
        position = next_position(output.positions, len(ids), type(self.model).__name__)
        last_position = (position + on_device(max_new_tokens, ids.device) - 1).clamp(min=(self.context_limit or 0) - 1)
        self.runner.join(cache, reserve, copies, position, last_position)
        self._reuse.start(prompt, output, cache)
        yield output

    def resumes(self, prompt: Prompt, others: Sequence[Prompt]) -> bool:
        return self._reuse.resumes(prompt, others)

    @torch.inference_mode()
    def retain(self, rows: Sequence[int], histories: Sequence[list[int]]) -> None:
        self._reuse.retain(rows, histories)

    def batch_key(self, prompt: Prompt) -> Hashable:
        return rope_side(self.config, prompt.input_ids.shape[1]), self.adapters.key(prompt.adapter)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        self._reuse.select(rows)
        self.runner.select(rows)

    @torch.inference_mode()
    def forward_tree(self, tree: TokenTree) -> TargetOutput:
        self.runner.adapter = self.adapters.key(self.adapters.chosen)
        output = self.runner.forward_tree(tree, tree.nodes, self.features)
        self._verified = output.features
        return output

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        self.runner.commit_nodes(verdict.path, lambda: [path for path, _ in verdict.host])
        self._reuse.commit(verdict, self._verified)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids).to(self.device)

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def narrow_head(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        return self._head.narrow(token_ids.to(self.device))

    def keys_values(self, layer: int, rows: int) -> KeysValues:
        return self.runner.cache.keys_values(layer, rows).to(self.device)

    def visual(self, prompt: Prompt) -> Tensor | None:
        """(batch, length) bool, positions of image or video features; None for text models."""
        return None


def sharded(target: Target) -> bool:
    """Whether a target's weights are sharded over the ranks of a job."""
    return isinstance(target, TransformersTarget) and is_sharded(target.model)


def _target_of(
    kind: type[TransformersTarget], model: PreTrainedModel, prefix_cache: PrefixCache | None
) -> TransformersTarget:
    target = kind(model)
    target.prefix_cache = prefix_cache
    return target


class PrefixReuse:
    """Prefix-cache lookups and insertions of a target; methods do nothing without a prefix cache."""

    def __init__(self, target: TransformersTarget) -> None:
        self._target = target
        self._answers: list[RunningStates | None] = []  # by row; None if the row's states are not cached
        self._step: tuple[Verdict, dict[Feature, Tensor]] | None = None  # last commit, until read by the host

    def looks_up(self, prompt: Prompt) -> bool:
        """Whether this prompt may resume from a cached prefix; requires a single row."""
        return self._target.prefix_cache is not None and len(prompt.singles) == 1

    def resume(self, prompt: Prompt, cache: TreeCache) -> tuple[dict[str, Any], Prefix, int] | None:
        """Copy the states of the longest cached prefix of a prompt to ``cache``.

        Returns:
            The decoder's inputs of the prompt, the prefix, and the number of common tokens; None without a prefix.
        """
        if not self.looks_up(prompt):
            return None
        visual, length = self._target.visual(prompt), prompt.input_ids.shape[1]
        media = 0 if visual is None or not bool(visual.any()) else int(visual[0].nonzero()[-1]) + 1
        match = self._find(prompt, media)
        if match is None:
            return None
        prefix, shared = match
        if not at_text(prefix.positions, shared - 1):
            return None
        call = {"input_ids": prompt.input_ids, "position_ids": continued(prefix.positions, shared, length)}
        given = self._target.decoder.chunk_inputs(call, cache)
        if given is None:
            return None
        cache.append(prefix.cache, length + 1)
        if shared < len(prefix.tokens):
            cache.truncate(shared)
        return given, prefix, shared

    def resumes(self, prompt: Prompt, others: Sequence[Prompt]) -> bool:
        if not self.looks_up(prompt):
            return False
        ids, key = prompt.input_ids[0].tolist(), self._key(prompt)
        shared = [common(ids, other.input_ids[0].tolist()) for other in others if self._key(other) == key]
        if match := self._find(prompt, 0):
            shared.append(match[1])
        return 2 * max(shared, default=0) >= len(ids)

    def start(self, prompt: Prompt, output: TargetOutput, cache: TreeCache) -> None:
        """Cache the states of a prefilled single-row prompt, and record the answers of its rows.

        Args:
            cache: cache after the prompt, with only the rows of this prompt.
        """
        prefixes = self._target.prefix_cache
        self._record()
        if prefixes is None or not prompt.singles:
            self._answers += [None] * len(prompt.input_ids)
            return
        parts = output.embeds, output.positions, output.features
        answers = [
            RunningStates.of(row, single, self._key(single), *parts) for row, single in enumerate(prompt.singles)
        ]
        self._answers += answers
        if len(answers) == 1:
            tokens, key = prompt.input_ids[0].tolist(), answers[0].key
            whole = Prefix(tokens, key, cache, output.logits, output.features, output.embeds, output.positions)
            prefixes.add(whole, self._uncuttable)

    def commit(self, verdict: Verdict, verified: dict[Feature, Tensor]) -> None:
        """Record the features of the accepted nodes of each row.

        Args:
            verified: features of the verified tree, (batch, nodes, hidden) each.
        """
        self._record()
        if all(answer is None for answer in self._answers):
            return
        nodes = verdict.path.clamp(min=0)
        index = torch.arange(len(nodes), device=nodes.device)[:, None]
        self._step = verdict, {name: states[index, nodes] for name, states in verified.items()}

    def _record(self) -> None:
        """Record the features of the last commit, (batch, depth, hidden) each."""
        if self._step is None:
            return
        (verdict, features), self._step = self._step, None
        for row, (answer, (path, _)) in enumerate(zip(self._answers, verdict.host, strict=True)):
            if answer is not None and path:
                accepted = {name: states[row : row + 1, : len(path)] for name, states in features.items()}
                answer.features.append(accepted)

    def retain(self, rows: Sequence[int], histories: Sequence[list[int]]) -> None:
        target = self._target
        self._record()
        if target.prefix_cache is None:
            return
        for row, history in zip(rows, histories, strict=True):
            answer, length = self._answers[row], target.runner.cache.lengths[row]
            if answer is None or length == answer.prompt:
                continue
            if length > len(history) and self._uncuttable:
                continue  # recurrent states include draft tokens after the stop
            cache = target.decoder.new_cache(length + 1, False)
            cache.append(target.runner.cache, length + 1, [row])
            if length > len(history):
                cache.truncate(len(history))
            target.prefix_cache.add(answer.prefix(history[:length], cache, target.embed), self._uncuttable)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._record()
        self._answers = [self._answers[row] for row in rows]

    def _find(self, prompt: Prompt, least: int) -> tuple[Prefix, int] | None:
        prefixes, ids = self._target.prefix_cache, prompt.input_ids[0].tolist()
        assert prefixes is not None
        return prefixes.find(ids, self._key(prompt), self._target.features, least, self._uncuttable)

    def _key(self, prompt: Prompt) -> Hashable:
        return self._target.batch_key(prompt), media_key(prompt), self._target.device, self._target.dtype

    @property
    def _uncuttable(self) -> bool:
        """Whether a prompt's states cannot be truncated to fewer tokens."""
        return self._target.decoder.layers is not None
