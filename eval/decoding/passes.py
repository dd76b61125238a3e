"""Times of verify passes by the form of a model's weights, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.eval.harness.llama_server import LlamaServer
from mmspec.loading import load_target
from mmspec.targets import gguf
from mmspec.targets.processor import Processor
from mmspec.targets.support import read_whole
from mmspec.targets.transformers_target import TransformersTarget

UNPACKED = "bfloat16, F.linear"


def load_as(folder: str, form: str) -> tuple[TransformersTarget, Processor]:
    """A target with weights as ``form``, a dtype of ``mmspec.load`` or ``UNPACKED``, and its processor."""
    if form != UNPACKED:
        return load_target(folder, "cpu", form)
    folder = gguf.resolved(folder)
    model: Any = read_whole(AutoModelForCausalLM, folder)
    return TransformersTarget(model.bfloat16().eval()), Processor.read(folder)


@torch.inference_mode()
def divergence(target: TransformersTarget, exact: Tensor, ids: Tensor) -> float:
    """Mean Kullback-Leibler divergence in nats of a target's next tokens in a text from exact ones.

    Args:
        exact: (1, length, vocab), logits of the exact weights.
        ids: (1, length) int64, the text.
    """
    expected, actual = (logits.float().log_softmax(-1) for logits in (exact, target.model(ids).logits))
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


def start(target: TransformersTarget, prefix: int, max_new_tokens: int) -> None:
    """Prefill so many tokens; each size of a pass is then timed as it is."""
    target.cost = None
    target.prefill(Prompt(torch.arange(prefix)[None] + 1000), max_new_tokens=max_new_tokens)


def verify_pass(target: TransformersTarget, nodes: int) -> Callable[[], float]:
    """A pass over a chain of so many nodes, with the host reading the choices; it returns its seconds.

    As in decoding, it follows another one, so that both find the same part of the weights in caches.
    """
    tree = TokenTree(torch.arange(nodes)[None] + 500, torch.arange(nodes)[None] - 1)

    def run() -> float:
        target.forward_tree(tree)
        start = clock()
        target.forward_tree(tree).logits.max(-1).indices.tolist()
        return clock() - start

    return run


def plain_step(server: LlamaServer, prefix: int) -> Callable[[], float]:
    """llama.cpp's plain decoding after a prompt of so many tokens; it returns the seconds per token."""
    prompt = range(1000, 1000 + prefix)
    return lambda: server.complete(prompt, 32, ignore_eos=True).token_seconds


def read_bytes(count: int) -> Callable[[], float]:
    """Reads so many bytes of memory, by a sum; it returns the seconds."""
    data = torch.ones(count // 4)

    def run() -> float:
        start = clock()
        data.sum().item()
        return clock() - start

    return run


def ratio(found: Mapping[Any, Sequence[float]], name: Any, other: Any) -> float:
    """Median over the rounds of the ratio of two calls' times."""
    return median(a / b for a, b in zip(found[name], found[other], strict=True))
