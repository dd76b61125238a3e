"""Draft models with another tokenizer, with recurrent layers, and with images."""

import copy
import pickle
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import AssistantToTargetTranslator

import mmspec
from mmspec import UserError
from mmspec.drafters.registry import make_drafter
from mmspec.drafters.small import SharedTokens, Small
from mmspec.targets.packing import pack_model, weights_kind
from tests.compiled import needs_kernels
from tests.draft_checks import check_logits
from tests.mmspec.drafters.test_drafters import OPTIONS, assert_equal, check_paths, target_of
from tests.mmspec.drafters.test_prompt_share import selected_by_loop
from tests.targets import plain_logits, row_of
from tests.tiny import shared_model
from tests.tiny.configs import IMAGE, VIDEO, VISION_CONFIGS, VOCAB
from tests.tiny.models import text_inputs, text_model, vision_inputs, vision_model
from tests.vocabularies import LETTERS, pair, smaller, words


def test_shared_tokens_are_those_of_transformers():
    target, draft = pair()
    ours = SharedTokens(target, draft, (VOCAB, 49))
    theirs = AssistantToTargetTranslator(target, draft, VOCAB).target_to_assistant_input_ids
    assert dict(zip(ours.target_ids.tolist(), ours.draft_ids.tolist(), strict=True)) == theirs
    assert 20 < len(theirs) < 49
    twice = target.convert_tokens_to_ids("qq")
    assert ours.translate([twice]) == [draft.convert_tokens_to_ids("q")] * 2


def test_a_draft_model_with_another_tokenizer():
    """Every node has the probability, among shared tokens, that the draft model gives it after the translated text."""
    model, small, tokenizers = shared_model("llama"), smaller(), pair()
    shared, inputs = SharedTokens(*tokenizers, (VOCAB, 49)), text_inputs(3, 9)
    own = dict(zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True))

    @torch.no_grad()
    def gain(tokens, path):
        ids, value = shared.translate(tokens), 1.0
        for token in path:
            logits = small(input_ids=torch.tensor([ids])).logits[0, -1]
            probs = logits[shared.draft_ids].softmax(-1)
            value *= float(probs[shared.draft_ids.tolist().index(own[token])])
            ids = [*ids, own[token]]
        return value

    check_paths(model, inputs, Small(small, 3, tokenizers=tokenizers), gain, nodes=7, depth=3, skip=(2,), new=10)


def test_tokenizers_are_read_from_the_folders(tmp_path, monkeypatch):
    model, small, inputs = text_model("llama"), smaller(), text_inputs(2, 9)
    for one, tokenizer, name in zip((model, small), pair(), ("target", "draft"), strict=True):
        one.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    model.config.name_or_path = str(tmp_path / "target")
    drafter = Small(str(tmp_path / "draft"))
    assert_equal(model, drafter, inputs, num_draft_tokens=8)
    assert len(drafter._shared.draft_ids) > 20


@needs_kernels
def test_a_model_that_is_read_by_name_is_packed_like_its_target(tmp_path):
    """Beside quantised weights as int8, as drafters are; a model object stays as it is."""
    shared_model("llama").save_pretrained(tmp_path)
    inputs, drafter, own = text_inputs(1, 9), Small(str(tmp_path)), text_model("llama")
    quantised, exact = text_model("llama"), text_model("llama")
    pack_model(quantised, "int4")
    for target, kind in ((quantised, "Int8Blocks"), (exact, None), (quantised, "Int8Blocks")):
        expected = mmspec.generate(target, drafter=None, **inputs, **OPTIONS)
        for used in (drafter, pickle.loads(pickle.dumps(drafter)), Small(own)):
            assert torch.equal(mmspec.generate(target, drafter=used, num_draft_tokens=6, **inputs, **OPTIONS), expected)
        assert weights_kind(drafter.model) == weights_kind(drafter.lm.model) == kind
        assert weights_kind(own) is None


