"""Text models as targets, and unsupported models."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers

import mmspec
from mmspec import Pipeline, TokenTree, UserError, plugins
from mmspec.checking.oracle import Oracle
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, output_of
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import make_drafter
from mmspec.engine.stopping import Stopper
from mmspec.eval.harness.small_configs import random_model, small_config
from mmspec.quantisation.linear import PackedLinear
from mmspec.sampling.sampler import Sampler
from mmspec.targets.decoder import Decoder
from mmspec.targets.packing import pack_model
from mmspec.targets.processor import Processor
from mmspec.targets.support import lay_out_for_few_rows, refuse_switch, rope_side
from mmspec.targets.transformers_target import FirstLayers, TransformersTarget
from mmspec.targets.tree_layers import tree_layers
from tests.compiled import needs_kernels
from tests.decoding import SteppedEngine, assert_threads_share
from tests.draft_checks import plain_pass
from tests.mmspec.engine.test_engine import TableTarget, said_plainly
from tests.targets import assert_trees_equal_paths, plain_logits, prefilled, prompt_of, row_of
from tests.tiny import byte_model, byte_tokenizer, random_tree, shared_model
from tests.tiny.configs import HYBRID_CONFIGS, TEXT_CONFIGS
from tests.tiny.models import text_inputs, text_model

PACKED = ("bfloat16", "int8", "int4")
SCORES = torch.randn(259, 1, 259, generator=torch.Generator().manual_seed(0)).expand(-1, 259, -1)
"""Scores of the next token by the token before the last."""

WINDOWED = ["mistral-window", "qwen2-window", "gemma2", "gemma3", "lfm3", "zaya", "inkling_text"]
_PADDED = {"right": ((0, 0), (11, 14)), "hole": ((0, 0), (5, 8)), "left": ((0, 4), (0, 0))}
"""Padding at the slots from one number to another, of two rows."""


def renamed_cache():
    """A model whose cache argument has a name that mmspec does not know, as 5.24 renamed it for releases before."""

    class Renamed(transformers.LlamaModel):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, states=None, use_cache=None):
            return super().forward(input_ids, attention_mask, position_ids, states, use_cache=use_cache)

    model = text_model("llama")
    model.model.__class__ = Renamed
    return model


def changed(name, **changes):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configured(TEXT_CONFIGS[name](), **changes)).eval()


def configured(config, **changes):
    for field, value in changes.items():
        setattr(config, field, value)
    return config


def assert_generates(model, inputs, seeds=1, nodes=12, **options):
    """Tokens with drafts, most of them accepted, are those of ``generate``."""
    options = {"do_sample": False, "eos_token_id": None, **options}
    reference = model.generate(**inputs, **options)
    for seed in range(seeds):
        oracle = Oracle(reference[:, inputs["input_ids"].shape[1] :].tolist(), vocab=90, seed=seed)
        assert torch.equal(mmspec.generate(model, drafter=oracle, nodes=nodes, **inputs, **options), reference)


@pytest.mark.parametrize("name", TEXT_CONFIGS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 12), (3, 4), (3, 20)])
def test_every_node_equals_its_path(name, batch, length):
    assert_trees_equal_paths(shared_model(name), text_inputs(batch, length), steps=3, seed=length)


def eager(name):
    model = text_model(name)
    model.set_attn_implementation("eager")
    return model


def grouped(heads, kv_heads):
    return changed("llama", num_attention_heads=heads, num_key_value_heads=kv_heads)


@pytest.mark.parametrize(
    ("model", "sizes", "options"),
    [
        *((partial(eager, name), (3, 9), {}) for name in ("llama", "mistral-window", "qwen2-window", "gemma3")),
        *((partial(shared_model, "llama"), (1, 1), {"nodes": 63, "shape": shape}) for shape in ("chain", "star")),
        *((partial(grouped, *heads), (2, 7), {}) for heads in ((6, 2), (5, 1), (4, 4), (6, 3))),
    ],
)
def test_nodes_of_other_attention_and_shapes_equal_their_paths(model, sizes, options):
    assert_trees_equal_paths(model(), text_inputs(*sizes), steps=2, **options)


@torch.inference_mode()
def test_the_head_takes_no_product_in_batches():
    # As for slices of one node it would by torch's choice, which copies the head each time.
    inputs, model = text_inputs(1, 9), copy.deepcopy(shared_model("llama")).requires_grad_(False)
    target = TransformersTarget(model)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        prefilled(target, prompt_of(inputs), 8)
        target.verify(TokenTree.root(inputs["input_ids"][:, -1]))
    batched = [event.input_shapes for event in profile.events() if event.name == "aten::bmm"]
    assert not any(model.config.vocab_size in shape for shapes in batched for shape in shapes)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "bamba", "falcon_mamba"])
@torch.no_grad()
def test_inputs_and_outputs_of_layers_are_the_models_own(name):
    model = shared_model(name)
    layers = model.get_decoder().layers
    names = (0, 1, output_of(0), output_of(len(layers) - 1), "last")
    ids = text_inputs(1, 11)["input_ids"]
    seen = plain_pass(model, {"input_ids": ids}, [])
    expected = dict(zip(names, (*seen.inputs[:2], seen.outputs[0], seen.outputs[-1], seen.last), strict=True))
    assert not torch.allclose(seen.outputs[-1], seen.last)
    for chunk in (None, 4):
        target = plugins.target_class(model.config)(model)
        output = prefilled(target, Prompt(ids[:, :7]), 8, names, chunk)
        tree = target.verify(TokenTree(ids[:, 7:], torch.arange(-1, 3)[None]), names)
        for one in names:
            got = torch.cat([output.features[one], tree.features[one]], dim=1)
            torch.testing.assert_close(got[0], expected[one], atol=1e-4, rtol=1e-4)


def test_rotations_that_depend_on_the_length_are_those_of_the_whole_prompt():
    start = {"original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0 + place for place in range(8)], **start}
    rotation = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **factors}
    config = small_config(transformers.Phi3Config, rope_parameters=rotation, **start)
    model, ids = random_model(config), text_inputs(1, 24)["input_ids"]
    target = TransformersTarget(model)
    for tokens in (ids[:, :5], ids):  # the first prompt is never split
        logits = prefilled(target, Prompt(tokens), 4, chunk=8).logits[:, -1]
        torch.testing.assert_close(logits, model(tokens).logits[:, -1], atol=1e-5, rtol=1e-5)
        target.keep([])


def test_threads_share_a_model():
    assert_threads_share(shared_model("llama"))


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"])
@pytest.mark.parametrize("model_name", ["llama", "gemma2"])
def test_attention_that_takes_no_trees_is_replaced_during_passes(name, model_name):
    model = text_model(model_name)
    model.config._attn_implementation_internal = name  # what from_pretrained(attn_implementation=...) leaves behind
    targets = TransformersTarget(model), TransformersTarget(text_model(model_name))
    eager = name == "eager" or model_name == "gemma2"  # of which transformers has no other
    assert targets[0].decoder.attention.name == ("eager" if eager else "mmspec_tree")
    tree = random_tree(torch.Generator().manual_seed(0), 1, 9, 90)
    for target in targets:
        prefilled(target, prompt_of(text_inputs(1, 5)), 9)
    torch.testing.assert_close(*(target.verify(tree).logits for target in targets), atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation == name


def small_t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (small_t5, "T5ForConditionalGeneration is an encoder-decoder"),
        (
            transformers.DeepseekV4Config,
            "ForCausalLM has compressed_sparse_attention, heavily_compressed_attention of another kind",
        ),
        (
            transformers.OpenAIGPTConfig,
            "forward must take a cache: that of OpenAIGPTModel in OpenAIGPTLMHeadModel does not",
        ),
        (renamed_cache, "^forward must take a cache: that of Renamed in LlamaForCausalLM does not$"),
        (
            transformers.XLMConfig,
            "^the target must be one that trees can reproduce: XLM.* takes the tokens of its cache again ",
        ),
    ],
)
def test_architectures_that_trees_cannot_pass_are_refused_by_name(make, message):
    model = random_model(small_config(make)) if isinstance(make, type) else make()
    with pytest.raises(UserError, match=message):
        TransformersTarget(model)


def test_masks_of_doge_are_exact_up_to_its_window():
    model = changed("doge", keep_window_size=28)
    for layer in model.model.layers:
        layer.self_attn.A.data.normal_()
    # Slots of other branches exceed the window.
    assert_generates(model, {"input_ids": torch.arange(5, 17)[None]}, nodes=24, max_new_tokens=16)


@pytest.mark.parametrize("padding", _PADDED)
@pytest.mark.parametrize("name", [*WINDOWED, "llama4", "gpt_neo", "llama"])
def test_padding_within_a_window_gives_the_same_tokens_or_is_refused(name, padding):
    """transformers' windows and chunks count slots, and so padding after tokens."""
    if name == "llama4":
        model = random_model(small_config(transformers.Llama4TextConfig, attention_chunk_size=8))
    elif name not in {**TEXT_CONFIGS, **HYBRID_CONFIGS}:
        pytest.skip(f"the installed transformers has no {name}")
    else:
        model = shared_model(name)
    ids = torch.randint(3, 90, (2, 14), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row, (first, last) in enumerate(_PADDED[padding]):
        mask[row, first:last] = 0
    inputs = dict(input_ids=ids, attention_mask=mask)
    refused = padding in ("right", "hole") and name != "llama"
    message = r"^attention_mask must .*: expected at most \d slots .*, got up to 25$"
    with pytest.raises(UserError, match=message) if refused else nullcontext():
        assert_generates(model, inputs, nodes=10, max_new_tokens=12)


@pytest.mark.parametrize(("new", "fits"), [(11, True), (12, False)])
def test_padding_after_tokens_where_no_window_is_exceeded(new, fits):
    model = changed("mistral-window", sliding_window=24)
    ids, mask = torch.randint(3, 90, (1, 14)), torch.ones(1, 14, dtype=torch.long)
    mask[:, 5:8] = 0
    message = r"expected at most 24 slots with padding after tokens, got up to 25$"
    with nullcontext() if fits else pytest.raises(UserError, match=message):
        assert_generates(model, dict(input_ids=ids, attention_mask=mask), max_new_tokens=new)


def test_a_padded_row_is_prefilled_the_same_in_chunks():
    inputs = text_inputs(1, 14)
    inputs["attention_mask"][:, :5] = 0
    steps = []
    for chunk in (None, 4):
        target = TransformersTarget(shared_model("llama"))
        step = prefilled(target, Prompt(**inputs), chunk=chunk)
        assert target.runner.cache.lengths == [9]
        steps.append(step)
    assert torch.equal(steps[0].logits, steps[1].logits)


def test_models_and_layers_that_no_plug_in_serves_are_refused_by_name(monkeypatch):
    """Also layers whose kinds are not named, as RecurrentGemma's in transformers 5.21, which decoded as attention."""
    with pytest.raises(UserError, match=r"^tree verification of BambaForCausalLM requires layer_types in SimpleName"):
        tree_layers(shared_model("bamba"), SimpleNamespace(model_type="bamba"))
    with pytest.raises(UserError, match="no target adapter supports T5Config: registered are text, vision"):
        mmspec.plugins.target_class(transformers.T5Config())
    monkeypatch.setattr(mmspec.plugins, "registered", lambda group: ())
    expected = (
        r"^layers must be full or sliding-window attention: BambaForCausalLM has linear_attention of another kind$"
    )
    with pytest.raises(UserError, match=expected):
        TransformersTarget(shared_model("bamba"))


def test_layers_with_states_are_on_one_device():
    places = {"_hf_hook": SimpleNamespace(execution_device="cpu"), "hf_device_map": {"lm_head": "cpu", "model": "meta"}}
    for fields in ({"_tp_size": 2}, places):
        model = copy.deepcopy(shared_model("bamba"))
        vars(model).update(fields)
        with pytest.raises(UserError, match=r"^layers with states .* device: BambaForCausalLM is split over several$"):
            TransformersTarget(model)


@pytest.mark.skipif("dory" not in TEXT_CONFIGS, reason="the installed transformers has no Dory")
def test_loops_over_layers():
    model = copy.deepcopy(shared_model("dory"))
    with pytest.raises(UserError, match=r"^single layers need a decoder that runs each once: got 8 runs of 4 layers$"):
        Decoder(model, 1)
    model.config.recurrent_kv_cache_mode = "last_loop"
    with pytest.raises(
        UserError, match=r"^loops over layers must have .*: expected .* in DoryForCausalLM, received 'l"
    ):
        TransformersTarget(model)
    model.config.n_recurrent_loops = 1
    TransformersTarget(model)
    # Counts as of a default configuration of fewer layers: transformers' own decoding fails, too.
    model.config.n_input_layers, model.config.n_recurrent_layers = 3, -1
    with pytest.raises(UserError, match=r"^loops .*: expected at least 0 n_recurrent_layers in Dory.*, received -1$"):
        TransformersTarget(model)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_that_does_more_than_is_known_is_refused(dtype, chunk):
    torch.manual_seed(0)
    model = random_model(small_config(transformers.BertConfig, is_decoder=True, initializer_range=0.5)).to(dtype)
    with pytest.raises(UserError, match="BertLMHeadModel transforms its logits after the output layer"):
        prefilled(TransformersTarget(model.eval()), Prompt(torch.tensor([[5, 6]])), 4, chunk=chunk)

    for name in ("llama", "gemma2"):  # whose heads are known
        prefilled(TransformersTarget(text_model(name).to(dtype)), Prompt(torch.tensor([[5, 6]])))


@pytest.mark.parametrize("chunk", [None, 2])
def test_logits_that_are_not_numbers_are_refused(chunk):
    model = copy.deepcopy(text_model("llama"))
    model.lm_head.weight.data[0] = torch.nan
    with pytest.raises(UserError, match=r"^weights must be finite: lm_head.weight contains NaN"):
        prefilled(TransformersTarget(model), Prompt(torch.tensor([[5, 6, 7, 8, 9]])), 4, chunk=chunk)


def _rope(kind, limit):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    return changed("llama", num_hidden_layers=1, max_position_embeddings=limit, rope_parameters=rope)


def roped(limit, rope, **changes):
    return configured(TEXT_CONFIGS["llama"](), max_position_embeddings=limit, rope_parameters=rope, **changes)


LONG, AT_28 = {"rope_type": "longrope"}, {"original_max_position_embeddings": 28}
SWITCHES = {
    ("attention temperatures change at 28 tokens: .* below", "slots"): [
        small_config(transformers.Llama4TextConfig, floor_scale=540),
        small_config(transformers.InklingTextConfig, log_scaling_n_floor=540),
    ],
    ("attention masks change at 28 tokens: .* below", "slots"): [
        configured(TEXT_CONFIGS["doge"](), keep_window_size=28)
    ],
    ("dynamic rotary embeddings change at 28 tokens: .* below", "tokens"): [
        roped(28, {"rope_type": "dynamic"}),
        roped(28, {"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}}),
    ],
    ("longrope rotary embeddings change at 28 tokens: .* stay on one side", "tokens"): [
        *(roped(28, LONG), roped(64, LONG | AT_28), roped(64, LONG, **AT_28))
    ],
    ("", ""): [
        *(roped(28, {"rope_type": "yarn"}), roped(28, {})),
        configured(small_config(transformers.Llama4TextConfig, floor_scale=540), attn_temperature_tuning=False),
        small_config(transformers.InklingTextConfig, log_scaling_n_floor=None),
    ],
}
"""Configurations by message and by the length that is compared with 28."""


@pytest.mark.parametrize(
    ("said", "compared", "config"), [(*key, config) for key, configs in SWITCHES.items() for config in configs]
)
def test_prompts_and_answers_are_on_one_side_of_what_changes_with_the_length(said, compared, config):
    for lengths, padded, new, crosses in (
        ([12], 12, [16], ()),
        ([12], 12, [17], ("slots", "tokens")),
        ([4, 12], 13, [24, 16], ("slots",)),
        ([12, 4], 12, [3, 25], ("slots", "tokens")),
        ([28, 30], 30, [7, 1], ("slots", "tokens")),
        ([29, 30], 30, [7, 1], () if "longrope" in said else ("slots", "tokens")),
    ):
        with (
            pytest.raises(UserError, match=f"^{said}, got {min(lengths)} and") if compared in crosses else nullcontext()
        ):
            refuse_switch(config, lengths, padded, new)
    assert rope_side(config, 29) == (True,) * bool(said)
    assert rope_side(config, 28) == (False,) * bool(said)


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 16), ("longrope", 64)])
def test_rotary_embeddings_that_change_within_an_answer_are_refused(kind, limit):
    mask = (torch.arange(20)[None] >= 20 - torch.tensor([4, 12])[:, None]).long()
    target, prompt = TransformersTarget(_rope(kind, limit)), Prompt(torch.ones_like(mask), mask)
    prefilled(target, prompt, [12, 4])  # padding does not count
    with pytest.raises(
        UserError, match=rf"^{kind} rotary embeddings change at 16 tokens: .*, got 4 and up to 13 more$"
    ):
        prefilled(target, prompt, [12, 5])
    loose = TransformersTarget(target.model, exact=False)  # of a draft model
    copied, model = copy.deepcopy((loose, loose.model))
    assert copied.model is model
    for one in (loose, loose.fork(), copied, pickle.loads(pickle.dumps(loose))):
        prefilled(one, prompt, [12, 5])


