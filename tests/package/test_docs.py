"""The documents say what the code says: schema, rules, README's claims that can be checked."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ampscope.causes import CAUSES
from ampscope.rules.catalog import NAMES, all_rules, render, sections
from ampscope.store.db import schema_text

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = ["What it detects", "Why it matters", "Blind spots", "Remedy"]


def test_the_store_s_page_prints_the_schema() -> None:
    text = (ROOT / "docs/store.md").read_text()
    found = re.search(r"<!-- schema -->\n```sql\n(.*?)\n```\n<!-- /schema -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == schema_text().strip()


def test_causes_are_printed_from_the_rules() -> None:
    assert (ROOT / "docs/causes.md").read_text() == render()


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.id)
def test_every_rule_has_the_four_headings(rule) -> None:  # type: ignore[no-untyped-def]
    assert [heading for heading, _ in sections(rule.documentation)] == HEADINGS
    assert all(text for _, text in sections(rule.documentation))


def test_every_cause_has_a_rule() -> None:
    assert set(NAMES) == set(CAUSES) - {"no_fault"}


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "pip install -r requirements.txt && streamlit run app/main.py" in text
    assert "pip install -r requirements-dev.txt && pytest" in text


@pytest.mark.parametrize("name", ["accuracy", "cost", "hardware"])
def test_pages_print_the_kept_figures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    printer = importlib.import_module(f"print_{name}")
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert printer.replaced(text) == text, f"python benchmarks/print_{name}.py --write"


@pytest.fixture
def print_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("print_gpu")


PAGES_OF_A_GPU = (
    "README.md",
    *(f"docs/{n}.md" for n in ("accuracy", "cost", "hardware", "rehearsal")),
)


@pytest.mark.parametrize("page", PAGES_OF_A_GPU)
def test_pages_print_the_kept_figures_of_a_gpu(page: str, print_gpu: ModuleType) -> None:
    text = (ROOT / page).read_text()
    kept = print_gpu.read()
    assert print_gpu.replaced(page, text, kept) == text, "python benchmarks/print_gpu.py --write"


# Made up: part, figure, value; where it is printed, and as what.
FIGURES = (
    ("tests", "passed", 23.0, "README.md", "23 tests on the GPU passed, 1 failed"),
    ("tests", "failed", 1.0, "README.md", "1 failed"),
    ("overhead", "gpt:medium:256 asleep", 1.0123, "docs/cost.md", "| 1.01 | 1.03 |"),
    ("overhead", "gpt:medium:256 default", 1.0345, "README.md", "1.03 times by default"),
    ("overhead", "gpt:medium:256 bare_ms", 21.34, "docs/cost.md", "| 21.3 |"),
    ("price", "gpt:small bf16 asleep launches", 3.0, "docs/cost.md", "asleep | – | 3 |"),
    ("kernel", "bfloat16 gaussian four share", 0.613, "docs/cost.md", "0.61"),
    ("ceilings", "bf16", 702.4, "docs/hardware.md", "| bf16 | 702 |"),
    ("ceilings", "copy", 2.97, "docs/hardware.md", "2.97 TB/s"),
    ("compare", "bf16 step_ms", 22.46, "docs/hardware.md", "| bf16 | 22.5 | – | 11.7 |"),
    ("compare", "bf16 joules", 11.7, "docs/hardware.md", "11.7"),
    ("compare", "fp32 over bf16", 4.62, "README.md", "bf16 is 4.6 times as fast as fp32"),
    ("cores", "gpt:medium:256 bf16 used", 0.973, "docs/hardware.md", "97.3%"),
    ("rehearsed", "gpt small fp16 share_in_another_bin", 0.00041, "docs/rehearsal.md", "0.00041"),
    ("diagnose", "c66 right", 1.0, "docs/accuracy.md", "| c66 | 1 |"),
)  # fmt: skip
OUTSIDE = ("ceilings", "fp16", 1234.5, "beyond the peak of random data")


def files_of_a_run(folder: Path, *, dry: bool = False) -> Path:
    """As benchmarks/gpu/run leaves them."""
    documents: dict[str, dict[str, Any]] = {}
    made = [(*figure[:3], True, "") for figure in FIGURES]
    for part, name, value, is_believable, reason in [*made, (*OUTSIDE[:3], False, OUTSIDE[3])]:
        document = documents.setdefault(part, {"part": part, "dry": dry, "figures": {}})
        document["figures"][name] = {
            "value": value, "unit": "", "low": None, "high": None,
            "believable": is_believable and not dry, "reason": reason,
        }  # fmt: skip
    card = {"name": "NVIDIA H100 80GB HBM3", "driver": "580.65.06", "kind": "h100"}
    look = {"part": "look", "dry": dry, "figures": {}, "setting": {"versions": {"torch": "2.11.0"}}}
    status = {"status": "ok"}
    files = {
        "summary": {
            "dry": dry, "began": "2027-01-31T12:00:00+00:00", "card": {} if dry else card,
            "parts": {"look": status, "price": {"status": "time over"}}, "look": look,
        },
        "hardware": {"schema": 1, "parts": documents},
    }  # fmt: skip
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("page", PAGES_OF_A_GPU)
def test_a_run_on_a_card_fills_the_pages(page: str, print_gpu: ModuleType, tmp_path: Path) -> None:
    found = print_gpu.read(files_of_a_run(tmp_path))
    text = print_gpu.replaced(page, (ROOT / page).read_text(), found)
    assert "NVIDIA H100 80GB HBM3, driver 580.65.06, torch 2.11.0, 2027-01-31" in text
    assert "No GPU was at hand" not in text
    for *_, where, words in FIGURES:
        assert where != page or words in text
    assert "1234" not in text
    assert "1,23" not in text
    if page == "docs/hardware.md":
        assert OUTSIDE[3] in text
    if page == "README.md":
        assert "1 of 2 parts" in text
    assert print_gpu.replaced(page, text, found) == text
    changed = text.replace("driver 580", "driver 581")
    assert print_gpu.replaced(page, changed, found) != changed


def test_figures_of_another_card_are_left_out(print_gpu: ModuleType, tmp_path: Path) -> None:
    path = files_of_a_run(tmp_path) / "hardware.json"
    files = json.loads(path.read_text())
    files["parts"]["ceilings"]["setting"] = {"gpu": "NVIDIA H200"}
    files["parts"]["compare"]["setting"] = {"gpu": "NVIDIA H100 80GB HBM3"}
    path.write_text(json.dumps(files))
    page = print_gpu.hardware(print_gpu.read(tmp_path))
    assert "702" not in page
    assert "22.5" in page


def test_a_dry_run_fills_no_page(print_gpu: ModuleType, tmp_path: Path) -> None:
    found = print_gpu.read(files_of_a_run(tmp_path, dry=True))
    nothing = print_gpu.read(tmp_path / "absent")
    for page in PAGES_OF_A_GPU:
        text = (ROOT / page).read_text()
        assert print_gpu.replaced(page, text, found) == print_gpu.replaced(page, text, nothing)
        assert "o GPU was at hand" in print_gpu.replaced(page, text, nothing)


def test_a_page_without_its_marks_is_refused(print_gpu: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no"):
        print_gpu.replaced("docs/cost.md", "no marks", print_gpu.read(tmp_path))


@pytest.mark.parametrize("page", sorted((ROOT / "pages").glob("*.py")), ids=lambda p: p.name)
def test_pages_stay_thin(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 60


DOCUMENTS = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"}
FOLDERS = ("core", "app", "pages", "tests", "benchmarks", "docs", "examples", ".ci")
OF_OTHERS = {
    "train.py",
    "ampscope-healthy.json",
    "setup.py",
    "pyproject.toml",
    "/home/me/train.py",
    ".streamlit/secrets.toml",
}
PLACEHOLDER = re.compile("NAME|ID|NN")


@functools.cache
def files() -> str:
    """All paths below the folders, one per line."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))
    return "".join(f"/{path.relative_to(ROOT)}\n" for path in found)


def exists(name: str) -> bool:
    """A dotted name: a module, or what a module has. Paddle's cannot be imported here."""
    module, _, last = name.rpartition(".")
    try:
        if not module or importlib.util.find_spec(name) is not None:
            return True
        return hasattr(importlib.import_module(module), last)
    except ModuleNotFoundError as error:
        return not str(error.name).startswith("ampscope")


@pytest.mark.parametrize("document", sorted(DOCUMENTS), ids=lambda path: path.stem)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", sorted(DOCUMENTS), ids=lambda path: path.stem)
def test_the_files_and_modules_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    paths = set(re.findall(r"`([\w./-]+\.(?:py|sql|json|toml))`", text)) - OF_OTHERS
    modules = set(re.findall(r"`(ampscope(?:\.[a-z_]+)+)`", text))
    assert [n for n in paths if f"/{n}\n" not in files() and not PLACEHOLDER.search(n)] == []
    assert [name for name in modules if not exists(name)] == []
