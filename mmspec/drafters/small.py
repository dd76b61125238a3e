"""Draft-model drafter: a small causal language model of the target's vocabulary, with its own KV cache.

Text only: visual positions of the prompt are dropped.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmspec import ops, plugins
from mmspec.cache.rows import RowTensor
from mmspec.core.budget import Budget
from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import CapturedDrafter, RowState, path_of, write_last
from mmspec.drafters.growth import Reach, grow_tree
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError
from mmspec.ops.transfer import on_device
from mmspec.targets import completed, gguf
from mmspec.targets.hub import cache_if_offline, is_path
from mmspec.targets.runner import StaticRunner
from mmspec.targets.support import read_whole
from mmspec.targets.transformers_target import TransformersTarget

_DEPTH, _NODES = 16, 512  # maximum tree size with static shapes


class Small(CapturedDrafter):
    """Draft-model drafter.

    Args:
        model: a causal language model of the target's vocabulary, or its name or folder.
        top_k: nodes extended per level, and children per node.
        trust_remote_code: allow Python code in the model's folder.

    Raises:
        UserError: no model, a model with layers other than attention, or (at ``attach``) a larger vocabulary than the
            target's.
    """

    learns: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel | str, top_k: int = 8, trust_remote_code: bool = False) -> None:
        if isinstance(model, str):
            model = _read(model, trust_remote_code)
        self.model: PreTrainedModel = model.eval()
        self.top_k = top_k
        super().__init__()
        if self.lm.decoder.layers is not None:
            # A recurrent state cannot be extended by uncommitted tokens.
            raise UserError(
                f"the small drafter must have attention layers only: {type(self.model).__name__} has others"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "model"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.model = self.lm.model

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        self.lm = TransformersTarget(self.model)
        self._output = RowTensor(static_shapes)  # (rows, hidden), at each row's last token

    def attach(self, target: Target) -> None:
        if target is self._target:
            return
        config: Any = getattr(target, "config", None)
        size, target_size = self.lm.config.vocab_size, getattr(config, "vocab_size", None)
        if target_size is not None and size > target_size:
            raise UserError(
                f"drafter and target must share a vocabulary: the drafter has {size} tokens, the target {target_size}"
            )
        self.model.to(target.device)  # type: ignore[arg-type]
        self._target = target
        self.reset()

    @property
    def parts(self) -> tuple[RowState, ...]:
        return self.lm, self._output

    def draft_chains(self, length: int) -> None:
        self.top_k = 1

    @property
    def limits(self) -> tuple[int, int]:
        return _DEPTH, _NODES

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        keep = torch.ones_like(prompt.input_ids) if prompt.attention_mask is None else prompt.attention_mask.long()
        if output.visual is not None:
            keep = keep * ~output.visual
        first = on_device([[row[-1]] for row in history], keep.device)
        ids, keep = torch.cat([prompt.input_ids, first], dim=1), F.pad(keep, (0, 1), value=1)
        # Move the text tokens to the right, in order: left padding.
        order = keep.sort(dim=1, stable=True).indices
        width = int(keep.sum(1).max())
        ids, mask = self._readable(ids.gather(1, order)[:, -width:]), keep.gather(1, order)[:, -width:]
        self.join(len(history), self.lm.decoder.static_shapes)
        read = self.lm.prefill(Prompt(ids, None if bool(mask.all()) else mask), max_new_tokens=1024)
        self._output.append(read.features["last"][:, -1])

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the accepted tokens."""
        self.queue((verdict.tokens,), verdict)

    def reserve(self, width: int) -> None:
        self.lm.runner.cache.reserve_nodes(width + _DEPTH * self.top_k)

    def advance(self, accepted: list[int]) -> None:
        self.lm.runner.cache.advance(accepted)

    def update(self, tokens: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Append accepted tokens, (batch, width), to the KV cache."""
        (batch, width), lm = tokens.shape, self.lm
        lm.runner.forget_nodes()
        chain = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril().expand(batch, -1, -1)
        depth = torch.arange(width, device=tokens.device).expand(batch, -1)
        states, path = lm.runner.forward_nodes(self._readable(tokens), depth, chain), path_of(length, width)
        if isinstance(lm.runner, StaticRunner):
            lm.runner.commit_on_device(path)
        else:
            lm.runner.commit_nodes(path, [list(range(count)) for count in length.tolist()])
        write_last(self._output, states, length)

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        lm, reach, levels = self.lm, Reach(), 0
        lm.runner.forget_nodes()

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal levels
            depth = torch.full_like(beam, levels)
            states = lm.runner.forward_nodes(beam, depth, reach(origin))
            lm.runner.keep_nodes(depth)
            levels += 1
            return self._children(states)

        tree = grow_tree(token, self._children(self._output.data[: len(token)]), extend, budget, self.top_k)
        lm.runner.forget_nodes()
        return tree

    def _readable(self, tokens: Tensor) -> Tensor:
        """Clamp tokens to the model's vocabulary, which may be smaller than the target's."""
        return tokens.clamp(max=self.lm.config.vocab_size - 1)

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return ops.top_log_probs(self.lm.head(hidden), self.top_k)


def _read(name: str, trust_remote_code: bool) -> PreTrainedModel:
    location = plugins.model_path(name)
    if is_path(location) and not os.path.exists(location):
        raise UserError(
            f"cannot load drafter 'small:{name}': expected a model's folder, name or hub id, there is no such folder"
        )
    with cache_if_offline("drafter", location) as options:
        folder = completed.resolved(gguf.resolved(location))
        return read_whole(AutoModelForCausalLM, folder, trust_remote_code=trust_remote_code, **options)


SPEC = DrafterSpec(
    "small",
    "Small model",
    "a small causal language model of the target's vocabulary, as in assisted generation",
    Small,
    argument="MODEL",
    trusts=True,
)