def test_vocabularies_with_nothing_in_common_are_refused():
    nothing = words(["1", "2", "3"], " ")
    target = words(list(LETTERS), "▁")
    target.add_tokens([])
    shared = SharedTokens(target, nothing, (VOCAB, 49))
    assert shared.target_ids.tolist() == [0]  # both have an unknown token
    foreign = MagicMock(return_value={"input_ids": []}, **{"get_vocab.return_value": {"1": 0}})
    with pytest.raises(UserError, match="must share tokens: their vocabularies have none in common"):
        Small(smaller(), tokenizers=(words(list(LETTERS), "▁"), foreign)).attach(target_of("llama"))


@pytest.mark.parametrize("name", ["qwen3", "bamba", "mamba", "qwen3_5_text"])
def test_draft_models_with_and_without_recurrent_layers(name):
    model, small, inputs = shared_model("llama"), shared_model(name), text_inputs(2, 9)
    rows = [row_of(inputs, number) for number in range(2)]
    logits = lambda row, tokens: plain_logits(small, rows[row], tokens)  # noqa: E731
    check_logits(model, inputs, Small(small, 3), logits, nodes=7, depth=3, skip=(2,), new=10)


@torch.no_grad()
def decoder_inputs(model, row):
    """What a vision-language model passes to its language model, which is left out of the result."""
    seen = {}

    def note(module, args, inputs):
        seen.update(inputs)

    with model.get_decoder().register_forward_pre_hook(note, with_kwargs=True):
        model(**row)
    return seen


