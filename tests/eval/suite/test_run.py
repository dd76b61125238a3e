"""``mmspec eval``: equality, acceptance, output formats, and resuming a killed run."""

import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image, ImageDraw
from transformers import AutoModelForCausalLM

import mmspec
from mmspec.cli.drafters import datastore
from mmspec.drafters.registry import drafter_specs
from mmspec.engine.engine import MAX_NUM_SEQS, Engine
from mmspec.errors import UserError
from mmspec.eval.suite import SuiteSettings, report, run
from mmspec.eval.suite.command import evaluate
from mmspec.eval.suite.methods import auto_methods, parse_methods
from mmspec.eval.suite.report import PUBLISHED, print_summary, published, write_report
from mmspec.eval.suite.run import Evaluator, answer_lines, read_records, run_suite
from mmspec.eval.suite.summary import summarise
from mmspec.files import alone
from mmspec.pipeline import Pipeline
from mmspec.vision.drafters.msd import MSD
from tests import dflash, mtp
from tests.model_folders import save_llava, save_text_model, tokenizer
from tests.tiny.configs import GATED_DELTA_CONFIGS
from tests.tiny.models import msd_network

METHODS = "generate,none,lookup,recycle@6,msd@6,short=msd@chain3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_llava(tmp_path_factory.mktemp("models") / "tiny")
    pipe = mmspec.load(str(folder), drafter=None)
    MSD(msd_network(pipe.model), total_tokens=9).save(folder / "drafter-msd", pipe.target)
    return str(folder)


def settings(folder, **changes):
    options = {"tasks": ("scenes-captions", "scenes-turns"), "methods": METHODS, "limit": 3, "rounds": 1}
    options |= {"warm_up": 1, "max_new_tokens": 8, "temperatures": (0.0, 1.0), "batch_sizes": (2,)}
    return SuiteSettings(folder, **{**options, **changes})


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, run_suite(settings(folder), out)


def without_times(value):
    if isinstance(value, dict):
        gone = ("seconds", "tstamp", "memory", "wall_time")
        return {
            k: without_times(v) for k, v in value.items() if k not in gone and "seconds" not in k and "first" not in k
        }
    return [without_times(one) for one in value] if isinstance(value, list) else value


