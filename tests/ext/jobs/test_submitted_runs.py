"""A diagnosis whose runs are jobs, of submitit's local executor and of a Ray cluster with two
workers; what is refused before a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.errors import BadInput
from ampscope.ext.jobs.submitted_runs import VARIABLE, SubmittedRuns
from ampscope.records import RunSpec
from ampscope.store.reader import Reader
from tests.helpers.diagnosis_contract import checked

OVERFLOWS = """
import torch
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
with torch.no_grad(): m[0].weight.mul_(3e5); m[1].weight.mul_(1e-5)
o = torch.optim.SGD(m.parameters(), 1e-9)
for i in range(6):
    o.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = m(torch.randn(16, 8)).float().mean()
    loss.backward(); o.step()
"""


def entered(tmp_path: Path, engine: str) -> None:
    spec = RunSpec("train.py", kind="script", time_limit_s=10.0)
    with SubmittedRuns(spec, tmp_path / "runs.db", engine):
        pass


def test_an_engine_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with monkeypatch.context() as without:
        for engine, library in (("slurm", "submitit"), ("ray", "ray")):
            without.setitem(sys.modules, library, None)
            with pytest.raises(BadInput, match=rf"pip install 'ampscope\[{engine}\]'"):
                entered(tmp_path, engine)
    pytest.importorskip("submitit")
    with pytest.raises(BadInput, match="no sbatch"):
        entered(tmp_path, "slurm")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", ["gpu", "no_such_parameter=3"])
@pytest.mark.parametrize(("engine", "library"), [("local", "submitit"), ("ray", "ray")])
def test_a_parameter_that_there_is_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, library: str, asked: str
) -> None:
    pytest.importorskip(library)
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(BadInput, match=VARIABLE):
        entered(tmp_path, engine)
    assert not list(tmp_path.glob("*.jobs/*"))


def test_a_ray_cluster_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "no address")
    with pytest.raises(BadInput, match="No Ray cluster can be used"):
        entered(tmp_path, "ray")


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An engine that can take jobs."""
    if request.param == "local":
        pytest.importorskip("submitit")
        yield "local"
        return
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield "ray"
    ray.shutdown()


def test_the_jobs_give_the_verdict_and_their_runs_are_merged(engine: str, tmp_path: Path) -> None:
    script, out, store = tmp_path / "train.py", tmp_path / "o.json", tmp_path / "runs.db"
    script.write_text(OVERFLOWS)
    arguments = ["diagnose", "--on", engine, "--no-verify", "--quiet", "--store", store]
    done = CliRunner().invoke(main, [*map(str, arguments), "--json", str(out), str(script)])
    document = checked(out.read_text())
    assert done.exit_code == 1, json.dumps(document)
    assert document["findings"][0]["cause"] == "activation_overflow"
    assert document["findings"][0]["module"] == "0"
    with Reader(store) as reader:
        runs = {info.spec.control: info for info in reader.runs()}
    assert runs.keys() == {"as_is", "fp32"}
    assert runs["fp32"].spec.parent == runs["as_is"].id
    assert len({info.spec.group for info in runs.values()}) == 1
    assert not list(tmp_path.glob("*.jobs"))
