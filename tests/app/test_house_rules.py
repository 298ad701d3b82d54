"""House rules of the dashboard that a reader can check and a tool should."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ampscope import extensions
from app import states

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "pages").glob("*.py"))
# The text of what is chosen, and the root's font size.
STYLES = {("states.py", "STYLE"): states.STYLE}
if "lessons" in extensions.all_extensions():
    STYLES["large_type.py", "STYLE"] = extensions.load("app.ext.lessons.large_type:STYLE")
APP = sorted((ROOT / "app").rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_a_page_only_puts_together_what_app_draws(path: Path) -> None:
    others = {n for n in imported(path) if n.split(".")[0] not in ("streamlit", "app")}
    assert not others


@pytest.mark.parametrize("path", APP, ids=lambda p: p.name)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", [*APP, *PAGES], ids=lambda p: p.name)
def test_nothing_is_drawn_as_html(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert not any(k.arg == "unsafe_allow_html" for k in node.keywords), node.lineno
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            assert name not in ("html", "iframe") or _is_own_style(path, node), node.lineno


def _is_own_style(path: Path, call: ast.Call) -> bool:
    """A style sheet that is a constant of its own file, and holds nothing else; or the script of
    the keys, which is a file as it is."""
    arguments = [ast.unparse(argument) for argument in call.args]
    if (path.name, arguments) == ("states.py", ["KEYS"]):
        return f"<script>{(ROOT / 'app' / 'keys.js').read_text()}</script>" == states.KEYS
    style = STYLES.get((path.name, *arguments), "")
    return style.startswith("<style>") and style.endswith("</style>") and style.count("<") == 2


@pytest.mark.parametrize("path", [*APP, *PAGES], ids=lambda p: p.name)
def test_the_dashboard_does_not_import_torch_or_sqlite(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path)}
    assert not tops & {"torch", "sqlite3"}


@pytest.mark.parametrize(
    "path", [p for p in APP if "figures" in (p.parent.name, p.stem)], ids=lambda p: p.name
)
def test_charts_write_powers_of_two_in_one_notation(path: Path) -> None:
    tree = ast.parse(path.read_text())
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    documented = {ast.get_docstring(n, clean=False) for n in ast.walk(tree) if _may_document(n)}
    assert not [t for t in texts if isinstance(t, str) and "2^" in t and t not in documented]
    assert "power_of_two" not in path.read_text()  # which is for plain text


def _may_document(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)


def test_every_page_is_in_the_navigation() -> None:
    from app.links import ENTRIES

    listed = [entry.file for entry in ENTRIES if entry.draw is None]
    theirs = [page for page in PAGES if "app.ext" in page.read_text()]  # extensions' pages
    there = theirs if extensions.all_extensions() else []
    assert sorted(listed) == [page for page in PAGES if page not in theirs or page in there]