def records(out):
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def test_every_method_gives_the_same_tokens(whole):
    rows = {(row["task"], row["temperature"], row["method"]): row for row in whole[1]["rows"]}
    counts = {"all": 12, "scenes-captions": 3, "scenes-turns": 9}
    assert {task for task, _, _ in rows} == counts.keys()
    for (task, temperature, method), row in rows.items():
        compared = 0 if temperature and method == "generate" else counts[task]
        assert (row["equal"], row["compared"], row["differences"]) == (compared, compared, [])
    assert {record["about"]["dtype"] for record in records(whole[0])} == {"float32"}
    plain, recycle, msd = (rows["all", 0.0, name] for name in ("none", "recycle@6", "msd@6"))
    assert plain["acceptance"]["mean_acceptance_length"] == 1.0 < recycle["acceptance"]["mean_acceptance_length"]
    assert recycle["acceptance"]["num_spec_steps"] < plain["acceptance"]["num_spec_steps"]
    assert sum(msd["shares"].values()) == pytest.approx(1)
    assert rows["all", 0.0, "generate"]["end_to_end"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    # Transformers supports prompt lookup for batch size 1 only.
    assert [(one["method"], one["batch"]) for one in whole[1]["refused"]] == [("lookup", 2)] * 2
    assert not any(method == "lookup" for _, _, method in rows)


def test_lossy_rows_say_so_and_are_greedy(folder, tmp_path):
    summary = run_suite(settings(folder, methods="msd@6~30", tasks=("scenes-captions",)), tmp_path)
    rows = {(row["method"], row["temperature"]): row for row in summary["rows"] if row["task"] == "scenes-captions"}
    assert [row["lossless"] for row in rows.values()] == [name != "msd@6~30" for name, _ in rows]
    assert rows["msd@6~30", 0.0]["equal"] < rows["msd@6~30", 0.0]["compared"]
    (refused,) = summary["refused"]
    assert (refused["temperature"], refused["reason"]) == (1.0, "lossy acceptance is greedy")
    assert "| msd@6~30 (not lossless) |" in (tmp_path / "report.md").read_text()


def test_all_methods_get_the_history_of_plain_decoding(whole, folder):
    turns = next(record for record in records(whole[0]) if record["task"] == "scenes-turns")["turns"]
    assert [turn["rows"] for turn in turns] == [[0, 1]] * 3
    sample = settings(folder).samples("scenes-turns")[0]
    pipe = mmspec.load(folder, drafter=None)
    before = [turn["methods"]["none"]["texts"][0] for turn in turns]
    answer = pipe.generate(**sample.conversation.request(before[:2]), max_new_tokens=8)
    assert turns[2]["methods"]["msd@6"]["answers"][0] == answer.token_ids


def test_rows_of_a_large_batch_decode_together(folder):
    big = MAX_NUM_SEQS + 1
    options = {"tasks": ("scenes-captions",), "methods": "none", "limit": big, "temperatures": (0.0,), "warm_up": 0}
    run = Evaluator(vars(settings(folder, **options, batch_sizes=(big,), max_new_tokens=3)))
    record = run({"task": "scenes-captions", "temperature": 0.0, "batch": big, "group": 0})
    assert len(record["ids"]) == big
    assert Engine.of(run.pipe.target).max_num_seqs == big


def test_a_killed_run_resumes_and_gives_the_same_results(whole, folder, tmp_path, monkeypatch, capfd):
    call, done = Evaluator.__call__, []

    def killed(self, job):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(job)
        return call(self, job)

    monkeypatch.setattr(Evaluator, "__call__", killed)
    with pytest.raises(KeyboardInterrupt):
        run_suite(settings(folder), tmp_path)
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text()[:-40])  # a kill in the middle of a line
    done.clear()
    capfd.readouterr()
    monkeypatch.setattr("mmspec.eval.suite.run.write_report", lambda summary, folder: None)
    monkeypatch.setattr(Evaluator, "__call__", lambda self, job: done.append(job) or call(self, job))
    summary = run_suite(settings(folder), tmp_path)
    assert len(done) == 8 - 2
    lines = [line.rpartition(",")[0] for line in capfd.readouterr().err.splitlines() if line.startswith("measuring")]
    assert (lines[0], lines[-1]) == ("measuring: 2/8", "measuring: 8/8, scenes-turns")
    assert without_times(records(tmp_path)) == without_times(records(whole[0]))
    plain = [{k: row[k] for k in ("method", "tokens", "acceptance", "equal")} for row in summary["rows"]]
    assert plain == [{k: row[k] for k in ("method", "tokens", "acceptance", "equal")} for row in whole[1]["rows"]]
    for file in (whole[0] / "answers").iterdir():
        ours, others = (p.read_text().splitlines() for p in (file, tmp_path / "answers" / file.name))
        assert without_times(list(map(json.loads, ours))) == without_times(list(map(json.loads, others)))
    monkeypatch.setattr("mmspec.eval.suite.run.Evaluator", lambda plain: pytest.fail("loaded"))
    assert run_suite(settings(folder), tmp_path) == summary  # nothing is measured again
    with pytest.raises(UserError, match=r"holds a run with rounds = 1: expected the same to resume it, received 5"):
        run_suite(settings(folder, rounds=5), tmp_path)


def test_damaged_records_are_named(tmp_path):
    read_records(tmp_path, {})
    (tmp_path / "records.jsonl").write_text('{"task": "a"}\n')
    with pytest.raises(UserError, match=r"records\.jsonl, line 1: expected a record with batch, received none"):
        read_records(tmp_path, {})
    (tmp_path / "settings.json").write_bytes(b"[]")
    with pytest.raises(UserError, match=r"settings\.json: expected a JSON object"):
        read_records(tmp_path, {})


