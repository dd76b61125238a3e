"""Draft-model drafter: a small language model with its own KV cache and recurrent states.

A vision-language draft model with the target's image tokens also receives images and videos, with all visual tokens or
a share (see ``prompt_share.py``); for other models, visual positions are dropped from the prompt. Long texts can also
be reduced. A model with another tokenizer drafts tokens shared by both vocabularies (arXiv 2502.05202).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedModel

from mmspec import ops, plugins
from mmspec.cache.rows import RowTensor
from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import AHEAD, CapturedDrafter, Counts, RowState, path_of, write_last
from mmspec.drafters.growth import LevelPasses, grow_tree
from mmspec.drafters.hidden_state import causal, last_tokens, packing
from mmspec.drafters.prompt_share import TOP_P, VisualShare, relevant
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError, explained
from mmspec.ops.transfer import on_device
from mmspec.targets import sources
from mmspec.targets.checkpoints import cache_if_offline, from_pretrained
from mmspec.targets.decoder import StaticRunner
from mmspec.targets.detokenizer import Vocabulary
from mmspec.targets.packing import QUANTISED, drafter_kind, pack_model
from mmspec.targets.support import base_model
from mmspec.targets.transformers_target import TransformersTarget


class Small(CapturedDrafter):
    """Draft-model drafter.

    Args:
        model: a causal or vision-language model, or its name or folder.
        trust_remote_code: allow Python code in the model's folder.
        tokenizers: of target and model, if they differ; None reads tokenizers where the sizes of vocabularies differ.
        share: 0.1 in ``small:MODEL@0.1``; share of the visual tokens for a vision-language model, the most attended and
        evenly spaced tokens; above 0, also the share of a long text's chunks, those most similar to its end.
        visual_top_p: share of the target's attention to cover by the most attended tokens; 0 spaces all evenly.

    Raises:
        UserError: no model or no share, or (at ``attach``) a vocabulary without the target's tokens, or a larger one.
    """

    learns: ClassVar[bool] = False
    checks: ClassVar[str] = "its tokenizer and chat template"

    def __init__(
        self,
        model: PreTrainedModel | str,
        top_k: int = 8,
        trust_remote_code: bool = False,
        tokenizers: tuple[Any, Any] | None = None,
        share: float = 1.0,
        visual_top_p: float = TOP_P,
    ) -> None:
        self._visual = VisualShare(share, visual_top_p)
        self._source = (model, trust_remote_code) if isinstance(model, str) else None
        self._kind: str | None = None  # of packed weights
        self.model: PreTrainedModel = self._read(*self._source) if self._source else base_model(model).eval()
        self._like = torch.empty(0, dtype=self.model.dtype)  # of its weights as they were read
        self.top_k, self._tokenizers = top_k, tokenizers
        self._shared: SharedTokens | None = None
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "model"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.model = self.lm.model

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        self.lm: TransformersTarget = plugins.target_class(self.model.config)(self.model, exact=False)
        self._output = RowTensor(static_shapes)  # (rows, hidden), at each row's last token

    def attach(self, target: Target) -> None:
        if target is self._target:
            return
        self._shared = self._shared_with(target)
        if isinstance(target, TransformersTarget):
            self._pack(drafter_kind(target, self._like.to(target.device)))
        self.model.to(target.device)  # type: ignore[arg-type]
        self._target = target
        self._visual.attach(target)
        self.reset()
        if self._shared is not None:
            self._own, self._theirs = (x.to(target.device) for x in (self._shared.draft_ids, self._shared.target_ids))
            self._narrow = self.lm.narrow_head(self._own)

    def _pack(self, kind: str | None) -> None:
        """Pack the weights of a model that was read by its name; others are the caller's."""
        if self._source is None or self._own_precision or kind == self._kind:
            return
        if self._kind is not None:
            self.model = self._read(*self._source)
        if kind is not None:
            pack_model(self.model, kind)
        self._kind = kind

    def _read(self, name: str, trust_remote_code: bool) -> PreTrainedModel:
        model, kind = _read(name, trust_remote_code)
        self._own_precision = kind in QUANTISED
        if self._own_precision:
            pack_model(model, kind)
        return model.eval()

    def _shared_with(self, target: Target) -> SharedTokens | None:
        """Tokens shared by the vocabularies of target and model; None if token ids are identical."""
        config: Any = getattr(target, "config", None)
        size, target_size = self.lm.config.vocab_size, getattr(config, "vocab_size", None)
        tokenizers = self._tokenizers
        if tokenizers is None and target_size not in (None, size):
            model: Any = getattr(target, "model", None)
            found = [tokenizer_of(one) for one in (model, self.model)]
            if None not in found and found[0].get_vocab() != found[1].get_vocab():
                tokenizers = found[0], found[1]
        if tokenizers is not None:
            shared = SharedTokens(*tokenizers, (target_size or size, size))
            if not len(shared.draft_ids):
                raise UserError("drafter and target must share tokens: their vocabularies have none in common")
            return shared
        if target_size is not None and size > target_size:
            raise UserError(
                f"drafter and target must share a vocabulary, or have tokenizers in their folders: the drafter has "
                f"{size} tokens, the target {target_size}"
            )
        return None

    @property
    def features(self) -> tuple[Feature, ...]:
        return () if self._shared is not None else self._visual.features

    @property
    def parts(self) -> tuple[RowState, ...]:
        return self.lm.runner, self._output

    def draft_chains(self, length: int) -> None:
        self.top_k = 1

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        if (seen := self._seen(prompt, output.visual)) is not None:
            self._begin_with_media(seen, output, history)
            return
        mask = prompt.attention_mask
        keep = torch.ones_like(prompt.input_ids).bool() if mask is None else mask.bool()
        if output.visual is not None:
            keep = keep & ~output.visual
        keep = relevant(prompt.input_ids, keep, self._visual.share)
        ids = torch.cat([prompt.input_ids, last_tokens(history, keep.device)], dim=1)
        keep = F.pad(keep, (0, 1), value=True)
        if self._shared is not None:
            texts = [row[kept].tolist() for row, kept in zip(ids, keep, strict=True)]
            ids, lengths = self._translated(texts, keep.device)
            keep = torch.arange(ids.shape[1], device=keep.device) < lengths[:, None]
        order, keep = packing(keep, left=True)
        ids = self._readable(ids.gather(1, order))
        self.join(len(history), self.lm.decoder.static_shapes)
        self._prefill(Prompt(ids, None if bool(keep.all()) else keep.long()))

    def _seen(self, prompt: Prompt, visual: Tensor | None) -> Prompt | None:
        """The prompt with images and videos at the tokens ``visual``; None if the model does not get them."""
        if visual is None or self._shared is not None or not self._visual.share or not bool(visual.any()):
            return None
        own = self.lm.visual(prompt)
        return None if own is None or not torch.equal(own, visual) else _unencoded(prompt)

    def _begin_with_media(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        """Prefill images and videos too, and queue the first tokens."""
        device, before, new = prompt.input_ids.device, self.rows, len(history)
        prompt = prompt.to(device, self.lm.dtype)
        if self._visual.share < 1:
            assert output.visual is not None
            mask, visual = prompt.attention_mask, self._visual.selected(output.visual, output, before)
            text = ~output.visual if mask is None else ~output.visual & mask.bool()
            prompt.prefill_mask = visual | relevant(prompt.input_ids, text, self._visual.share)
        self.join(new, self.lm.decoder.static_shapes)
        message = "the draft model must take the target's images and videos; with small:MODEL@0 it drafts without them"
        with explained(message, ValueError, RuntimeError, TypeError):
            self._prefill(prompt)
        first = on_device([[0]] * before + [[row[-1]] for row in history], device)
        lengths = [0] * before + [1] * new
        self._pending.append(((first, on_device(lengths, device)), partial(list, lengths)))

    def _prefill(self, prompt: Prompt) -> None:
        *_, read = self.lm.prefill([prompt], [AHEAD] * len(prompt.input_ids), ("last",))
        assert read is not None
        self._output.append(read.features["last"][:, -1])

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the accepted tokens."""
        if self._shared is None:
            self.queue((verdict.tokens,), verdict)
            return
        ids, lengths = self._translated([tokens for _, tokens in verdict.host], verdict.tokens.device)
        self._pending.append(((ids, lengths), lengths.tolist))

    def _translated(self, rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
        """Translate target tokens to draft tokens, padded on the right; also returns their numbers, (batch,) int64."""
        assert self._shared is not None
        own = [self._shared.translate(row) for row in rows]
        width = max(1, *map(len, own))
        padded = on_device([row + [0] * (width - len(row)) for row in own], device)
        return padded, on_device([len(row) for row in own], device)

    def reserve(self, width: int) -> None:
        self.lm.runner.cache.reserve_nodes(width + self.limits[0] * self.top_k)

    def advance(self, accepted: Counts) -> None:
        self.lm.runner.cache.advance(accepted)

    def update(self, tokens: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Append accepted tokens, (batch, width), to the KV cache."""
        (batch, width), lm = tokens.shape, self.lm
        lm.runner.forget_nodes()
        chain = causal(batch, width, tokens.device)
        depth = torch.arange(width, device=tokens.device).expand(batch, -1)
        states, path = lm.runner.forward_nodes(self._readable(tokens), depth, chain)["last"], path_of(length, width)
        if isinstance(lm.runner, StaticRunner):
            lm.runner.commit_on_device(path)
        else:
            lm.runner.commit_nodes(path, lambda: [list(range(count)) for count in length.tolist()])
        write_last(self._output, states, length)

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        passes = LevelPasses(self.lm.runner, self.lm.decoder.layers is not None)

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            return self._children(passes(beam if self._shared is None else self._own[beam], origin))

        tree = grow_tree(token, self._children(self._output.data[: len(token)]), extend, plan, self.top_k)
        passes.end()
        if self._shared is not None:
            tree.tokens[:, 1:] = self._theirs[tree.tokens[:, 1:]]
        return tree

    def _readable(self, tokens: Tensor) -> Tensor:
        """Clamp tokens to the model's vocabulary, which may be smaller than the target's."""
        return tokens.clamp(max=self.lm.config.vocab_size - 1)

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        head = self.lm.head if self._shared is None else self._narrow
        return ops.top_log_probs(head(hidden), self.top_k)


def _read(name: str, trust_remote_code: bool) -> tuple[PreTrainedModel, Any]:
    """A draft model and its dtype: without a GPU, the type of a quantised GGUF file, for packing."""
    location = plugins.model_path(name)
    with cache_if_offline("drafter", location) as options:
        source, options["trust_remote_code"] = sources.find(location), trust_remote_code
        config = source.config(**options)
        on_cpu = source.dtype in QUANTISED and not torch.cuda.is_available()
        return source.model(plugins.target_class(config).auto_class, config, "auto", on_cpu, **options)


class SharedTokens:
    """Tokens shared by the tokenizers of target and draft model, and translation of other tokens.

    Tokens are equal if their strings are equal, apart from the marker of a leading space.

    Args:
        sizes: number of the models' tokens, of the target and of the draft model.

    Attributes:
        target_ids, draft_ids: (shared,) int64, ids of the shared tokens in both vocabularies.
    """

    def __init__(self, target: Any, draft: Any, sizes: tuple[int, int]) -> None:
        theirs, ours = target.get_vocab(), draft.get_vocab()
        signs = _space_sign(target), _space_sign(draft)
        pairs = {theirs[name]: ours[one] for one in ours if (name := _renamed(one, *signs)) in theirs}
        pairs = {token: own for token, own in pairs.items() if token < sizes[0] and own < sizes[1]}
        self._token_bytes, self._draft = Vocabulary(target).token_bytes, draft
        self._pieces: dict[int, list[int]] = {token: [own] for token, own in pairs.items()}
        self.target_ids, self.draft_ids = (torch.tensor([*ids], dtype=torch.long) for ids in (pairs, pairs.values()))

    def translate(self, tokens: Sequence[int]) -> list[int]:
        """Draft tokens of the target's: a token that is not shared is encoded by its text."""
        for token in tokens:
            if token not in self._pieces:
                text = self._token_bytes(token).decode(errors="replace")
                self._pieces[token] = self._draft(text, add_special_tokens=False)["input_ids"]
        return [piece for token in tokens for piece in self._pieces[token]]


def _space_sign(tokenizer: Any) -> str:
    """The tokenizer's marker of a leading space."""
    ids = tokenizer(" ", add_special_tokens=False)["input_ids"]
    return str(tokenizer.convert_ids_to_tokens(ids)[0])[:1] if ids else ""


def _renamed(token: str, target: str, draft: str) -> str:
    """A draft model's token with the target tokenizer's marker of a leading space."""
    return target + token[1:] if target and draft and target != draft and token.startswith(draft) else token


def tokenizer_of(model: Any) -> Any:
    """The tokenizer in a model's folder, or in the cache of the hub; None if there is none."""
    name = "" if model is None else model.config.name_or_path
    if not name:
        return None
    try:
        return from_pretrained(AutoTokenizer, name, local_files_only=True)
    except (OSError, UserError, ValueError):
        return None


def _unencoded(prompt: Prompt) -> Prompt | None:
    """The prompt with its original images and videos; None if these are unknown."""
    encoded = "mm_encoder_outputs"  # set by transformers' ``generate``
    if encoded not in prompt.inputs:
        return prompt
    others = {name: value for name, value in prompt.inputs.items() if name != encoded}
    return replace(prompt, inputs={**others, **prompt.media}, media={}) if prompt.media else None


SPEC = DrafterSpec(
    "small",
    "Small model",
    "a small language or vision-language model, as in assisted generation (arXiv 2211.17192)",
    Small,
    argument="MODEL",
    parse_settings=lambda share: {"share": float(share)} if re.fullmatch(r"\d*\.?\d+", share) else None,
    trusts=True,
    train="small",
)
