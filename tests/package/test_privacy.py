"""What is recorded of a script's arguments, paths and machine, and what is handed on."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope import masks, privacy
from ampscope.errors import BadInput
from ampscope.launcher.script_runs import repeatable
from ampscope.observations import BadOp, Outcome, SourceText
from ampscope.records import Event, ModuleRecord, NonFiniteRecord, OpRecord, RunSpec, State
from ampscope.render.html import to_html
from ampscope.render.markdown import to_markdown
from ampscope.runner.child_frame import lock_path
from ampscope.store import codec, sharing
from ampscope.store.export import to_json
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.story.build import document
from tests.helpers import script_stores, stores, watched_stores
from tests.helpers.child_runs import run_command
from tests.helpers.classes import Class

SECRET = "hf_S3cr3tValue"
MASKED = {
    ("--token", SECRET): ("--token", "***"),
    (f"--token={SECRET}",): ("--token=***",),
    (f"--hf_token={SECRET}",): ("--hf_token=***",),
    ("--apiKey", SECRET): ("--apiKey", "***"),
    ("-password", SECRET): ("-password", "***"),
    ("--db-password", "-dashed"): ("--db-password", "***"),
    (f"AWS_SECRET_ACCESS_KEY={SECRET}",): ("AWS_SECRET_ACCESS_KEY=***",),
    (f"logger.wandb.api_key={SECRET}",): ("logger.wandb.api_key=***",),
    (f"https://me:{SECRET}@host.org/x?y=1",): ("https://***@host.org/x?y=1",),
    (f"s3://{SECRET}@bucket/data",): ("s3://***@bucket/data",),
    ("--header", f"Authorization: Bearer {SECRET}"): ("--header", "Authorization: ***"),
    (f'{{"token": "{SECRET}"}}',): ('{"token": "***"}',),
    ("--credentials", SECRET, "--lr", "1"): ("--credentials", "***", "--lr", "1"),
    ("--auth", "--lr", "1"): ("--auth", "--lr", "1"),
    (f"--config=logger.api_key={SECRET}",): ("--config=logger.api_key=***",),
    (f"--set=a=1,b.token='{SECRET}',c=2",): ("--set=a=1,b.token=***",),
    (f'{{"hub": {{"token": "{SECRET}"}}, "lr": 1}}',): ('{"hub": {"token": "***"}, "lr": 1}',),
    ("push", f"hf_{SECRET[3:]}{'x' * 20}"): ("push", "***"),
    (f"ghp_{'S3cr3tValue' * 3}",): ("***",),
}
KEPT = (
    ("--lr", "3e-4", "--epochs=5"),
    ("--max-tokens", "512", "--tokenizer", "gpt2"),
    ("--key-dim", "64", "--num-keys=8"),
    ("--token-file", "token.txt"),
    ("data:8080", "https://host.org/a@b", "monkey=1", "--author=me"),
)


@pytest.mark.parametrize("args", MASKED)
def test_values_after_names_of_secrets_are_masked(args: tuple[str, ...]) -> None:
    found = masks.masked(args)
    assert SECRET not in " ".join(found)
    assert found == MASKED[args]


@pytest.mark.parametrize("args", KEPT)
def test_other_values_are_kept(args: tuple[str, ...]) -> None:
    assert masks.masked(args) == args


def test_a_secret_is_in_no_part_of_a_store(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    spec = RunSpec("/home/me/train.py", kind="script", args=("--token", SECRET, "--lr", "1"))
    masks.hide_secrets_of(spec.args)
    try:
        writer = RunWriter.create(store, spec)
        writer.add_observations([Outcome("exception", error_text=f"bad token {SECRET}")])
        writer.finish(State.FAILED, f"It raised: {SECRET}", f"Traceback\n  x({SECRET!r})")
        writer.close()
    finally:
        masks._hidden.clear()
        masks.masked_text.cache_clear()
    assert SECRET.encode() not in b"".join(p.read_bytes() for p in tmp_path.iterdir())
    with Reader(store) as reader:
        info = reader.run(writer.run_id)
        assert info.spec.args == ("--token", "***", "--lr", "1")
        to_json(reader, [info], tmp_path / "run.json")
    assert SECRET not in (tmp_path / "run.json").read_text()
    with pytest.raises(BadInput, match="not stored"):
        repeatable(info)


def test_a_run_of_an_older_version_is_masked_where_it_is_read(tmp_path: Path) -> None:
    from tests.helpers.stores import change

    store = tmp_path / "runs.db"
    run_id = stores.finished(store)
    data = f'{{"workload":"t.py","kind":"script","args":["--token","{SECRET}"]}}'
    change(store, "UPDATE run SET spec=? WHERE id=?", data, run_id)
    with Reader(store) as reader:
        assert reader.run(run_id).spec.args == ("--token", "***")


def test_names_of_a_run_stay_as_they_are(tmp_path: Path) -> None:
    control = "fp32_modules:teacher.head;fp32_lines:é.py:4"
    spec = RunSpec("é.py", kind="script", args=("--password", "teacher"), control=control)
    path, op = "teacher.backbone", "teacher.op"
    seen = replace(script_stores.bad_op(path), op=op, module_type="teacher", consumers=(op,))
    masks.hide_secrets_of(spec.args)
    try:
        writer = RunWriter.create(tmp_path / "runs.db", spec)
        writer.add_modules([ModuleRecord(0, path, "teacher", shared_with=path)])
        writer.add_ops(0, [OpRecord(0, "forward", op, "fp16", "fp16", 1)])
        writer.add_nonfinite([NonFiniteRecord(0, path, 0, 1, 1, 0, 0)])
        writer.add_observations([seen])
        writer.finish(State.FAILED, "not teacher")
        writer.close()
        with Reader(tmp_path / "runs.db") as reader:
            info, (found,) = reader.run(writer.run_id), reader.observations(writer.run_id)
            assert [m.path for m in reader.modules(writer.run_id)] == [path]
            assert [n.parameter for n in reader.nonfinite(writer.run_id)] == [path]
    finally:
        masks._hidden.clear()
        masks.masked_text.cache_clear()
    assert (info.spec.control, info.message) == (control, "not ***")
    assert isinstance(found, BadOp)
    assert (found.module, found.module_type, found.op, found.consumers) == (
        path, "teacher", op, (op,)
    )  # fmt: skip


def test_paths_and_lines_name_their_files_whatever_a_secret_is(tmp_path: Path) -> None:
    from ampscope.observations import LineUse

    spec = RunSpec("work/student/train.py", kind="script", args=("--password", "student"))
    masks.hide_secrets_of(spec.args)
    use = LineUse("student/train.py:8", "mm", ("fp16",), "fp16", False, 1, 0, 0)
    try:
        writer = RunWriter.create(tmp_path / "runs.db", spec)
        writer.add_observations([use, SourceText("student/train.py", ("x = 'student'",))])
        writer.add_event(Event(1, "capsule", "loss", "student", path="/d/student/1.capsule"))
        writer.close()
        with Reader(tmp_path / "runs.db") as reader:
            info, found = reader.run(writer.run_id), reader.observations(writer.run_id)
            (event,) = reader.events(writer.run_id)
    finally:
        masks._hidden.clear()
        masks.masked_text.cache_clear()
    assert info.spec.workload == "work/student/train.py"
    assert found == [use, SourceText("student/train.py", ("x = '***'",))]
    assert (event.text, event.path) == ("***", "/d/student/1.capsule")


def test_keys_of_objects_do_not_become_one() -> None:
    masks.hide_secrets_of(("--password", "teacher1", "--secret", "teacher2"))
    try:
        found = codec.storable_parts({"teacher1": 1, "teacher2": "é"})
    finally:
        masks._hidden.clear()
        masks.masked_text.cache_clear()
    assert found == {"teacher1": 1, "teacher2": "é"}


LINE = "  File \"/x/{}.py\", line 3, in f\n    hub_token = self.f(password='Hq7TAILv2')\n"


@pytest.mark.parametrize("name", ["a", "é"])
def test_a_traceback_is_masked_alike_whatever_letters_are_in_it(tmp_path: Path, name: str) -> None:
    from tests.helpers.stores import change

    store = tmp_path / "runs.db"
    run_id = stores.finished(store)
    change(store, "UPDATE run SET traceback=? WHERE id=?", LINE.format(name), run_id)
    with Reader(store) as reader:
        assert reader.run(run_id).traceback == LINE.format(name).replace("Hq7TAILv2", "***")


def test_a_long_traceback_is_cut_before_it_is_masked() -> None:
    started = time.process_time()
    long = 'E\n  File "a.py", line 1\n    ' + "é" * 2_000_000 + LINE.format("b") * 20_000
    for stored in (codec.to_column("traceback", long), codec.imported_traceback(long)):
        assert isinstance(stored, str)
        assert len(stored) <= 100_000
        assert "TAIL" not in stored
        assert "characters left out" in stored
        assert stored.endswith(LINE.format("b").replace("Hq7TAILv2", "***"))
    assert time.process_time() - started < 5.0


def test_a_secret_at_the_cut_is_masked() -> None:
    masks.hide_secrets_of(("--password", "Hq7TAILv2"))
    try:
        for behind in range(10):
            stored = codec.storable("x" * (4_975 - behind) + " Hq7TAILv2 " + "y" * 20_000)
            assert "TAIL" not in stored
            stored = codec.storable("x" * 20_000 + " Hq7TAILv2 " + "y" * (4_975 - behind))
            assert "TAIL" not in stored
    finally:
        masks._hidden.clear()
        masks.masked_text.cache_clear()


SCRIPT = f"""
import sys
import torch
assert sys.argv[1:] == ["--token", "{SECRET}", "caf\\udcff"], sys.argv
w = torch.nn.Linear(2, 1)
o = torch.optim.SGD(w.parameters(), 0.1)
for _ in range(3):
    o.zero_grad(); w(torch.ones(4, 2)).mean().backward(); o.step()