def test_answers_are_in_spec_benchs_format(whole):
    path = whole[0] / "answers" / "tiny-recycle@6-float32-temp-0.0-batch-2.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["question_id"] for line in lines][:3] == [4000000, 4000001, 4000002]
    assert list(lines[0]) == ["question_id", "category", "model_id", "choices", "tstamp"]
    (choice,) = lines[3]["choices"]
    assert [len(choice[name]) for name in ("turns", "decoding_steps", "new_tokens", "wall_time")] == [3] * 4
    assert sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
    # The prefill's token belongs to no step.
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - 3
    # The time of a batch is divided among its rows.
    record = records(whole[0])[0]
    seconds = [one["total"] for one in record["turns"][0]["methods"]["none"]["seconds"]]
    lines = answer_lines(record, "none")
    assert sum(line["choices"][0]["wall_time"][0] for line in lines) == pytest.approx(*seconds)


def test_the_report_has_figures_and_plots(whole):
    text = (whole[0] / "report.md").read_text()
    assert "## scenes-turns, temperature 1, batch 2" in text
    assert text.count("- `lookup`, batch 2: refused: ValueError") == 1  # once for both temperatures
    assert "The plots show temperature 0, batch 2." in text
    assert ", 1 round after a warm-up" in text
    found = next(row["acceptance_difference"] for row in whole[1]["rows"] if row["acceptance_difference"])
    assert f"| {found['difference']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f}) |" in text
    for name in ("speedup", "tasks", "accepted", "time", "tree-size"):
        assert f"(plots/{name}.svg)" in text
        assert (whole[0] / "plots" / f"{name}.svg").read_text().startswith("<?xml")


