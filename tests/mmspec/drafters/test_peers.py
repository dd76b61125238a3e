"""Drafters that speculators trains and saves draft what its own forward passes compute."""

import copy

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from mmspec.drafters import layouts
from mmspec.drafters.registry import make_drafter
from mmspec.training.dflash import selector_loss
from tests.draft_checks import check_drafts, plain_pass
from tests.mtp import mtp_tensors, write_target
from tests.targets import row_of
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.models import dflash_network, text_inputs

pytest.importorskip("speculators.models.eagle3.core", reason="speculators cannot be imported", exc_type=ImportError)
from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators.convert.mtp.converter import MTPConverter
from speculators.models.dflash import core as dflash
from speculators.models.dflash2.metrics import selector_training_candidates
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.peagle import core as peagle
from speculators.proposals.greedy import GreedyTokenProposalConfig

# Their code for releases of transformers before the cache argument's new name.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

IDS, BLOCK, MASK = torch.arange(4, 84, 2), 5, 99
SHAPE = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {**SHAPE, "vocab_size": VOCAB, "attn_implementation": "eager"}
SWITCHES = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [2, 0, 1, 1]},
    {"fc_norm": True, "norm_output": True},
]


def settings(algorithm, steps=3):
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )


def peer(algorithm, layer, target, **fields):
    """A random drafter of speculators, with the embedding and the output layer of its target."""
    kind = SpeculatorModelConfig.registry[algorithm]
    config = kind(transformer_layer_config=layer, speculators_config=settings(algorithm), **fields)
    torch.manual_seed(0)
    model = SpeculatorModel.registry[algorithm](config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.25)
    model.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    if model.use_draft_vocab:
        marked = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True)
        model.load_vocab_mappings(marked, IDS - torch.arange(len(IDS)))
    else:
        model.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    return model


def check(model, folder, scores, depth=4):
    """Decode; every node must have the probability by the peer's scores, and every output token be right.

    Args:
        folder: a saved drafter.
        scores: called with a row's tokens, the pass of the target over them and drafted tokens; logits of each of
            these over the draft vocabulary, and factors.
    """
    inputs, drafter = text_inputs(2), make_drafter(str(folder))
    drafter.top_k = 3
    rows = [row_of(inputs, b) for b in range(2)]

    def gain(tokens, seen, path):
        logits, factors = scores(tokens, seen, path)
        ids = IDS.tolist() if logits.shape[-1] == len(IDS) else range(VOCAB)
        shares = logits.softmax(-1)[range(len(path)), [ids.index(token) for token in path]]
        return float(shares.prod() * factors.prod())

    def gains(target, b, said, paths):
        tokens, seen = [*rows[b]["input_ids"][0].tolist(), *said], plain_pass(model, rows[b], said)
        return [gain(tokens, seen, path) for path in paths]

    with torch.no_grad():
        check_drafts(model, inputs, drafter, gains, depth=depth, skip=(1,), new=7)


def states(seen, model, length):
    """The inputs of layers that a head of EAGLE-3 reads before each token but the first, with nothing at ``length``."""
    outputs = [*seen.inputs, seen.outputs[-1]]
    read = torch.cat([outputs[layer][:-1] for layer in model.target_layer_ids], dim=-1)
    return torch.nn.functional.pad(read, (0, 0, 0, length - len(read)))[None]


def noted(model, call):
    """Outputs of the output layer during a call."""
    found = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: found.append(out[0]))
    call()
    hook.remove()
    return found


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
def test_eagle3(fields, tmp_path):
    target, layers = shared_model("llama"), 1 + ("fc_norm" in fields)
    fields = {"draft_vocab_size": len(IDS), "eagle_aux_hidden_state_layer_ids": [0, 1, 2], **fields}
    model = peer("eagle3", LlamaConfig(**SIZES, num_hidden_layers=layers), target, **fields)
    model.save_pretrained(tmp_path)

    def scores(tokens, seen, path):
        known = [*tokens[1:], *path]
        given = {"input_ids": torch.tensor([known]), "document_ids": torch.zeros(1, len(known), dtype=torch.long)}
        read = states(seen, model, len(known))
        levels = noted(model, lambda: model(hidden_states=read, ttt_steps=len(path), **given))
        return torch.stack([level[len(tokens) - 2] for level in levels]), torch.ones(1)

    check(target, tmp_path, scores)


