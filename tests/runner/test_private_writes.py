"""No kind of write reaches the user's files: each of the table's is made at each kind of place, in
each way of having private files, and the tree is as before, byte for byte, with times and modes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import Outcome
from ampscope.runner.private_files import COMPARED, FORCED, OVERLAY
from tests.helpers.private_modes import MODES, tree
from tests.helpers.script_diagnoses import spec

# Each gets ``file`` and ``folder`` (with ``inner``), which are there, and ``new``, which is not.
KINDS = {
    "open w": "open(file, 'w').write('x')",
    "open a": "open(file, 'a').write('x')",
    "open r+": "open(file, 'r+').write('x')",
    "open x": "open(new, 'x').write('x')",
    "os.open": "os.write(os.open(file, os.O_WRONLY | os.O_TRUNC), b'x')",
    "O_TRUNC alone": "os.open(file, os.O_RDONLY | os.O_TRUNC)",
    "os.rename": "os.rename(file, new)",
    "os.rename over": "open(new, 'w').write('x'); os.replace(new, file)",
    "os.remove": "os.remove(file)",
    "os.truncate": "os.truncate(file, 1)",
    "os.chmod": "os.chmod(file, 0o600)",
    "os.chmod of a folder": "os.chmod(folder, 0o700)",
    "os.utime": "os.utime(file, (1, 1))",
    "os.symlink": "os.symlink(file, new)",
    "os.link": "os.link(file, new); open(new, 'a').write('x')",
    "os.mkdir": "os.mkdir(new)",
    "os.makedirs": "os.makedirs(new + '/a/b'); open(new + '/a/b/c', 'w').write('x')",
    "os.rmdir": "os.remove(folder + '/inner'); os.rmdir(folder)",
    "os.mkfifo": "os.mkfifo(new)",
    "shutil.rmtree": "shutil.rmtree(folder)",
    "shutil.move": "shutil.move(file, new)",
    "shutil.copy": "shutil.copy(__file__, file)",
    "shutil.copytree": "shutil.copytree(folder, new)",
    "pathlib write": "pathlib.Path(file).write_bytes(b'x')",
    "pathlib touch": "pathlib.Path(file).touch()",
    "pathlib unlink": "pathlib.Path(file).unlink()",
    "torch.save path": "torch.save({'w': torch.ones(3)}, file)",
    "torch.save file": "torch.save({'w': torch.ones(3)}, open(file, 'wb'))",
    "torch.from_file": "torch.from_file(file, shared=True, size=10).fill_(1)",
    "safetensors": "safetensors.torch.save_file({'w': torch.ones(3)}, file)",
    "numpy save": "numpy.save(open(file, 'wb'), numpy.ones(3))",
    "numpy savetxt": "numpy.savetxt(file, numpy.ones(3))",
    "numpy memmap": "numpy.memmap(file, mode='r+', shape=4)[:] = 1",
    "tofile": "numpy.ones(3).tofile(file)",
    "tarfile": "tarfile.open(file, 'w').close()",
    "zipfile": "zipfile.ZipFile(file, 'w').writestr('a', 'x')",
    "bz2": "bz2.open(file, 'w').write(b'x')",
    "gzip": "gzip.open(file, 'w').write(b'x')",
    "lzma": "lzma.open(file, 'w').write(b'x')",
    "sqlite": "sqlite3.connect(new).execute('create table t (a)')",
    "shelve": "shelve.open(new).close()",
    "csv": "csv.writer(open(file, 'w', newline='')).writerow([1])",
    "json": "json.dump({}, open(file, 'w'))",
    "pickle": "pickle.dump({}, open(file, 'wb'))",
    "logging": "logging.FileHandler(file).emit(logging.makeLogRecord({'msg': 'x'}))",
    "mmap": "mmap.mmap(os.open(file, os.O_RDWR), 4)[0:1] = b'x'",
    "C open": "assert libc.open(file.encode(), os.O_WRONLY | os.O_TRUNC) >= 0",
    "C rename": "assert libc.rename(file.encode(), new.encode()) == 0",
    "C unlink": "assert libc.unlink(file.encode()) == 0",
    "C truncate": "assert libc.truncate(file.encode(), ctypes.c_long(1)) == 0",
    "cp": "run('cp', __file__, file)",
    "mv": "run('mv', file, new)",
    "rm -r": "run('rm', '-r', folder)",
    "touch": "run('touch', file)",
    "chmod": "run('chmod', '600', file)",
    "sh": "run('sh', '-c', 'echo x >> \"$0\"', file)",
    "Python child": "run(sys.executable, '-c', 'import sys; open(sys.argv[1], \"w\")', file)",
    "os.system": "assert os.system(f'echo x > {shlex.quote(file)}') == 0",
    "forked child": "pid = os.fork()\nif not pid:\n    open(file, 'w').write('x'); os._exit(0)\n"
    "assert os.waitpid(pid, 0)[1] == 0",
}
SCRIPT = """\
import bz2, csv, ctypes, gzip, json, logging, lzma, mmap, os, pathlib, pickle, shelve, shlex, shutil
import sqlite3, subprocess, sys, tarfile, zipfile
import numpy, safetensors.torch, torch