def test_a_report_without_matplotlib_and_with_notes_of_single_tables(whole, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    about = {"not_scored": "no package"}
    rows = [{**row, **(about if row["task"] == "scenes-turns" else {})} for row in whole[1]["rows"]]
    text = write_report({**whole[1], "rows": rows}, tmp_path).read_text()
    assert "they need the package matplotlib" in text
    noted = [part for part in text.split("\n## ") if "Not scored: no package." in part]
    assert {part.partition(",")[0] for part in noted} == {"scenes-turns"}


def test_bars_of_the_times_of_phases():
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    shares = [{"prefill": 0.5, "verify": 0.25, "rest": 0.25}, {"tower": 0.125, "draft": 0.5, "rest": 0.375}]
    report._time(axes, [{"method": name, "shares": one} for name, one in zip("ab", shares, strict=True)])
    bars = [(bar.get_y(), box.get_label(), bar.get_x(), bar.get_width()) for box in axes.containers for bar in box]
    first, second = ([(*bar[1:],) for bar in bars if (bar[0] > 0.5) == row and bar[3]] for row in (0, 1))
    assert first == [("prefill", 0, 0.5), ("verify", 0.5, 0.25), ("rest", 0.75, 0.25)]
    assert second == [("tower", 0, 0.125), ("draft", 0.125, 0.5), ("rest", 0.625, 0.375)]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first method is on top


def test_published_results_are_next_to_a_run_and_name_their_source(whole, tmp_path, capsys):
    assert PUBLISHED not in (whole[0] / "report.md").read_text()
    text = write_report(whole[1], tmp_path, others=True).read_text()
    section = text.split(f"## {PUBLISHED}")[1].strip().splitlines()
    assert section[0] == "| method | model | task | results | hardware | source |"
    header, cells = published()
    assert section[2:] == [f"| {' | '.join(row)} |" for row in cells]
    methods = {"MSD", "ViSpec", "FLASH", "STree", "EAGLE-2", "EAGLE-3", "DFlash", "DSpark", "DREAM-S"}
    assert {row[0] for row in cells} == methods
    assert all(len(row) == len(header) and all(row) for row in cells)
    assert "| STree | Llama3.1-Mamba2-8B-distill | one short prompt | 1456 ms, vanilla speculative decoding" in text
    print_summary(whole[1], others=True)
    printed = capsys.readouterr().out
    assert PUBLISHED in printed
    assert printed.count("`lookup`, batch 2: refused: ValueError") == 1
    assert "RTX 3090" in printed


def test_a_difference_is_reported_with_its_margin(folder, tmp_path, monkeypatch):
    wrong = Evaluator(vars(settings(folder, methods="generate", temperatures=(0.0,), batch_sizes=(1,), rounds=1)))
    original = run.run_interleaved

    def corrupted(pipe, requests, methods, rounds, options):
        batches = original(pipe, requests, methods, rounds, options)
        batches["none"][0].answers[0][4] += 1
        return batches

    monkeypatch.setattr(run, "run_interleaved", corrupted)
    record = wrong({"task": "scenes-captions", "temperature": 0.0, "batch": 1, "group": 0})
    result = record["turns"][0]["methods"]["none"]
    assert result["equal"] == [False]
    assert result["differences"][0]["position"] == 4
    assert result["differences"][0]["margin"] > 0
    rows = summarise([record], {"scenes-captions": wrong._samples["scenes-captions"]}, {"scenes-captions": None})
    assert [(row["equal"], row["compared"]) for row in rows] == [(1, 1), (0, 1)]
    assert rows[1]["differences"][0]["id"] == "4000000"
    about = {**record["about"], "device": "cpu"}
    summary = {"about": about, "settings": {"rounds": 1}, "rows": rows, "refused": []}
    section = write_report(summary, tmp_path).read_text().split("## Answers that differ")[1]
    assert re.search(r"\| `none` \| 0 \| 1 \| scenes-captions 4000000, turn 0 \| 4 \| [\d.e-]+ \|", section)


def test_top_p_reaches_every_method(folder, monkeypatch):
    given = []
    evaluate = Evaluator(vars(settings(folder, methods="generate", temperatures=(0.7,), top_p=0.4, rounds=1)))
    for owner, name in ((Pipeline, "generate_batch"), (type(evaluate.pipe.model), "generate")):
        call = getattr(owner, name)
        recorded = lambda *rest, call=call, **more: given.append(more["top_p"]) or call(*rest, **more)  # noqa: E731
        monkeypatch.setattr(owner, name, recorded)
    evaluate({"task": "scenes-captions", "temperature": 0.7, "batch": 1, "group": 0})
    assert given == [0.4, 0.4]


def test_drafters_are_found_by_the_models_name(folder):
    """Models of GGUF files are configured in a folder of the cache, where no drafter is."""
    target = mmspec.load(folder, drafter=None).target
    target.model.config.name_or_path = str(Path(folder).parent)
    assert isinstance(parse_methods("msd", target, model=folder)[1].drafter, MSD)
    with pytest.raises(UserError, match="msd needs a checkpoint"):
        parse_methods("msd", target)


def test_method_specs(folder):
    target = mmspec.load(folder, drafter=None).target
    small = save_text_model(Path(folder).parent / "small")
    specs = f"""msd,msd@7,recycle@chain,c=msd@chain4,none,lookup,ngram@chain,recycle@6~1.5,msd~2,small:{small}@chain,
        assisted:{small}/,{folder}/drafter-msd@3,x=small:{small}"""
    found = {method.name: method for method in parse_methods(specs, target)}
    assert {name: (method.nodes, method.lossy) for name, method in found.items()} == {
        **{"none": (0, 0), "msd": (None, 0), "msd@7": (7, 0), "recycle@chain": (None, 0)},
        **{"c": (4, 0), "lookup": (0, 0), "ngram@chain": (None, 0), "recycle@6~1.5": (6, 1.5), "msd~2": (None, 2)},
        **{"small:small@chain": (None, 0), "assisted:small": (0, 0), "drafter-msd@3": (3, 0), "x": (None, 0)},
    }
    with pytest.raises(UserError):  # another target's
        parse_methods(f"{folder}/drafter-msd", mmspec.load(str(small), drafter=None).target)
    assert (found["c"].drafter.top_k, found["c"].drafter.depth) == (1, 4)
    assert found["lookup"].generate_options == {"prompt_lookup_num_tokens": 10}
    alone = [spec.name for spec in drafter_specs() if spec.alone]
    chains = [spec.name for spec in drafter_specs() if spec.alone and spec.chains]
    both = parse_methods(
        """llama.cpp,x=llama.cpp:"a,b" --c "d, 'e'" --f=1,generate,llama.cpp:a --f=1""", target, {"llama.cpp": str}
    )
    assert [(method.name, method.peer) for method in both] == [
        ("generate", None), ("none", None), ("llama.cpp", ""), ("x", """"a,b" --c "d, 'e'" --f=1"""),
        ("llama.cpp:a --f=1", "a --f=1"),
    ]  # fmt: skip
    assert auto_methods(Path(folder))[3:] == ["msd", *alone, "msd@chain", *(f"{name}@chain" for name in chains)]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ("msd@bush", "shape must be tree, chain or chainN: got 'bush'"),
        ("msd@0", "shape must be"),
        ("nope", "unknown drafter"),
        ("none@4", "plain decoding drafts no nodes: expected 'none' or a drafter, got 'none@4'"),
        ("a=none,a=lookup", r"its own label \(LABEL=METHOD\): 'a' is given twice"),
        ("generate:nope", "generate speculates as generate:mtp or generate:dflash:FOLDER: got 'generate:nope'"),
        ("generate:dflash", "generate speculates as .*: got 'generate:dflash'"),
        ("generate:dflash:/nowhere", "cannot load assistant '/nowhere'"),
        ("assisted:/nowhere", "cannot load assistant '/nowhere'"),
    ],
)
def test_invalid_methods_are_refused(folder, specs, message):
    with pytest.raises(UserError, match=message):
        parse_methods(specs, mmspec.load(folder, drafter=None).target)


