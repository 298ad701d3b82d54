"""The documents say what the code says: schema, rules, README's claims that can be checked."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

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