print("the token is", sys.argv[2])
raise RuntimeError("bad token " + sys.argv[2])
"""


def test_the_script_itself_gets_its_arguments(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    script = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xff.py"))
    script.write_text(SCRIPT)
    arguments = ["run", "--quiet", "--store", str(store), str(script)]
    found = run_command(*arguments, "--token", SECRET, "caf\udcff")
    assert "3 optimizer steps" in found.stderr, found.stderr
    assert SECRET.encode() not in b"".join(p.read_bytes() for p in tmp_path.glob("runs.db*"))
    assert not list(privacy.private_folder().glob("given-*"))
    with Reader(store) as reader:
        (info,) = reader.runs()
    assert info.spec.args == ("--token", "***", "caf\\udcff")
    assert info.spec.label == "caf\\udcff.py"
    assert "RuntimeError" in info.message


def test_everything_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(privacy.VARIABLE, "arguments,host,paths,source")
    spec = RunSpec("/home/me/deep/train.py", kind="script", args=("--data", "/home/me/data"))
    writer = RunWriter.create(tmp_path / "runs.db", spec)
    writer.start(replace(stores.MACHINE, host="secret-host"))
    trace = 'Traceback:\n  File "/home/me/train.py", line 3, in f\n    x = secret_code()\nE: no'
    writer.finish(State.FAILED, "No file /home/me/deep/data.bin there", trace)
    writer.close()
    with Reader(tmp_path / "runs.db") as reader:
        info = reader.run(writer.run_id)
    whole = str(dataclasses.asdict(info))
    assert info.spec.workload == "train.py"
    assert info.spec.args == ("(left out)",)
    assert info.message == "No file data.bin there"
    for word in ("/home", "secret-host", "secret_code"):
        assert word not in whole


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ('API_KEY = "abc123"', 'API_KEY = "***"'),
        ("    wandb.login(key='abc')", "    wandb.login(key='***')"),
        ('os.environ["HF_TOKEN"] = "abc"', 'os.environ["HF_TOKEN"] = "***"'),
        ('{"password": "p w"}', '{"password": "***"}'),
        ("url = 'https://me:pw@host/x'", "url = 'https://***@host/x'"),
        ("login('hf_" + "a" * 24 + "')", "login('***')"),
        ("key = self.key(x)", "key = self.key(x)"),
        ("tokens = tokenizer(text)", "tokens = tokenizer(text)"),
        ("q, k = w['query'], w['key']", "q, k = w['query'], w['key']"),
        ("mode = 'train'  # key", "mode = 'train'  # key"),
    ],
)
def test_secrets_in_a_line_of_source_are_masked(line: str, kept: str) -> None:
    assert masks.masked_source(line) == kept


def test_left_out_sources_have_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(privacy.VARIABLE, "source")
    writer = RunWriter.create(tmp_path / "runs.db", RunSpec("/home/me/train.py", kind="script"))
    writer.add_observations([SourceText("train.py", ("x = secret_code()",))])
    writer.close()
    with Reader(tmp_path / "runs.db") as reader:
        assert reader.observations(writer.run_id) == [SourceText("train.py", ())]


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(privacy.VARIABLE, "everything")
    with pytest.raises(BadInput, match="arguments, host, paths, source"):
        privacy.leaves_out("host")


def test_a_report_drops_the_home_folder_and_the_host(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    path = f"{Path.home()}/project/train.py"
    writer = RunWriter.create(store, replace(stores.SPEC, label=f"of {path} on night-host"))
    writer.start(replace(stores.MACHINE, host="night-host"))
    writer.finish(State.FAILED, f"No file {path} on night-host.", f'File "{path}", line 3')
    writer.close()
    with Reader(store) as reader:
        made = [document(reader, [writer.run_id], as_recorded=kept) for kept in (False, True)]
    short, whole = map(to_markdown, made)
    assert str(Path.home()) not in short
    assert "night-host" not in short.replace("\\", "")
    assert "night-host" in whole.replace("\\", "")


@pytest.mark.parametrize("page", ["home", "diagnosis", "training"])
def test_students_see_neither_arguments_nor_folders(
    page: str, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers.classes import said

    spec = replace(script_stores.SPEC, workload="/home/me/zebra/train.py", args=("--x", "finch"))
    seen = script_stores.seen([script_stores.broken(i) for i in range(4)])
    run_id = script_stores.run(store_path, "as_is", seen, spec, State.FAILED, "No /home/me/zebra/d")
    watching = watched_stores.begun(store_path, watched_stores.good(12))
    watching.add_event(Event(3, "note", "n", "See /home/me/zebra/x", path="/home/me/zebra/c"))
    watching.close()
    sharing.share(store_path, [run_id, watching.run_id], wanted=True)
    room = Class(monkeypatch)
    shown = {
        who: said(
            getattr(room, who)().page(page, run=run_id if page != "training" else watching.run_id)
        )
        for who in ("student", "teacher")
    }
    assert "zebra" not in shown["student"]
    assert "finch" not in shown["student"]
    if page != "home":
        assert "zebra" in shown["teacher"]


# --- the temporary folder


def test_a_temporary_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / f"ampscope-{os.getuid()}"
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="not a folder of yours"):
        lock_path("cpu")
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    assert lock_path("cpu").parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    real = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: real + 1)
    folder.rename(tmp_path / f"ampscope-{real + 1}")
    with pytest.raises(BadInput, match="not a folder of yours"):
        lock_path("cpu")


def test_a_secret_is_found_behind_any_name() -> None:
    assert masks.masked_text("2nd_token=abcd --1-hf-token=abcd x.token: ab3d9f") == (
        "2nd_token=*** --1-hf-token=*** x.token: ***"
    )
    assert masks.masked_text("a 9p+x://me:pw@host/x") == "a 9p+x://***@host/x"
    assert masks.masked_text("https://host/x?token=abcd&k=1") == "https://host/x?token=***&k=1"


# --- eight secrets, from end to end

PLANTED = tuple(f"Hq{n}TAIL{n}zR" for n in range(8))
LEAKY = f"""
import os, sys
import torch
WATCHED
os.environ["LATE_TOKEN"] = "{PLANTED[0]}"  # as python-dotenv does
def sign_in(user, password: str = "{PLANTED[1]}", token=os.environ.get("X") or "{PLANTED[2]}"):
    raise RuntimeError(" ".join([
        "user password=hunter2,{PLANTED[3]}", "Bearer {PLANTED[4]}", "https://me:p@{PLANTED[5]}@host",
        os.environ["LATE_TOKEN"], os.environ["HUB_SECRET"], *sys.argv[1:],
    ]))