def test_transformers_assisted_decoding_of_a_text_model(tmp_path):
    model = save_text_model(tmp_path / "text")
    options = {"tasks": ("texts",), "methods": f"a=assisted:{model}", "limit": 1, "max_new_tokens": 12}
    summary = run_suite(SuiteSettings(str(model), **options, rounds=1, warm_up=0), tmp_path / "out")
    rows = {row["method"]: row for row in summary["rows"]}
    assert rows["a"]["equal"] == 1
    assert rows["a"]["acceptance"]["mean_acceptance_length"] > 1  # the model is its own assistant


@pytest.mark.long
def test_transformers_own_speculation(tmp_path):
    """By native layers, by a DFlash model, and refused: in batches, without such layers, for a recurrent model."""
    config = mtp.CONFIGS["mellum"](1)
    config.vocab_size = 320
    model = AutoModelForCausalLM.from_config(config).eval()
    native = mtp.write_target(tmp_path / "native", model, mtp.published_tensors(mtp.mtp_model(model), None))
    plain = save_text_model(tmp_path / "plain")
    dflash.reference().save_pretrained(tmp_path / "drafts")
    config = GATED_DELTA_CONFIGS["qwen3_5_text"]()
    config.vocab_size = 320
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hybrid")
    for other in (native, tmp_path / "hybrid"):
        tokenizer().save_pretrained(other)
    methods = {native: "generate:mtp", plain: f"generate:mtp,d=generate:dflash:{tmp_path / 'drafts'}"}
    methods[tmp_path / "hybrid"] = "generate:mtp"
    rows, refused = {}, {}
    for one, specs in methods.items():
        options = {"tasks": ("texts",), "methods": specs, "limit": 2, "max_new_tokens": 12, "batch_sizes": (1, 2)}
        out = tmp_path / f"out-{one.name}"
        summary = run_suite(SuiteSettings(str(one), **options, rounds=1, warm_up=0), out)
        rows |= {(one.name, row["method"], row["batch"]): row for row in summary["rows"]}
        refused |= {(one.name, why["method"], why["batch"]): why["reason"] for why in summary["refused"]}
        assert all(f"refused: {why['reason']}" in (out / "report.md").read_text() for why in summary["refused"])
    for key in (("native", "generate:mtp", 1), ("plain", "d", 1)):
        assert (rows[key]["equal"], rows[key]["compared"]) == (2, 2)
        assert rows[key]["requests"]["overall"]["mean_accepted_tokens"] >= 1
    assert ("plain", "d", 2) not in rows
    assert "batch_size = 1" in refused["native", "generate:mtp", 2]
    assert "num_mtp_layers" in refused["plain", "generate:mtp", 1]
    assert "stateful models" in refused["hybrid", "generate:mtp", 1]


