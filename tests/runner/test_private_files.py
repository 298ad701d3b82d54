"""The runs of a diagnosis write to files of their own: the user's stay as they are, byte for byte,
no run sees another's, and each starts from what the user had.

Everything is tried in each way of doing it that this machine allows.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from ampscope import files
from ampscope.analysis.run_view import RunView
from ampscope.files import remove_leftovers_in, throw_away
from ampscope.launcher.plan import run_diagnosis
from ampscope.launcher.script_runs import ENDS_WITHIN_S, ScriptRuns, jobs_folder
from ampscope.observations import Outcome
from ampscope.runner import private_copy
from ampscope.runner import put_back as before_runs
from ampscope.runner.private_copy import (
    ALL_WRITES,
    COPIED_ENTRIES,
    Copy,
    copied,
    landlock_version,
)
from ampscope.runner.private_files import COMPARED, COPY, FORCED, OVERLAY, roots_of
from ampscope.runner.put_back import put_back
from ampscope.story.verdict_words import next_step, options
from tests.helpers.private_modes import MODES, WHY_NOT, tree
from tests.helpers.script_diagnoses import diagnosed, spec

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


@pytest.mark.parametrize("kind", MODES)
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


@pytest.mark.parametrize("kind", MODES)
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


@pytest.mark.parametrize("kind", MODES)
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


@pytest.mark.parametrize("kind", [*MODES, ""])
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


@pytest.mark.parametrize("kind", MODES)
def test_a_script_may_clean_its_temporary_folder(
    kind: str, project: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Nothing of the user's can be reached there, and neither can the store."""
    temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short, as most are
    request.addfinalizer(lambda: throw_away(temporary))
    monkeypatch.setenv(FORCED, kind)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(project)
    (project / "train.py").write_text(
        HEALTHY + "import subprocess, tempfile\n"
        "subprocess.run(['find', tempfile.gettempdir(), '-name', '*.t*', '-delete'])\n"
        "subprocess.run(f'rm -rf {tempfile.gettempdir()}/*', shell=True)\nsteps()\n"
    )
    before = tree(project)
    report = diagnosed(project / "train.py", project / "runs.db")
    assert report.diagnosis.verdict == "no_fault", report.undecided
    after = {path: facts for path, facts in tree(project).items() if "runs.db" not in path}
    assert {**after, ".": ()} == {**before, ".": ()}


def test_what_lies_behind_another_machine_is_named_and_met_by_one_run_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(
        HEALTHY + "import socket\nasked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "try:\n    asked.connect(('192.0.2.1', 9))\nexcept OSError:\n    pass\nsteps()\n"
    )
    report = diagnosed(path, tmp_path.parent / f"{tmp_path.name}.db")
    assert report.diagnosis.verdict == "no_fault", (report.undecided, report.notes)
    assert any("192.0.2.1" in n and "one at a time" in n for n in report.notes), report.notes