w = torch.nn.Linear(2, 1)
o = torch.optim.SGD(w.parameters(), 0.1)
for _ in range(3):
    o.zero_grad(); w(torch.ones(4, 2)).mean().backward(); o.step()
print("the tokens are", sys.argv[1:])
sign_in("me", password="{PLANTED[1]}", token="{PLANTED[2]}")
"""
GIVEN = (f"--password=abc,{PLANTED[7]}", "--token", f"--{PLANTED[7]}")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["run", "watch", "diagnose"])
def test_of_eight_secrets_none_reaches_the_store_or_what_is_made_of_it(
    way: str, tmp_path: Path
) -> None:
    store, script = tmp_path / "runs.db", tmp_path / "leaky.py"
    script.write_text(LEAKY.replace("WATCHED", ""))
    secret = {"HUB_SECRET": PLANTED[6]}
    if way == "watch":
        script.write_text(
            LEAKY.replace("WATCHED", "import ampscope").replace(
                "for _ in",
                f"watch = ampscope.watch(w, o, store={str(store)!r}, name='--token {PLANTED[7]}')"
                "\nfor _ in",
            )
        )
        command = [sys.executable, str(script), *GIVEN]
        subprocess.run(command, env={**os.environ, **secret}, capture_output=True, timeout=120)
    else:
        run_command(way, "--quiet", "--store", store, script, *GIVEN, **secret)
    with Reader(store) as reader:
        runs = reader.runs()
        assert runs
        to_json(reader, runs, tmp_path / "run.json")
        made = document(reader, [run.id for run in runs])
        message = " ".join(run.message for run in runs)
        texts = [
            seen.lines
            for run in runs
            for seen in reader.observations(run.id)
            if isinstance(seen, SourceText)
        ]
    assert "RuntimeError" in message
    lines = script.read_text().split("\n")
    for text in texts if way == "diagnose" else ():  # line for line, but for the secrets
        assert [n for n, line in enumerate(text) if line != lines[n]] == [4, 5, 7, 15]
    assert texts or way != "diagnose"
    (tmp_path / "report.html").write_text(to_html(made))
    (tmp_path / "report.md").write_text(to_markdown(made))
    for name in ("run.json", "report.html", "report.md"):
        assert (tmp_path / name).stat().st_size > 500
    script.unlink()
    found = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert [secret for secret in PLANTED if secret.encode() in found] == []
    assert b"TAIL" not in found