def page(folder, name, text):
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).multiline_text((4, 4), text, fill="black")
    image.save(folder / f"{name}.png")


@pytest.mark.long
def test_documents_with_and_without_a_text_beside_them(tmp_path):
    """Pages are drawn; the text of the second page is the model's own transcript, which is then drafted."""
    pages = tmp_path / "data" / "documents"
    pages.mkdir(parents=True)
    page(pages, "a", "Invoice 4\nTotal 12")
    page(pages, "b", "A letter\nwith two lines")
    options = {"tasks": ("documents",), "data": str(tmp_path / "data"), "max_new_tokens": 24, "rounds": 1, "warm_up": 0}
    first = run_suite(SuiteSettings("tiny-llava", methods="ngram@8", **options), tmp_path / "without")
    assert list(first["rows"][0]["requests"]) == ["overall", "without a text"]
    answer = records(tmp_path / "without")[1]["turns"][0]["methods"]["none"]["texts"][0]
    (pages / "b.txt").write_text(answer)
    store = tmp_path / "store"
    build = ["build", str(pages / "b.txt"), "--model", "tiny-llava", "--out", str(store)]
    assert CliRunner().invoke(datastore, build).exit_code == 0
    methods = f"ngram@8,with=ngram+datastore:{store}@8"
    summary = run_suite(SuiteSettings("tiny-llava", methods=methods, **options), tmp_path / "with")
    found = {row["method"]: row for row in summary["rows"]}
    assert {row["equal"] for row in found.values()} == {2}
    accepted = {
        name: {part: figures["mean_accepted_tokens"] for part, figures in row["requests"].items()}
        for name, row in found.items()
    }
    assert list(accepted["with"]) == ["overall", "without a text", "with a text"]
    assert accepted["with"]["with a text"] > 2 * accepted["ngram@8"]["with a text"]