def test_a_killed_run_leaves_the_files_as_they_were_too(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are compared, and the run can do that no more. What it wrote is kept."""
    monkeypatch.setenv(FORCED, COMPARED)
    monkeypatch.chdir(project)
    (project / "train.py").write_text(
        "import os\n"
        f"real = {str(project)!r}\n"
        "open(f'{real}/notes.txt', 'w').write('written over')\n"
        "open(f'{real}/new.txt', 'w').write('new')\n"
        "os.remove(f'{real}/logs/old.log'); os.rmdir(f'{real}/logs')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    before = {path: facts[:3] for path, facts in tree(project).items()}
    with ScriptRuns(spec(project / "train.py"), tmp_path / "runs.db", private=True) as runs:
        run = runs.run("as_is")
    assert {path: facts[:3] for path, facts in tree(project).items()} == before
    kept = tmp_path / "runs.db.changed" / run.info.id
    assert (kept / str(project / "notes.txt")[1:]).read_text() == "written over"
    assert (kept / str(project / "new.txt")[1:]).read_text() == "new"


def test_a_report_names_what_was_put_back_and_nothing_else(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, COMPARED)
    monkeypatch.chdir(project)
    path = project / "train.py"
    path.write_text(HEALTHY + "open('appended.log', 'a').write('x')\nsteps()\n")
    unchanged = diagnosed(path, tmp_path / "runs.db")
    assert [note for note in unchanged.notes if "differed" in note] == []
    path.write_text(HEALTHY + f"open('{project}/notes.txt', 'a').write('x')\nsteps()\n")
    named = diagnosed(path, tmp_path / "runs.db")
    (note,) = [note for note in named.notes if "differed" in note]
    assert str(project / "notes.txt") in note
    assert "train.py" not in note
    assert (project / "notes.txt").read_text() == "notes"


def test_without_any_way_the_run_says_what_to_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, "none of them")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(HEALTHY + "open('made', 'w').write('x')\nsteps()\n")
    report = diagnosed(path, tmp_path / "runs.db")
    assert "--in-place" in report.could_not_run
    assert not (tmp_path / "made").exists()


def test_in_place_writes_for_real_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run after the other: two at a time would meet."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(
        HEALTHY + "import os\nos.mkdir('busy')\nsteps()\nopen('made', 'a').write('x')\n"
        "os.rmdir('busy')\n"
    )
    report = run_diagnosis(spec(path), tmp_path / "runs.db", in_place=True)
    assert report.diagnosis.verdict == "no_fault", report.undecided
    assert (tmp_path / "made").read_text() == "xx"
    assert any("--in-place" in note for note in report.notes)


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


@pytest.mark.parametrize(
    "arg",
    ["-o{out}", "--out={out}/new/run", "a/../../out", "./../out", "file://{out}",
     '{{"out": "{out}"}}',
     "out.dir={out},x=1", "{out}"],
)  # fmt: skip
def test_a_folder_in_an_argument_is_a_root(arg: str, tmp_path: Path) -> None:
    project, out = tmp_path / "project", tmp_path / "out"
    (project / "a").mkdir(parents=True)
    out.mkdir()
    roots = roots_of("-m train", str(project), (arg.format(out=out),))
    assert roots == sorted([str(project), str(out)], key=len)


def test_the_folder_above_is_a_root(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    assert roots_of("-m train", str(tmp_path / "project"), ("..",)) == [str(tmp_path)]


def test_a_copy_is_named_where_its_original_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    copy = Copy([str(out)], [], [], "/copy", "/store")
    for text in ("{}", "--out={}/a", "-o{}", "file://{}/b", '{{"out": "{}"}}', "/usr:{}:/bin"):
        assert copy.led_text(text.format(out)) == text.format(f"/copy{out}")
    for text in (f"{out}er", f"/x{out}", "https://example.org/out", "a/b", "--lr=1/2", "~"):
        assert copy.led_text(text) == text


_IN_VIEW = """
import ctypes, os, shutil, subprocess, sys, tempfile
from pathlib import Path
from ampscope.runner import private_files
from ampscope.store import db
kind, place, folder, system, before, code = sys.argv[1:]
exec(before)
os.environ[private_files.FORCED] = kind
private_files._SYSTEM += (system,)
store, opened = Path(place) / "runs.db", []
view = private_files.private_files(
    "-m none", (), store, Path(folder),
    lambda _: opened or opened.append(db.open_for_writing(store)),
)
opened or opened.append(db.open_for_writing(view.store))
exec(code)
"""


# Root's Python may lie where nobody else can read it: everything is imported and read before. The
# process may write its /proc/self/uid_map where it can be dumped (PR_SET_DUMPABLE).
_BECOME_A_USER = """
schema = db.schema_text()
db.schema_text = lambda: schema
os.setgroups([]); os.setresgid(12345, 12345, 12345); os.setresuid(12345, 12345, 12345)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
"""


def in_view(
    kind: str,
    folder: Path,
    code: str,
    system: str = "",
    *,
    before: str = "",
    after: str = "",
    as_user: bool = False,
    **environment: str,
) -> str:
    """What ``code`` prints in a process that stands in ``folder`` and has private files.
    ``system``: a folder that counts as the system's. ``before``: code that runs before.
    ``as_user``: as nobody in particular, who runs ``after`` next."""
    with tempfile.TemporaryDirectory() as made:
        place, view = Path(made) / "store", Path(made) / "view"
        place.mkdir()
        if as_user:
            for path in (Path(made), place, folder, *folder.rglob("*")):
                os.chown(path, 12345, 12345)
            before += _BECOME_A_USER + after
        told = [kind, str(place), str(view), system, before, code]
        command = [sys.executable, "-c", _IN_VIEW, *told]
        alone = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
            "PWD": str(folder),
            **environment,
        }  # as a fork is
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=alone)
        assert ran.returncode == 0, ran.stderr
        put_back(view, Path(made) / "aside")
        throw_away(view)
    return ran.stdout


@pytest.mark.parametrize("kind", MODES)
def test_a_script_may_stand_in_a_system_folder(kind: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/one").write_text("1")
    (tmp_path / "log").write_text("log")
    code = "open('log', 'a').write('x'); print(open('log').read(), open('data/one').read())"
    assert in_view(kind, tmp_path, code, str(tmp_path)).strip() == "logx 1"
    assert (tmp_path / "log").read_text() == "log"


@pytest.mark.parametrize("kind", MODES)
def test_a_variable_that_names_a_folder_above_takes_nothing_away(kind: str, tmp_path: Path) -> None:
    """A shared cache above the project, and a folder above a system's one with much in it."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "log").write_text("log")
    (tmp_path / "many").mkdir()
    for number in range(COPIED_ENTRIES):
        (tmp_path / "many" / str(number)).touch()
    code = "open('log', 'a').write('x'); print(open('log').read())"
    for system in ("", str(here)):
        said = in_view(kind, here, code, system, HF_HOME=str(tmp_path), SOME=str(tmp_path))
        assert said.strip() == "logx"
        assert (here / "log").read_text() == "log"


@pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")
def test_an_overlay_over_many_places_needs_few_open_files(tmp_path: Path) -> None:
    code = (
        "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], view.kind,"
        " len(os.listdir('/proc/self/fd')) < 20)"
    )
    mounts = "".join(
        f"p = {str(tmp_path)!r} + '/{n}'; os.mkdir(p); overlay._mount('tmpfs', p, 'tmpfs', 0)\n"
        for n in range(60)
    )
    before = (
        "import resource; from ampscope.runner import overlay; overlay._own_namespace()\n"
        f"{mounts}resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))"
    )
    assert in_view(OVERLAY, tmp_path, code, before=before).split() == ["64", OVERLAY, "True"]


@pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")
def test_a_place_that_has_gone_ends_no_overlay(tmp_path: Path) -> None:
    """As another program's temporary folder or socket, between the listing and the mount."""
    before = (
        "from ampscope.runner import overlay\n"
        "overlay._is_there = lambda place: True\n"
        "overlay._sockets = lambda: ['/tmp/ampscope-is-no-socket']\n"
        "top = overlay._top_folders\n"
        "overlay._top_folders = lambda: [*top(), '/ampscope-is-not-there']"
    )
    assert in_view(OVERLAY, tmp_path, "print(view.kind)", before=before).strip() == OVERLAY


@pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")
def test_where_an_overlay_leaves_no_temporary_folder_a_copy_is_made(tmp_path: Path) -> None:
    before = (
        "from ampscope.runner import overlay\n"
        "cover = overlay._cover\n"
        "def covered(place, *args, **options):\n"
        "    cover(place, *args, **options)\n"
        "    if place == '/tmp': overlay._make_read_only(place)\n"
        "overlay._cover = covered\n"
    )
    code = "print(view.kind); tempfile.TemporaryFile()"
    said = in_view("", tmp_path, code, before=before, TMPDIR="/tmp", LANG="C").strip()
    assert said in (COPY, COMPARED)


@pytest.mark.parametrize("kind", MODES)
def test_a_store_may_be_a_link(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    before = f"os.mkdir({str(target)!r}); os.symlink({str(target)!r} + '/a.db', place + '/runs.db')"
    here = tmp_path / "here"
    here.mkdir()
    in_view(kind, here, "opened[0].execute('create table a (b)')", before=before)
    with sqlite3.connect(target / "a.db") as db:
        assert db.execute("select count(*) from a").fetchone() == (0,)


@pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")
@pytest.mark.parametrize("as_user", [False, True])
def test_a_store_may_lie_in_a_folder_that_is_covered_itself(as_user: bool, tmp_path: Path) -> None:
    """What is written there by the run must be there when it has ended."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        os.chmod(made, 0o755)
        target = Path("/tmp") / f"ampscope-{secrets.token_hex(4)}.db"
        before = f"os.symlink({str(target)!r}, place + '/runs.db')"
        try:
            code = "opened[0].execute('create table a (b)'); opened[0].commit()"
            in_view(OVERLAY, Path(made), code, before=before, as_user=as_user)
            with sqlite3.connect(target) as db:
                assert db.execute("select count(*) from a").fetchone() == (0,)
        finally:
            target.unlink(missing_ok=True)


def test_what_only_a_variable_names_is_not_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program is at work there; the script itself is led to the copy."""
    (tmp_path / "here").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others/log").write_text("log")
    monkeypatch.setenv("RESULTS", str(tmp_path / "others"))
    code = (
        "open(os.environ['RESULTS'] + '/log', 'a').write('x')\n"
        f"open('{tmp_path}/others/ne' + 'w', 'w').write('by another program')"
    )
    in_view(COMPARED, tmp_path / "here", code)
    assert (tmp_path / "others/log").read_text() == "log"
    assert (tmp_path / "others/new").read_text() == "by another program"


def test_a_file_beyond_the_walk_s_limit_is_neither_new_nor_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the run has deleted one of those before it."""
    here, base = tmp_path / "here", tmp_path / "view"
    here.mkdir()
    for number in range(8):
        (here / str(number)).write_text("kept")
    monkeypatch.setattr(before_runs, "COMPARED_ENTRIES", 5)
    monkeypatch.setattr(private_copy, "landlock_version", lambda: 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = tree(here)
    copied([str(here)], [], [], [], base, tmp_path / "runs.db", [], only=False)
    told = json.loads((base / "before.json").read_text())
    seen = [path for path in told["files"] if path != str(here)]
    os.unlink(min(seen))
    put_back(base, tmp_path / "aside")
    assert {p: f[:3] for p, f in tree(here).items()} == {p: f[:3] for p, f in before.items()}
    assert not (tmp_path / "aside").exists()


def test_a_user_s_own_change_keeps_its_time_where_the_copy_is_a_link(tmp_path: Path) -> None:
    here, view = tmp_path / "here", tmp_path / "view"
    here.mkdir()
    (here / "large").write_text("before")
    os.utime(here / "large", ns=(1, 1))
    facts = before_runs._facts(str(here / "large"))
    (view / "files" / str(here)[1:]).mkdir(parents=True)
    (view / "files" / str(here / "large")[1:]).symlink_to(here / "large")
    told = {"only": True, "roots": [str(here)], "store": "", "files": {str(here / "large"): facts}}
    told |= {"temporary": str(view / "t"), "unread": [], "apart": []}
    (view / "before.json").write_text(json.dumps(told))
    with (here / "large").open("r+b") as large:
        large.write(b"AFTER!")
    changed = (here / "large").stat().st_mtime_ns
    put_back(view, tmp_path / "aside")
    assert (here / "large").stat().st_mtime_ns == changed


def test_a_file_whose_name_begins_as_the_store_s_is_the_user_s(tmp_path: Path) -> None:
    here = tmp_path / "project"
    here.mkdir()
    for name in ("run", "run-wal", "run_train.py"):
        (here / name).touch()
    (here / "run.changed").mkdir()
    base = tmp_path / "copy"
    base.mkdir()
    Copy([str(here)], [], [], str(base), str(here / "run")).make()
    assert os.listdir(f"{base}{here}") == ["run_train.py"]


def test_much_data_leaves_the_rest_of_a_copy_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data listed before the project's own folders, in it and in a folder that an argument names:
    the project's other files are copied, and what holds the project too."""
    project, base = tmp_path / "asked/project", tmp_path / "copy"
    for folder in ("data/one", "outputs/run", "src"):
        (project / folder).mkdir(parents=True)
        (project / folder / "file").touch()
    for number in range(60):
        (project / "data/one" / str(number)).touch()
    for number in range(20):
        (tmp_path / "asked/a" / str(number)).mkdir(parents=True)
        (tmp_path / "asked/a" / str(number) / "file").touch()
    monkeypatch.setattr(private_copy, "COPIED_ENTRIES", 10)
    monkeypatch.setattr(private_copy._is_large, "__defaults__", (10,))
    monkeypatch.setattr(private_copy, "LINKS", 50)
    base.mkdir()
    root = str(tmp_path / "asked")
    Copy([root], [], [], str(base), "", [str(project)]).make()
    copy = Path(f"{base}{project}")
    assert (copy / "data/one").is_symlink()
    for name in ("outputs/run", "outputs/run/file", "src", "src/file"):
        assert (copy / name).exists()
        assert not (copy / name).is_symlink()
    assert Path(f"{base}{root}/a/0/file").exists()


def test_a_copy_has_a_limit_of_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, base = tmp_path / "here", tmp_path / "copy"
    (here / "a").mkdir(parents=True)
    base.mkdir()
    for number in range(5):
        (here / "a" / str(number)).write_bytes(b"x" * 100)
    (here / "z.py").write_text("x")
    monkeypatch.setattr(private_copy, "ALL_BYTES", 301)
    monkeypatch.setattr(private_copy, "cloned", lambda source, target: False)
    Copy([str(here)], [], [], str(base), "", [str(here)]).make()
    copied_files = [
        p for p in Path(f"{base}{here}").rglob("*") if p.is_file() and not p.is_symlink()
    ]
    assert {p.name for p in copied_files} == {"z.py", "0", "1", "2"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_user_namespace_that_cannot_be_written_is_not_entered() -> None:
    """As on Ubuntu 24.04; here because the process cannot be dumped."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        os.chmod(made, 0o755)
        here = Path(made) / "here"
        here.mkdir()
        no_dump = "prctl = ctypes.CDLL(None).prctl; prctl(4, 0, 0, 0, 0)\n"
        code = "print(view.kind, os.geteuid())"
        said = in_view("", here, code, after=no_dump, as_user=True).split()
    assert said[0] in (COPY, COMPARED)
    assert said[1] == "12345"


@pytest.mark.skipif(landlock_version() < ALL_WRITES, reason="no Landlock")
def test_a_socket_can_be_made_where_the_temporary_folder_has_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, here = tmp_path / ("long" * 15), tmp_path / "here"
    for folder in (long, here):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    code = (
        "import socket; made = tempfile.mkdtemp(prefix='pymp-')\n"
        "socket.socket(socket.AF_UNIX).bind(made + '/listener-12345678'); print(made)"
    )
    made = Path(in_view(COPY, here, code).strip())
    assert not made.parent.exists()


@pytest.mark.parametrize("kind", MODES)
def test_a_file_of_root_s_folder_can_be_written(kind: str) -> None:
    if kind == OVERLAY:
        pytest.skip("no overlay goes over /")
    before = sorted(os.listdir("/"))
    code = "open('ampscope_made', 'w').write('x'); print(len(open('etc/passwd').read()) > 1)"
    assert in_view(kind, Path("/"), code).strip() == "True"
    assert sorted(os.listdir("/")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("kind", MODES)
def test_an_ordinary_user_s_files_stay_as_they_are(kind: str) -> None:
    """In a user namespace, where an overlay cannot copy the folders of others: ``mine`` lies in one
    of root's."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        os.chmod(made, 0o755)
        (Path(made) / "others").mkdir()
        project, mine = Path(made) / "project", Path(made) / "others/mine"
        for folder in (project, mine):
            folder.mkdir()
            (folder / "file").write_text("kept")
        for path in (mine, mine / "file"):
            os.chown(path, 12345, 12345)
        code = (
            "import os, pathlib, shutil, subprocess\n"
            "open('file', 'a').write('x'); os.mkdir('new'); os.chmod('file', 0o600)\n"
            "subprocess.run(['sh', '-c', 'rm file; echo x > other'])\n"
            f"place = pathlib.Path('{mine}')\n"
            "try:\n    open(place / 'file', 'w').write('x'); (place / 'new').touch()\n"
            "    print('written')\nexcept OSError as error: print(type(error).__name__)\n"
        )
        os.chown(project, 12345, 12345)
        os.chown(project / "file", 12345, 12345)
        before = tree(Path(made))
        said = in_view(kind, project, code, as_user=True).strip()
        assert said == {OVERLAY: "written", COPY: "PermissionError"}.get(kind, "written")
        if kind != COMPARED:  # which knows of no folder that nothing names
            assert tree(Path(made)) == before
        assert tree(project) == {k: v for k, v in before.items() if k.startswith(f"{project}/")} | {
            ".": (project.stat().st_mtime_ns,)
        }


@pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")
@pytest.mark.parametrize("as_user", [False, True])
def test_a_file_moves_from_the_project_to_another_folder(as_user: bool) -> None:
    """One overlay covers both, where both lie on one file system."""
    if as_user and os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        project, out = Path(made) / "project", Path(made) / "out"
        for folder in (project, out):
            folder.mkdir()
        (out / "m.pt").write_text("kept")
        if as_user:
            for path in (Path(made), out, out / "m.pt"):
                os.chown(path, 12345, 12345)
        before = tree(Path(made))
        code = (
            "for name in 'ab': open(name, 'w').write('new')\n"
            f"os.replace('a', '{out}/m.pt'); os.link('b', '{out}/b')\n"
            f"print(open('{out}/m.pt').read(), open('{out}/b').read())"
        )
        assert in_view(OVERLAY, project, code, as_user=as_user).split() == ["new", "new"]
        assert tree(Path(made)) == before


@pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")
@pytest.mark.parametrize(
    ("kind", "first"), [("", "steps()\n"), (OVERLAY, "steps()\n"), (OVERLAY, "")],
    ids=["again", "after", "before"],
)  # fmt: skip
def test_what_an_overlay_keeps_apart_is_not_the_script_s_fault(
    kind: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file moves from one folder of ``/`` to another, after the training and before it: in a copy
    where that may be, else the report says what to ask for."""
    monkeypatch.setenv(FORCED, kind)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as out:
        path.write_text(
            HEALTHY + "import os, sys\n"
            f"{first}open('m.tmp', 'w').write('x'); os.replace('m.tmp', sys.argv[1] + '/m.pt')\n"
            "steps()\n"
        )
        report = diagnosed(path, tmp_path.parent / f"{tmp_path.name}.db", args=(out,))
        assert os.listdir(out) == []
    baseline = RunView("as_is", "", ())
    if kind == OVERLAY:
        assert options(report, baseline) == " --in-place"
        assert "learning rate" not in next_step(report, baseline)
    else:
        assert report.diagnosis.verdict == "no_fault", (report.undecided, report.notes)
        assert any("overlay" in note for note in report.notes)


@pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
@pytest.mark.parametrize("as_user", [False, True])
def test_shared_memory_of_an_overlay_is_its_own(as_user: bool) -> None:
    """Made by name, as semaphores are, and by torch's processes; and what was there is seen."""
    if as_user and os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    torch = (
        "import torch\n"
        "torch.multiprocessing.set_sharing_strategy('file_system')\n"
        "data = torch.utils.data.DataLoader(torch.arange(40.), 4, num_workers=2)\n"
        "print(sum(batch.sum().item() for batch in data))\n"
    )
    code = ("print(780.0)\n" if as_user else torch) + (
        "made = open(old + '.made', 'w+b'); made.truncate(8)\n"
        "shared = mmap.mmap(made.fileno(), 8)\n"
        "context = multiprocessing.get_context('fork')\n"
        "done = context.Semaphore(0)\n"
        "def child():\n    shared[0] = 7; done.release()\n"
        "other = context.Process(target=child); other.start(); done.acquire(); other.join()\n"
        "print(shared[0], open(old).read())\n"
        "open(old, 'w').write('new')"
    )
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as here,
        tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="ampscope-") as old,
    ):
        old.write(b"old")
        old.flush()
        if as_user:
            os.chown(old.name, 12345, 12345)
        named = f"old = {old.name!r}\n"
        said = in_view(
            OVERLAY, Path(here), named + code, as_user=as_user,
            before="import mmap, multiprocessing.synchronize, multiprocessing.popen_fork\n",
        )  # fmt: skip
        assert said.split() == ["780.0", "7", "old"]
        assert Path(old.name).read_text() == "old"
        assert not os.path.exists(f"{old.name}.made")


@pytest.mark.skipif(landlock_version() < ALL_WRITES, reason="no Landlock")
def test_a_copy_s_note_says_what_can_be_changed_elsewhere(tmp_path: Path) -> None:
    """The kernel decides what is true; the note names each kind of change that it lets by."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    for name in "abcdef":
        (elsewhere / name).write_text("kept")
    code = f"""
place = {str(tmp_path)!r} + '/else' + 'where/'
tries = {{
    "contents": lambda: open(place + 'a', 'a').write('x'),
    "truncated": lambda: os.truncate(place + 'a', 1),
    "names": lambda: os.rename(place + 'b', place + 'z'),
    "removed": lambda: os.remove(place + 'c'),
    "made": lambda: os.mkdir(place + 'new'),
    "permissions": lambda: os.chmod(place + 'd', 0o600),
    "times": lambda: os.utime(place + 'e', (1, 1)),
    "attributes": lambda: os.setxattr(place + 'f', 'user.a', b'x'),
}}
for name, change in tries.items():
    try:
        change()
        print("DONE", name)
    except OSError as error:
        print("REFUSED", name, type(error).__name__)
print(*view.notes())
"""
    said = in_view(COPY, here, code).splitlines()
    done = {line.split()[1] for line in said if line.startswith("DONE")}
    refused = {line.split()[1] for line in said if line.startswith("REFUSED")}
    assert {"contents", "truncated", "names", "removed", "made"} <= refused
    assert done
    assert all(kind in said[-1].lower() for kind in done)


def compared_view(here: Path, view: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process has begun, of which the files are compared."""
    monkeypatch.setattr(private_copy, "landlock_version", lambda: 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    copied([str(here)], [], [], [], view, view.parent / "runs.db", [], only=False)


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    return {path: facts[:3] for path, facts in tree(folder).items()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_a_full_disk_is_emptied_before_a_file_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(here)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no mount here")
    request.addfinalizer(lambda: subprocess.run(["umount", str(here)], check=True))
    for name in ("w", "grown"):
        (here / name).write_bytes(name[:1].encode() * (2 << 20))
    before = contents(here)
    compared_view(here, tmp_path / "view", monkeypatch)
    (here / "w").unlink()
    for name, mode in (("grown", "wb"), ("fill", "ab")):
        with (here / name).open(mode) as file, contextlib.suppress(OSError):
            for _ in range(6 if name == "grown" else 64):
                file.write(b"x" * (1 << 20))
                file.flush()
    done = put_back(tmp_path / "view", tmp_path / "aside")
    assert contents(here) == before
    assert not done.left


@pytest.mark.parametrize("store_is_full", [False, True])
def test_what_cannot_be_put_back_keeps_its_backup_and_is_named_first(
    store_is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("a", "w", "z"):
        (here / name).write_text(f"the user's {name}")
    compared_view(here, tmp_path / "view", monkeypatch)
    for name in ("a", "w", "z"):
        (here / name).write_text("by the script")
    replace = before_runs._replace

    def full(*paths: str) -> None:
        raise OSError(errno.ENOSPC, "full")

    def on_a_full_disk(path: str, kept: str, aside: str) -> None:
        (full if path[-2:] in ("/a", "/w") else replace)(path, kept, aside)

    monkeypatch.setattr(before_runs, "_replace", on_a_full_disk)
    if store_is_full:
        monkeypatch.setattr(before_runs, "copy_file", full)
    done = put_back(tmp_path / "view", tmp_path / "aside")
    assert (here / "z").read_text() == "the user's z"
    assert done.restored == [str(here / "z")]
    throw_away(tmp_path / "view")
    for name, backup in zip(("a", "w"), done.left.values(), strict=True):
        assert Path(backup).read_text() == f"the user's {name}"
    said = before_runs.sentence([done])
    assert said.startswith(f"NOT put back, left changed by the script or while it ran: {here}/a ")
    assert all(f"{path} (it was as {backup} is)" in said for path, backup in done.left.items())


@pytest.mark.parametrize(
    "change",
    [
        "mv d e",
        "rm -r d && echo x > d",
        "rm a && mkdir a && echo x > a/b",
        "rm l && mkdir l",
        "chmod 0 d && chmod 700 a",
        "rm -r d && ln -s / d",
        "rm a && ln -s d/e/f a",
    ],
)
def test_what_became_another_kind_of_file_is_put_back(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "d/e").mkdir(parents=True)
    (here / "d/e/f").write_text("f")
    (here / "a").write_text("a")
    (here / "l").symlink_to("a")
    before = contents(here)
    compared_view(here, tmp_path / "view", monkeypatch)
    subprocess.run(change, shell=True, cwd=here, check=True)
    done = put_back(tmp_path / "view", tmp_path / "aside")
    assert contents(here) == before
    assert not done.left


def test_extended_attributes_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "a").write_text("a")
    try:
        os.setxattr(here / "a", "user.mine", b"1")
    except (OSError, AttributeError):
        pytest.skip("no extended attributes here")
    compared_view(here, tmp_path / "view", monkeypatch)
    os.setxattr(here / "a", "user.mine", b"2")
    os.setxattr(here / "a", "user.other", b"2")
    put_back(tmp_path / "view", tmp_path / "aside")
    assert os.listxattr(here / "a") == ["user.mine"]
    assert os.getxattr(here / "a", "user.mine") == b"1"


def test_what_was_too_large_for_a_copy_is_named_as_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "large").write_text("large")
    monkeypatch.setattr(private_copy, "COPIED_BYTES", 1)
    monkeypatch.setattr(private_copy, "LARGE_BYTES", 1)
    monkeypatch.setattr(private_copy, "cloned", lambda *paths: False)
    compared_view(here, tmp_path / "view", monkeypatch)
    (here / "large").write_text("changed")
    done = put_back(tmp_path / "view", tmp_path / "aside")
    assert done.left == {str(here / "large"): ""}
    assert Path(f"{tmp_path}/aside.txt").read_text() == f"not put back: {here}/large\n"


def test_signals_wait_until_files_are_put_back(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, COMPARED)
    monkeypatch.chdir(project)
    (project / "train.py").write_text(
        HEALTHY + f"open('{project}/notes.txt', 'a').write('x')\n"
        f"import time; open('{project}/ready', 'w'); time.sleep(60)\n"
    )
    before = contents(project)
    put = before_runs._restored

    def while_signals_come(*args: object) -> bool:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) * 3:
            os.kill(os.getpid(), number)
        return put(*args)  # type: ignore[arg-type]  # handed on

    monkeypatch.setattr(before_runs, "_restored", while_signals_come)
    old = {n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGTERM, signal.SIGHUP)}
    runs = ScriptRuns(spec(project / "train.py"), tmp_path / "runs.db", private=True)

    def until_a_signal() -> None:
        with runs:
            runs.start("as_is")
            while not (project / "ready").exists():
                time.sleep(0.05)
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            until_a_signal()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert contents(project) == before
    assert str(project / "notes.txt") in runs.files_note()


@pytest.mark.parametrize(("one", "other"), [(".", "."), (".", "a"), ("a", ".")])
def test_two_runs_are_not_compared_in_one_folder(
    one: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here/a").mkdir(parents=True)
    monkeypatch.setattr(private_copy, "WAITED_S", 0.0)
    compared_view(tmp_path / "here" / one, tmp_path / "view1", monkeypatch)
    with pytest.raises(OSError, match="another diagnosis is at work"):
        compared_view(tmp_path / "here" / other, tmp_path / "view2", monkeypatch)
    put_back(tmp_path / "view1", tmp_path / "aside")
    compared_view(tmp_path / "here" / other, tmp_path / "view2", monkeypatch)
    put_back(tmp_path / "view2", tmp_path / "aside")


@pytest.mark.skipif(sys.platform != "linux", reason="no subreaper")
def test_what_a_script_leaves_running_is_ended_before_files_are_put_back(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, COMPARED)
    monkeypatch.chdir(project)
    (project / "train.py").write_text(
        HEALTHY + "import subprocess\n"
        f'subprocess.run(\'setsid nohup sh -c "(sleep 3; echo x >> {project}/notes.txt)" '
        "> /dev/null 2>&1 &', shell=True)\nsteps()\n"
    )
    said: list[str] = []
    with ScriptRuns(spec(project / "train.py"), tmp_path / "runs.db", private=True) as runs:
        runs.wait(runs.start("as_is"), say=said.append)
        assert runs.compared == [str(project)]
        time.sleep(4)
    assert (project / "notes.txt").read_text() == "notes"
    assert any(str(project) in words for words in said)


def test_a_repository_is_copied_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / ".git").mkdir(parents=True)
    (here / ".git/HEAD").write_text("main")
    before = contents(here)
    compared_view(here, tmp_path / "view", monkeypatch)
    copy = Path(f"{tmp_path}/view/files{here}/.git")
    assert not copy.is_symlink()
    (copy / "HEAD").write_text("the copy's")
    assert contents(here) == before
    (here / ".git/HEAD").write_text("other")
    (here / ".git/index").write_text("new")
    done = put_back(tmp_path / "view", tmp_path / "aside")
    assert contents(here) == before
    assert not done.left


def test_what_changed_in_an_installation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    for name in (".venv/lib/__pycache__", "node_modules/a"):
        (here / name).mkdir(parents=True)
    (here / ".venv/pyvenv.cfg").touch()
    (here / ".venv/lib/kept").touch()
    compared_view(here, tmp_path / "view", monkeypatch)
    (here / ".venv/lib/__pycache__/x.pyc").touch()
    (here / "node_modules/a/new").touch()
    (here / ".venv/pyvenv.cfg").write_text("changed")
    done = put_back(tmp_path / "view", tmp_path / "aside")
    assert list(done.left) == [f"{here}/.venv/pyvenv.cfg", f"{here}/node_modules/a/new"]
    assert (here / "node_modules/a/new").exists()


def test_a_link_to_the_folder_above_leads_into_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "above/here"
    (here / "in").mkdir(parents=True)
    (tmp_path / "above/beside").write_text("kept")
    (here / "up").symlink_to("..")
    (here / "in/self").symlink_to("..")
    before = contents(tmp_path / "above")
    compared_view(here, tmp_path / "view", monkeypatch)
    copy = Path(f"{tmp_path}/view/files{here}")
    assert (copy / "up/beside").read_text() == "kept"
    for name in ("up/beside", "up/new", "in/self/new"):
        (copy / name).write_text("by the script")
    put_back(tmp_path / "view", tmp_path / "aside")
    assert contents(tmp_path / "above") == before


def test_a_second_run_that_met_no_other_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two are made one at a time where files are compared; here the first ends early."""
    monkeypatch.setenv(FORCED, COMPARED)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(HEALTHY + "steps()\n")
    start, wait = ScriptRuns.start, ScriptRuns.wait
    started: list[str] = []

    def one_after_the_other(runs: ScriptRuns, control: str, parent: str = "", **more: Any) -> str:
        if started:
            wait(runs, started[0])
        started.append(start(runs, control, parent, **more))
        return started[-1]

    monkeypatch.setattr(ScriptRuns, "start", one_after_the_other)
    report = diagnosed(path, tmp_path.parent / f"{tmp_path.name}.db", verify=False)
    assert report.diagnosis.verdict == "no_fault", report.undecided
    assert len(started) == 2


def test_a_repository_that_is_not_kept_whole_is_left_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / ".git/objects").mkdir(parents=True)
    for name in ("HEAD", "objects/old", "objects/packed"):
        (here / ".git" / name).write_text(name)
    (here / "a").write_text("a")
    monkeypatch.setattr(private_copy, "COPIED_ENTRIES", 1)
    monkeypatch.setattr(private_copy, "cloned", lambda *paths: False)
    compared_view(here, tmp_path / "view", monkeypatch)
    assert Path(f"{tmp_path}/view/files{here}/.git").is_symlink()
    (here / ".git/HEAD").write_text("new")
    (here / ".git/objects/new").write_text("new")
    (here / ".git/objects/packed").unlink()
    after = contents(here / ".git")
    (here / "more").write_text("new")
    done = put_back(tmp_path / "view", tmp_path / "aside")
    assert contents(here / ".git") == after
    assert not (here / "more").exists()
    names = ("HEAD", "objects/new", "objects/packed")
    assert done.left == {f"{here}/.git/{name}": "" for name in names}
    assert not [path for path in done.restored if "/.git" in path]


def test_what_could_not_be_read_before_is_not_new_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "a/in").mkdir(parents=True)
    for name in ("a/in/file", "b", "c"):
        (here / name).write_text(name)
    before = contents(here)
    facts = before_runs._facts

    def broken(path: str) -> before_runs._Facts:
        if path in (f"{here}/a/in", f"{here}/b"):
            raise OSError(errno.EIO, "input/output error")
        return facts(path)

    with monkeypatch.context() as patch:
        patch.setattr(before_runs, "_facts", broken)
        compared_view(here, tmp_path / "view", monkeypatch)
    (here / "c").write_text("by the script")
    done = put_back(tmp_path / "view", tmp_path / "aside")
    assert contents(here) == before
    assert done.restored == [f"{here}/c"]


def test_what_is_no_installation_any_more_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "env/lib").mkdir(parents=True)
    (here / "env/pyvenv.cfg").touch()
    (here / "env/lib/a").touch()
    compared_view(here, tmp_path / "view", monkeypatch)
    (here / "env/pyvenv.cfg").unlink()
    done = put_back(tmp_path / "view", tmp_path / "aside")
    assert (here / "env/lib/a").exists()
    assert done.left == {f"{here}/env/pyvenv.cfg": ""}


def test_the_only_backup_is_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "a").write_text("the user's")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runs = ScriptRuns(spec(here / "a"), tmp_path / "runs.db", private=True)
    assert Path(runs.folder.name).parent == tmp_path
    view = runs._file("run", "view")
    runs._started.append("run")
    compared_view(here, view, monkeypatch)
    (here / "a").write_text("by the script")

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(before_runs, "_replace", full)
        patch.setattr(before_runs, "copy_file", full)
        patch.setattr(os, "rename", full)
        runs._end_view("run")
    (here / "a").write_text("later")
    runs._end()
    (backup,) = runs._put_back[0].left.values()
    assert Path(backup).read_text() == "the user's"
    assert (here / "a").read_text() == "later"
    monkeypatch.setattr(files, "_is_left", lambda *_: True)
    remove_leftovers_in(tmp_path)
    assert Path(backup).read_text() == "the user's"
    throw_away(view.parent)


def test_own_children_are_given_the_time_to_put_files_back() -> None:
    pytest.importorskip("mcp")
    pytest.importorskip("psutil")
    from ampscope.ext.agents.jobs import ENDING_S
    from ampscope.ext.jobs.submitted_runs import STOP_S

    assert min(ENDING_S, STOP_S) > ENDS_WITHIN_S  # the fork server's, before files are put back


def test_what_jobs_of_a_store_share_is_the_store_s_own() -> None:
    assert str(jobs_folder(Path("/a/runs.db"))) in before_runs.store_names("/a/runs.db")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no signal at a parent's end")
def test_a_run_ends_with_a_fork_server_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"import os, time\nopen('{tmp_path}/part', 'w').write(str(os.getpid()))\n"
        f"os.rename('{tmp_path}/part', '{tmp_path}/pid')\ntime.sleep(30)\n"
    )
    with ScriptRuns(spec(path), tmp_path / "runs.db") as runs:
        started = runs.start("as_is")
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert runs._process is not None
        runs._process.kill()
        runs.wait(started)
        pid = int((tmp_path / "pid").read_text())
        until = time.monotonic() + 5
        while is_running(pid) and time.monotonic() < until:
            time.sleep(0.05)
        left = is_running(pid)
        if left:
            os.kill(pid, signal.SIGKILL)
        assert not left


def is_running(pid: int) -> bool:
    """Also where nobody has waited for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
