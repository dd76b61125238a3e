"""`mmspec train` on tiny targets: every command learns, starts from weights of others, resumes, and refuses."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, LlavaForConditionalGeneration

pytest.importorskip("accelerate")

import mmspec
from mmspec.cli import main
from mmspec.cli.commands import train as commands
from mmspec.core.target import output_of
from mmspec.drafters.dflash import DFlash
from mmspec.drafters.layer import Rotary, rotary_frequencies
from mmspec.drafters.registry import make_drafter
from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.pipeline import Generation
from mmspec.targets.packing import pack_model
from mmspec.training import dflash, eagle3, kangaroo
from mmspec.training.data import TEXT, Conversation
from mmspec.training.dflash import DFlashOptions
from mmspec.training.eagle3 import Eagle3Options
from mmspec.training.features import Features
from mmspec.training.kangaroo import KangarooOptions
from mmspec.training.objectives import LossOutput
from mmspec.training.options import RunOptions
from mmspec.training.run import frequent_tokens
from mmspec.training.small import _first_layers
from mmspec.training.tasks import DrafterTask, TrainingTask, decoder_weights, mask_token
from mmspec.training.trainer import CURVE, DRAFTER, LOG
from mmspec.vision.drafters.msd import MSDConfig, MSDNetwork
from mmspec.vision.training import fit_projection
from tests.eagle3 import EAGLE4, QWEN3_VL, cut, head_tensors, write_head
from tests.model_folders import save_llava, save_text_model
from tests.tiny import shared_model
from tests.tiny.models import dflash_network
from tests.training import terminated_at

TEXT_ONLY = ("small", "mamba")
"""Commands that are tested on a text target, which is faster."""

STILL = "--steps 1 --rate 1e-12 --prompts 0"
"""So small a rate leaves weights as they are."""


def rows(folder):
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def evaluations(folder):
    return [row for row in rows(folder) if row["event"] == "held-out"]


def saved(out):
    return load_file(out / DRAFTER / "model.safetensors")


def assert_same(out, other, atol=1e-6, rtol=0.0):
    theirs = saved(other)
    for name, value in saved(out).items():
        torch.testing.assert_close(theirs[name], value, atol=atol, rtol=rtol)


def easy(folder, kind, scale):
    """Make a random target's next token depend mostly on the last token: easy to learn."""
    target = kind.from_pretrained(folder)
    for layer in target.get_decoder().layers:
        layer.self_attn.o_proj.weight.data *= 0.05
        layer.mlp.down_proj.weight.data *= 0.05
    said = torch.zeros(320, 1)
    said[2:40] = scale
    target.lm_head.weight.data *= said
    target.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return easy(save_llava(tmp_path_factory.mktemp("llava")), LlavaForConditionalGeneration, 1.0)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    folder = save_text_model(tmp_path_factory.mktemp("text"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    return easy(folder, LlamaForCausalLM, 4.0)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Conversations that a target has answered, with an image each or without."""

    @cache
    def call(target, images=False):
        folder, pipe, lines = tmp_path_factory.mktemp("conversations"), mmspec.load(target, drafter=None), []
        for number in range(12 if pipe.processor.reads_media else 24):
            record: dict[str, Any] = {"id": str(number)}
            prompt, image = f"Count to {number * 7}.", folder / f"{number}.png"
            if images:
                Image.new("RGB", (32, 32), (20 * number, 99, 255 - 20 * number)).save(image)
                record["image"] = image.name
            content = {"images": [image]} if images else {}
            said = pipe.generate(
                [{"role": "user", "content": prompt}] if not images else prompt, max_new_tokens=20, nodes=0, **content
            )
            answer = {"from": "gpt", "value": said.text, "token_ids": said.token_ids}
            lines.append(json.dumps({**record, "conversations": [{"from": "human", "value": prompt}, answer]}))
        (folder / "data.jsonl").write_text("\n".join(lines))
        return folder / "data.jsonl"

    return call


@pytest.fixture
def train(request, answered):
    def call(out, *options, command="msd", **replaced):
        small = command in TEXT_ONLY
        target = request.getfixturevalue("text_model" if small else "model")
        chosen = {"text": answered(target)} | ({} if small else {"data": answered(target, True)}) | replaced
        given = [part for name, path in chosen.items() if path for part in (f"--{name}", str(path))]
        given += ["--batch", "6", "--held-out", "4", "--prompts", "4", "--max-new-tokens", "16", "--warmup", "5"]
        if command == "mamba":
            given += ["--hidden-size", "32", "--heads", "2", "--head-dim", "16", "--state", "4"]
        result = CliRunner().invoke(
            commands, [command, "--target", target, "--out", str(out), *given, *" ".join(options).split()]
        )
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return call


# ---------------------------------------------------------------------- learning

EAGLE3 = "--passes 3 --top-k 4 --depth 4 --total-tokens 12"
DFLASH = "--block-size 5 --anchors 8 --top-k 4 --total-tokens 12"
DSPARK = "--loss tv --markov-rank 16 --markov-type rnn --confidence markov --from-anchor --causal 1"
XPRESS = "--markov-rank 16 --markov-type xpress"
DFLASH2 = "--conv-kernel-size 2 --conv-group-size 8 --selector-rank 16 --selector-top-k 12"
FLASH = "--rank 12 --loss lk --reads 0,1 --confidence --depth 6"
NARROW = "--draft-vocabulary 40"
MEDUSA = f"--heads 3 --top-k 4 --total-tokens 12 {NARROW}"
LEARNING = [  # command, options, fields of the saved drafter or of its network's configuration, a metric
    ("small", "--layers 1 --hidden 32", "hidden_size=32 num_hidden_layers=1 vocab_size=320", "right_1"),
    ("mamba", "--top-k 4", "name=mamba top_k=4 hidden_size=32", "right_1"),
    ("msd", "--tensorboard --top-k 4 --total-tokens 12", "top_k=4 depth=6 total_tokens=12 decoupled=True", "right_1"),
    ("flash", "", "name=flash latents=2 span=16 slots=12", "right_6"),
    ("flash", "--latents 3 --slots 1 --passes 2", "latents=3 slots=1", "right_2"),
    ("flash", "--ratio 2 --slots 2 --passes 2 --glancing 0.4", "latents=8 slots=2", "right_4"),
    ("flash", FLASH, "latents=2 slots=12 rank=12", "coverage_6"),
    ("eagle3", f"{NARROW} {EAGLE3}", "top_k=4 depth=4 total_tokens=12 mask_token_id=None", "right_3"),
    ("eagle3", f"--loss lk --parallel --keep 0.8 {NARROW} {EAGLE3}", "name=eagle3", "right_3"),
    ("dflash", f"{NARROW} {DFLASH}", "depth=15 total_tokens=12 block_size=5 target_layer_ids=[0,1]", "right_4"),
    ("dflash", f"--from-target {NARROW} {DFLASH}", "top_k=4", "right_4"),
    ("dflash", f"{DSPARK} {NARROW} {DFLASH}", "markov_rank=16 causal=[1] markov_outputs=40", "confidence_5"),
    ("dflash", f"{DFLASH2} {DFLASH}", "selector_rank=16 selector_tokens=320 conv_kernel_size=2", "selector_4"),
    ("dflash", f"{XPRESS} {NARROW} {DFLASH}", "markov_rank=16 markov_type=xpress", "base_4"),
    ("medusa", f"--layers 2 {MEDUSA}", "name=medusa layers=2 heads=3 head=40", "right_3"),
    ("medusa", f"--grounded --shared-output {MEDUSA}", "name=hydra layers=1 head=0", "right_3"),
    ("medusa", f"--grounded --prefix {MEDUSA}", "name=hydra head=40", "right_3"),
    ("kangaroo", f"--exit-layer 1 --total-tokens 12 {NARROW}", "name=kangaroo exit_layer=1", "right_1"),
]
LOSS = {"msd": 0.7, "medusa": 0.95, "kangaroo": 0.95}
"""The loss after training is below this share of the first loss."""


@pytest.mark.parametrize(
    ("command", "options", "fields", "metric"),
    [pytest.param(*case, marks=() if case[0] in TEXT_ONLY else pytest.mark.long) for case in LEARNING],
)
def test_a_drafter_learns_to_predict_its_target(command, options, fields, metric, request, train, tmp_path):
    """It is saved with its settings, and leaves an answer as it is."""
    assert "drafter written to" in train(tmp_path, "--steps", "60", "--rate", "1e-2", options, command=command)
    first, last = evaluations(tmp_path)
    assert last["loss"] < LOSS.get(command, 0.8) * first["loss"]
    assert last["mean_acceptance_length"] > first["mean_acceptance_length"] + (0.2 if command == "flash" else 0.3)
    assert metric in last
    assert "acceptance" in (tmp_path / CURVE).read_text()
    assert ("--tensorboard" in options) == bool(list((tmp_path / "tensorboard").glob("**/events.*")))
    drafter = make_drafter(f"{'small:' if command == 'small' else ''}{tmp_path / DRAFTER}")
    config = drafter.model.config if command == "small" else drafter.network.config
    expected = dict(field.split("=") for field in fields.split())
    found = {name: getattr(drafter if hasattr(drafter, name) else config, name) for name in expected}
    assert {name: str(value).replace(" ", "") for name, value in found.items()} == expected
    assert NARROW not in options or len(drafter.draft_ids) == 40
    if command == "eagle3":
        assert ("--parallel" in options) == (config.mask_token_id is not None)
    target = request.getfixturevalue("text_model" if command in TEXT_ONLY else "model")
    pipe, plain = mmspec.load(target, drafter), mmspec.load(target, None)
    answers = [one.generate("Count to 7.", max_new_tokens=16, nodes=12) for one in (pipe, plain)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.mean_acceptance_length > 1.3
    arguments = ["--model", target, "--drafter", str(tmp_path / DRAFTER), "--out", str(tmp_path / "out")]
    exported = main(["export", *arguments])
    markov = command == "dflash" and "--markov-rank" in options  # of 40 tokens, without an output layer of its own
    assert exported == (
        0 if command in ("eagle3", "dflash", "medusa") and "--grounded" not in options and not markov else 2
    )
    assert exported == 2 or make_drafter(str(tmp_path / "out")).name == command


def test_the_same_command_resumes_the_run(train, tmp_path):
    options = ["--epochs", "2", "--prompts", "0", "--layers", "2", "--draft-vocabulary", "12"]
    train(tmp_path / "whole", *options, command="mamba")
    assert rows(tmp_path / "whole")[-1]["step"] == 7  # 20 conversations are not held out; batches of 6
    with terminated_at(3):
        assert "stopped at step 4; run the same command again" in train(tmp_path / "parts", *options, command="mamba")
    with pytest.raises(UserError, match=r"state = 4: expected the same to resume it, received 8"):
        train(tmp_path / "parts", *options, "--state", "8", command="mamba")
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"conversations": TURNS}) for _ in range(9)))
    with pytest.raises(UserError, match=r"text = .*: expected the same"):
        train(tmp_path / "parts", *options, text=other, command="mamba")
    train(tmp_path / "parts", *options, "--checkpoint-minutes", "1", command="mamba")
    assert len(saved(tmp_path / "whole")["draft_ids"]) == 12
    assert_same(tmp_path / "whole", tmp_path / "parts", 0.0)


TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


# ---------------------------------------------------------------------- starts


@pytest.mark.long
def test_settings_keep_the_drafter_that_training_starts_from(train, tmp_path):
    """Further layers add nothing at first, and a head of full rank is the target's."""
    shape = ["--draft-vocabulary", "10", "--slots", "6", "--depth", "6"]
    train(tmp_path / "first", "--steps", "30", "--rate", "1e-2", *shape, command="flash")
    options = ["--steps", "1", "--rate", "1e-12", "--depth", "6", "--slots", "6", "--rank", "32", "--reads", "1,0"]
    train(tmp_path / "more", *options, "--start", str(tmp_path / "first" / DRAFTER), command="flash")
    before, after = (
        next(row for row in rows(tmp_path / name)[::step] if row["event"] == "held-out")
        for name, step in (("first", -1), ("more", 1))
    )
    config = json.loads((tmp_path / "more" / DRAFTER / "config.json").read_text())["network"]
    assert (config["rank"], config["head"], config["reads"]) == (32, 10, [1, 0])
    for depth in range(1, 7):
        assert after[f"token_{depth}"] == pytest.approx(before[f"token_{depth}"], rel=1e-3)
    assert after["mean_acceptance_length"] == before["mean_acceptance_length"]


@pytest.mark.long
def test_layers_switches_and_a_cache(train, tmp_path):
    options = f"--steps 2 --prompts 0 --layers 2 --reads 1,0 --outputs --norm-before-residual --norm-before-fc {EAGLE3}"
    assert "no --text: training on --data only" in train(tmp_path / "a", options, text=None, command="eagle3")
    train(tmp_path / "b", options, f"--cache {tmp_path / 'cache'}", text=None, command="eagle3")
    assert list((tmp_path / "cache").glob("*.safetensors"))
    assert_same(tmp_path / "a", tmp_path / "b", 1e-4, 1e-3)
    drafter = make_drafter(str(tmp_path / "a" / DRAFTER))
    config = drafter.network.config
    assert (config.layers, config.reads, config.outputs, config.states, config.head) == (2, [1, 0], True, 2, 320)
    assert (config.norm_before_residual, config.norm_before_fc, config.norm_output) == (True, True, True)
    assert not config.fc_norm
    begin = ["--start", str(tmp_path / "a" / DRAFTER), EAGLE3]
    train(tmp_path / "on", STILL, *begin, command="eagle3")
    assert_same(tmp_path / "a", tmp_path / "on")
    with pytest.raises(UserError, match=r"expected lm_head.weight \(10, \d+\) to start from, received \(320, \d+\)"):
        train(tmp_path / "other", STILL, *begin, "--draft-vocabulary", "10", command="eagle3")


@pytest.mark.long
def test_a_head_starts_as_one_with_and_without_parallel_levels(train, tmp_path):
    masks, kept = [], []
    for name, *options in (("a",), ("b", "--parallel"), ("c",), ("d", "--sequential")):
        options += ["--start", str(tmp_path / chr(ord(name) - 1) / DRAFTER)] if name != "a" else []
        train(tmp_path / name, STILL, *options, command="eagle3")
        masks.append(make_drafter(str(tmp_path / name / DRAFTER)).network.config.mask_token_id)
        kept.append(saved(tmp_path / name))
    assert masks == [None, masks[1], masks[1], None]
    assert masks[1] is not None
    assert kept[1].keys() - kept[0].keys() == {"mask_hidden"}
    for before, after in pairwise(kept):
        for name in before.keys() & after.keys():
            torch.testing.assert_close(before[name], after[name], atol=1e-6, rtol=0)


@pytest.mark.long
def test_blocks_start_as_the_targets_last_layers_or_as_another_drafter(model, train, tmp_path):
    still, changes = f"{STILL} {DFLASH}", "--from-target --layers 1 --reads 0"
    heads = "--mask-token-id 7 --markov-rank 16 --markov-type rnn --confidence markov"
    train(tmp_path / "a", still, changes, heads, command="dflash")
    found, layer = saved(tmp_path / "a"), mmspec.load(model, None).model.get_decoder().layers[-1]
    attention, mlp = layer.self_attn, layer.mlp
    expected = {
        "q": attention.q_proj.weight,
        "kv": torch.cat([attention.k_proj.weight, attention.v_proj.weight]),
        "out": attention.o_proj.weight,
        "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down": mlp.down_proj.weight,
        "input_norm": layer.input_layernorm.weight,
    }
    for name, weight in expected.items():
        torch.testing.assert_close(found[f"layers.0.{name}.weight"], weight.detach(), atol=1e-6, rtol=0)
    folder = str(tmp_path / "a" / DRAFTER)
    train(tmp_path / "b", still, "--start", folder, "--cache", str(tmp_path / "cache"), command="dflash")
    assert_same(tmp_path / "a", tmp_path / "b")
    assert make_drafter(str(tmp_path / "b" / DRAFTER)).network.config.mask_token_id == 7
    with pytest.raises(UserError, match=r"--from-target needs layers like the drafter's: expected .*q_proj.weight"):
        train(tmp_path / "d", still, "--from-target", "--heads", "1", "--kv-heads", "1", command="dflash")
    with pytest.raises(UserError, match="reads outputs of layers 0, 2: the target has 2 layers"):
        train(tmp_path / "e", still, "--reads", "0,2", command="dflash")
    train(tmp_path / "f", still, changes, DFLASH2, command="dflash")
    convolved = saved(tmp_path / "f")
    assert "layers.0.attention_conv.base" in convolved
    torch.testing.assert_close(convolved["layers.0.q.weight"], found["layers.0.q.weight"], atol=1e-6, rtol=0)


@pytest.mark.long
def test_training_starts_from_a_drafter(train, tmp_path):
    shape = ["--no-decoupled", "--heads", "2", "--kv-heads", "1"]
    train(tmp_path / "msd", "--steps", "2", "--draft-vocabulary", "10", "--mlp", "16", *shape)
    begin = tmp_path / "msd" / DRAFTER
    train(tmp_path / "on", STILL, "--start", str(begin))
    assert_same(tmp_path / "msd", tmp_path / "on")
    options = f"{STILL} --start {begin} --slots 3 --latents 2 --precision bfloat16"
    train(tmp_path / "flash", options, command="flash")
    network = json.loads((tmp_path / "flash" / DRAFTER / "config.json").read_text())["network"]
    assert (network["mlp"], network["slots"], network["latents"]) == (16, 3, 2)
    assert_same(tmp_path / "msd", tmp_path / "flash")
    options = ["--draft-vocabulary", "10", "--slots", "3", "--depth", "3", "--rank", "4"]
    train(tmp_path / "a", "--steps", "10", "--rate", "1e-2", "--prompts", "0", *options, command="flash")
    train(tmp_path / "b", STILL, "--start", str(tmp_path / "a" / DRAFTER), command="flash")
    assert_same(tmp_path / "a", tmp_path / "b")


def test_blocks_before_training(text_model, tmp_path):
    """Of as many layers as the target, from its layers: the states of the first are normed as its inputs."""
    pipe, ids, options = mmspec.load(text_model, None), torch.arange(40), partial(DFlashOptions, out=tmp_path)
    for weight in pipe.model.parameters():
        weight.requires_grad_(False).add_(torch.rand_like(weight) * (weight.ndim == 1))  # of norms
    task = dflash.setup(options(markov_rank=4, from_target=True), pipe, ids)
    config, own, decoder = task.network.config, task.network.state_dict(), pipe.model.get_decoder()
    assert (config.block_size, config.layers, config.target_layer_ids) == (8, 2, [0, 1])
    assert (config.markov_inputs, config.markov_outputs, config.mask_token_id) == (320, 40, mask_token(pipe))
    assert (task.layers, task.draft_ids is ids) == ((output_of(0), "last"), True)
    assert not task.network.markov_head.weight.any()
    for name, layer in zip(("layers.0", "layers.1"), decoder.layers, strict=True):
        assert torch.equal(own[f"{name}.input_norm.weight"], layer.input_layernorm.weight)
    assert torch.equal(own["hidden_norm.weight"], decoder.layers[0].input_layernorm.weight)
    assert torch.equal(own["norm.weight"], decoder.norm.weight)
    assert torch.equal(own["fc.weight"], torch.eye(48).repeat(1, 2) * (torch.arange(96) >= 48))
    network = dflash.setup(options(selector_rank=4), pipe, None).network
    assert (network.config.selector_tokens, bool(network.successors.weight.any())) == (320, False)
    with pytest.raises(UserError, match="--selector-rank needs all tokens of the target: leave out --draft-vocabulary"):
        dflash.setup(options(selector_rank=4), pipe, ids)
    DFlash(dflash_network(pipe.model, head=320), None).save(tmp_path / "head", pipe.target)
    with pytest.raises(UserError, match=r"head: expected a drafter with the target's output layer and plain rotary"):
        dflash.setup(options(start=tmp_path / "head"), pipe, None)


def test_heads_before_training(text_model, tmp_path):
    pipe, ids = mmspec.load(text_model, None), torch.arange(40)
    found = []
    for options in ({"reads": [1, 0]}, {"parallel": True, "norm_before_fc": True}):
        task = eagle3.setup(Eagle3Options(out=tmp_path, **options), pipe, ids)
        config = task.network.config
        found.append((config.states, config.fc_norm, config.norm_output, config.mask_token_id, config.head))
        torch.testing.assert_close(task.network.lm_head.weight, pipe.model.lm_head.weight[:40])
    assert found == [(2, True, True, None, 40), (3, False, True, mask_token(pipe), 40)]
    task = kangaroo.setup(KangarooOptions(out=tmp_path, exit_layer=1), pipe, ids)
    assert (task.layers, task.network.config.exit_layer, task.draft_ids is ids) == ((output_of(0),), 1, True)
    with pytest.raises(UserError, match="an early exit must be after a layer before the last"):
        kangaroo.setup(KangarooOptions(out=tmp_path, exit_layer=2), pipe, ids)


def test_a_draft_model_starts_as_the_targets_first_layers(text_model, train, tmp_path):
    """All of them give its own choices; of a new network, embedding and output layer are the target's."""
    train(tmp_path / "all", STILL, "--from-target", "--layers", "2", "--prompts", "4", command="small")
    (first, _) = evaluations(tmp_path / "all")
    assert first["right_1"] == 1.0
    assert first["mean_acceptance_length"] > 4
    train(tmp_path / "one", STILL, "--from-target", "--layers", "1", command="small")
    theirs, ours = (
        LlamaForCausalLM.from_pretrained(one).state_dict() for one in (text_model, tmp_path / "one" / DRAFTER)
    )
    assert {name for name in theirs if ".layers.1." not in name} == set(ours)
    for name, weight in ours.items():
        torch.testing.assert_close(weight.float(), theirs[name], atol=1e-3, rtol=1e-2)
    for options in (["--layers", "3"], ["--hidden", "32"]):
        with pytest.raises(
            UserError,
            match=r"^--from-target takes the target's width and at most its layers, .* 'layers': 2}: received",
        ):
            train(tmp_path / "none", STILL, "--from-target", *options, command="small")
    train(tmp_path / "new", STILL, "--layers", "1", command="small")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / DRAFTER).state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(ours[name], theirs[name].bfloat16(), atol=1e-3, rtol=1e-2)
    words = [AutoTokenizer.from_pretrained(one).get_vocab() for one in (text_model, tmp_path / "new" / DRAFTER)]
    assert words[0] == words[1]


def test_a_target_with_images_has_a_draft_model_of_text(tmp_path):
    """The decoder's layers belong to the language model inside."""
    pipe = mmspec.load(str(save_llava(tmp_path)), None)
    ids = torch.randint(4, 300, (1, 9))
    with torch.no_grad():
        expected = pipe.model(input_ids=ids).logits
        torch.testing.assert_close(_first_layers(pipe, 2, None)(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_weights_of_packed_layers_have_their_published_names(name):
    plain = copy.deepcopy(shared_model(name)).bfloat16()
    for parameter in plain.parameters():
        if parameter.ndim == 1:  # biases are zero, weights of norms are one
            parameter.data += torch.rand_like(parameter)
    packed = copy.deepcopy(plain)
    pack_model(packed, "bfloat16")
    found, weights = decoder_weights(SimpleNamespace(model=packed), [1]), plain.get_decoder().state_dict()
    expected = {key.replace("layers.1.", "layers.0."): one for key, one in weights.items() if "layers.0." not in key}
    assert set(found) == set(expected)
    for key, weight in found.items():
        torch.testing.assert_close(weight, expected[key])


def test_a_network_starts_as_the_best_linear_guess():
    """Where the next hidden state is linear in token embedding and hidden state, nothing is left to learn."""
    torch.manual_seed(0)
    network = MSDNetwork(MSDConfig(hidden_size=8, heads=2, kv_heads=1, head_dim=4, mlp=12, decoupled=False))
    step, shift = torch.randn(16, 8) / 4, torch.randn(8)
    batches = []
    for _ in range(3):
        embeds = torch.randn(5, 30, 8)
        hidden = [torch.randn(5, 8)]
        for place in range(1, 30):
            hidden.append(torch.cat([embeds[:, place], hidden[-1]], dim=-1) @ step + shift)
        answer = torch.zeros(5, 30, dtype=torch.bool)
        answer[:, 10:] = True
        states = torch.stack(hidden, dim=1)
        states[:, :9] = torch.randn(5, 9, 8)  # outside of answers
        batches.append(Features(answer.long(), states, embeds, torch.zeros_like(answer), answer, ~answer | answer))
    fit_projection(network, batches, ridge=1e-9)
    rotation = Rotary(rotary_frequencies(4, 10000.0))
    rotation.reserve(40, embeds)
    x = network.combine(embeds[:, 11:], states[:, 10:-1], None)
    with torch.no_grad():
        guess = network(x, rotation(slice(0, x.shape[1])), lambda q, k, v: torch.randn_like(q))
    torch.testing.assert_close(guess, states[:, 11:], atol=1e-4, rtol=1e-4)
    before = network.fc.weight.clone()
    fit_projection(network, [replace(batches[0], answer=torch.zeros_like(answer))])
    assert torch.equal(network.fc.weight, before)  # no answers


@pytest.mark.long
def test_a_fitted_network_starts_better(train, tmp_path):
    losses = []
    for options in ((), ("--fit",)):
        folder = tmp_path / str(len(options))
        train(folder, "--steps", "1", "--prompts", "0", *options)
        losses.append(rows(folder)[0]["loss"])
    assert losses[1] < 0.8 * losses[0]


def test_weights_to_start_from_are_not_fitted(train, tmp_path):
    train(tmp_path / "first", STILL)
    train(tmp_path / "on", STILL, "--fit", "--start", str(tmp_path / "first" / DRAFTER))
    assert_same(tmp_path / "first", tmp_path / "on")


# ---------------------------------------------------------------------- refusals


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("msd", ["--held-out", "24"], "held-out must leave conversations to train on: there are 24, received 24"),
        ("msd", ["--heads", "3"], "kv_heads must divide heads: got 2 for 3"),
        ("msd", ["--head-dim", "7"], "head_dim must be even, as rotary positions turn pairs: got 7"),
        ("msd", ["--device", "gpu"], "device must be auto, cpu or cuda: received 'gpu'"),
        ("msd", ["--dtype", "bfloat16", "--precision", "float32"], "precision float32 needs a target in float32"),
        ("flash", ["--rank", "4", "--passes", "2"], "passes must be 1 with rank: got 2"),
        ("eagle3", ["--reads", "1,2,9"], "reads inputs of layers 1, 2, 9: the target has 2 layers"),
    ],
)
def test_invalid_options_are_refused(command, options, message, train, tmp_path):
    with pytest.raises(UserError, match=message):
        train(tmp_path, *options, command=command)


@pytest.mark.long
def test_heads_that_cannot_be_started_from_are_refused(model, train, tmp_path):
    refused = train(tmp_path / "a", "--reads", "2;3", command="eagle3")
    assert "'--reads': '2;3' is not a valid integer" in refused
    target = mmspec.load(model, None).target
    config = cut(QWEN3_VL, vocab_size=320, target_model_type="llava", hidden_size=target.config.hidden_size)
    head = write_head(tmp_path / "head", config, head_tensors(config))
    with pytest.raises(UserError, match="expected a head with plain rotary positions, received M-RoPE"):
        train(tmp_path / "c", "--start", str(head), command="eagle3")
    config = cut(EAGLE4, [0, 1, 1], vocab_size=320, draft_vocab_size=320, hidden_size=target.config.hidden_size)
    head = write_head(tmp_path / "eagle4", config, head_tensors(config, "C"))
    with pytest.raises(UserError, match="expected an EAGLE-3 head without a sliding window, received EAGLE-4's"):
        train(tmp_path / "d", "--start", str(head), command="eagle3")


def test_missing_and_unusable_conversations_are_refused(answered, model, train, tmp_path):
    with pytest.raises(UserError, match=r"in --text or --data, received neither"):
        train(tmp_path, text=None, data=None)
    with pytest.raises(UserError, match=r"--text takes conversations without media: 0 has some"):
        train(tmp_path, text=answered(model, True))
    options = ["--target", str(save_text_model(tmp_path / "bare")), "--text", str(answered(model))]
    with pytest.raises(UserError, match="conversations need a chat template"):
        CliRunner().invoke(commands, ["mamba", "--out", str(tmp_path / "b"), *options], catch_exceptions=False)


# ---------------------------------------------------------------------- parts


def task_of(names, objective=None, extract=None, **options):
    """A task whose held-out conversations ask these names; drafts have seven nodes."""
    turns = [[("user", [{"type": "text", "text": name}]), ("assistant", "yes")] for name in names]
    messages = [tuple({"role": role, "content": content} for role, content in one) for one in turns]
    held_out = [Conversation(name, one, (None,)) for name, one in zip(names, messages, strict=True)]
    setup = TrainingTask(torch.nn.Linear(1, 1), objective, lambda *_: SimpleNamespace(tree_size=7))
    pipe = SimpleNamespace(target=None, processor=SimpleNamespace(reads_media=False))
    return DrafterTask(pipe, setup, {TEXT: held_out}, held_out, extract, RunOptions(out=Path("unused"), **options))


def test_acceptance_counts_verify_steps_only(monkeypatch):
    """The first token of each answer comes from its prefill; a prompt too long for the target is skipped."""
    accepted = {"a": [2, 0, 1], "b": [0], "c": []}

    def generate(prompt, temperature, max_new_tokens, nodes):
        (name,) = (message["content"] for message in prompt)
        if name == "long":
            raise UserError("too long")
        assert (max_new_tokens, nodes) == (5, 7)
        stats = Stats(num_generated_tokens=1)
        for count in accepted[name]:
            stats.record_step(4, 3, count, count + 1)
        return Generation("", [0] * stats.num_generated_tokens, "length", stats)

    monkeypatch.setattr("mmspec.training.tasks.Pipeline", lambda *_: SimpleNamespace(generate=generate))
    task = task_of(("a", "long", "b", "c"), prompts=4, max_new_tokens=5)
    assert task._acceptance() == {"mean_acceptance_length": (3 + 1 + 2 + 1) / 4}
    accepted |= {"a": [], "b": []}
    assert task._acceptance() == {}


def test_held_out_losses_are_means_over_answer_tokens():
    """However conversations are batched, and for a metric that only one batch has."""
    counts = {"a": 1, "b": 2, "c": 9}

    def extract(batch):
        answer = torch.zeros(len(batch), 12, dtype=torch.bool)
        for row, one in zip(answer, batch, strict=True):
            row[1 : 2 + counts[one.id]] = True  # the first of an answer is not predicted
        return Features(answer.long(), answer[..., None].float(), None, None, answer, None)

    def objective(_, given):
        count = (given.batch.answer.sum(1) - 1).float()
        mean = (count * count).sum() / count.sum()  # of a token: the length of its answer
        return LossOutput(mean, {"long": 3.0} if float(count.max()) > 2 else {})

    for batch in (1, 2, 3):
        task = task_of(counts, objective, extract, prompts=0, batch=batch)
        assert task.evaluate() == pytest.approx({"loss": (1 + 4 + 81) / 12, "long": 3.0})


def test_the_most_frequent_tokens_come_first():
    answers = [[5, 5, 5, 9, 9], [9, 5, 7]]
    assert frequent_tokens(answers, 2, [2], 10).tolist() == [2, 5]
    assert frequent_tokens(answers, 3, [2], 10).tolist() == [2, 5, 9]
    assert frequent_tokens(answers, 6, [2], 10).tolist() == [0, 1, 2, 5, 7, 9]  # then the first of the vocabulary
    assert frequent_tokens([[5, 9]], 99, [2, 9], 10).tolist() == list(range(10))
