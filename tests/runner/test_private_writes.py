"""No kind of write reaches the user's files: each of the table's is made at each kind of place, in
each way of having private files, and the tree is as before, byte for byte, with times and modes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest

from ampscope.launcher.script_runs import ScriptRun as Run
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
    "forked child": "pid = os.fork()\nif not pid:\n    try:\n        open(file, 'w').write('x')\n"
    "        os._exit(0)\n    finally:\n        os._exit(1)\nassert os.waitpid(pid, 0)[1] == 0",
}
SCRIPT = """\
import bz2, csv, ctypes, gzip, json, logging, lzma, mmap, os, pathlib, pickle, shelve, shlex, shutil
import sqlite3, subprocess, sys, tarfile, zipfile
import numpy, safetensors.torch, torch

libc = ctypes.CDLL(None)
def run(*command): subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
for place, found in {places}.items():
    out, failed = eval(found), {{}}
    for number, (name, text) in enumerate({kinds}.items()):
        file, folder, new = (f"{{out}}/{{number}}{{end}}" for end in (".txt", ".d", ".new"))
        try:
            exec(text)
        except Exception as error:
            failed[name] = f"{{type(error).__name__}}: {{error}}"[:90]  # 20,000 are kept of all
    print(json.dumps([place, number + 1, failed]), flush=True)
"""
# Where each place lies, and how the script comes to it. No two share a folder: what makes one of
# them private must do nothing for another.
PLACES = {
    "project": ("project/1", "'1'"),
    "project, absolute": ("project/2", "{here!r} + '/2'"),
    "script's folder": ("project/3", "os.path.dirname(os.path.abspath(__file__)) + '/3'"),
    "link": ("elsewhere4/out", "'link'"),
    "relative link": ("elsewhere5/out", "'link2'"),
    "argument": ("elsewhere6/out", "sys.argv[1].partition('=')[2]"),
    "relative argument": ("elsewhere7/out", "sys.argv[2]"),
    "environment": ("elsewhere8/out", "os.environ['OUT_DIR']"),
    "configuration": ("elsewhere9/out", "open('config.yaml').read()"),
}
REFUSED = ("project, absolute", "configuration")  # where the script runs in a copy


Tree = dict[str, tuple[object, ...]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Tree, Tree]]:
    """``written(mode)``: one run that makes every write at every place; the tree before and after
    it."""

    @cache
    def made(mode: str) -> tuple[Run, Tree, Tree]:
        folder = tmp_path_factory.mktemp(mode)
        at = {place: folder / where for place, (where, _) in PLACES.items()}
        for out in at.values():
            out.mkdir(parents=True)
            for number in range(len(KINDS)):
                (out / f"{number}.txt").write_text("kept as it is, whatever is done to it, " * 3)
                (out / f"{number}.d").mkdir()
                (out / f"{number}.d/inner").write_text("inner")
        project = folder / "project"
        (project / "sub").mkdir()
        (project / "pyproject.toml").touch()
        (project / "link").symlink_to(at["link"])
        (project / "link2").symlink_to("../elsewhere5/out")
        (project / "config.yaml").write_text(str(at["configuration"]))
        ways = {place: way.format(here=str(project)) for place, (_, way) in PLACES.items()}
        (project / "train.py").write_text(SCRIPT.format(places=ways, kinds=KINDS))
        arguments = (f"--out={at['argument']}", "sub/../../elsewhere7/out")
        asked = spec(project / "train.py", args=arguments, time_limit_s=240.0)
        store = folder.parent / f"{folder.name}.db"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FORCED, mode)
            patch.setenv("OUT_DIR", str(at["environment"]))
            patch.chdir(project)
            before = tree(folder)
            with ScriptRuns(asked, store, private=True) as runs:
                return runs.run("as_is"), before, tree(folder)

    return made


@pytest.mark.quick(*(f"overlay-{place}" for place in PLACES))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_no_kind_of_write_reaches_the_user_s_files(
    mode: str, place: str, written: Callable[[str], tuple[Run, Tree, Tree]]
) -> None:
    run, before, after = written(mode)
    lines = [json.loads(line) for line in run.output.splitlines() if line.startswith("[")]
    said = {place: (tried, failed) for place, tried, failed in lines}
    assert set(said) == set(PLACES), (run.info.message, run.output)
    tried, failed = said[place]
    assert tried == len(KINDS)
    if mode == OVERLAY or place not in REFUSED:
        assert failed == {}
    elif mode != COMPARED:
        assert len(failed) > len(KINDS) // 2
        assert not any("ReadOnly" in words for words in failed.values())
    assert isinstance(run.observations[-1], Outcome)
    without_inodes = mode == COMPARED  # what was replaced is put back as a new file
    assert _comparable(after, without_inodes) == _comparable(before, without_inodes)


def _comparable(found: Tree, without_inodes: bool) -> Tree:
    return {path: facts[:3] if without_inodes else facts for path, facts in found.items()}
