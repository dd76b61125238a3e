"""One device-to-host copy per step: which processors need more, and steps in which torch forbids others on a GPU.

On a CPU, ``tests/mmspec/engine/test_matrix.py`` counts them.
"""

import pytest
import torch
from transformers.generation import logits_process as hf

from mmspec import SamplingParams
from mmspec.core.plan import StepPlan
from mmspec.core.verify import Verdict
from mmspec.engine.stopping import Stopper
from mmspec.sampling import defaults
from mmspec.sampling.batch_sampler import BatchSampler
from mmspec.sampling.sampler import Sampler
from tests import matrix
from tests.decoding import decode
from tests.device import as_launches, on_a_gpu, waiting
from tests.mmspec.sampling.test_sampler import PROCESSORS, VOCAB, histories_and_tree, rows_of
from tests.targets import prompt_of

pytestmark = pytest.mark.long

SAMPLING = {
    "greedy": lambda: Sampler(),
    "top-k": lambda: Sampler(defaults.processors(SamplingParams(temperature=0.8, top_k=20)), do_sample=True),
    "top-p": lambda: Sampler(defaults.processors(SamplingParams(temperature=1.0, top_p=0.9)), do_sample=True),
    "what was said": lambda: Sampler(
        [
            hf.RepetitionPenaltyLogitsProcessor(1.1),
            hf.NoRepeatNGramLogitsProcessor(3),
            hf.NoBadWordsLogitsProcessor([[3], [4, 5]]),
            hf.MinNewTokensLengthLogitsProcessor(9, 20, 7),
        ]
    ),
}


def steps(name, kind, batch, sampling, plan):
    """An answer step by step on a GPU; the first of the rows ends early."""
    target = matrix.new_target(name, "cuda")
    drafter = matrix.drafter_of(kind, target.model, "captured")
    if drafter is not None:
        drafter.attach(target)
    inputs = on_a_gpu(matrix.inputs_of(name, 2, batch), "cuda")
    stopper = Stopper(60, criteria=[])
    for rows in decode(target, drafter, prompt_of(inputs), SAMPLING[sampling](), stopper, plan):
        if batch > 1 and len(rows[0].token_ids) > 8:
            rows[0].finish_reason = "stop"
        yield rows


WAITING = {"eta", "top-h", "length decay", "watermark", "prefix", "subclass", "subclass, padding ignored"}
"""transformers' processors that read values on the host, and processors that run path by path."""


@pytest.mark.usefixtures("at_every_node")
@pytest.mark.parametrize("name", PROCESSORS)
def test_which_processors_wait(name, monkeypatch):
    as_launches(monkeypatch)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile leaves it False
    history, tree = histories_and_tree(0)
    logits, sampler = torch.randn(3, tree.nodes, VOCAB), BatchSampler()
    rows = rows_of(Sampler(PROCESSORS[name]()), history)
    sampler.choose(rows, tree, logits)
    with waiting() as counts:
        sampler.choose(rows, tree, logits)
    assert bool(counts) == (name in WAITING)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "kind"), matrix.STATIC)
def test_torch_finds_no_other_waiting(name, kind, batch, sampling, monkeypatch):
    """From the fourth step on, when all is compiled and captured."""
    copies, host = [], Verdict.host.func

    def only_copy(verdict):
        torch.cuda.set_sync_debug_mode("default")
        copies.append(host(verdict))
        torch.cuda.set_sync_debug_mode("error" if len(copies) > 3 else "default")
        return copies[-1]

    found = type(Verdict.host)(only_copy)
    found.__set_name__(Verdict, "host")
    monkeypatch.setattr(Verdict, "host", found)
    plan = StepPlan(0 if kind == "plain" else 12, 4)
    try:
        for _, rows in zip(range(12), steps(name, kind, batch, sampling, plan), strict=False):
            assert len(rows) == batch
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 4 < len(copies) <= 11
