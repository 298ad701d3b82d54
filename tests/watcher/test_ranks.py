"""Watching under torchrun: every rank its own records, and what they add up to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from ampscope.analysis.ranks import first_nonfinite, merged
from ampscope.records import Role, State
from ampscope.store.reader import Reader
from tests.helpers.watched import recorded

SCRIPT = Path(__file__).parent / "rank_training.py"
ELEMENTS = 8 * 16 + 16 + 16 * 16 + 16 + 16 * 1 + 1  # of the script's model

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not sys.platform.startswith("linux"),
    reason="needs torch.distributed with gloo",
)


def torchrun(ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(SCRIPT), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=environment
    )


def ids_by_rank(store: Path) -> dict[int, str]:
    with Reader(store) as reader:
        return {run.spec.rank: run.id for run in reader.runs()}


@pytest.fixture(scope="module")
def with_a_nan(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """``with_a_nan(kind, ranks)``: the store of a training whose rank 1 has a NaN at step 7."""

    @cache
    def made(kind: str, ranks: int) -> Path:
        store = tmp_path_factory.mktemp(f"{kind}-{ranks}") / "runs.db"
        done = torchrun(ranks, kind, store, "--nan-at", 7, "--nan-rank", 1)
        assert done.returncode == 0, done.stderr[-2000:]
        return store

    return made


@pytest.mark.parametrize(
    ("kind", "ranks"), [("ddp", 2), ("ddp", 4), ("ddp-inside", 2), ("fsdp", 2), ("fsdp", 4)]
)
def test_a_nan_of_rank_1_is_found_and_parameters_count_once(
    with_a_nan: Callable[[str, int], Path], kind: str, ranks: int
) -> None:
    store = with_a_nan(kind, ranks)
    runs = {rank: recorded(store, id_) for rank, id_ in ids_by_rank(store).items()}
    assert sorted(runs) == list(range(ranks))
    assert len({run.info.spec.group for run in runs.values()}) == 1
    found = first_nonfinite({rank: run.events for rank, run in runs.items()})
    assert found is not None
    assert (found.step, found.ranks) == (7, (1,))
    assert "ank 1" in found.sentence
    for role, per_rank in ((Role.WEIGHT_GRAD, 0), (Role.WEIGHT, 0), (Role.ACTIVATION, 260)):
        frames = [f for run in runs.values() for f in run.frames[role] if f.step == 0]
        total = int(merged(frames).rows.sum())
        assert total == (ranks * per_rank or ELEMENTS)


@pytest.mark.slow  # alone, it runs the training
def test_the_merged_gradients_are_the_whole_gradients(
    with_a_nan: Callable[[str, int], Path],
) -> None:
    """FSDP2's parts against the same training's gradients under DDP, which every rank has whole:
    those of the first step, where the weights are the same."""
    rows = {}
    for kind in ("ddp", "fsdp"):
        store = with_a_nan(kind, 2)
        runs = [recorded(store, id_) for id_ in ids_by_rank(store).values()]
        frames = [f for run in runs for f in run.frames[Role.WEIGHT_GRAD] if f.step == 0]
        assert frames
        frame = merged(frames)
        rows[kind] = {m: frame.row_of(m) for m in sorted(set(frame.modules))}
    assert rows["ddp"].keys() == rows["fsdp"].keys()
    for module, row in rows["ddp"].items():
        # A sum in another order may round a value across a power of two.
        assert int(np.abs(row - rows["fsdp"][module]).sum()) <= 2


def test_nothing_more_is_sent_between_ranks(tmp_path: Path) -> None:
    """The script counts its collectives through torch's own profiler; either rank may end first."""
    counts = [
        sorted(torchrun(2, "ddp", tmp_path / f"{w}.db", "--watch", w, "--count").stdout.split("\n"))
        for w in ("yes", "no")
    ]
    assert any(line.startswith("collectives") for line in counts[0])
    assert counts[0] == counts[1]


