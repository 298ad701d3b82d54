"""``ampscope preflight``: exit status, forms of output, repairs, suppression, bad input."""

from __future__ import annotations

import ast
import json
import os
import pickle
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from click.testing import CliRunner, Result

from ampscope.cli.main import main
from tests.helpers.sarif_schema import check_log

CLIPPED = '''"""Clips what carries the scale."""
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler()
for x in batches:
    with autocast():
        loss = model(x).mean()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
'''


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["preflight", *map(str, args)])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(CLIPPED)
    return path


def test_findings_are_printed_with_their_place(script: Path) -> None:
    done = run(script)
    assert done.exit_code == 1
    first, second, last = done.output.splitlines()
    assert first.startswith(f"{script}:4:1: PRE001 note: ")
    assert second.startswith(f"{script}:13:5: AMP015 error: ")
    assert last == "2 findings in 1 file."


def test_nothing_found_is_status_0(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    assert run(path).exit_code == 0


def test_fix_writes_what_diff_shows(script: Path) -> None:
    shown = run(script, "--diff")
    assert shown.exit_code == 1
    assert script.read_text() == CLIPPED
    fixed = run(script, "--fix")
    assert fixed.exit_code == 0
    text = script.read_text()
    ast.parse(text)
    added = {line[1:] for line in shown.output.splitlines() if line.startswith("+")}
    assert {
        "from torch.amp import GradScaler, autocast",
        'scaler = GradScaler("cuda")',
        '    with autocast("cuda"):',
        "    scaler.unscale_(optimizer)",
    } <= added
    assert all(f"{line}\n" in text for line in added if not line.startswith("++"))


def test_line_ends_and_a_byte_order_mark_are_kept(script: Path) -> None:
    script.write_bytes(b"\xef\xbb\xbf" + CLIPPED.replace("\n", "\r\n").encode())
    run(script, "--fix")
    data = script.read_bytes()
    assert data.startswith(b"\xef\xbb\xbf")
    assert data.count(b"\n") == data.count(b"\r\n") == CLIPPED.count("\n") + 1


@pytest.mark.parametrize(
    ("comment", "left"), [("[AMP015]", 1), ("", 1), ("[AMP016]", 2), ("[AMP016, amp015]", 1)]
)
def test_a_comment_suppresses(script: Path, comment: str, left: int) -> None:
    clip = "clip_grad_norm_(model.parameters(), 1.0)"
    script.write_text(CLIPPED.replace(clip, f"{clip}  # ampscope: ignore{comment}"))
    assert f"{left} finding" in run(script).output.splitlines()[-1]


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ('ignore = ["PRE001"]', {"AMP015"}),
        ('select = ["deprecated_spelling"]', {"PRE001"}),
        ('ignore = ["AMP015", "PRE001"]', set()),
    ],
)
def test_pyproject_says_what_is_reported(script: Path, table: str, found: set[str]) -> None:
    (script.parent / "pyproject.toml").write_text(f"[tool.ampscope.preflight]\n{table}\n")
    done = run(script, "--format", "json")
    assert {f["code"] for f in json.loads(done.output)["findings"]} == found
    assert done.exit_code == (1 if found else 0)


def test_pyproject_leaves_paths_out(script: Path) -> None:
    (script.parent / "old").mkdir()
    script.rename(script.parent / "old" / "train.py")
    (script.parent / "new.py").write_text("import torch\n")
    assert run(script.parent).exit_code == 1
    (script.parent / "pyproject.toml").write_text('[tool.ampscope.preflight]\nexclude = ["old"]\n')
    assert run(script.parent).exit_code == 0


@pytest.mark.parametrize("table", ['ignore = ["AMP999"]', "ignore = 3", 'wrong = ["x"]', "= ="])
def test_a_wrong_table_is_bad_input(script: Path, table: str) -> None:
    (script.parent / "pyproject.toml").write_text(f"[tool.ampscope.preflight]\n{table}\n")
    said_once(run(script))