@torch.no_grad()
def chosen_tokens(target, row, share):
    """Places of the visual tokens to keep, by the eager attention of one of the target's layers."""
    ids = row["input_ids"][0].tolist()
    visual = [place for place, token in enumerate(ids) if token in (IMAGE, VIDEO)]
    usual = target.config._attn_implementation
    target.set_attn_implementation("eager")
    found = [weights for weights in target(**row, output_attentions=True).attentions if weights is not None]
    target.set_attn_implementation(usual)
    weights = found[len(found) * 2 // 3][0].mean(0)[visual[-1] + 1 :].sum(0).tolist()
    return sorted(selected_by_loop(visual, weights, max(1, round(share * len(visual)))))


@torch.no_grad()
def after_pruned_prompt(model, row, chosen, tokens):
    """(1 + len(tokens), vocabulary) logits after a prompt without the other visual tokens and each further token."""
    given, ids = decoder_inputs(model, row), row["input_ids"][0].tolist()
    visual = [place for place, token in enumerate(ids) if token in (IMAGE, VIDEO)]
    places = sorted({*range(len(ids))} - {*visual} | {*chosen})
    embeds = given["inputs_embeds"][:, places]
    embeds = torch.cat([embeds, model.get_input_embeddings()(torch.tensor([tokens], dtype=torch.long))], dim=1)
    known = given.get("position_ids")
    known = torch.arange(len(ids))[None] if known is None else known
    further = int(known[-1, ..., -1].max()) + 1 + torch.arange(len(tokens))
    positions = torch.cat([known[..., places], further.expand(*known.shape[:-1], -1)], dim=-1)
    deep = {}
    if given.get("visual_pos_masks") is not None:
        marks = torch.tensor([[*(place in chosen for place in places), *(False for _ in tokens)]])
        ranks = [visual.index(place) for place in chosen]
        deep = {
            "visual_pos_masks": marks,
            "deepstack_visual_embeds": [layer[ranks] for layer in given["deepstack_visual_embeds"]],
        }
    # Without a mask, transformers takes gaps between positions for ends of packed sequences.
    given = {"inputs_embeds": embeds, "attention_mask": torch.ones(embeds.shape[:2]), "position_ids": positions}
    hidden = model.get_decoder()(**given, **deep, use_cache=False)[0]
    return model.get_output_embeddings()(hidden)[0, len(places) - 1 :]


@pytest.mark.parametrize(
    ("name", "share"),
    [("llava", 1.0), ("llava_onevision", 0.3), ("qwen2_vl", 0.3), ("qwen3_vl", 0.3), ("qwen3_5", 1.0)],
)
def test_vision_language_draft_models(name, share):
    batch = 1 if name == "llava_onevision" else 2  # without padding, and with
    model, small, inputs = shared_model(name), vision_model(name, seed=1), vision_inputs(name, batch)
    rows = [row_of(inputs, number) for number in range(batch)]
    chosen = [chosen_tokens(model, row, share) for row in rows]
    logits = lambda row, tokens: after_pruned_prompt(small, rows[row], chosen[row], tokens)  # noqa: E731
    check_logits(model, inputs, Small(small, 3, share=share), logits, nodes=7, depth=3, skip=(2,), new=8)


def test_a_folder_and_a_share(tmp_path):
    vision_model("llava", seed=1).save_pretrained(tmp_path)
    model, inputs = shared_model("llava"), vision_inputs("llava", 1)
    prompts = []
    for spec, length in (
        (f"small:{tmp_path}@0.25", 8 + 4),
        (f"small:{tmp_path}", 8 + 16),
        (f"small:{tmp_path}@0", 8 + 1),
    ):
        drafter = make_drafter(spec)
        begin = drafter.begin

        def noted(prompt, output, history, drafter=drafter, begin=begin):
            begin(prompt, output, history)
            prompts.append(drafter.lm.runner.cache.length)

        drafter.begin = noted
        assert_equal(model, drafter, inputs, num_draft_tokens=8)
        assert prompts[-1] == length  # with the first token, where no image is read
    with pytest.raises(UserError, match=r"^the share of the prompt must be from 0 to 1: got 1.5$"):
        make_drafter(f"small:{tmp_path}@1.5")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_draft_model_may_cross_the_length_at_which_its_rotary_embeddings_change(kind):
    """It need not be exact: in the prompt's room for an answer, in the answer, and before both."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 16}
    torch.manual_seed(0)
    shape = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 4}
    limit = 16 if kind == "dynamic" else 64
    draft = LlamaForCausalLM(
        LlamaConfig(**shape, num_hidden_layers=1, max_position_embeddings=limit, rope_parameters=rope)
    ).eval()
    for length in (5, 14, 20):
        (stats,) = assert_equal(shared_model("llama"), Small(draft), text_inputs(1, length), nodes=4)
        assert stats.num_draft_tokens > 0


@pytest.mark.drafter_fails
def test_images_of_another_size_are_not_drafted_for():
    other = copy.deepcopy(VISION_CONFIGS["llava"]())
    other.vision_config.image_size = 24
    torch.manual_seed(0)
    small = AutoModelForImageTextToText.from_config(other).eval()
    (stats,) = assert_equal(shared_model("llava"), Small(small), vision_inputs("llava", 1))
    why = "Small: UserError: the draft model must take the target's images and videos; with small:MODEL@0 "
    assert stats.drafter_error.startswith(why)


@pytest.mark.parametrize(("name", "hooked"), [("llava", True), ("qwen2_vl", False)])
def test_a_vision_language_model_drafts_for_itself_what_it_says(name, hooked):
    model, inputs = shared_model(name), vision_inputs(name, 2)
    asked = dict(drafter=Small(model, top_k=1), num_draft_tokens=4, return_dict_in_generate=True, **inputs, **OPTIONS)
    out = model.generate(custom_generate=mmspec.decode, **asked) if hooked else mmspec.generate(model, **asked)
    for stats in out.stats:
        assert stats.accept_lengths[:-1] == [5] * (len(stats.accept_lengths) - 1)
    assert torch.equal(out.sequences, model.generate(**inputs, **OPTIONS))


def test_several_answers_to_one_image_are_drafted_without_it():
    model, inputs = shared_model("llava"), vision_inputs("llava", 1)
    options = {**OPTIONS, "do_sample": True, "num_return_sequences": 2}
    answers = []
    for drafter in (None, Small(vision_model("llava", seed=1))):
        torch.manual_seed(0)
        answers.append(mmspec.generate(model, drafter=drafter, num_draft_tokens=4, **inputs, **options))
    assert torch.equal(*answers)
