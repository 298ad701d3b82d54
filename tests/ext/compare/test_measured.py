"""Comparisons and batch searches that really run, in children, on small models."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.errors import BadInput
from ampscope.ext.compare.comparison import by_precision
from ampscope.ext.compare.measure import batch_child, batch_size, interleaved
from ampscope.ext.compare.measure.batch_size import Grid
from ampscope.ext.compare.measure.batch_trials import Trials
from ampscope.launcher.launch import launch
from ampscope.records import BatchTrial, LargestBatch, LossCurve, RunSpec, State, StepTimes
from ampscope.store.reader import Reader
from tests.helpers.child_runs import wait_until

MIB = 2**20
# Activations known by construction: a row of 2,048 numbers a sample through 16 sigmoids, each of
# which keeps its output.
KNOWN = """
import torch
from torch import nn

from ampscope import Workload

{more}


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2048))

    def forward(self, x):
        x = x * self.scale
        for _ in range(16):
            x = torch.sigmoid(x)
        return x


def build(seed):
    return Workload(
        model=Chain(),
        batches={batches},
        loss=lambda model, batch: {loss},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""
ROW_BYTES = 2048 * 4


def known(
    folder: Path,
    batches: str = "[torch.ones(4, 2048)]",
    loss: str = "model(batch).mean()",
    more: str = "",
) -> str:
    file = folder / "known.py"
    file.write_text(KNOWN.format(batches=batches, loss=loss, more=more))
    return f"{file}:build"


def ended(spec: RunSpec, store: Path) -> tuple[State, str, list[object]]:
    run_id = launch(spec, store)
    info = wait_until(store, run_id)
    with Reader(store) as reader:
        return info.state, info.message, list(reader.results(run_id))


def test_a_comparison_trains_all_precisions_from_the_same_start(tmp_path: Path) -> None:
    spec = RunSpec(
        "mlp", kind="compare", precision="fp32,bf16", steps=8, seeds=2, policy="native",
        time_limit_s=60, device="cpu",
    )  # fmt: skip
    state, message, results = ended(spec, tmp_path / "s.db")
    assert state is State.FINISHED, message
    curves = {(r.precision, r.seed): r for r in results if isinstance(r, LossCurve)}
    assert set(curves) == set(itertools.product(("fp32", "bf16"), (0, 1)))
    assert all(len(c.losses) == 8 for c in curves.values())
    # An oracle that knows nothing of ampscope's loop: the same model, trained by hand in fp32.
    assert curves["fp32", 1].losses == pytest.approx(by_hand("mlp", 1, 8), rel=1e-6)
    assert curves["fp32", 0].losses[0] == pytest.approx(curves["bf16", 0].losses[0], rel=0.02)
    fp32, bf16 = by_precision(results)  # type: ignore[arg-type]  # they are results
    assert fp32.times is not None
    assert fp32.times.samples == 32
    assert fp32.times.step.repeats == 2 * (8 - 2)
    assert fp32.times.forward is not None
    assert bf16.memory is not None
    assert bf16.memory.peak > 20_000
    assert bf16.other_memory is not None
    assert [t.samples for t in fp32.other_times] == [128, 512]
    assert 0 < (bf16.times.cast_share if bf16.times and bf16.times.cast_share else 0) < 1


def by_hand(name: str, seed: int, steps: int) -> list[float]:
    from ampscope.workloads.load import load
    from ampscope.workloads.protocol import iterate

    torch.manual_seed(seed)
    workload = load(name, size="tiny", seed=seed)
    optimizer = workload.optimizer(workload.model.parameters())
    losses = []
    for batch in itertools.islice(iterate(workload), steps):
        optimizer.zero_grad()
        loss = workload.loss(workload.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_step_of_ones_own_and_a_batch_without_dimension_are_borne(tmp_path: Path) -> None:
    step = """
def step(model, batch, optimizer, scaler, autocast):
    optimizer.zero_grad()
    with autocast():
        loss = model(batch[0]).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss
"""
    name = known(tmp_path, "[(torch.ones(4, 2048), torch.ones(3))]", "model(batch[0]).mean()", step)
    file = Path(name.removesuffix(":build"))
    file.write_text(file.read_text().replace("lr=0.1),", "lr=0.1), step=step,"))
    spec = RunSpec(
        name, kind="compare", precision="fp32,bf16", steps=4, policy="native", time_limit_s=60
    )
    state, message, results = ended(spec, tmp_path / "s.db")
    assert state is State.FINISHED, message
    assert "begin with different numbers" in message
    times = [r for r in results if isinstance(r, StepTimes)]
    assert [t.forward for t in times] == [None, None]
    assert {t.samples for t in times} == {0}


def test_the_search_ends_within_one_step_of_what_is_known(tmp_path: Path) -> None:
    limit = 96
    spec = RunSpec(
        known(tmp_path), kind="batch", precision="fp32", policy="native", device="cpu",
        memory_limit_mib=limit, multiple_of=16, time_limit_s=120,
    )  # fmt: skip
    state, message, results = ended(spec, tmp_path / "s.db")
    assert state is State.FINISHED, message
    found = next(r for r in results if isinstance(r, LargestBatch))
    trials = {r.samples: r.fits for r in results if isinstance(r, BatchTrial)}
    assert trials[found.samples]
    assert found.too_many is not None
    assert not trials[found.too_many]
    assert found.too_many - found.samples == 16
    # The batch, 16 outputs that are kept, the mean's gradient and the first that is made of it.
    largest = int(limit * MIB / (19 * ROW_BYTES)) // 16 * 16
    assert abs(found.samples - largest) <= 16


def test_running_out_of_memory_twenty_times_harms_nothing(tmp_path: Path) -> None:
    spec = RunSpec(known(tmp_path), kind="batch", precision="fp32", policy="native")
    trials = Trials(torch.device("cpu"), 64 * MIB)
    made = [trials.attempt(spec, 100_000 + 1000 * n, 60.0) for n in range(20)]
    assert not any(m.fits for m in made)
    assert all("memory" in m.how_it_ended for m in made)
    assert trials.attempt(spec, 8, 60.0).fits


def test_the_embedding_programs_main_is_not_run_in_a_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = ModuleType("__main__")
    foreign.__file__ = str(tmp_path / "main.py")
    Path(foreign.__file__).write_text("raise SystemExit('must not run')")
    monkeypatch.setitem(sys.modules, "__main__", foreign)
    spec = RunSpec(known(tmp_path), kind="batch", precision="fp32", policy="native")
    assert Trials(torch.device("cpu"), 0).attempt(spec, 8, 60.0).fits


def test_a_child_that_dies_without_a_word_did_not_fit(tmp_path: Path) -> None:
    more = "import os, signal"
    loss = "model(batch).mean() if len(batch) < 50 else os.kill(os.getpid(), signal.SIGKILL)"
    spec = RunSpec(known(tmp_path, loss=loss, more=more), kind="batch", precision="fp32")
    made = Trials(torch.device("cpu"), 0).attempt(spec, 64, 60.0)
    assert not made.fits
    assert made.how_it_ended == "Out of memory. The process was ended by SIGKILL."


def test_a_crash_without_a_limit_is_no_answer(tmp_path: Path) -> None:
    more, loss = "import os, signal", "os.kill(os.getpid(), signal.SIGSEGV)"
    spec = RunSpec(known(tmp_path, loss=loss, more=more), kind="batch", precision="fp32")
    with pytest.raises(BadInput, match="was ended by SIGSEGV without reporting an error"):
        Trials(torch.device("cpu"), 0).attempt(spec, 64, 60.0)


def test_a_batch_that_does_not_fit_is_made_smaller(tmp_path: Path) -> None:
    spec = RunSpec(
        known(tmp_path, "[torch.ones(2000, 2048)]"), kind="batch", precision="fp32",
        policy="native", device="cpu", memory_limit_mib=96, multiple_of=64, time_limit_s=120,
    )  # fmt: skip
    state, message, results = ended(spec, tmp_path / "s.db")
    assert state is State.FINISHED, message
    first = next(r for r in results if isinstance(r, BatchTrial))
    assert (first.samples, first.fits) == (2000, False)
    found = next(r for r in results if isinstance(r, LargestBatch))
    # 2,000 rows of 8 KiB are held as well, whatever the batch.
    largest = int((limit_left := 96 * MIB - 2000 * ROW_BYTES) / (19 * ROW_BYTES)) // 64 * 64
    assert limit_left > 0
    assert abs(found.samples - largest) <= 64


def test_a_try_that_takes_too_long_ends_the_search_and_not_the_run(tmp_path: Path) -> None:
    more, loss = "import time", "(time.sleep(30 if len(batch) > 4 else 0), model(batch).mean())[1]"
    spec = RunSpec(
        known(tmp_path, loss=loss, more=more), kind="batch", precision="fp32", policy="native",
        device="cpu", memory_limit_mib=96, multiple_of=4, time_limit_s=12,
    )  # fmt: skip
    state, message, results = ended(spec, tmp_path / "s.db")
    assert state is State.FINISHED, message
    assert "the time limit ended the search early" in message
    found = next(r for r in results if isinstance(r, LargestBatch))
    assert (found.samples, found.too_many) == (4, None)


def test_other_words_about_memory_are_no_lack_of_it(tmp_path: Path) -> None:
    loss = "(_ for _ in ()).throw(RuntimeError('refers to a single memory location'))"
    spec = RunSpec(known(tmp_path, loss=loss), kind="batch", precision="fp32")
    with pytest.raises(BadInput, match="single memory location"):
        Trials(torch.device("cpu"), 64 * MIB).attempt(spec, 8, 60.0)


@pytest.mark.parametrize(
    ("batches", "loss", "words"),
    [
        ("[(torch.ones(4, 2048), torch.ones(3))]", "model(batch[0]).mean()", "No batch dimension"),
        ("[torch.ones(4, 2048)]", "1 / 0", "ZeroDivisionError"),
        ("[]", "model(batch).mean()", "is empty"),
    ],
)
def test_a_search_over_what_cannot_be_searched_gives_one_sentence(
    tmp_path: Path, batches: str, loss: str, words: str
) -> None:
    spec = RunSpec(known(tmp_path, batches, loss), kind="batch", precision="fp32")
    with pytest.raises(BadInput, match=words):
        Trials(torch.device("cpu"), 0).attempt(spec, 8, 60.0)


@pytest.mark.parametrize(("step", "sizes"), [(8, [8, 16, 24]), (1, [1, 2, 3]), (0, [1, 2, 4])])
def test_the_grid_of_sizes(step: int, sizes: list[int]) -> None:
    grid = Grid(step)
    assert [grid.samples(place) for place in (1, 2, 3)] == sizes
    assert [grid.place(size) for size in sizes] == [1, 2, 3]
    assert grid.place(sizes[2] + 0.5) == 3
    assert grid.samples(grid.place(0)) == 0


class Search:
    """In place of the search for one precision: what it is told to keep below."""

    bounds: ClassVar[list[int]] = []

    def __init__(self, *args: object) -> None:
        pass

    def run(self, limit_bytes: int) -> list[str]:
        self.bounds.append(limit_bytes)
        return []


@pytest.mark.parametrize(("asked_mib", "bound_mib"), [(0, 40), (16, 16), (64, 40)])
def test_a_memory_limit_bounds_a_gpu_as_well(
    monkeypatch: pytest.MonkeyPatch, asked_mib: int, bound_mib: int
) -> None:
    """In the prediction, and in each trial; 40 MiB of the GPU are free, of 80."""
    where = torch.device("cuda", 0)
    spec = RunSpec("mlp", kind="batch", precision="fp32", memory_limit_mib=asked_mib)
    monkeypatch.setattr(batch_size, "_Search", Search)
    monkeypatch.setattr(batch_size.Trials, "free_bytes", lambda trials: 40 * 2**20)
    batch_size.measure(spec, where, None, bool)  # type: ignore[arg-type]  # nothing is written
    assert Search.bounds.pop() == bound_mib * 2**20

    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda where: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: call())  # CUDA runs in a trial
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    facts = SimpleNamespace(total_memory=80 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: shares.append(share)
    )
    monkeypatch.setattr(batch_child, "_tried", lambda *args: None)
    batch_child.attempt(spec, "cuda:0", 8, 0)
    assert shares == ([asked_mib / 80] if asked_mib else [])


def test_the_command_prints_the_verdict_first_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    command = ["compare", "mlp", "--size", "tiny", "--precision", "fp32,bf16", "--steps", "6"]
    command += ["--seeds", "2", "--price", "2", "--json", str(out), "--store", str(tmp_path / "s")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].startswith(("AMP ", "Look at the loss", "Too noisy"))
    assert "a million samples cost" in done.stdout
    assert "What articles promise, and bf16 here" in done.stdout
    found = json.loads(out.read_text())
    assert found["base"] == "fp32"
    assert found["precisions"][1]["times"]["step"]["repeats"] == 2 * (6 - 2)
    assert found["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["compare", "nothing"], "There is no workload 'nothing'"),
        (["compare", "mlp", "--precision", "fp32,fp12"], "no precision called 'fp12'"),
        (["compare", "mlp", "--precision", "fp32,tf32", "--device", "cpu"], "tf32 needs a CUDA"),
        (["compare", "mlp", "--seeds", "0"], "Seeds must be from 1"),
        (
            ["batch-size", "mlp", "--multiple-of", "0", "--memory-limit", "64"],
            "--multiple-of takes a number from 1",
        ),
        (["batch-size", "mlp", "--device", "cpu"], "say how much memory training may take"),
        (["compare", "mlp", "--precision", "fp32,,fp32"], "at least two precisions"),
        (["batch-size", "mlp", "--memory-limit", "-5"], "memory limit must be 0"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    tmp_path: Path, command: list[str], words: str
) -> None:
    done = CliRunner().invoke(main, [*command, "--store", str(tmp_path / "s.db")])
    assert done.exit_code == 2
    assert words in done.stderr
    assert not (tmp_path / "s.db").exists()


def test_a_device_without_a_counter_of_energy_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "energy_counter", lambda _: None)
    monkeypatch.setattr(interleaved, "why_none", lambda _: "It is a MIG slice.")
    one = SimpleNamespace(device=torch.device("cuda", 0))
    said = interleaved._energy({"fp32": one}, None, 1, None, None)  # type: ignore[arg-type, dict-item]
    assert said == ["It is a MIG slice."]


SCRIPT = """
import sys

import torch
from torch import nn

print("to standard output")
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{setup}
generator = torch.Generator().manual_seed(5)
x, y = torch.randn(32, 64, generator=generator), torch.arange(32) % 4
for step in range({steps}):
    optimizer.zero_grad()
    {step}
"""
PLAIN = "loss = nn.functional.cross_entropy(model(x), y); loss.backward(); optimizer.step()"
SCALED = """
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
"""


def script(folder: Path, setup: str = "", step: str = PLAIN, steps: int = 50) -> Path:
    file = folder / "train.py"
    file.write_text(SCRIPT.format(setup=setup, step=step, steps=steps))
    return file


def clocked(file: Path, precision: str, *args: str, steps: int = 8) -> dict[str, object]:
    from ampscope.ext.compare.measure.script_timing import main as clock

    out = file.parent / f"{precision}.json"
    command = [sys.executable, "-m", clock.callback.__module__, "--precision", precision]  # type: ignore[union-attr]  # it has one
    command += ["--steps", str(steps), "--seconds", "60", "--seed", "3", "--out", str(out)]
    subprocess.run([*command, str(file), *args], check=True, timeout=120, capture_output=True)
    found: dict[str, object] = json.loads(out.read_text())
    return found


def script_by_hand(steps: int) -> list[float]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(32, 64, generator=generator), torch.arange(32) % 4
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_untouched_script_is_clocked_in_every_precision(tmp_path: Path, precision: str) -> None:
    found = clocked(script(tmp_path), precision)
    tolerance = {"fp32": 1e-6, "bf16": 0.02, "fp16": 0.005}[precision]
    hand = script_by_hand(8)
    assert found["losses"] == pytest.approx(hand, rel=tolerance)
    assert (found["losses"] == hand) == (precision == "fp32")
    assert len(found["seconds"]) == 7  # type: ignore[arg-type]  # a list
    assert (found["problem"], found["foreign"]) == ("", "")


def test_a_script_with_its_own_amp_keeps_it_and_its_losses_are_unscaled(tmp_path: Path) -> None:
    file = script(tmp_path, 'scaler = torch.amp.GradScaler("cpu")', SCALED)
    hand = script_by_hand(8)
    assert clocked(file, "fp16")["losses"] == pytest.approx(hand, rel=0.005)
    assert clocked(file, "fp32")["losses"] == pytest.approx(hand, rel=1e-6)
    bf16 = clocked(file, "bf16")
    assert bf16["losses"] == pytest.approx(hand, rel=0.02)
    assert bf16["foreign"] == ""


def test_skipped_steps_of_a_script_are_counted_and_keep_their_place(tmp_path: Path) -> None:
    """At a first scale of 2^24 the first steps are skipped; their losses are those of a model that
    has not moved, on the same batch."""
    file = script(tmp_path, 'scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)', SCALED)
    found = clocked(file, "fp16", steps=30)
    skipped, losses = found["skipped"], found["losses"]
    assert isinstance(skipped, list)
    assert isinstance(losses, list)
    assert skipped == list(range(len(skipped)))
    assert 5 < len(skipped) < 30
    assert len(set(losses[: len(skipped) + 1])) == 1
    assert losses[-1] < losses[0]
    assert len(losses) == 30


def test_the_command_compares_a_script(tmp_path: Path) -> None:
    file, store = script(tmp_path), tmp_path / "s.db"
    command = ["compare", str(file), "--precision", "fp32,bf16", "--seeds", "2", "--steps", "8"]
    done = CliRunner().invoke(main, [*command, "--store", str(store), "--", "--lr", "3"])
    assert done.exit_code == 0, done.output
    assert "speed against fp32" in done.stdout
    assert "Of an untouched script whole steps are timed" in done.stderr
    with Reader(store) as reader:
        info = reader.runs()[0]
        found = by_precision(reader.results(info.id))
    assert info.spec.args == ("--lr", "3")
    assert [len(m.curves) for m in found] == [2, 2]
    assert all(m.times is not None and m.times.step.repeats == 12 for m in found)
    assert all(m.process is not None for m in found)


@pytest.mark.parametrize(
    ("steps", "setup", "words"),
    [
        (2, "", "made 2 optimizer steps; a comparison needs 4"),
        (9, "raise ValueError('the data is missing')", "ValueError: the data is missing"),
        (9, "import os; os._exit(3)", "exited without reporting an error"),
        (9, "sys.exit(2)", "It called sys.exit(2)"),
    ],
)
def test_a_script_that_cannot_be_compared_gives_one_sentence(
    tmp_path: Path, steps: int, setup: str, words: str
) -> None:
    command = ["compare", str(script(tmp_path, setup, steps=steps)), "--precision", "fp32,bf16"]
    done = CliRunner().invoke(main, [*command, "--seeds", "1", "--store", str(tmp_path / "s.db")])
    assert done.exit_code == 1
    assert words in done.stderr


def test_arguments_belong_to_scripts_alone(tmp_path: Path) -> None:
    command = ["compare", "mlp", "--store", str(tmp_path / "s.db"), "--", "--lr"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert "mlp takes no arguments; only a script does." in done.stderr


def test_sigterm_stops_the_measurement_too(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    command = [sys.executable, "-m", "ampscope.cli.main", "compare", "gpt", "--size", "small"]
    command += ["--precision", "fp32,bf16", "--store", str(store)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not store.exists():
            time.sleep(0.1)
        with Reader(store) as reader:
            while not (runs := reader.runs()) or runs[0].state is not State.RUNNING:
                time.sleep(0.1)
            process.terminate()
            assert process.wait(60) == 130
            assert reader.runs()[0].state is State.CANCELLED
    finally:
        process.kill()
        process.wait()
