"""Gemma-4 assistants draft what transformers' candidate generator drafts with them."""

import copy
import math
from functools import partial

import pytest
import torch
import transformers
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from mmspec import UserError
from mmspec.core.plan import StepPlan
from mmspec.drafters.gemma4 import Gemma4, sharing_allowed
from mmspec.drafters.registry import make_drafter, registered_name
from tests.gemma4 import CENTROIDS, assistant_of, target_model
from tests.mmspec.drafters.test_drafters import assert_equal, check_paths, target_of
from tests.mtp import dense
from tests.targets import prefilled, prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.models import gemma4_assistant, text_inputs


@torch.no_grad()
def proposals(assistant, model, tokens, count):
    """Chain of transformers' generator after a sequence, from a pass of the model over all tokens but the last."""
    config = copy.deepcopy(model.generation_config)
    config.max_length = 999
    generator = SinglePositionMultiTokenCandidateGenerator(assistant, model.get_input_embeddings(), config)
    generator.num_assistant_tokens = count
    ids = torch.tensor([tokens])
    outputs = model(input_ids=ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    given = {"attention_mask": torch.ones_like(ids)}
    drafted, logits = generator.get_candidates(ids, given, outputs, False, 0)
    return drafted[0, len(tokens) :].tolist(), logits[0]


@torch.no_grad()
def gain_of(assistant, model, tokens, path):
    """Probability of a path, by passes of the assistant that are forced to its tokens."""
    outputs = model(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    state, last, gain = outputs.hidden_states[-1][:, -1:], tokens[-1], 1.0
    for token in path:
        out = assistant(
            inputs_embeds=torch.cat([model.get_input_embeddings()(torch.tensor([[last]])), state], dim=-1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=outputs.shared_kv_states,
        )
        gain *= float(out.logits[0, 0].softmax(-1)[token])
        state, last = out.last_hidden_state, token
    return gain


@pytest.mark.parametrize(("centroids", "length"), [(False, 3), (False, 9), (True, 9)])
def test_chains_are_those_of_transformers(centroids, length):
    model = target_model(VOCAB - 1 if centroids else VOCAB)
    assistant = assistant_of(model, **CENTROIDS if centroids else {})
    drafter, history, trees = Gemma4(copy.deepcopy(assistant)), [], []
    drafter.draft_chains(4)
    begin, propose = drafter.begin, drafter.propose
    drafter.begin = lambda prompt, output, rows: (history.extend(rows), begin(prompt, output, rows))

    def proposed(token, plan):
        tree = propose(token, plan)
        trees.append((list(history[0]), tree.tokens[0, 1:].tolist()))
        return tree

    drafter.propose = proposed
    inputs = text_inputs(1, length)
    assert_equal(model, drafter, inputs, num_draft_tokens=4)
    assert len(trees) > 5
    for tokens, chain in trees:
        assert chain == proposals(assistant, model, tokens, 4)[0][: len(chain)]


def test_trees_of_a_batch():
    model = target_model()
    assistant = assistant_of(model)
    gain = partial(gain_of, assistant, model)
    drafter = Gemma4(copy.deepcopy(assistant), top_k=3)
    check_paths(model, text_inputs(3, 9), drafter, gain, nodes=7, depth=4, skip=(1, 4), new=10)


def test_of_the_tokens_of_the_nearest_centroids():
    model = target_model(VOCAB - 1)
    assistant = assistant_of(model, **CENTROIDS)
    drafter = Gemma4(copy.deepcopy(assistant), top_k=30)
    target = target_of(model)
    drafter.attach(target)
    inputs = text_inputs(1, 9)
    history = [*inputs["input_ids"][0].tolist(), 7]
    drafter.begin(prompt_of(inputs), prefilled(target, prompt_of(inputs), reads=drafter.features), [history])
    tree = drafter.propose(torch.tensor([7]), StepPlan(40, 1))
    logits = proposals(assistant, model, history, 1)[1][0]
    near = logits > logits.min()
    assert sorted(tree.tokens[0, 1:].tolist()) == near.nonzero()[:, 0].tolist()
    among = logits.masked_fill(~near, -math.inf).log_softmax(-1)
    torch.testing.assert_close(tree.log_probs[0, 1:], among[tree.tokens[0, 1:]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("unified", [False, True][: 1 + hasattr(transformers, "Gemma4UnifiedAssistantConfig")])
def test_a_folder(unified, tmp_path):
    model = target_model()
    assistant = assistant_of(model)
    if unified:
        config = transformers.Gemma4UnifiedAssistantConfig(
            text_config={**assistant.config.text_config.to_dict(), "model_type": "gemma4_unified_text"},
            backbone_hidden_size=assistant.config.backbone_hidden_size,
        )
        with sharing_allowed():
            same = transformers.Gemma4UnifiedAssistantForCausalLM(config)
        same.load_state_dict(assistant.state_dict())
        assistant = same
    assistant.save_pretrained(tmp_path)
    for name in (str(tmp_path), f"gemma4:{tmp_path}"):
        drafter = make_drafter(name)
        assert registered_name(drafter) == "gemma4"
        assert_equal(model, drafter, text_inputs(2, 9), num_draft_tokens=8)


def test_other_targets_and_other_models_are_one_line(tmp_path):
    assistant = assistant_of(target_model())
    for name, message in [
        ("llama", r"sliding_attention with .kv_heads, head_dim. .2, 12.: got llama with .* no sliding_attention$"),
        ("mellum", r"full_attention with .kv_heads, head_dim. .2, 24.: got .* full_attention with .2, 12.$"),
    ]:
        other = dense("mellum", 1)[0] if name == "mellum" else shared_model(name)
        with pytest.raises(UserError, match=message) as caught:
            Gemma4(assistant).attach(target_of(other))
        assert "\n" not in str(caught.value)
    for width, vocab in ((64, VOCAB), (48, 100)):
        other = gemma4_assistant(shared_model("llama"))
        other.backbone_hidden_size, other.config.get_text_config().vocab_size = width, vocab
        message = f"hidden size {width} and {vocab} tokens.*: got llama with hidden size 48 and 101 tokens"
        with pytest.raises(UserError, match=message):
            Gemma4(other).attach(target_of("llama"))
    with pytest.raises(UserError, match=r"gemma4 takes a model of type gemma4_assistant, .*: got llama"):
        Gemma4(shared_model("llama"))
    assistant.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        make_drafter(str(tmp_path))
    assert "\n" not in str(caught.value)
