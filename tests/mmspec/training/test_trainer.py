"""The trainer on a toy task: schedules, checkpoints, resuming, several processes, curves."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from mmspec import files
from mmspec.errors import UserError
from mmspec.training.curve import draw
from mmspec.training.data import MIXED, POOL, TEXT, CurriculumSampler
from mmspec.training.objectives import LossOutput
from mmspec.training.options import RunOptions, Schedule
from mmspec.training.tasks import Optimisers
from mmspec.training.trainer import CHECKPOINT, CURVE, DRAFTER, LOG, Trainer, lr_factor, mean_metrics

EXAMPLES = 40


class Toy:
    """Learns a fixed linear map; the loss of a batch is a mean over its examples' own number of rows."""

    def __init__(self, optimiser="muon", rate=1e-2, batch=4, seed=1):
        torch.manual_seed(3)
        self.network: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.lengths = {kind: [1 + index % 5 for index in range(EXAMPLES)] for kind in (TEXT, MIXED)}
        self.optimisers = Optimisers(self.network, optimiser, rate)
        self.sampler = CurriculumSampler(self.lengths, batch, seed, 0.3)
        self.progress: list[float] = []

    def batch(self, examples):
        parts = []
        for kind, index in examples:
            generator = torch.Generator().manual_seed(index + 1000 * (kind == MIXED))
            parts.append(torch.randn(self.lengths[kind][index], 4, generator=generator))
        x = torch.cat(parts)
        return x, x[:, :2] - x[:, 2:]

    def weight(self, batch):
        return len(batch[0])

    def loss(self, network, batch, generator, progress=1.0):
        x, y = batch
        self.progress.append(progress)
        error = (network(x) - y).square().mean()
        return LossOutput(error, {"error": float(error.detach()), "noise": float(torch.rand((), generator=generator))})

    def evaluate(self):
        with torch.no_grad():
            loss = self.loss(
                self.network,
                self.batch([(kind, index) for kind in self.lengths for index in range(9)]),
                torch.Generator(),
            ).total
        return {"loss": float(loss), "mean_acceptance_length": 1.0}

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        torch.save(self.network.state_dict(), folder / "weights.pt")


def trainer(folder, toy=None, settings=None, seed=1, **chosen):
    of_task = {name: chosen.pop(name) for name in ("optimiser", "rate", "batch") if name in chosen}
    plan = {"steps": 30, "warmup": 2, "checkpoint_minutes": 99.0, **chosen}
    return Trainer(
        folder, Schedule(**plan, seed=seed), toy or Toy(seed=seed, **of_task), Accelerator(cpu=True), settings
    )


def weights(run):
    return run.task.network.state_dict()


def rows(folder):
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def after(steps):
    left = iter(range(steps))
    return lambda: next(left, None) is None


class KilledError(Exception):
    pass


