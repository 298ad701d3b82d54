"""Tools and resources for an agent, asked through the SDK's client in this process."""

from __future__ import annotations

import base64
import io
import json
import os
import xml.etree.ElementTree as Tree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mcp import Client
from mcp_types import CallToolResult
from PIL import Image

from ampscope.diagnosis.load import load_diagnosis
from ampscope.errors import BadInput
from ampscope.ext.agents import server as agent_server
from ampscope.ext.agents.answers import fix_tried
from ampscope.ext.agents.jobs import Folders
from ampscope.ext.agents.server import AgentServer, make_server
from ampscope.records import RunSpec, State, StepRecord
from ampscope.render.contract import to_json
from ampscope.render.picture import NamedChart, charts, to_svg
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.story.build import document
from tests.helpers import script_stores
from tests.helpers.dashboard_server import in_a_loop
from tests.helpers.hostile_texts import HOSTILE

Ask = Callable[..., CallToolResult]
CLIPS = """
import torch
scaler = torch.amp.GradScaler("cuda")
for x in data:
    with torch.autocast("cuda", torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scripts/ with a script and links, a folder and a script beside it, and a store."""
    place = tmp_path_factory.mktemp("agents")
    for name in ("scripts", "scripts2"):
        (place / name / "sub").mkdir(parents=True)
        (place / name / "sub" / "clips.py").write_text(CLIPS)
    (place / "outside.py").write_text(CLIPS)
    (place / "scripts" / "link.py").symlink_to(place / "outside.py")
    (place / "scripts" / "away").symlink_to(place / "scripts2")
    (place / "scripts" / "near.py").symlink_to(place / "scripts" / "sub" / "clips.py")
    (place / "scripts" / "loop.py").symlink_to(place / "scripts" / "loop.py")
    (place / "scripts" / "broken.py").write_text("def :\n")
    script_stores.overflow(place / "runs.db")
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> AgentServer:
    return make_server(place / "runs.db", Folders([place / "scripts"]))


@pytest.fixture(scope="module")
def head(place: Path) -> str:
    """The baseline run of the diagnosis in the store."""
    with Reader(place / "runs.db") as reader:
        return next(run.id for run in reader.runs() if run.spec.control == "as_is")


@pytest.fixture
def ask(server: AgentServer) -> Ask:
    """``ask("list_runs", limit=2)``"""

    def asked(tool: str, **arguments: Any) -> CallToolResult:
        async def call() -> CallToolResult:
            async with Client(server) as client:
                return await client.call_tool(tool, arguments)

        return in_a_loop(call())

    return asked


def told(result: CallToolResult) -> dict[str, Any]:
    """The structured content, which must be strict JSON."""
    assert not result.is_error, result.content
    assert result.structured_content is not None
    text = json.dumps(result.structured_content, allow_nan=False)
    found: dict[str, Any] = json.loads(text)
    return found


def sentence(result: CallToolResult) -> str:
    """Of an error."""
    assert result.is_error
    (part,) = result.content
    text: str = getattr(part, "text", "")
    assert "\n" not in text
    assert "Traceback" not in text
    assert text.endswith((".", "list", "FOLDER", "diagnose"))
    return text