@pytest.mark.parametrize(
    ("kind", "limit", "length", "new"),
    [("dynamic", 16, 6, 10), ("longrope", 64, 6, 10), ("longrope", 64, 17, 20), ("yarn", 64, 9, 20)],
)
def test_rotary_embeddings_on_one_side_of_the_change(kind, limit, length, new):
    assert_generates(_rope(kind, limit), text_inputs(1, length), seeds=3, max_new_tokens=new)


@pytest.mark.parametrize(
    ("kind", "limit", "lengths", "new"),
    [("dynamic", 64, [5, 40], [50, 20]), ("longrope", 64, [3, 9], [12, 5]), ("longrope", 64, [20, 30], [4, 30])],
)
def test_stacked_prompts_have_limits_of_their_own(kind, limit, lengths, new):
    """Limits apply per prompt, not to the longest of the batch; stacked prompts give the logits of single prompts."""
    target, pads = TransformersTarget(_rope(kind, limit)), [max(lengths) - length for length in lengths]
    target.keep([])
    ids = [torch.arange(3, 3 + length)[None] for length in lengths]
    alone = [
        prefilled(TransformersTarget(target.model), Prompt(one), count) for one, count in zip(ids, new, strict=True)
    ]
    stacked = prefilled(target, Prompt.stack([Prompt(one) for one in ids]), new)
    assert min(pads) == 0 < max(pads)
    torch.testing.assert_close(stacked.logits, torch.cat([one.logits for one in alone]), atol=2e-4, rtol=2e-4)