libc = ctypes.CDLL(None)
def run(*command): subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
PLACE = {place}
for number, (name, text) in enumerate({kinds}.items()):
    file, folder, new = (f"{{PLACE}}/{{number}}{{end}}" for end in (".txt", ".d", ".new"))
    try:
        exec(text)
        print(f"{{name}}: done", flush=True)
    except Exception as error:
        print(f"{{name}}: {{type(error).__name__}}: {{error}}", flush=True)
"""
# How the script comes to the place: an expression of its own, its arguments.
PLACES = {
    "project": ("'out'", ()),
    "project, absolute": ("{here!r} + '/out'", ()),
    "script's folder": ("os.path.dirname(os.path.abspath(__file__)) + '/out'", ()),
    "link": ("'link'", ()),
    "relative link": ("'link2'", ()),
    "argument": ("sys.argv[1].partition('=')[2]", ("--out={elsewhere}",)),
    "relative argument": ("sys.argv[1]", ("sub/../../elsewhere/out",)),
    "environment": ("os.environ['OUT_DIR']", ()),
    "configuration": ("open('config.yaml').read()", ()),
}
REFUSED = ("project, absolute", "configuration")  # where the script runs in a copy


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_no_kind_of_write_reaches_the_user_s_files(
    mode: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere" / "out"
    (project / "sub").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    for out in (project / "out", elsewhere):
        out.mkdir(parents=True)
        for number in range(len(KINDS)):
            (out / f"{number}.txt").write_text("kept as it is, whatever is done to it, " * 3)
            (out / f"{number}.d").mkdir()
            (out / f"{number}.d/inner").write_text("inner")
    (project / "link").symlink_to(elsewhere)
    (project / "link2").symlink_to("../elsewhere/out")
    (project / "config.yaml").write_text(str(elsewhere))
    expression, args = PLACES[place]
    text = SCRIPT.format(place=expression.format(here=str(project)), kinds=KINDS)
    (project / "train.py").write_text(text)
    monkeypatch.setenv(FORCED, mode)
    monkeypatch.setenv("OUT_DIR", str(elsewhere))
    monkeypatch.chdir(project)
    before = tree(tmp_path)
    asked = spec(project / "train.py", args=tuple(a.format(elsewhere=elsewhere) for a in args))
    with ScriptRuns(asked, tmp_path.parent / f"{tmp_path.name}.db", private=True) as runs:
        run = runs.run("as_is")
    said = dict(line.split(": ", 1) for line in run.output.splitlines() if ": " in line)
    assert set(said) >= set(KINDS), (run.info.message, run.output)
    failed = {kind: said[kind] for kind in KINDS if said[kind] != "done"}
    if mode == OVERLAY or place not in REFUSED:
        assert failed == {}
    elif mode != COMPARED:
        assert len(failed) > len(KINDS) // 2
        assert not any("ReadOnly" in words for words in failed.values())
    outcome = run.observations[-1]
    assert isinstance(outcome, Outcome)
    without_inodes = mode == COMPARED  # what was replaced is put back as a new file
    assert _comparable(tree(tmp_path), without_inodes) == _comparable(before, without_inodes)


def _comparable(
    found: dict[str, tuple[object, ...]], without_inodes: bool
) -> dict[str, tuple[object, ...]]:
    return {path: facts[:3] if without_inodes else facts for path, facts in found.items()}