@pytest.mark.slow  # alone, it runs the training
def test_a_sharded_capsule_is_not_run_with_other_weights(
    tmp_path: Path, with_a_nan: Callable[[str, int], Path]
) -> None:
    """Fresh weights were taken for those of the step, and a finite result for a verdict."""
    store = with_a_nan("fsdp", 2)
    run = recorded(store, ids_by_rank(store)[1])
    capsule = run.of("capsule")[0]
    assert not any("ampscope replay" in alarm.text for alarm in run.of("alarm"))
    build = tmp_path / "net.py"
    build.write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Linear(8, 16), "
        "nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))\n"
    )
    again = ampscope("replay", capsule.path, "--model", f"{build}:build")
    assert again.returncode == 2
    assert "The capsule is of a sharded training (FSDP)" in again.stderr


def test_diagnose_on_each_rank_is_refused_at_once(tmp_path: Path) -> None:
    """`torchrun --no-python ampscope diagnose` waited for ranks that never came."""
    store, started = tmp_path / "runs.db", time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command += ["--nproc-per-node", "2", sys.executable, "-m", "ampscope.cli.main", "diagnose"]
    command += ["--store", str(store), str(SCRIPT), "ddp", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode != 0
    assert f"-m torch.distributed.run --nproc-per-node 2 {SCRIPT} ddp x" in done.stderr
    assert time.monotonic() - started < 60
    assert not store.exists()


def test_unused_parameters_under_ddp_change_nothing(tmp_path: Path) -> None:
    """Each step leaves a branch without a gradient, and a Function hands None to a hook."""
    weights = {}
    for watch in ("yes", "no"):
        store, file = tmp_path / f"{watch}.db", tmp_path / f"{watch}.pt"
        done = torchrun(2, "ddp-unused", store, "--watch", watch, "--weights", file)
        assert done.returncode == 0, done.stderr  # torchrun's own report stands below the rank's
        assert "stopped watching" not in done.stderr
        weights[watch] = torch.load(file, weights_only=True)
    assert weights["yes"].keys() == weights["no"].keys()
    assert all(torch.equal(weights["yes"][n], weights["no"][n]) for n in weights["no"])
    for id_ in ids_by_rank(tmp_path / "yes.db").values():
        run = recorded(tmp_path / "yes.db", id_)
        assert (run.info.state, len(run.steps)) == (State.FINISHED, 12)
        assert all(step.grad_norm for step in run.steps)


def test_a_rank_that_dies_takes_nothing_of_the_others_with_it(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    done = torchrun(2, "alone", store, "--kill-rank", 1, "--kill-at", 5)
    assert done.returncode != 0
    assert str(int(signal.SIGKILL)) in done.stderr
    runs = {rank: recorded(store, id_) for rank, id_ in ids_by_rank(store).items()}
    assert runs[1].info.state is State.LOST
    assert [s.step for s in runs[1].steps] == list(range(5))
    assert len(runs[0].steps) >= 5
    assert all(frame.rows.sum() for frame in runs[0].frames[Role.ACTIVATION])


def ampscope(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ampscope.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_folder_gets_a_file_a_rank_that_merge_into_a_diagnosis(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    done = torchrun(2, "ddp", folder, "--steps", 6, "--nan-at", 4, "--nan-rank", 1)
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted(folder.glob("*.db"))
    assert len(files) == 2
    out = tmp_path / "all.db"
    merging = ampscope("runs", "merge", folder, "--into", out)
    assert merging.returncode == 0, merging.stderr
    ids = ids_by_rank(out)
    assert [len(recorded(out, ids[rank]).steps) for rank in (0, 1)] == [6, 6]
    judged = ampscope("runs", "ranks", ids[0], "--store", out)
    assert judged.returncode == 1
    assert "Rank 1 went non-finite first, at step 4" in judged.stdout
    alone = next(path for path in files if "rank0" in path.name)
    assert (
        "Ranks not in this store: 1" in ampscope("runs", "ranks", ids[0], "--store", alone).stdout
    )
