"""Prompts of conversations, answered step by step with a prefix cache."""

from unittest.mock import patch

import torch

from mmspec import SamplingParams, plugins
from mmspec.cache.prefix_cache import PrefixReuse
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters.ngram import Ngram
from mmspec.engine.stopping import Stopper
from mmspec.sampling import defaults
from tests.decoding import decode
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.models import text_inputs, vision_inputs


def new_target(model):
    return plugins.target_class(model.config)(model)


def answered(target, prefixes, prompt, drafter=None, nodes=6, new=8, chunk=None):
    """Tokens of a prompt's answer, and how many of the prompt's states were known; with a ``chunk``, prefilled in
    passes of so many tokens, as beside other sequences."""
    sampler = defaults.sampler(SamplingParams(seed=3))
    plan, prefill = StepPlan(nodes, 3), PrefixReuse.prefill

    def in_chunks(reuse, prompts, limits, reads, _):
        passes = [*prefill(reuse, prompts, limits, reads, chunk)]
        if chunk is not None and target.decoder.layers is not None:  # recurrent; others may need a pass before
            assert chunk * len(passes) >= prompt.input_ids.shape[1] - passes[-1].cached_tokens
        return iter(passes)

    with patch.object(PrefixReuse, "prefill", in_chunks):
        *_, (row,) = decode(target, drafter, prompt, sampler, Stopper(new, criteria=[]), plan, prefixes=prefixes)
    return row.token_ids, row.stats.num_cached_tokens


def followed(prompt, answer, question=(5, 6, 7, 8)):
    """The prompt of the next turn."""
    ids = torch.cat([prompt.input_ids, torch.tensor([[*answer, *question]])], dim=1)
    more = ids.shape[1] - prompt.input_ids.shape[1]
    grown = {
        name: torch.nn.functional.pad(value, (0, more)) if value.shape == prompt.input_ids.shape else value
        for name, value in prompt.inputs.items()
    }
    return Prompt(ids, None, grown)


def prompts_of(name, turns=3):
    """A conversation's prompts, its answers as a pipeline without cached prefixes gives them."""
    model = shared_model(name)
    vision = hasattr(model.config, "vision_config")
    prompt = prompt_of(vision_inputs(name, 1, 2) if vision else text_inputs(1, 20))
    prompt.attention_mask = None
    target, found = new_target(model), []
    for _ in range(turns):
        answer, known = answered(target, None, prompt)
        assert known == 0
        found.append((prompt, answer))
        prompt = followed(prompt, answer)
    return model, found


class Reader(Ngram):
    """Records all outputs that a drafter reads after a prefill."""

    features = "last", 1

    def __init__(self):
        super().__init__()
        self.read = []

    def begin(self, prompt, output, history):
        super().begin(prompt, output, history)
        parts = output.logits, output.visual, output.embeds, output.positions, *map(output.features.get, self.features)
        self.read.append([None if part is None else part.clone() for part in parts])
