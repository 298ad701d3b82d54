"""The runs of a diagnosis write to files of their own: the user's stay as they are, byte for byte,
no run sees another's, and each starts from what the user had.

Everything is tried in each way of doing it that this machine allows.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
from pathlib import Path

import pytest

from ampscope.files import make_deletable
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import Outcome
from ampscope.runner.overlay import overlaid
from ampscope.runner.private_copy import ALL_WRITES, landlock_version
from ampscope.runner.private_files import COMPARED, COPY, FORCED, OVERLAY, roots_of
from tests.helpers.script_diagnoses import diagnosed, spec


def why_no_overlay() -> str:
    """ "" where this machine allows overlays. Tried in a process of its own."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "root"
        root.mkdir()
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            said = ""
            try:
                overlaid([str(root)], [], Path(made) / "runs.db", Path(made) / "view")
            except BaseException as error:
                said = str(error) or type(error).__name__
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            said = answer.read()
        os.waitpid(pid, 0)
        make_deletable(Path(made))
    return said


WHY_NOT = why_no_overlay()
KINDS = [
    pytest.param(OVERLAY, marks=pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")),
    pytest.param(
        COPY, marks=pytest.mark.skipif(landlock_version() < ALL_WRITES, reason="no Landlock")
    ),
    COMPARED,
]

RESUMES = """\
import os, shutil, sqlite3
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
torch.manual_seed(0)
net = nn.Linear(16, 4)
opt = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
start = 0
if os.path.exists("ckpt.pt"):
    state = torch.load("ckpt.pt")
    net.load_state_dict(state["net"]); start = state["step"]
assert start == 60, f"resumes at {start}"
assert sorted(os.listdir("logs")) == ["old.log"], os.listdir("logs")
os.makedirs("out")                                   # fails where another run has made it
(HERE / "absolute.txt").write_text("by an absolute path")
shutil.rmtree("old")
os.remove("logs/old.log")
os.rename("notes.txt", "renamed.txt")
with open("appended.log", "a") as log:
    log.write("more\\n")
with sqlite3.connect("metrics.db") as db:
    db.execute("create table if not exists m (step integer)")
for step in range(start, start + 20):
    x = torch.randn(32, 16)
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(net(x), x[:, :4])
    scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
    torch.save({"net": net.state_dict(), "step": step + 1}, "ckpt.tmp")
    os.replace("ckpt.tmp", "ckpt.pt")
    torch.save(net.state_dict(), str(HERE / "best.pt"))
    for old in Path("kept").glob("*.pt"):
        old.unlink()
    torch.save(net.state_dict(), f"kept/{step}.pt")
    db.execute("insert into m values (?)", (step,)); db.commit()
assert torch.load("ckpt.pt")["step"] == 80
assert not os.path.exists("notes.txt") and Path("renamed.txt").read_text() == "notes"
assert Path("appended.log").read_text() == "log\\nmore\\n"
assert db.execute("select count(*) from m").fetchone() == (21,)
"""
HEALTHY = """\
import torch
torch.manual_seed(0)
m = torch.nn.Linear(4, 2); o = torch.optim.SGD(m.parameters(), 0.1)
def steps(n=6):
    for _ in range(n):
        o.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(torch.randn(8, 4)).float().square().mean()
        loss.backward(); o.step()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with what a script of sixty steps has left."""
    import torch

    folder = tmp_path / "my project, 2"
    for name in ("logs", "old/deep", "kept", "data"):
        (folder / name).mkdir(parents=True)
    (folder / "train.py").write_text(RESUMES)
    (folder / "logs/old.log").write_text("old")
    (folder / "old/deep/file").write_text("deep")
    (folder / "notes.txt").write_text("notes")
    (folder / "appended.log").write_text("log\n")
    (folder / "link").symlink_to("notes.txt")
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 4)
    torch.save({"net": net.state_dict(), "step": 60}, folder / "ckpt.pt")
    torch.save(net.state_dict(), folder / "kept/59.pt")
    torch.save(net.state_dict(), folder / "best.pt")
    with sqlite3.connect(folder / "metrics.db") as db:
        db.execute("create table m (step integer)")
        db.execute("insert into m values (59)")
    db.close()
    return folder


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything there is below ``folder``: kind, contents, mode, time of change."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        contents = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        )
        found[str(path)] = (contents, facts.st_mode, facts.st_mtime_ns, facts.st_ino)
    found["."] = (folder.stat().st_mtime_ns,)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_resumes_and_deletes_leaves_the_tree_as_it_is(
    kind: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, kind)
    monkeypatch.chdir(project)
    before = tree(project)
    answers = []
    for number in range(3):
        report = diagnosed(project / "train.py", tmp_path / f"runs{number}.db")
        answers.append((report.diagnosis.verdict, report.undecided))
        assert tree(project) == before
    assert answers == [("no_fault", "")] * 3, report.notes


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_may_lie_in_the_project(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, kind)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(HEALTHY + "open('made', 'w').write('x')\nsteps()\n")
    report = diagnosed(path, tmp_path / "runs.db")
    assert report.diagnosis.verdict == "no_fault", report.undecided
    assert {p.name for p in tmp_path.iterdir()} <= {
        "train.py", "runs.db", "runs.db-wal", "runs.db-shm"
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_large_data_is_not_copied_and_stays_as_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of 8 GiB is read, and another large one is written over."""
    monkeypatch.setenv(FORCED, kind)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with (tmp_path / "data/big.bin").open("wb") as big:
        big.truncate(8 << 30)
    with (tmp_path / "weights.bin").open("wb") as weights:
        weights.truncate(100 << 20)
    path = tmp_path / "train.py"
    path.write_text(
        HEALTHY + "f = open('data/big.bin', 'rb'); f.seek(5 << 30); assert f.read(2) == b'\\0\\0'\n"
        "open('weights.bin', 'wb').write(b'mine'); open('data/more', 'w').write('x')\n"
        "assert open('weights.bin', 'rb').read() == b'mine'\nsteps()\n"
    )
    before = tree_of_sizes(tmp_path)
    report = diagnosed(path, tmp_path.parent / f"{tmp_path.name}.db")
    assert report.diagnosis.verdict == "no_fault", report.undecided
    assert tree_of_sizes(tmp_path) == before
    assert report.elapsed_s < 60


@pytest.mark.parametrize("kind", [*KINDS, ""])
def test_the_working_folder_may_hold_the_store_and_the_temporary_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a user stands in /tmp, and the script is a project's elsewhere."""
    here, project = tmp_path / "here", tmp_path / "project"
    (here / "temporary").mkdir(parents=True)
    project.mkdir()
    (project / "pyproject.toml").touch()
    path = project / "train.py"
    path.write_text(HEALTHY + "open('made', 'w').write('x')\nsteps()\n")
    monkeypatch.setenv(FORCED, kind)
    monkeypatch.setenv("TMPDIR", str(here / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(here)
    report = diagnosed(path, here / "runs.db")
    assert report.diagnosis.verdict == "no_fault", report.undecided
    assert not (here / "made").exists()


def tree_of_sizes(folder: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    )


@pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")
def test_native_code_and_other_programs_write_into_the_overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, OVERLAY)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.txt").write_text("kept")
    path = tmp_path / "train.py"
    path.write_text(
        HEALTHY + "import subprocess, torch\n"
        f"subprocess.run(['sh', '-c', 'echo x > {tmp_path}/kept.txt; rm -f {tmp_path}/train.py'])\n"
        f"torch.from_file('{tmp_path}/mapped.bin', shared=True, size=10).fill_(1)\nsteps()\n"
    )
    before = tree(tmp_path)
    report = diagnosed(path, tmp_path.parent / f"{tmp_path.name}.db")
    assert report.diagnosis.verdict == "no_fault", report.undecided
    assert tree(tmp_path) == before


WRITES = {
    "open": "open(place, 'w').close()",
    "torch.save": "import torch; torch.save(1, place)",
    "safetensors": "import safetensors.torch; safetensors.torch.save_file({}, place)",
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shared_is_named_and_written_by_one_run_at_a_time(
    kind: str, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that met in that folder would see each other's file, also one that native code
    writes."""
    monkeypatch.setenv(FORCED, kind)
    elsewhere, project = tmp_path / "scratch", tmp_path / "project"
    elsewhere.mkdir()
    project.mkdir()
    monkeypatch.chdir(project)
    path = project / "train.py"
    path.write_text(
        HEALTHY + "import os, time\n"
        f"place = '{elsewhere}/busy'\n"
        "steps(3)\nassert not os.path.exists(place)\n"
        f"{WRITES[write]}\n"
        "time.sleep(1); steps(3)\nos.remove(place)\n"
    )
    report = diagnosed(path, tmp_path / "runs.db")
    assert report.diagnosis.verdict == "no_fault", (report.undecided, report.notes)
    assert any(str(elsewhere) in n and "one at a time" in n for n in report.notes), report.notes


def test_a_folder_that_an_argument_names_is_private_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, project = tmp_path / "experiments", tmp_path / "project"
    out.mkdir()
    project.mkdir()
    monkeypatch.chdir(project)
    path = project / "train.py"
    path.write_text(
        HEALTHY + "import os, sys\nout = sys.argv[1].partition('=')[2]\n"
        "os.makedirs(out)\nopen(out + '/log', 'w').write('x')\nsteps()\n"
    )
    report = diagnosed(path, tmp_path / "runs.db", args=(f"--out={out}/one/two",))
    assert report.diagnosis.verdict == "no_fault", report.undecided
    assert all(note.startswith("On CUDA") for note in report.notes)
    assert list(out.iterdir()) == []


def test_a_plain_run_writes_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(HEALTHY + "steps()\nopen('made', 'w').write('by the user')\n")
    with ScriptRuns(spec(path), tmp_path / "runs.db") as runs:
        ended = runs.run("as_is").observations[-1]
    assert isinstance(ended, Outcome)
    assert ended.ended == "returned"
    assert (tmp_path / "made").read_text() == "by the user"


def test_roots_are_the_project_and_never_the_system(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    script = str(project / "scripts/train.py")
    assert roots_of(script, str(project / "scripts")) == [str(project)]
    assert roots_of(script, "/") == [str(project)]
    assert roots_of("-m train", "/usr") == []
    assert str(tmp_path) in roots_of(script, str(project), ("--out", f"{tmp_path}/new/run"))


def test_nothing_of_a_view_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setenv("TMPDIR", str(made))
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    path = project / "train.py"
    path.write_text(HEALTHY + "import os; os.makedirs('a/b'); open('a/b/c', 'w')\nsteps()\n")
    assert diagnosed(path, tmp_path / "runs.db").diagnosis.verdict == "no_fault"
    left = [p.name for p in made.iterdir() if not p.name.startswith("torchinductor")]
    kept = f"ampscope-{os.getuid()}"  # locks and arguments that are handed over; stays
    assert [name for name in left if name != kept] == []
    assert sys.platform != "linux" or str(made) not in Path("/proc/self/mountinfo").read_text()