def test_peagle(tmp_path, monkeypatch):
    target, fields = shared_model("llama"), {"fc_norm": True, "norm_output": True, "draft_vocab_size": len(IDS)}
    fields["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    model = peer("peagle", LlamaConfig(**SIZES, num_hidden_layers=2), target, mask_token_id=MASK, **fields)
    model.save_pretrained(tmp_path)

    def scores(tokens, seen, path):
        known, last = [*tokens[1:], *path], len(tokens) - 2
        at = torch.tensor([*range(last), *[last] * len(path)])
        depth = torch.tensor([*[0] * last, *range(len(path))])
        monkeypatch.setattr(peagle, "generate_cod_sample_indices", lambda **asked: (at, depth))
        monkeypatch.setattr(peagle, "compute_metrics", lambda **asked: (None, {}))  # kernels of a GPU
        given = {"input_ids": torch.tensor([known]), "document_ids": torch.zeros(1, len(known), dtype=torch.long)}
        given["verifier_last_hidden_states"] = torch.zeros(1, len(known), 48)
        (levels,) = noted(model, lambda: model(hidden_states=states(seen, model, len(known)), **given))
        return levels[last:], torch.ones(1)

    check(target, tmp_path, scores)


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64, "use_sliding_window": True}
ALL, SOME = {"draft_vocab_size": VOCAB}, {"draft_vocab_size": len(IDS)}
BLOCKS = [
    ("dflash", ALL, SLIDING),
    ("dflash", {**SOME, "sliding_window_non_causal": True}, SLIDING),
    ("dspark", {**ALL, "markov_rank": 6}, {}),
    ("dspark", {**SOME, "markov_rank": 6, "confidence_head_with_markov": False}, {}),
    ("dspark", {**ALL, "markov_rank": 6, "markov_head_type": "gated"}, {}),
    ("dspark", {**ALL, "markov_rank": 6, "markov_head_type": "rnn"}, {}),
    ("dspark", {**ALL, "markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False}, {}),
    ("dspark", {**ALL, "markov_rank": 0, "confidence_head_with_markov": False}, {}),
    ("xpress", {**ALL, "xpress_rank": 6}, {}),
    ("xpress", {**SOME, "xpress_rank": 6, "xpress_mlp_ratio": 3, "sample_from_anchor": True}, SLIDING),
    ("dflash2", {**ALL, "selector_rank": 6, "selector_top_k": 7}, SLIDING),
    ("dflash2", {**ALL, "conv_kernel_size": 3, "conv_group_size": 8, "sample_from_anchor": True}, {}),
]


@pytest.mark.parametrize(("algorithm", "fields", "kinds"), BLOCKS, ids=str)
def test_blocks(algorithm, fields, kinds, tmp_path, monkeypatch):
    """Windows are wider than what is read: their edges are tested against transformers."""
    target, layer = shared_model("llama"), Qwen3Config(**SIZES, num_hidden_layers=2, **kinds)
    model = peer(
        algorithm, layer, target, block_size=BLOCK, mask_token_id=MASK, aux_hidden_state_layer_ids=[2, 1], **fields
    )
    model.save_pretrained(tmp_path)
    first = 0 if model.config.sample_from_anchor else 1

    def scores(tokens, seen, path):
        last, valid = len(tokens) - 1, torch.ones(1, dtype=torch.bool)
        block = [tokens[-1], *path, *[0] * BLOCK][:BLOCK]
        monkeypatch.setattr(dflash, "select_anchors", lambda *asked: (torch.tensor([last]), valid))
        known = torch.tensor([[*tokens[:-1], *block]])
        read = torch.cat([seen.last, seen.outputs[0]], dim=-1)[:last]
        read = torch.nn.functional.pad(read, (0, 0, 0, BLOCK))[None]
        zeros = torch.zeros_like(known)
        hidden, logits, *_ = model._backbone_forward(
            read, known, zeros, torch.zeros(1, *known.shape[1:], 48), zeros, max_anchors=1
        )
        before = torch.tensor([block if first == 0 else [block[0], *block[:-1]]])
        factors, embeds = torch.ones(BLOCK), None
        if getattr(model, "markov_head", None) is not None:
            embeds = model.markov_head.prev_embeddings(before)
            logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden, prev_emb=embeds)
        if getattr(model, "refiner_head", None) is not None:
            if first:
                before = torch.tensor([[tokens[-2], *block[:-1]]])
            logits = logits + model.refiner_head.block_bias(before, hidden)
        if getattr(model, "confidence_head", None) is not None:
            heard = torch.cat([hidden, embeds], dim=-1) if model.config.confidence_head_with_markov else hidden
            factors = model.confidence_head(heard)[0].sigmoid()
        slots = slice(first, first + len(path))
        if getattr(model, "candidate_selector", None) is not None:
            among, chosen = model.candidate_selector.select(logits, hidden, before)
            factors = logits.softmax(-1).gather(-1, among).sum(-1)[0]  # the other tokens' part
            logits = torch.full_like(logits, -torch.inf).scatter(-1, among, chosen)
        return logits[0, slots], factors[slots]

    check(target, tmp_path, scores, depth=BLOCK - first)


def test_the_selectors_loss():
    """Of targets among the candidates, and of others, which take the place of the least probable one."""
    target, layer = shared_model("llama"), Qwen3Config(**SIZES, num_hidden_layers=1)
    own = {"block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [2, 1], "selector_top_k": 7}
    peers = peer("dflash2", layer, target, draft_vocab_size=VOCAB, **own).candidate_selector
    network = dflash_network(target, selector_rank=256, selector_tokens=VOCAB, selector_top_k=7)
    network.predecessors.weight.data = peers.predecessor_codebook.data
    network.successors.weight.data = peers.successor_codebook.data
    network.selector_state.weight.data = peers.hidden_projection.weight.data
    g = torch.Generator().manual_seed(0)
    scores, goal, states = (torch.randn(40, size, generator=g) for size in (VOCAB, VOCAB, 48))
    goal[:20] = scores[:20].roll(1, -1).where(scores[:20] < 1, scores[:20])
    goal, previous = goal.softmax(-1), torch.randint(VOCAB, (40,), generator=g)
    among, place, found = selector_training_candidates(scores.topk(7).indices, goal.argmax(-1))
    assert 0 < int(found.sum()) < 40
    logits = peers.score_candidates(scores, states, previous, among)
    expected = torch.nn.functional.cross_entropy(logits, place)
    torch.testing.assert_close(selector_loss(network, scores, goal, states, previous), expected)


@pytest.mark.parametrize("algorithm", ["eagle3", "peagle", "dflash", "dflash2", "dspark", "xpress"])
def test_drafters_that_are_written_are_read(algorithm, tmp_path):
    target, reads, own = shared_model("llama"), "aux_hidden_state_layer_ids", {"mask_token_id": MASK}
    if algorithm not in ("eagle3", "peagle"):
        layer, own = Qwen3Config(**SIZES, num_hidden_layers=2, **SLIDING), {**own, "block_size": BLOCK, reads: [2, 1]}
    else:
        layer, own = LlamaConfig(**SIZES, num_hidden_layers=2), {**own, f"eagle_{reads}": [0, 1, 2]}
    if algorithm == "eagle3":
        del own["mask_token_id"]
    target.save_pretrained(tmp_path / "target")
    if algorithm == "xpress":
        own["xpress_mlp_ratio"] = 3
    own["draft_vocab_size"] = VOCAB if algorithm == "dflash2" else len(IDS)
    model = peer(algorithm, layer, target, **own)
    model.save_pretrained(tmp_path / "theirs")
    known = copy.deepcopy(target.config)
    known.name_or_path = str(tmp_path / "target")
    layouts.write(make_drafter(str(tmp_path / "theirs")), known, tmp_path / "ours", "speculators")
    again, state = SpeculatorModel.from_pretrained(tmp_path / "ours"), model.state_dict()
    assert type(again) is type(model)
    fields = ("mask_token_id", "block_size", "sliding_window_non_causal", "sample_from_anchor", "markov_rank")
    fields += ("xpress_rank", "xpress_mlp_ratio", "conv_kernel_size", "conv_group_size")
    fields += ("selector_rank", "selector_top_k")
    for name in (*fields, reads, f"eagle_{reads}", *layouts.families.SWITCHES):
        assert getattr(again.config, name, None) == getattr(model.config, name, None)
    for name, tensor in again.state_dict().items():
        if not name.startswith("verifier"):
            assert torch.equal(tensor, state[name]), name


def test_native_mtp(tmp_path):
    """The first level, by the layer that its converter reads from a target's checkpoint."""
    target = shared_model("qwen3_5_text")
    folder = write_target(tmp_path / "target", target, mtp_tensors(target))
    config = MTPSpeculatorConfig(transformer_layer_config=target.config, speculators_config=settings("mtp", 1))
    model = MTPDraftModel(config).eval()
    missing = model.load_state_dict(MTPConverter().convert_to_state_dict(folder), strict=False).missing_keys
    assert not any(name.startswith("mtp_layers") for name in missing)
    model.embed_tokens, model.lm_head = target.get_input_embeddings(), target.get_output_embeddings()

    def scores(tokens, seen, path):
        known = torch.tensor([[*tokens, 0]])
        hidden = torch.nn.functional.pad(seen.last, (0, 0, 0, 1))[None]
        (logits,), _, _ = model(known, hidden)
        return logits[:, -1], torch.ones(1)

    check(target, f"mtp:{folder}", scores, depth=1)
