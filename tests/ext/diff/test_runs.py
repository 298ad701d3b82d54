"""``ampscope diff`` on real scripts: settings, files, commits, recorded runs, and git bisect."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from ampscope.cli.main import main
from ampscope.errors import BadInput
from ampscope.ext.diff.cli import diff as command
from ampscope.ext.diff.run_diff import values_of
from ampscope.ext.diff.runs import (
    DiffOptions,
    DiffResult,
    NewRun,
    Recorded,
    SideRuns,
    as_recorded,
    compared_sides,
    worktree,
)
from ampscope.launcher.script_runs import ScriptRun, ScriptRuns
from ampscope.observations import Outcome
from ampscope.records import AUTO, Machine, RunInfo, RunSpec, State
from ampscope.store.reader import Reader
from tests.helpers.hostile_objects import TRAININGS
from tests.helpers.hostile_objects import script as hostile
from tests.helpers.inductor import needs_compiler

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
HISTORY = Path(__file__).parents[3] / "benchmarks" / "diff_history.py"
SCRIPT = """\
import os, sys, torch
from torch import nn
torch.manual_seed(0)
if "fail" in sys.argv: raise ValueError("asked to")
net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
net[1].eps = float(os.environ.get("EPS", "1e-5"))
model = torch.compile(net, backend=sys.argv[1]) if "compile" in sys.argv else net
optimizer = torch.optim.AdamW(net.parameters(), eps=1e-4 if "eps" in sys.argv else 1e-8)
for step in range(4):
    x = torch.randn(16, 8)
    device, half = ("cuda", None) if "cuda" in sys.argv else ("cpu", torch.bfloat16)
    with torch.autocast(device, half, enabled="half" in sys.argv):
        y = model(x)
    if "late" in sys.argv and step == 2: y = y.sigmoid()
    loss = (y.float() - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def diff(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON and what was printed."""
    out = folder / "out.json"
    command = ["diff", "--quiet", "--repeats", "2", "--store", str(folder / "r.db")]
    command += ["--json", str(out), *arguments]
    done = CliRunner().invoke(main, command)
    return done.exit_code, json.loads(out.read_text()), done.output


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_variable_that_changes_a_module(tmp_path: Path, script: str) -> None:
    status, found, printed = diff(tmp_path, "--with", "EPS=1e-2", script)
    assert (status, found["verdict"], found["schema"]) == (1, "different", 1)
    first = found["first"]
    assert isinstance(first, dict)
    assert (first["step"], first["role"], first["module"]) == (0, "activation", "1")
    assert first["op"]["op"] == "native_layer_norm(fp32)"
    assert "different from step 0 on. The first difference is in 1" in printed
    assert "2 runs of A are the same bit for bit" in printed


def test_objects_that_answer_as_they_like_differ_in_their_numbers_alone(tmp_path: Path) -> None:
    """One training after the other in one script; its sibling's last has another rate."""
    last = hostile("== makes a module")
    paths = []
    for name, ending in (("one", last), ("other", last.replace("0.05", "0.06"))):
        texts = [*map(hostile, TRAININGS), ending]
        path = tmp_path / f"{name}.py"
        path.write_text(
            f"for text in {texts!r}:\n"
            "    exec(compile(text, __file__, 'exec'), {'__name__': '__main__'})\n"
        )
        paths.append(str(path))
    status, found, printed = diff(tmp_path, "--repeats", "1", "--steps", "1000", *paths)
    assert (status, found["verdict"]) == (1, "different"), printed
    assert found["first"]["step"] >= 6 * len(TRAININGS), printed  # all of them make 6 or more


def test_a_script_against_itself_and_its_recorded_run(tmp_path: Path, script: str) -> None:
    status, found, printed = diff(tmp_path, "--seeds", "2", script, script)
    assert (status, found["ledger_count"], found["first"]) == (0, 0, None)
    assert found["loss"]["seeds"] == 0  # no seed changes that
    with Reader(tmp_path / "r.db") as reader:
        kept = [reader.run(run) for side in "ab" for run in found[side]["runs"]]
    assert {run.machine.policy for run in kept if run.machine} == {"native"}
    assert "the same bit for bit: 4 steps" in printed
    (tmp_path / "train.py").write_text(SCRIPT.replace("range(4)", "range(3)"))
    run = found["a"]["runs"][0]
    status, again, printed = diff(tmp_path, run, script)
    assert (status, again["a"]["runs"]) == (1, found["a"]["runs"])
    assert "A makes 4 optimizer steps, B 3" in printed
    assert diff(tmp_path, run, run)[0] == 0


def test_autocast_fills_the_ledger_and_is_rounding(tmp_path: Path, script: str) -> None:
    status, found, printed = diff(tmp_path, "--with-args", "half", script)
    assert status == 1
    rows = {(row["kind"], row["name"]): row for row in found["ledger"]}
    second = rows["activation", "0"]["second"]
    set_by = ("bf16", "train.py:12", "autocast (bf16)")
    assert (second["dtype"], second["line"], second["why"]) == set_by
    assert {kind for kind, _ in rows} == {"activation"}
    assert "Other dtypes:" in printed
    runs = [found[side]["runs"][0] for side in ("a", "b")]
    assert diff(tmp_path, "--allow-rounding", *runs)[0] == 0


@pytest.mark.parametrize(
    ("argument", "step", "role"), [("eps", 0, "weight"), ("late", 2, "loss")]
)  # fmt: skip
def test_optimizer_and_loss(
    tmp_path: Path, script: str, argument: str, step: int, role: str
) -> None:
    status, found, _ = diff(tmp_path, "--with-args", argument, script)
    first = found["first"]
    assert isinstance(first, dict)
    assert (status, first["step"], first["role"]) == (1, step, role)
    settings = {s["name"]: s["second"] for s in found["settings"]}
    if argument == "eps":
        assert settings == {"optimizer0 eps": "0.0001"}
    else:  # the ops of this step were recorded by one more run of both
        assert first["op"]["op"] == "sub(fp32)"
        assert first["op"]["before"]["other"] == "sigmoid(fp32)"


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own code
@pytest.mark.parametrize(
    "backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=needs_compiler)]
)
def test_a_module_inside_compiled_code_is_named(tmp_path: Path, script: str, backend: str) -> None:
    """Compiled alone, the linear layers give what they give eagerly, the normalization does not."""
    torch.manual_seed(0)
    x, layers = torch.randn(16, 8), [nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)]
    same = []
    for layer in layers:
        same.append(torch.equal(torch.compile(layer, backend=backend)(x), layer(x)))
        x = layer(x)
    status, found, printed = diff(tmp_path, "--with-args", f"{backend} compile", script)
    first = found["first"]
    assert (status, first["step"], first["role"]) == (1, 0, "activation")
    assert first["module"] == str(same.index(False))
    assert "The module was found by one more run" in printed
    assert diff(tmp_path, script, script, backend, "compile")[0] == 0


def test_seeds_are_what_a_loss_is_held_against(tmp_path: Path, script: str) -> None:
    _, found, printed = diff(tmp_path, "--seeds", "2", "--with-args", "eps", script)
    loss = found["loss"]
    assert isinstance(loss, dict)
    assert loss["seeds"] == 2
    assert loss["between_seeds"] > abs(loss["first"] - loss["second"]) > 0
    assert "between 3 seeds of A" in printed


@no_cuda
def test_a_script_that_asks_for_cuda_is_rehearsed_on_both_sides(
    tmp_path: Path, script: str
) -> None:
    """B alone asks for a device; A would train without one."""
    arguments = ("--with-args", "half cuda", script, "half")
    status, found, printed = diff(tmp_path, *arguments)
    assert (status, found["first"]["dtypes"]) == (1, ["bf16", "fp16"])
    (note,) = found["notes"]
    assert note.startswith("B asks for CUDA, and this machine has none, so A and B were run on")
    assert note in " ".join(printed.split())
    with Reader(tmp_path / "r.db") as reader:
        kept = [reader.run(run) for side in "ab" for run in found[side]["runs"]]
    assert {run.machine.policy for run in kept if run.machine} == {"rehearsal"}


@dataclass
class Runs:
    """Stands in for the processes of one side."""

    wants_cuda: bool
    spec: RunSpec = field(default_factory=lambda: RunSpec("t.py", kind="script"))
    made: list[str] = field(default_factory=list)

    def run(self, control: str, parent: str = "") -> ScriptRun:
        self.made.append(self.spec.policy)
        lacks = self.wants_cuda and self.spec.policy != "cuda"
        ended = Outcome(
            ended="exception" if lacks else "returned", steps=0 if lacks else 1,
            error_type="E", error_text="No CUDA GPUs are available" if lacks else "",
        )  # fmt: skip
        policy = "rehearsal" if self.spec.policy == "cuda" else "native"
        machine = Machine("cpu", "", policy, "", "", "", "", "")
        info = RunInfo(
            control, self.spec, State.FINISHED, 0.0, None, None, None, None, machine, "", "", 1, 0.0
        )
        return ScriptRun(info, (ended,), "")


def planned(
    first: Runs | Recorded, second: Runs | Recorded, asked: str = AUTO
) -> tuple[DiffResult, list[list[str]]]:
    """The result, and the policies under which each side was run."""
    sides = []
    for side, other in ((first, second), (second, first)):
        if isinstance(side, Runs):
            side.spec = replace(side.spec, policy=asked)
            if isinstance(other, Recorded):
                like = as_recorded(NewRun(side.spec, "side"), other)
                assert isinstance(like, NewRun)
                side.spec = like.spec
            sides.append(SideRuns(NewRun(side.spec, "side"), cast(ScriptRuns, side)))
        else:
            sides.append(SideRuns(side, None))
    found = compared_sides(sides[0], sides[1], DiffOptions(repeats=1), lambda text: None)
    return found, [side.made for side in (first, second) if isinstance(side, Runs)]


@pytest.mark.parametrize(
    ("wanting", "made"),
    [
        ((True, True), [[AUTO, "cuda"], ["cuda"]]),
        ((True, False), [[AUTO, "cuda"], ["cuda"]]),
        ((False, True), [[AUTO, "cuda"], [AUTO, "cuda"]]),
        ((False, False), [[AUTO], [AUTO]]),
    ],
)
def test_both_sides_run_under_the_same_rules(
    wanting: tuple[bool, bool], made: list[list[str]]
) -> None:
    first, second = map(Runs, wanting)
    found, policies = planned(first, second)
    assert policies == made
    assert len(found.notes) == any(wanting)


@pytest.mark.parametrize(("policy", "asked"), [("rehearsal", "cuda"), ("native", "native")])
def test_a_recorded_side_says_under_which_rules_the_other_runs(policy: str, asked: str) -> None:
    side = Recorded("run a", ("a",), (values_of([Outcome("returned", steps=1)]),), policy)
    assert planned(side, Runs(wants_cuda=True))[1] == [[asked]]
    assert planned(Runs(wants_cuda=True), side)[1] == [[asked]]


def test_unequal_rules_are_compared_only_between_two_recorded_runs() -> None:
    one = values_of([Outcome("returned", steps=1)])
    first, second = (
        Recorded(f"run {policy}", (policy,), (one,), policy) for policy in ("native", "rehearsal")
    )
    said = "B ran on a simulated CUDA device, A under the CPU's own"
    found, _ = planned(Runs(wants_cuda=False), second, asked="native")
    assert found.diff.verdict == "unknown"
    assert found.diff.reason.startswith(said)
    found, _ = planned(first, second)
    assert not found.diff.reason.startswith(said)
    assert found.notes[-1].startswith(said)


def test_what_cannot_be_told_is_125_with_a_reason(tmp_path: Path, script: str) -> None:
    status, found, printed = diff(tmp_path, "--with-args", "fail", script)
    assert (status, found["verdict"]) == (125, "unknown")
    assert "B failed: ValueError at train.py:4: asked to" in str(found["reason"])
    assert "around the runs" not in printed  # all that B lacks is no difference of the settings
    assert printed.count("Only ") == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{}"], "Name B as well"),
        (["{}", "nowhere.py"], "There is no file nowhere.py, and no recorded run of that id"),
        (["--with", "EPS", "{}"], "--with takes NAME=VALUE"),
        (["--commits", "a", "{}"], "--commits takes two commits"),
        (["--against", "a", "--commits", "a..b", "{}"], "not both"),
        (["--under", "fp33", "{}"], "There is no intervention"),
        (["--repeats", "0", "{}", "{}"], "Repeats must be 1 or more"),
        (["--python", "nowhere", "{}"], "There is no Python nowhere"),
        (["--against", "HEAD", "{}"], "git rev-parse failed"),
        (["--with-args", "'", "{}"], "--with-args cannot be read"),
        (["--nope", "{}"], "There is no option --nope"),
    ],
)
def test_bad_input_is_one_sentence_and_no_verdict(
    tmp_path: Path, script: str, arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    status, found, printed = diff(tmp_path, *(a.format(script) for a in arguments))
    assert status == 125  # 1 and 2 are "bad" to git bisect
    assert reason in str(found["reason"])
    assert "Could not tell." in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("arguments", "understood"),
    [
        (["t.py", "--with", "A=1"], (("A=1",), None, 30, "t.py", ())),
        (["t.py", "--against", "v1.0"], ((), "v1.0", 30, "t.py", ())),
        (["--steps", "5", "t.py", "--against", "v1.0", "--lr", "3"],
         ((), "v1.0", 5, "t.py", ("--lr", "3"))),
        (["t.py", "--with=A=1", "--steps", "5", "x"], (("A=1",), None, 5, "t.py", ("x",))),
        (["--with", "A=1", "t.py", "--steps", "5"], (("A=1",), None, 30, "t.py", ("--steps", "5"))),
        (["a.py", "b.py", "--steps", "5"], ((), None, 30, "a.py", ("b.py", "--steps", "5"))),
        (["t.py", "--nope", "x"], ((), None, 30, "t.py", ("--nope", "x"))),
    ],
    ids=str,
)  # fmt: skip
def test_options_behind_the_only_script(arguments: list[str], understood: tuple[Any, ...]) -> None:
    """As in the documents' `diff train.py --with A=1`; what follows them is the script's."""
    given = command.make_context("diff", arguments).params
    names = ("variables", "against", "steps", "first", "rest")
    assert tuple(given[name] for name in names) == understood