RING = """def train(model, optimizer, batches):
    import torch
    scaler = torch.amp.GradScaler()
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


def said_once(done: Result) -> None:
    """One clear sentence, and status 2."""
    assert done.exit_code == 2
    (line,) = done.output.strip().splitlines()
    assert line.startswith("ampscope: ")
    assert line.endswith(".")


@pytest.mark.parametrize(
    "content",
    [b"def f(:\n", b"\x7fELF\0\0\1", b"# " + b"x" * 3_000_000, b"x = '\xff\xfe'\n", b"(" * 5000],
    ids=["syntax", "binary", "large", "encoding", "nesting"],
)
def test_what_is_no_python_is_bad_input(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    said_once(run(path))


@pytest.mark.parametrize("name", ["archive.pt", "weights.safetensors", "values.pkl"])
def test_a_checkpoint_is_no_python(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".pt":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", pickle.dumps({}))
    elif path.suffix == ".pkl":
        path.write_bytes(pickle.dumps({"a": 1}))
    else:
        path.write_bytes(struct.pack("<Q", 2) + b"{}")
    said_once(run(path))


def test_a_thousand_files_that_import_each_other_in_a_ring(tmp_path: Path) -> None:
    """Each imports the function that the next one defines, and so on around; one has a fault."""
    for number in range(1000):
        body = f"from part{(number + 1) % 1000} import train as other\n\n\n{RING}"
        if number == 500:
            body = body.replace("        scaler.unscale_(optimizer)\n", "")
        (tmp_path / f"part{number}.py").write_text(body)
    done = run(tmp_path)
    assert done.exit_code == 1, done.output
    assert "part500.py" in done.stdout
    assert "1 finding in 1000 files." in done.stdout


_HEAD = (
    "import torch\nfrom torch.amp import GradScaler, autocast\nmodel = torch.nn.Linear(1, 1)\n"
    "opt = torch.optim.SGD(model.parameters(), 0.1)\nx = x.cuda(True)\n"
)


def _scalers(count: int) -> str:
    steps = "    s{0}.scale(loss).backward()\n    s{0}.step(opt)\n"
    return (
        _HEAD + "".join(f"s{n} = GradScaler()\n" for n in range(count)) + "for x in data:\n"
        "    loss = model(x)\n" + "".join(steps.format(n) for n in range(count))
    )


def _loops(depth: int) -> str:
    lines = [f"{' ' * n}for x{n} in data:" for n in range(depth)]
    step = ("loss = model(x0)", "s.scale(loss).backward()", "s.step(opt)", "s.update()")
    return _HEAD + "s = GradScaler()\n" + "\n".join([*lines, *(" " * depth + s for s in step)])


@pytest.mark.parametrize("text", [_scalers(500), _loops(19)], ids=len)
def test_a_file_is_looked_at_as_far_as_its_size_allows(tmp_path: Path, text: str) -> None:
    """Looks grow with the square of the scalers, and double with each loop."""
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text("import torch\n")
    began = time.process_time()
    done = run(tmp_path)
    assert time.process_time() - began < 8  # 1 s on a quiet core
    assert done.stderr.count("\n") == 1
    assert "a.py was looked at in part: all of it takes more work than its size" in done.stderr
    assert "in 2 files" in done.stdout


def test_a_file_of_100_mb_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    said_once(run(path))


@pytest.mark.parametrize("table", ["[tool]\nampscope = 3", "tool = 3", "tool.ampscope = []"])
def test_what_is_no_table_above_ours_is_bad_input(script: Path, table: str) -> None:
    (script.parent / "pyproject.toml").write_text(table + "\n")
    done = run(script)
    said_once(done)
    assert "is not a table" in done.output


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    said_once(run(tmp_path / "pipe.py"))
    said_once(run("/dev/zero"))


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("train.ipynb", '{"cells": [{"source": ["import torch"]}]}', "notebook"),
        ("exported.py", "import torch\n%matplotlib inline\n", "IPython"),
    ],
)
def test_a_notebook_is_not_taken_for_a_script(
    tmp_path: Path, name: str, text: str, word: str
) -> None:
    (tmp_path / name).write_text(text)
    done = run(tmp_path / name)
    said_once(done)
    assert word in done.output


def test_a_defect_of_a_check_is_one_sentence(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("ampscope.ext.preflight.checks.check_source", fail)
    said_once(run(script))


@pytest.mark.skipif(os.name != "posix", reason="permissions of a folder")
def test_what_may_not_be_read_is_named(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("ampscope.ext.preflight.checks.os.scandir", refused)
    said_once(run(script.parent))
    monkeypatch.setattr(Path, "stat", refused)
    said_once(run(script))


def test_what_is_not_there_is_bad_input(tmp_path: Path) -> None:
    said_once(run(tmp_path / "none.py"))
    said_once(run(tmp_path))


def test_a_broken_file_does_not_hide_the_others(script: Path) -> None:
    (script.parent / "broken.py").write_text("print 'python 2'\n")
    done = run(script.parent)
    assert done.exit_code == 1
    assert "Left out: " in done.stderr
    assert "2 findings in 1 file; 1 left out." in done.stdout


def test_sarif_is_valid_against_the_standard_s_schema(script: Path) -> None:
    log = json.loads(run(script, "--format", "sarif").stdout)
    check_log(log)
    deprecated, clip = log["runs"][0]["results"]
    assert (deprecated["ruleId"], clip["ruleId"]) == ("PRE001", "AMP015")
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in (deprecated, clip))
    region = clip["locations"][0]["physicalLocation"]["region"]
    line = CLIPPED.splitlines()[region["startLine"] - 1]
    assert line[region["startColumn"] - 1 : region["endColumn"] - 1].startswith("torch.nn.utils")
    (change,) = clip["fixes"][0]["artifactChanges"]
    assert (
        change["replacements"][0]["insertedContent"]["text"].strip().startswith("scaler.unscale_")
    )


def test_the_schema_refuses_what_is_no_sarif(script: Path) -> None:
    log = json.loads(run(script, "--format", "sarif").stdout)
    del log["runs"][0]["tool"]
    with pytest.raises(jsonschema.ValidationError):
        check_log(log)


def test_junit_has_a_case_for_each_file(script: Path) -> None:
    (script.parent / "clean.py").write_text("import torch\n")
    out = script.parent / "junit.xml"
    run(script.parent, "--format", "junit", "--out", out)
    (suite,) = ElementTree.parse(out).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    failures = [case.find("failure") is not None for case in suite]
    assert failures == [False, True]


def test_neither_torch_nor_the_script_is_loaded(script: Path) -> None:
    script.write_text(CLIPPED + "\nraise SystemExit(77)\n")
    code = (
        "import sys\nfrom ampscope.ext.preflight.checks import Settings, check_paths\n"
        "from pathlib import Path\n"
        f"check_paths([Path({str(script)!r})], Settings())\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.quick("bad input")
@pytest.mark.parametrize(
    ("fail", "text", "status"),
    [("true", CLIPPED, 1), ("false", CLIPPED, 0), ("true", "import torch\n", 0), ("false", "(", 2)],
    ids=["findings fail", "findings pass", "nothing", "bad input"],
)
def test_the_action_s_check(tmp_path: Path, fail: str, text: str, status: int) -> None:
    root = Path(__file__).resolve().parents[3]
    (tmp_path / "train.py").write_text(text)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "ampscope"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ampscope.cli.main "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PATHS": "train.py",
        "SARIF": "out.sarif",
        "FAIL": fail,
        "GITHUB_OUTPUT": str(tmp_path / "outputs"),
    }
    script = root / ".github" / "actions" / "preflight" / "check.sh"
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == status
    if status < 2:
        check_log(json.loads((tmp_path / "out.sarif").read_text()))
        found = 1 if text == CLIPPED else 0
        assert (tmp_path / "outputs").read_text() == f"status={found}\n"


OVERFLOWING = """import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for step in range(9):
    x = torch.randn(4, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        hidden = model(x) * 3.0e4
        loss = (hidden * 300).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_three_steps_show_what_the_source_does_not(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(OVERFLOWING)
    assert run(path).exit_code == 0
    done = run(path, "--steps", 3, "--format", "json")
    found = json.loads(done.stdout)["findings"]
    assert done.exit_code == 1, done.output
    assert [(f["code"][:3], f["path"], f["line"] > 0) for f in found] == [("AMP", str(path), True)]
    assert path.read_text() == OVERFLOWING


def test_steps_of_what_cannot_be_run(tmp_path: Path) -> None:
    assert run(tmp_path, "--steps", 3).exit_code == 2  # a folder
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    assert run(path, "--steps", 0).exit_code == 2


@pytest.mark.parametrize("end", ["", "\n"])
def test_git_applies_the_diff(tmp_path: Path, end: str) -> None:
    """Of an absolute path, below the root; also where the file ends without a new line."""
    path = tmp_path / "train.py"
    path.write_text("from torch.cuda.amp import GradScaler\nscaler = GradScaler()" + end)
    shown = run(path, "--diff").stdout
    assert shown.startswith(f"--- a{path}\n+++ b{path}\n")
    patch = shown.replace(f"{tmp_path}/", "/")
    done = subprocess.run(
        ["git", "apply", "-"],
        input=patch,
        text=True,
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    diffed = path.read_text()
    path.write_text("from torch.cuda.amp import GradScaler\nscaler = GradScaler()" + end)
    run(path, "--fix")
    assert diffed == path.read_text()
    assert "torch.amp" in diffed