def test_the_command(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def call(*options):
        return CliRunner().invoke(evaluate, options)

    assert "pope" in call("--list").output
    with pytest.raises(UserError, match="expected --out FOLDER"):
        CliRunner().invoke(evaluate, [], catch_exceptions=False)
    common = ["--model", folder, "--tasks", "scenes-counting", "--limit", "1", "--methods", "ngram@chain,ngram@3"]
    common += ["--rounds", "1", "--warm-up", "0", "--max-new-tokens", "5", "--out", str(tmp_path)]
    with alone(tmp_path / ".lock", tmp_path), pytest.raises(UserError, match="another process is writing"):
        CliRunner().invoke(evaluate, common, catch_exceptions=False)
    given = []
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(run, "run_suite", lambda *arguments: given.append(arguments) or 1 / 0)
        assert call(*common, "--data", ".", "--engine", "ray", "--workers", "3", "--tasks", "embedded").exception
    ((called, *others),) = given
    assert (called.data, called.rounds, others) == (str(tmp_path.resolve()), 1, [tmp_path, "ray", 3])
    assert (called.tasks[0], "texts" in called.tasks) == ("scenes-captions", False)
    result = call(*common)
    assert result.exception is None, result.output
    assert "scenes-counting, temperature 0, batch 1" in result.output
    assert " reference " in result.output  # the score's name is in the header
    lines = result.stdout.splitlines()
    assert all(len(line) <= 100 and "\N{HORIZONTAL ELLIPSIS}" not in line for line in lines)
    for title in ("scenes-counting, temperature 0, batch 1", "scenes-counting, temperature 0, batch 1, by request"):
        at = max(number for number, line in enumerate(lines) if line.strip() == title)
        assert any(re.match(r"│ ngram@chain +│ \S+ ", line) for line in lines[at : at + 12])  # no cell is cut
    columns = "tokens per step", "a draft", "tokens/s", "p50 ms, p90 ms, p95 ms, p99 ms", "user tokens/s", "equal"
    for column in columns:
        assert sum(line.startswith(f"{column}: ") for line in lines) == 1
    assert result.output.count("copy oracle: ") == 1
    assert "vs none" not in result.output  # as `whole request` and `decoding` are
    assert PUBLISHED in call(*common, "--published").output
    content = json.loads(call(*common, "--json", "--published").stdout)
    assert content == json.loads((tmp_path / "summary.json").read_text())
    assert [(row["method"], row["baseline"]) for row in content["rows"]] == [
        (name, "none") for name in ("none", "ngram@chain", "ngram@3")
    ]
    assert content["about"]["cost"]["tokens"][:3] == [1, 2, 4]
    report, _ = (tmp_path / "report.md").read_text().split(f"## {PUBLISHED}")
    assert "over `none`, preprocessing" in report
    assert "copy oracle: " in report
    assert "generate" not in report
    lines = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    shown = dict(zip(next(cells for cells in lines if "p50 ms" in cells), lines[-1], strict=True))
    *_, figures = content["rows"][-1]["requests"].values()
    expected = {
        "number": f"{figures['requests']}",
        "MAT": f"{figures['mean_accepted_tokens']:.2f}",
        "speedup": f"{figures['walltime_speedup']:.2f}x",
        "slowest": f"{figures['slowest']['total']:.2f}x",
        "throughput": f"{figures['throughput_speedup']:.2f}x",
        "p50 ms": f"{1000 * figures['latency']['p50']:.1f}",
        "output tokens/s": f"{figures['output_tokens_per_second']:.1f}",
        "user tokens/s": f"{figures['user_tokens_per_second']['mean']:.1f}",
        "equal": f"{figures['equal']}/1",
    }
    assert {name: shown[name] for name in expected} == expected


class KilledEvaluator(Evaluator):
    """Kills its own process once, in the middle of the run."""

    def __call__(self, job):
        mark = os.path.join(os.path.dirname(self.settings.model), "died")
        if job["task"] == "scenes-turns" and not os.path.exists(mark):
            with open(mark, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(job)


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install -e .[ray]")


@pytest.mark.slow
@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_same_results_and_repeats_a_killed_workers_job(whole, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mmspec.eval.suite.run.Evaluator", KilledEvaluator)
    summary = run_suite(settings(folder), tmp_path, engine="ray", workers=2)
    assert os.path.exists(os.path.join(os.path.dirname(folder), "died"))
    assert len(records(tmp_path)) == 8
    key = json.dumps
    same = [sorted(without_times(records(out)), key=key) for out in (tmp_path, whole[0])]
    assert same[0] == same[1]
    assert [row["equal"] for row in summary["rows"]] == [row["equal"] for row in whole[1]["rows"]]


@pytest.mark.slow
@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_a_usage_error_in_a_worker_is_one_line(folder, tmp_path):
    with pytest.raises(UserError, match=r"^unknown drafter: expected one of .*, got 'nope'"):
        run_suite(settings(folder, methods="nope"), tmp_path, engine="ray")