@pytest.mark.parametrize("arguments", [[], ["--repeats", "x", "a.py"], ["--policy", "mps", "a.py"]])
def test_a_command_that_cannot_be_read_is_no_verdict_either(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["diff", *arguments])
    assert (result.exit_code, "Error: " in result.output) == (125, True)


def history(folder: Path, commits: int, bad: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, str(HISTORY), str(folder), "--commits", str(commits)]
    command += ["--bad", str(bad), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout) if more else {}


def test_a_commit_is_put_into_a_worktree_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    history(repository, 4, 2)
    monkeypatch.chdir(repository)
    before = (repository / "model.py").read_text()
    with worktree(Path("train.py"), "HEAD~3") as (path, folder):
        assert path.parent == folder != repository
        assert "eps=1e-3" not in (folder / "model.py").read_text()
    assert "eps=1e-3" in before == (repository / "model.py").read_text()
    assert not folder.exists()
    listed = subprocess.run(
        ["git", "worktree", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert len(listed.splitlines()) == 1
    for named, commit, reason in (
        ("train.py", "nowhere", "There is no commit nowhere"),
        ("other.py", "HEAD", "There is no file other.py in commit HEAD"),
    ):
        with (
            pytest.raises(BadInput, match=re.escape(reason)),
            worktree(Path(named), commit),
        ):
            pass


def test_two_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    history(repository, 3, 1)
    monkeypatch.chdir(repository)
    monkeypatch.delenv("GIT_DIR", raising=False)
    status, found, _ = diff(tmp_path, "--against", "HEAD~2", "train.py")
    first = found["first"]
    assert isinstance(first, dict)
    assert (status, first["module"]) == (1, "norm")


def test_bisect_finds_the_commit_without_a_hand(tmp_path: Path) -> None:
    found = history(tmp_path / "repository", 16, 11, "--bisect")
    assert found["right"], found
    assert int(str(found["tried"])) < 12


def test_bisect_skips_a_commit_that_does_not_run(tmp_path: Path) -> None:
    """Of the commits 1 to 6 git tries the third first: it is no Python at all."""
    found = history(tmp_path / "repository", 7, 5, "--broken", "3", "--bisect")
    assert (found["right"], found["skipped"]) == (True, 1), found


def test_another_python(tmp_path: Path, script: str) -> None:
    """A virtual environment is another Python with this one's packages."""
    environment = tmp_path / "environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", environment],
        check=True,
    )
    (site,) = environment.glob("lib/python*/site-packages")
    own = [p for p in sys.path if "site-packages" in p]
    (site / "own.pth").write_text("\n".join(own))
    status, found, printed = diff(
        tmp_path, "--python", os.fspath(environment / "bin" / "python"), script
    )
    assert (status, found["verdict"]) == (0, "same"), printed