def test_answers_keep_the_schemas_that_the_tools_publish(
    server: AgentServer, ask: Ask, head: str, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    with Reader(place / "runs.db") as reader:
        result = load_diagnosis(reader, head)
    commands: list[list[str]] = []

    async def child(command: list[str], folder: Path, hear: object) -> tuple[int, str, str]:
        commands.append(command)
        return 1, to_json(result), ""

    monkeypatch.setattr(agent_server, "run_child", child)
    monkeypatch.setattr(agent_server, "unused_gpu", lambda found: "torch cannot use the GPU.")
    asked = {
        "preflight": {"paths": ["."], "show_diff": True},
        "diagnose": {"script": "sub/clips.py", "args": ["--store", "x y"], "steps": 3},
        "read_verdict": {"run_id": head},
        "list_runs": {},
        "compare_runs": {"first": head, "second": result.runs["fp32"].id},
    }
    tools = {tool.name: tool for tool in in_a_loop(server.list_tools())}
    assert tools.keys() == asked.keys() | {"try_fix", "render_chart"}
    for name, arguments in asked.items():
        answer = told(ask(name, **arguments))
        schema = tools[name].output_schema
        assert schema is not None
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(answer, schema)
        jsonschema.validate(arguments, tools[name].input_schema)
        if name == "diagnose":
            assert answer["notes"][0] == "torch cannot use the GPU."
    (command,) = commands
    script = str((place / "scripts" / "sub" / "clips.py").resolve())
    assert command[-3:] == [script, "--store", "x y"]  # the script's own, whatever they look like


def test_a_verdict_says_what_the_command_line_says(ask: Ask, head: str, place: Path) -> None:
    with Reader(place / "runs.db") as reader:
        oracle = json.loads(to_json(load_diagnosis(reader, head)))
    answer = told(ask("read_verdict", run_id=head, limit=100))
    first, expected = answer["findings"][0], oracle["findings"][0]
    assert answer["verdict"] == oracle["verdict"] == "fault"
    for name in ("code", "cause", "module", "op", "step", "explanation", "evidence"):
        assert first[name] == expected[name], name
    for name in ("kind", "patch", "verified", "control"):
        assert first["fix"][name] == expected["fix"][name], name
    assert answer["tried"] == oracle["tried"]
    assert answer["run"] == head


def test_evidence_comes_in_pages(ask: Ask, head: str) -> None:
    whole = told(ask("read_verdict", run_id=head, limit=100))["findings"][0]["evidence"]
    found, offset = [], 0
    while offset is not None:
        part = told(ask("read_verdict", run_id=head, offset=offset, limit=1))
        found += part["findings"][0]["evidence"]
        offset = part["next_offset"]
    assert found == whole
    assert len(whole) > 1


def test_runs_come_in_pages(ask: Ask, place: Path) -> None:
    with Reader(place / "runs.db") as reader:
        known = [run.id for run in reader.runs()]
    found, offset = [], 0
    while offset is not None:
        part = told(ask("list_runs", offset=offset, limit=2))
        assert len(part["runs"]) <= 2
        found += [run["id"] for run in part["runs"]]
        offset = part["next_offset"]
    assert found == known


@pytest.mark.parametrize(
    ("tool", "arguments", "what"),
    [
        ("diagnose", {"script": "/etc/hostname"}, "does not lie below"),
        ("diagnose", {"script": "../outside.py"}, "does not lie below"),
        ("diagnose", {"script": "sub/../../outside.py"}, "does not lie below"),
        ("diagnose", {"script": "link.py"}, "does not lie below"),
        ("diagnose", {"script": "away/sub/clips.py"}, "does not lie below"),
        ("diagnose", {"script": "loop.py"}, "does not lie below"),
        ("diagnose", {"script": "../scripts2/sub/clips.py"}, "does not lie below"),
        ("diagnose", {"script": "../nowhere.py"}, "does not lie below"),
        ("diagnose", {"script": "nowhere.py"}, "There is no file nowhere.py"),
        ("diagnose", {"script": "sub"}, "is not a file"),
        ("diagnose", {"script": "a\0b"}, "no name of a script"),
        ("diagnose", {"script": ""}, "no name of a script"),
        ("preflight", {"paths": ["x" * 300]}, "There is no file xxx"),
        ("diagnose", {}, "argument script: Field required"),
        ("diagnose", {"script": "near.py", "stepz": 3}, "no argument 'stepz'"),
        ("diagnose", {"script": "near.py", "steps": 0}, "Steps must be from 1"),
        ("diagnose", {"script": "near.py", "steps": "many"}, "argument steps"),
        ("diagnose", {"script": "near.py", "time_limit_s": 1e9}, "time limit"),
        ("diagnose", {"script": "near.py", "policy": "gpu"}, "no policy 'gpu'"),
        ("diagnose", {"script": "near.py", "device": "tpu"}, "no device 'tpu'"),
        ("diagnose", {"script": "near.py", "folder": ".."}, "does not lie below"),
        ("diagnose", {"script": "near.py", "args": ["x"] * 101}, "100 arguments"),
        ("diagnose", {"script": "near.py", "args": ["a\0b"]}, "null byte"),
        ("preflight", {"paths": ["link.py"]}, "does not lie below"),
        ("preflight", {"paths": ["broken.py"]}, "is not Python"),
        ("preflight", {"paths": []}, "Name 1 to 50"),
        ("preflight", {"paths": ["."], "limit": 0}, "limit must be from 1 to 100"),
        ("read_verdict", {"run_id": "ffff"}, "not in this store"),
        ("read_verdict", {"run_id": "ff", "offset": -1}, "offset must be from 0"),
        ("list_runs", {"limit": 1000}, "limit must be from 1 to 100"),
        ("compare_runs", {"first": "ffff", "second": "eeee"}, "not in this store"),
        ("try_fix", {"run_id": "ffff", "control": "bf16"}, "not in this store"),
        ("try_fix", {"run_id": "ffff", "control": "magic"}, "no intervention 'magic'"),
        ("try_fix", {"run_id": "ffff", "control": "as_is"}, "changes nothing"),
        ("render_chart", {"run_id": "ffff"}, "not in this store"),
        ("no_tool", {}, "There is no tool 'no_tool'"),
    ],
)
def test_bad_input_is_one_sentence(
    ask: Ask, tool: str, arguments: dict[str, Any], what: str
) -> None:
    assert what in sentence(ask(tool, **arguments))


def test_a_script_elsewhere_is_not_run_again(ask: Ask, head: str) -> None:
    """The store's script is /home/me/train.py; the store is no permission to run it."""
    assert "no file /home/me/train.py" in sentence(ask("try_fix", run_id=head, control="bf16"))


def test_a_recorded_script_outside_is_refused(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec(workload=str(place / "outside.py"), kind="script", control="as_is", group="g")
    writer = RunWriter.create(tmp_path / "r.db", spec)
    writer.finish(State.FINISHED, "")
    writer.close()
    server = make_server(tmp_path / "r.db", Folders([place / "scripts"]))

    async def never(*_: object) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(agent_server, "run_child", never)

    async def call() -> CallToolResult:
        async with Client(server) as client:
            arguments = {"run_id": writer.run_id, "control": "bf16"}
            return await client.call_tool("try_fix", arguments)

    assert "does not lie below" in sentence(in_a_loop(call()))


def test_without_a_folder_no_script_is_touched(place: Path) -> None:
    server = make_server(place / "runs.db", Folders([]))

    async def call() -> CallToolResult:
        async with Client(server) as client:
            return await client.call_tool("preflight", {"paths": [str(place / "outside.py")]})

    assert "without a folder of scripts" in sentence(in_a_loop(call()))


def test_an_agent_without_runs_is_told_to_call_a_tool(tmp_path: Path) -> None:
    server = make_server(tmp_path / "none.db", Folders([]))

    async def call() -> CallToolResult:
        async with Client(server) as client:
            return await client.call_tool("list_runs", {})

    assert "call diagnose" in sentence(in_a_loop(call()))


def test_preflight_reads_no_table_above_the_folders(ask: Ask, place: Path) -> None:
    (place.parent / "pyproject.toml").write_text("[tool.ampscope.preflight]\nsecret_key = 1\n")
    try:
        answer = told(ask("preflight", paths=["."]))
    finally:
        (place.parent / "pyproject.toml").unlink()
    assert "secret_key" not in str(answer)


def test_preflight_reads_no_file_that_a_link_leads_to_outside(ask: Ask, place: Path) -> None:
    answer = told(ask("preflight", paths=["."], show_diff=True))
    read = {os.path.relpath(f["path"], place / "scripts") for f in answer["findings"]}
    assert read == {"near.py", os.path.join("sub", "clips.py")}
    assert answer["files"] == 2
    assert {f["code"] for f in answer["findings"]} == {"AMP015"}
    assert "+    scaler.unscale_(optimizer)" in answer["diff"]
    said = "\n".join(answer["not_read"])
    assert "link.py leads out" in said
    assert "broken.py" in said


def test_two_runs_are_compared(ask: Ask, head: str, place: Path) -> None:
    with Reader(place / "runs.db") as reader:
        fp32 = load_diagnosis(reader, head).runs["fp32"].id
        losses = [{s.step: s.loss for s in reader.steps(run)} for run in (head, fp32)]
    common = sorted(losses[0].keys() & losses[1].keys())
    different = [n for n in common if losses[0][n] != losses[1][n]]
    answer = told(ask("compare_runs", first=head, second=fp32))
    assert answer["runs"] == [head, fp32]
    assert answer["common_steps"] == len(common)
    assert answer["first_different_step"] == (different[0] if different else None)
    alike = told(ask("compare_runs", first=head, second=head))
    assert alike["first_different_step"] is None
    assert alike["modules_different"] == 0


def test_a_fix_that_was_run_is_judged_as_the_diagnosis_judges_it(head: str, place: Path) -> None:
    with Reader(place / "runs.db") as reader:
        known = load_diagnosis(reader, head)
        assert known.trials
        for trial in known.trials:
            answer = fix_tried(reader, head, trial.control)
            assert answer.cured is trial.cured
            assert answer.run == known.runs[trial.control].id
            assert answer.cause == known.diagnosis.findings[0].cause
            assert (answer.step_time_ratio, answer.peak_memory_ratio) == (trial.price, trial.memory)
        with pytest.raises(BadInput, match="Nothing was recorded"):
            fix_tried(reader, head, "lr:0.5")


def picture(result: CallToolResult) -> Image.Image:
    """The PNG that a tool answered."""
    data = base64.b64decode(getattr(result.content[0], "data", ""))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return Image.open(io.BytesIO(data)).convert("RGB")


def test_a_chart_is_a_picture(ask: Ask, head: str, place: Path) -> None:
    with Reader(place / "runs.db") as reader:
        known = charts(document(reader, [head]))
    result = ask("render_chart", run_id=head, chart=1)
    assert known[0].chart.title in getattr(result.content[1], "text", "")
    drawn = picture(result)
    assert drawn.width == 1350
    colours = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in drawn.getcolors(1 << 24) or []}
    assert "#ffffff" in colours  # the ground
    assert "#1b2330" in colours  # letters, without which it says nothing
    series = getattr(known[0].chart, "series", ())
    assert {s.colour.lower() for s in series if s.points.steps} <= colours


def test_a_chart_of_hostile_names_is_text_alone(ask: Ask, place: Path, head: str) -> None:
    """Names reach the drawing as escaped text: no element, no address, no control character."""
    with Reader(place / "runs.db") as reader:
        known = charts(document(reader, [head]))[0]
    plain = {part.tag for part in Tree.fromstring(to_svg(known)).iter()}
    for text in HOSTILE:
        named = NamedChart(text, text, known.chart)
        assert {part.tag for part in Tree.fromstring(to_svg(named)).iter()} == plain


def test_texts_of_runs_are_data(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    for text in HOSTILE:
        spec = RunSpec(workload="gpt", label=text, steps=1)
        writer = RunWriter.create(path, spec)
        writer.add_step(StepRecord(0, loss=float("nan")))
        writer.finish(State.FAILED, text)
        writer.close()
    server = make_server(path, Folders([]))

    async def call() -> CallToolResult:
        async with Client(server) as client:
            return await client.call_tool("list_runs", {"limit": 100})

    answer = told(in_a_loop(call()))
    assert len(answer["runs"]) == len(HOSTILE)
    for run in answer["runs"]:
        assert run["title"].isprintable()
        assert len(run["title"]) < 400
        assert len(run["message"]) < 1_100
        assert all(c.isprintable() or c in "\n\t" for c in run["message"])


def test_resources(server: AgentServer, head: str) -> None:
    async def read() -> list[str]:
        async with Client(server) as client:
            listed = await client.list_resources()
            templates = await client.list_resource_templates()
            assert {r.uri for r in listed.resources} == {"ampscope://runs", "ampscope://rules"}
            assert len(templates.resource_templates) == 2
            addresses = ("runs", f"runs/{head}", "rules", "rules/AMP001", "rules/PRE001")
            parts = []
            for address in addresses:
                (part,) = (await client.read_resource(f"ampscope://{address}")).contents
                parts.append(getattr(part, "text", ""))
            for address in ("rules/AMP999", "runs/ffff"):
                with pytest.raises(Exception, match=r"no cause|not in this"):
                    await client.read_resource(f"ampscope://{address}")
            return parts

    runs, run, rules, cause, code = in_a_loop(read())
    assert head in {r["id"] for r in json.loads(runs)["runs"]}
    assert json.loads(run)["id"] == head
    assert "AMP001 activation_overflow" in rules
    assert "What it detects" in cause
    assert code.startswith("PRE001")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No tool may fail as a fault of ampscope."""
    yield
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