def test_the_loss_falls_and_all_files_are_written(tmp_path):
    run = trainer(tmp_path / "one", steps=30, rate=1e-1)
    run.train()
    log = rows(run.folder)
    held_out = [row["loss"] for row in log if row["event"] == "held-out"]
    assert len(held_out) == 2
    assert held_out[-1] < 0.5 * held_out[0]
    trained = [row for row in log if row["event"] == "train"]
    assert {"step", "minutes", "loss", "error", "rate", "stage", "share"} <= trained[0].keys()
    assert [row["step"] for row in trained] == list(range(1, 31))
    assert trained[-1]["rate"] < 0.1 * trained[10]["rate"]
    assert (run.folder / DRAFTER / "weights.pt").exists()
    assert not list(tmp_path.glob("**/*.part"))
    curve = (run.folder / CURVE).read_text()
    assert "<!-- one -->" in curve
    assert "<!-- one, held-out -->" in curve
    draw(run.folder / LOG, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == curve


def test_stages_follow_the_schedule():
    """The share of mixed examples grows from 0 to 1: a quarter in the first half of stage 2, three quarters after."""
    sampler, drawn, stages = CurriculumSampler({TEXT: [1] * 9, MIXED: [1] * 9}, 4, 1, 0.4), [], []
    for step in range(200):
        drawn.append([kind == MIXED for kind, _ in sampler.next(step / 200)])
        stages.append(sampler.info["stage"])
    assert stages == [1] * 81 + [2] * 119
    assert sampler.info["share"] == pytest.approx((199 / 200 - 0.4) / 0.6, abs=1e-3)
    assert not any(map(any, drawn[:80]))
    for part, share in ((drawn[80:140], 0.25), (drawn[140:], 0.75)):
        assert abs(sum(map(sum, part)) / sum(map(len, part)) - share) < 0.12


@pytest.mark.parametrize("kind", [TEXT, MIXED])
def test_one_kind_of_examples_makes_one_stage_and_every_example_is_seen_once_per_epoch(kind):
    sampler, epochs = CurriculumSampler({kind: list(range(24))}, batch=3, seed=0), []
    for progress in (0.0, 0.5, 1.0):
        epochs.append([example for _ in range(8) for example in sampler.next(progress)])
        assert sampler.info == {"stage": 2 if kind == MIXED else 1, "share": float(kind == MIXED)}
    assert sorted(epochs[0]) == sorted(epochs[1]) == [(kind, index) for index in range(24)]
    assert epochs[0] != epochs[1]


def test_a_sampler_depends_on_its_seed_and_resumes_anywhere():
    """The seed changes the order (of 9 examples of one length) and the choice of multimodal batches."""
    whole, other, begun, resumed = (
        CurriculumSampler({TEXT: [1] * 9, MIXED: [1] * 9}, 4, seed=seed) for seed in (5, 6, 5, 5)
    )
    expected, others = ([one.next(share / 30) for share in range(30)] for one in (whole, other))
    flat = [[one for batch in found for one in batch] for found in (expected, others)]
    assert [kind for kind, _ in flat[0]] != [kind for kind, _ in flat[1]]
    assert [index for kind, index in flat[0] if kind == TEXT] != [index for kind, index in flat[1] if kind == TEXT]
    pools = (CurriculumSampler({TEXT: [1] * 64}, batch=1, seed=seed) for seed in (5, 6))
    assert len({frozenset(one.next(0.0)[0] for _ in range(POOL)) for one in pools}) == 2
    drawn = [begun.next(share / 30) for share in range(11)]
    resumed.load_state_dict(begun.state_dict())
    assert drawn + [resumed.next(share / 30) for share in range(11, 30)] == expected


def test_stopped_and_killed_runs_equal_an_uninterrupted_one_when_resumed(tmp_path):
    whole = trainer(tmp_path / "whole", steps=16)
    whole.train()
    trainer(tmp_path / "parts", steps=16).train(stop=after(7))
    killed = trainer(tmp_path / "parts", steps=16)
    assert killed.step == 7

    def kill():
        if killed.step == 12:
            raise KilledError
        return False

    with pytest.raises(KilledError):
        killed.train(stop=kill)
    resumed = trainer(tmp_path / "parts", steps=16)
    assert resumed.step == 7  # steps after the killed run's last checkpoint are repeated
    resumed.train()
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name

    def timeless(folder):
        return [{name: x for name, x in row.items() if name != "minutes"} for row in rows(folder)]

    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    finished = (tmp_path / "parts" / CHECKPOINT).read_bytes()
    again = trainer(tmp_path / "parts", steps=16)
    assert again.done
    again.train()
    assert (tmp_path / "parts" / CHECKPOINT).read_bytes() == finished


def test_a_log_of_few_rows_has_them_at_the_same_steps_when_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("mmspec.training.trainer.LOG_ROWS", 3)
    monkeypatch.setattr("mmspec.training.trainer.draw", lambda log, out: None)
    for stop in (12, 5):
        trainer(tmp_path / str(stop), steps=12).train(stop=after(stop))
        trainer(tmp_path / str(stop), steps=12).train()
        assert [row["step"] for row in rows(tmp_path / str(stop)) if row["event"] == "train"] == [1, 4, 8, 12]


def test_a_torn_checkpoint_never_replaces_a_whole_one(tmp_path, monkeypatch):
    run = trainer(tmp_path, steps=3)
    run.train()
    before = (tmp_path / CHECKPOINT).read_bytes()

    def torn(state, file):
        try:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("unexpected pos 704 vs 598") from error  # torch.save's own

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(UserError, match=rf"^cannot write {tmp_path}/{CHECKPOINT}: .*No space left on device$"):
        run.save()
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_a_folder_has_one_run_of_the_same_settings_and_version(tmp_path):
    with files.alone(tmp_path / ".lock", tmp_path), pytest.raises(UserError, match="another process is writing"):
        trainer(tmp_path).train()
    trainer(tmp_path, settings={"batch": 4, "data": ["a"]}).train(stop=after(1))
    assert not (tmp_path / ".lock").exists()
    with pytest.raises(UserError, match=r"batch = 4: expected the same to resume it, received 8"):
        trainer(tmp_path, settings={"batch": 8, "data": ["a"]})
    assert trainer(tmp_path, settings={"batch": 4, "data": ("a",)}).step == 1
    state = torch.load(tmp_path / CHECKPOINT)
    torch.save({name: state[name] for name in ("network", "optimisers", "step")} | {"stage": 1}, tmp_path / CHECKPOINT)
    expected = "a checkpoint with network, optimisers, order, .*, received one without order, seconds, settings; choose"
    with pytest.raises(UserError, match=rf"^{tmp_path} holds a run of another version: expected {expected}"):
        trainer(tmp_path)


@pytest.mark.parametrize("other", [{"minutes": 1.0}, {"epochs": 2.0}])
def test_two_lengths_are_refused(other):
    with pytest.raises(UserError, match=rf"one of steps, minutes and epochs: received .*{next(iter(other))}"):
        RunOptions(out=Path("unused"), steps=30, **other)


@pytest.fixture
def clock(monkeypatch):
    """The trainer's clock, by which every step takes 10 seconds. Curves, which take long, are not drawn."""
    now, learn = [0.0], Trainer._train_step

    def slow(run):
        now[0] += 10.0
        return learn(run)

    monkeypatch.setattr("mmspec.training.trainer.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Trainer, "_train_step", slow)
    monkeypatch.setattr("mmspec.training.trainer.draw", lambda log, out: None)
    return now


def test_minutes_end_a_run_that_was_resumed(tmp_path, clock):
    """The clock of the whole run determines rate, progress and end, wherever it was interrupted: 12 steps of 10 s."""
    plan = {"steps": None, "minutes": 2.0, "hold": 0.5, "report_minutes": 99.0}
    whole, parts = Toy(), Toy()
    trainer(tmp_path / "whole", whole, **plan).train()
    assert whole.progress == pytest.approx([1.0, *(step / 12 for step in range(12)), 1.0])
    trainer(tmp_path / "parts", parts, **plan).train(stop=after(5))
    for steps in (4, 99):
        clock[0] = 7000.0 - clock[0]  # the clock of another process, another day
        resumed = trainer(tmp_path / "parts", parts, **plan)
        assert not resumed.done
        resumed.train(stop=after(steps))
    assert (resumed.step, resumed.seconds, resumed.done) == (12, 120.0, True)
    assert parts.progress == pytest.approx(whole.progress)
    trained = [row for row in rows(tmp_path / "parts") if row["event"] == "train"]
    assert trained[-1]["step"] == 12
    for row in trained:
        step = row["step"]
        assert row["minutes"] == pytest.approx(step / 6, abs=1e-3)
        assert row["rate"] == pytest.approx(1e-2 * lr_factor((step - 1) / 12, step - 1, 2, 0.5), rel=1e-5)
    assert trainer(tmp_path / "parts", **plan).done


@pytest.mark.usefixtures("clock")
def test_checkpoints_and_reports_at_their_intervals(tmp_path, monkeypatch):
    """12 steps of 10 s; a step's time counts from the next step on."""
    events: list[tuple[str, int]] = []

    def told(name):
        done = getattr(Trainer, name)

        def tell(run):
            events.append((name, run.step))
            done(run)

        return tell

    monkeypatch.setattr(Trainer, "save", told("save"))
    monkeypatch.setattr(Trainer, "report", told("report"))
    trainer(tmp_path, steps=12, checkpoint_minutes=0.5, report_minutes=1.0).train()
    assert [step for name, step in events if name == "save"] == [4, 7, 10, 12]
    assert [step for name, step in events if name == "report"] == [0, 7, 12]
    assert trainer(tmp_path, steps=12).done
    # A resumed run counts its intervals from where it goes on.
    events.clear()
    trainer(tmp_path / "more", steps=12, checkpoint_minutes=0.5, report_minutes=1.0).train(stop=after(6))
    resumed = trainer(tmp_path / "more", steps=12, checkpoint_minutes=0.5, report_minutes=1.0)
    resumed.train()
    assert [step for name, step in events if name == "save"] == [4, 6, 10, 12]
    assert [step for name, step in events if name == "report"] == [0, 12]


def test_noise_depends_on_seed_and_step(tmp_path):
    for seed in (1, 2):
        trainer(tmp_path / str(seed), steps=4, seed=seed).train()
    noise = [row["noise"] for seed in (1, 2) for row in rows(tmp_path / str(seed)) if row["event"] == "train"]
    assert len({*noise}) == 8


@pytest.mark.parametrize(
    ("optimiser", "rates"), [("adamw", [("AdamW", 8e-3)]), ("muon", [("Muon", 8e-3), ("AdamW", 4e-3)])]
)
def test_parameters_are_updated_at_their_learning_rates(optimiser, rates):
    """The first step of AdamW moves a parameter by its rate against the gradient's sign, and decays it."""
    network = nn.ModuleDict({"embed": nn.Embedding(5, 4), "layer": nn.Linear(4, 3)})
    optimisers = Optimisers(network, optimiser, 8e-3)
    assert [(type(one).__name__, group["lr"]) for one in optimisers.all for group in one.param_groups] == rates
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    signs = {name: torch.sign(parameter.grad) for name, parameter in network.named_parameters()}
    optimisers.step(0.5)
    for name, parameter in network.named_parameters():
        if optimiser == "adamw" or name != "layer.weight":
            moved = 0.5 * rates[-1][1] * (signs[name] + 0.01 * before[name])
            torch.testing.assert_close(parameter.detach(), before[name] - moved, atol=1e-6, rtol=1e-4)
    assert not torch.equal(network["layer"].weight, before["layer.weight"])


def test_rates_rise_and_fall():
    at = [(0.0, 0), (0.0, 1), (0.3, 3), (0.4, 9), (0.7, 20), (1.0, 30)]
    assert [lr_factor(progress, step, 4, 0.4) for progress, step in at] == pytest.approx([0.25, 0.5, 1, 1, 0.5, 0])


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    run = trainer(tmp_path)
    next(iter(run.task.network.parameters())).data.fill_(float("nan"))
    run.report = lambda: None
    with pytest.raises(UserError, match=r"finite: nan at step 1; try a lower --rate"):
        run.train()


def _process(rank, port, folder, stop_at):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)  # from the parent process
    run = trainer(folder, steps=8, batch=5)
    assert run.accelerator.num_processes == 2
    # One process alone is asked to stop; both must.
    run.train(after(stop_at) if stop_at and rank == 1 else lambda: False)
    run.task.save(folder / f"rank{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_two_processes_take_the_steps_of_one(tmp_path):
    alone = trainer(tmp_path / "alone", steps=8, batch=5)
    alone.train()
    for stop_at in (3, None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = (port, tmp_path / "both", stop_at)
        # Not "fork": locks of the threads of this process would stay locked in its children.
        torch.multiprocessing.start_processes(_process, args=arguments, nprocs=2, start_method="spawn")
        assert torch.load(tmp_path / "both" / CHECKPOINT)["step"] == (stop_at or 8)
    for rank in range(2):
        found = torch.load(tmp_path / "both" / f"rank{rank}" / "weights.pt")
        for name, value in weights(alone).items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)
    assert [row["step"] for row in rows(tmp_path / "both")] == [0, *range(1, 9), 8]


def test_running_means_are_of_the_steps_that_have_a_metric():
    steps = [(torch.tensor(loss), some) for loss, some in ((1.0, {"a": 2.0}), (3.0, {"a": 4.0, "b": 7.0}), (5.0, {}))]
    assert mean_metrics(steps) == {"loss": 3.0, "a": 3.0, "b": 7.0}