def test_padding_within_a_prompt_is_no_limit_of_the_prompt_beside_it():
    target = TransformersTarget(shared_model("mistral-window"))
    mask = torch.ones(2, 4, dtype=torch.long)
    mask[0, 1] = 0
    prefilled(target, Prompt(torch.arange(8).view(2, 4), mask), [1, 30])
    target.keep([])
    with pytest.raises(UserError, match="padding before tokens only"):
        prefilled(target, Prompt(torch.arange(8).view(2, 4), mask), [30, 1])


def test_rows_ahead_of_others_stay_within_learned_positions():
    """Up to the last position that the model has, in a batch whose rows advance at different speed."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=101, n_embd=48, n_layer=1, n_head=4, n_positions=32, initializer_range=0.25, pad_token_id=0
    )
    assert_generates(
        transformers.AutoModelForCausalLM.from_config(config).eval(), text_inputs(3, 9), seeds=5, max_new_tokens=23
    )


@pytest.mark.parametrize(("limit", "max_new_tokens"), [(512, 2), (10, 8)])
def test_positions_reach_as_far_as_the_context_and_what_is_asked_for(limit, max_new_tokens):
    """Eight nodes in sequence: past the requested tokens but within the context, and the reverse."""
    model, inputs = changed("llama", max_position_embeddings=limit), text_inputs(3, 9)
    target = TransformersTarget(model)
    prefilled(target, prompt_of(inputs), max_new_tokens)
    tree = random_tree(torch.Generator().manual_seed(0), 3, 8, 90, ragged=False, shape="chain")
    logits = target.verify(tree).logits
    for b in range(3):
        expected = plain_logits(model, row_of(inputs, b), tree.tokens[b].tolist())[1:]
        torch.testing.assert_close(logits[b], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("place", [None, 0, 1, 2])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_every_end_token_ends_an_answer(place, drafter):
    model = copy.deepcopy(byte_model())
    model.generation_config.eos_token_id = None
    pipe = mmspec.Pipeline(TransformersTarget(model), Processor(byte_tokenizer()), make_drafter(drafter))
    assert pipe.target.eos_token_ids == []
    said = pipe.generate("abc", max_new_tokens=12, nodes=4).token_ids
    last = next(token for token in said[4:] if token not in said[:4])
    ends = [token for token in range(3, 9) if token not in said][:3]
    if place is not None:
        ends[place] = last
    model.generation_config.eos_token_id = last if place is None else ends
    assert pipe.target.eos_token_ids == ([last] if place is None else ends)
    result = pipe.generate("abc", max_new_tokens=12, nodes=4)
    assert (result.token_ids, result.finish_reason) == (said[: said.index(last) + 1], "stop")


def test_weights_laid_out_for_few_rows_are_the_same_weights():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(30, 8), "head": torch.nn.Linear(8, 30, bias=False)})
    model["body"], model["wide"] = torch.nn.Linear(8, 12), torch.nn.Linear(8, 2050)
    model["rounded"] = torch.nn.Linear(8, 12).to(torch.bfloat16)
    model["head"].weight = model["embed"].weight
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lay_out_for_few_rows(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model["body"].weight.t().is_contiguous()
    for name in ("embed", "wide", "rounded"):  # embedding, too wide, not float32
        assert model[name].weight.is_contiguous()


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [5, 2, 90], [100, 37, 5, 64]])
@pytest.mark.parametrize("kind", [None, "capped", *(pytest.param(kind, marks=needs_kernels) for kind in PACKED)])
def test_a_narrow_head_gives_the_logits_of_its_tokens(ids, kind):
    """With its part of the bias; packed, too: of blocks of 16 rows it takes rows. Or with a cap of scores."""
    torch.manual_seed(0)
    config = transformers.PhiConfig(
        vocab_size=101, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.get_output_embeddings().bias.data.normal_()
    hidden = torch.randn(2, 3, 48, dtype=torch.bfloat16 if kind in PACKED else torch.float32)
    if kind in PACKED:
        pack_model(model, kind)
        assert isinstance(model.get_output_embeddings(), PackedLinear)
    target = TransformersTarget(shared_model("gemma2") if kind == "capped" else model)
    torch.testing.assert_close(target.narrow_head(torch.tensor(ids))(hidden), target.head(hidden)[..., ids])


def mpt(longest):
    return transformers.MptForCausalLM(
        transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=90, max_seq_len=longest)
    ).eval()


def gpt_neo(longest):
    return changed("gpt_neo", max_position_embeddings=longest)


@pytest.mark.parametrize("kind", [mpt, gpt_neo])
@pytest.mark.parametrize("order", [1, -1])
def test_a_row_at_the_last_slot_of_attention_drafts_as_deep_as_the_others(order, kind):
    torch.manual_seed(0)
    longest = 32
    model = kind(longest)
    prompts, new = [list(range(3, 31)), [40, 41, 42]][::order], [4, 20][::order]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)[0]
        for ids, count in zip(prompts, new, strict=True)
    ]
    said = [row[len(ids) :].tolist() + [5] * longest for ids, row in zip(prompts, expected, strict=True)]
    engine = SteppedEngine(plugins.target_class(model.config)(model), Oracle(said, vocab=90, seed=0), StepPlan(12))
    rows = [
        row
        for ids, count in zip(prompts, new, strict=True)
        for row in engine.add(Prompt(torch.tensor([ids])), Sampler(), Stopper(count))
    ]
    engine.wait(lambda: all(row.done for row in rows))
    assert [row.error for row in rows] == [None, None]
    assert [row.history for row in rows] == [row.tolist() for row in expected]


class Table(TableTarget):
    dtype, context_limit, eos_token_ids = torch.float32, 200, (2,)

    def __init__(self):
        super().__init__(SCORES)

    def fork(self):
        return Table()


@pytest.mark.parametrize("nodes", [None, 0, 6])
@pytest.mark.parametrize("drafter", [None, Ngram, Recycle])
def test_a_target_alone_decodes(drafter, nodes):
    pipe = Pipeline(Table(), Processor(byte_tokenizer()), drafter and drafter())
    prompts = ["one, two", "ab", "one, two, one, two"]
    answers = pipe.generate_batch([{"prompt": prompt} for prompt in prompts], max_new_tokens=40, nodes=nodes)
    rows = [byte_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    assert [answer.token_ids for answer in answers] == [said_plainly(SCORES, row, 40, eos=(2,)) for row in rows]
    assert answers[0].text == byte_tokenizer().decode(answers[0].token_ids, skip_special_tokens=True)
    assert pipe.name == "Table"
    if drafter is Recycle and nodes == 6:
        assert answers[0].stats.mean_acceptance_length > 1


def test_its_limits_hold():
    pipe = Pipeline(Table(), Processor(byte_tokenizer()))
    with pytest.raises(UserError, match=r"^an early exit requires a target that is a model of transformers: this"):
        FirstLayers(pipe.target, 1)
    with pytest.raises(UserError, match=r"context of 200 tokens: got 200$"):
        pipe.generate("x" * 200)
    assert len(pipe.generate("x" * 190, max_new_tokens=99).token_ids) <= 10
