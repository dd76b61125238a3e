"""Random models and drafters in published shapes, and acceptance at a set rate, for ``mmspec.eval.gpu``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, BambaConfig, LlamaConfig, PreTrainedTokenizerFast

from mmspec import plugins
from mmspec.cache.rows import RowTensor
from mmspec.core.drafter import Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict, accept_path
from mmspec.drafters.captured import CapturedDrafter, TrainedDrafter
from mmspec.drafters.dflash import DFlash, DFlashConfig, DFlashNetwork, default_layer_ids
from mmspec.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Network
from mmspec.eval.kernels.gpu_kernels import device_seconds
from mmspec.ops.transfer import on_device
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.drafters.msd import MSD, Flash, MSDConfig, MSDNetwork

_COMMON: dict[str, Any] = dict(
    initializer_range=0.002, max_position_embeddings=16384, tie_word_embeddings=False, eos_token_id=None
)
_TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
)
_TINY |= dict(vocab_size=160)
_TINY_BAMBA = _TINY | dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, attn_layer_indices=[1])
_BAMBA: dict[str, Any] = dict(
    vocab_size=128256, num_key_value_heads=8, mamba_d_state=128, attn_layer_indices=[9, 18, 27]
)


def config_of(name: str, tiny: bool) -> Any:
    """``7b``: the language model of LLaVA-1.5-7B; ``hybrid``: Bamba-9B; or a tiny one of the class. Fields that are not
    given here have these values by default."""
    if name == "7b":
        return LlamaConfig(**_COMMON | (_TINY if tiny else dict(vocab_size=32064)))
    return BambaConfig(**_COMMON | _BAMBA | (_TINY_BAMBA if tiny else {}))


def random_target(config: Any, device: torch.device, dtype: torch.dtype) -> TransformersTarget:
    """A model with random weights, made on the device.

    Its layers change embeddings little, and the output layer is the embedding moved by a row. It counts: no near ties
    make answers depend on the order of sums in bfloat16.
    """
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    embedding = model.get_input_embeddings().weight.data.normal_()
    model.get_output_embeddings().weight.data.copy_(embedding.roll(1, 0))
    target: TransformersTarget = plugins.target_class(config)(model)
    return target


def random_drafters(target: TransformersTarget) -> dict[str, TrainedDrafter]:
    """Drafters with random networks of published shapes for this target: what their drafts cost."""
    config, layers, head = target.config, target.config.num_hidden_layers, min(32_000, target.config.vocab_size)
    dflash = DFlashConfig.like(
        config, layers=min(5, layers), block_size=16, mask_token_id=0, target_layer_ids=default_layer_ids(layers)
    )
    with torch.device(target.device):
        return {
            "msd": MSD(MSDNetwork(MSDConfig.like(config)).to(target.dtype)),
            "flash": Flash(MSDNetwork(MSDConfig.like(config, slots=12)).to(target.dtype), top_k=4, depth=12),
            "eagle3": Eagle3(Eagle3Network(Eagle3Config.like(config, head=head)).to(target.dtype), torch.arange(head)),
            "dflash": DFlash(DFlashNetwork(dflash).to(target.dtype)),
        }


def number_processor(vocab: int) -> Processor:
    """Its text is the numbers of tokens."""
    words = WordLevel({str(token): token for token in range(vocab)}, unk_token="0")
    return Processor(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)))


class SetAcceptance(Wrapper):
    """A drafter at its cost, whose drafts are replaced: along a path, each is right with a set probability.

    Trees keep their number of nodes. A path of as many levels as the drafter drafts comes first; all other nodes are
    wrong children of the root.

    Args:
        answers: plain decoding's new tokens, by prompt.
        rate: probability that a draft is right, after right drafts.
        vocab: number of tokens.
    """

    drafter: CapturedDrafter

    def __init__(self, drafter: CapturedDrafter, answers: Mapping[Any, list[int]], rate: float, vocab: int) -> None:
        self.drafter, self._answers, self._rate, self._vocab = drafter, answers, rate, vocab
        self._random, self._width = random.Random(0), max(map(len, answers.values()))
        self._at, self._tokens = RowTensor(), RowTensor()  # next place in the answer; (rows, 2, width) answers, drafts

    @property
    def drafts_ahead(self) -> bool:
        return self.drafter.drafts_ahead

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        super().begin(prompt, output, history)
        rows = [self._answers[tuple(row[:-1])] for row in history]
        rows = [row + [0] * (self._width - len(row)) for row in rows]
        drafts = [[(x + (self._random.random() >= self._rate)) % self._vocab for x in row] for row in rows]
        self._tokens.append(on_device(list(zip(rows, drafts, strict=True)), prompt.input_ids.device))
        self._at.append(on_device([1] * len(rows), prompt.input_ids.device))

    def select(self, rows: Sequence[int]) -> None:
        for part in (self.drafter, self._tokens, self._at):
            part.select(rows)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        super().observe(tree, verdict, output)
        self._at.data += verdict.length

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        nodes = super().propose(token, plan).nodes
        depth = min(nodes - 1, self.drafter.limits[0], plan.depth)
        place = torch.arange(nodes, device=token.device).expand(len(token), -1)
        path = place <= depth
        at = (self._at.data[:, None] + (place - 1).where(path, 0)).clamp(0, self._width - 1)
        answers, drafts = (tokens.gather(1, at) for tokens in self._tokens.data.unbind(1))
        tokens = drafts.where(path, (answers + 1 + place - depth) % self._vocab)
        tokens = torch.cat([token[:, None], tokens[:, 1:]], dim=1)
        log_probs = place.clamp(max=depth) * math.log(self._rate) - place.where(~path, 0)
        tree = TokenTree(tokens, (place - 1).where(path, 0), log_probs=log_probs, check=False)
        tree.max_depth = depth
        return tree


def time_passes(
    target: TransformersTarget, batch: int, prefix: int, nodes: Sequence[int], bandwidth: float, calls: int
) -> dict[str, Any]:
    """Milliseconds of verify passes over chains after a prefix, of commits and of drafts, medians of calls in a row.

    A draft comes after a step that accepted three tokens, which the drafter reads.
    """
    config: Any = target.config
    device = target.device
    ids = torch.arange(prefix, device=device).repeat(batch, 1) % config.vocab_size

    def milliseconds(run: Callable[[], Any]) -> float:
        return 1000 * median(device_seconds(run, device, calls))

    def chain(count: int) -> TokenTree:
        place = torch.arange(count, device=device).repeat(batch, 1)
        return TokenTree(place, place - 1, check=False)

    drafts, plan = {}, StepPlan(max(nodes) - 1)
    for name, drafter in random_drafters(target).items():
        drafter.attach(target)
        reads = tuple(drafter.features)
        *_, output = target.prefill([Prompt(ids)], [256] * batch, reads, 1024)
        assert output is not None
        drafter.begin(Prompt(ids), output, [[*row, 0] for row in ids.tolist()])
        tree = chain(7)
        step = tree, accept_path(tree, (tree.tokens + 1).where(tree.tokens < 3, 0)), target.verify(tree, reads)

        def draft(drafter: CapturedDrafter = drafter, step: Any = step) -> None:
            drafter.observe(*step)
            drafter.propose(step[1].bonus, plan)

        drafts[name] = milliseconds(draft)
        target.keep([])
    list(target.prefill([Prompt(ids)], [256] * batch))
    passes = {str(count): milliseconds(partial(target.verify, chain(count))) for count in nodes}
    nothing = ids.new_full((batch, 4), -1)
    commit = milliseconds(lambda: target.runner.commit_nodes(nothing, lambda: [[]] * batch))
    target.keep([])
    weights: Any = [*target.model.get_decoder().layers.parameters(), *target.model.get_output_embeddings().parameters()]
    attending, states = config.num_hidden_layers, 0  # layers, and bytes of a sequence's recurrent states
    if config.model_type == "bamba":
        attending, heads = len(config.attn_layer_indices), config.mamba_n_heads
        states = 4 * (config.num_hidden_layers - attending) * heads * config.mamba_d_head * config.mamba_d_state
    kv = 2 * prefix * config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    read = sum(x.nbytes for x in weights) + batch * (states + kv * attending * target.dtype.itemsize)
    floor = 1000 * read / bandwidth
    facts = {"pass_ms": passes, "floor_ms": floor, "floor_of_plain": floor / passes["1"], "draft_ms": drafts}
    return {**facts, "commit_ms": commit}
