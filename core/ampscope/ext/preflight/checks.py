"""Preflight of files and folders: every check, what is suppressed, and the repairs written back."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from ampscope.causes import StableCode
from ampscope.errors import BadInput
from ampscope.ext.preflight import evaluation, half_parameters, loss_scale, protocol, spelling
from ampscope.ext.preflight.codes import find_code
from ampscope.ext.preflight.finding import SourceFinding
from ampscope.ext.preflight.roles import Roles
from ampscope.ext.preflight.script import Script
from ampscope.ext.preflight.source import SourceFile, TooMuchWorkError, bounded_looks, read_source
from ampscope.files import write_whole

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}


@dataclass(frozen=True, slots=True)
class Settings:
    """``[tool.ampscope.preflight]`` of a pyproject.toml: codes to ignore, codes to report alone,
    glob patterns of paths to leave out."""

    ignore: frozenset[str] = frozenset()
    select: frozenset[str] = frozenset()
    exclude: tuple[str, ...] = ()

    def wants(self, code: StableCode) -> bool:
        return code.code not in self.ignore and (not self.select or code.code in self.select)


@dataclass(slots=True)
class Result:
    """Findings of a run, files looked at, and one sentence for each file that could not be."""

    findings: list[SourceFinding] = field(default_factory=list)
    sources: dict[str, SourceFile] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def settings_of(table: object, where: str) -> Settings:
    """Raises BadInput for a table that names unknown keys or codes."""
    if not isinstance(table, dict):
        raise BadInput(f"[tool.ampscope.preflight] of {where} is not a table.")
    known = {"ignore", "select", "exclude"}
    if unknown := sorted(set(table) - known):
        raise BadInput(
            f"[tool.ampscope.preflight] of {where} has no {unknown[0]!r}; it has "
            f"{', '.join(sorted(known))}."
        )
    for key, value in table.items():
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise BadInput(f"{key} in [tool.ampscope.preflight] of {where} is not a list of texts.")
    codes = {
        key: frozenset(find_code(text).code for text in table.get(key, ()))
        for key in ("ignore", "select")
    }
    return Settings(codes["ignore"], codes["select"], tuple(table.get("exclude", ())))


def check_paths(
    paths: Sequence[Path], settings: Settings, say: Callable[[str], None] | None = None
) -> Result:
    """Files are read or BadInput is raised; of a folder, what cannot be read is named in
    ``unread``. Raises BadInput where nothing could be read at all."""
    result = Result()
    for path in paths:
        if os.path.isdir(path):  # Path.is_dir raises below a folder that cannot be entered
            try:
                found = list(files_below(path, settings.exclude))
            except OSError as error:
                raise BadInput(f"Cannot read {error.filename}: {error.strerror}.") from error
            if not found:
                raise BadInput(f"There is no Python file in {path}.")
            for file in found:
                try:
                    _check_file(file, settings, result)
                except BadInput as error:
                    result.unread.append(str(error))
        else:
            _check_file(path, settings, result)
    if not result.sources:
        raise BadInput(result.unread[0])
    return result


def files_below(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    """Python files of a folder, hidden and installed ones left out, in order. Raises OSError
    where the folder itself cannot be read; one below it is skipped."""
    with os.scandir(folder):
        pass
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            f
            for f in folders
            if not f.startswith(".")
            and f not in _SKIPPED
            and not os.path.exists(Path(root, f, "pyvenv.cfg"))  # Path.exists may raise
        )
        for name in sorted(names):
            path = Path(root, name)
            shown = path.relative_to(folder).as_posix()
            if name.endswith(".py") and not any(
                fnmatch(shown, e) or fnmatch(shown, f"{e.rstrip('/')}/*") for e in exclude
            ):
                yield path


def _check_file(path: Path, settings: Settings, result: Result) -> None:
    source = read_source(path)
    if source.path in result.sources:
        return
    try:
        result.findings += check_source(source, settings)
    except Exception as error:  # a defect of a check; the other files are still looked at
        raise BadInput(
            f"{source.path} could not be checked: {type(error).__name__} in ampscope itself. "
            "Please report it; a folder's other files are checked without this one."
        ) from error
    result.sources[source.path] = source
    if source.is_cut:
        result.unread.append(
            f"{source.path} was looked at in part: all of it takes more work than its size allows."
        )


def check_source(source: SourceFile, settings: Settings | None = None) -> list[SourceFinding]:
    """The findings of one file, in the order of the text, without those suppressed. Where all would
    take more work than the file's size allows: those found until then, and ``source.is_cut``."""
    if not source.uses_torch:
        return []
    found: list[SourceFinding] = []
    with bounded_looks(source):
        try:
            found += _all_findings(source)
        except TooMuchWorkError:
            source.is_cut = True
    settings = settings or Settings()
    kept: dict[tuple[str, int], SourceFinding] = {}
    for f in sorted(found, key=lambda f: (f.line, f.column, f.code.code)):
        if settings.wants(f.code) and not source.is_ignored(f.code.code, f.line, f.end_line):
            kept.setdefault((f.code.code, f.line), f)
    return list(kept.values())


def _all_findings(source: SourceFile) -> Iterator[SourceFinding]:
    yield from spelling.check(source)
    roles = Roles(source)
    yield from protocol.check(source, roles)
    script = Script(source, roles)
    yield from half_parameters.check(script)
    yield from loss_scale.check(script)
    yield from evaluation.check(script)


def repaired(source: SourceFile, findings: Sequence[SourceFinding]) -> str:
    """The text with all safe repairs; of two that overlap the first alone. It parses, or nothing
    is changed."""
    text, done, out = source.text, 0, []
    edits = sorted({e for f in findings for e in f.edits}, key=lambda e: (e.start, e.end))
    for edit in edits:
        if edit.start < done:
            continue
        out += [text[done : edit.start], edit.new]
        done = edit.end
    changed = "".join([*out, text[done:]])
    try:
        ast.parse(changed)
    except SyntaxError:
        return text
    return changed


def difference(source: SourceFile, changed: str) -> str:
    """The repairs as a unified diff, as git writes it: an absolute path without its first slash."""
    path = source.path.lstrip("/")
    lines = difflib.unified_diff(
        source.text.splitlines(keepends=True),
        changed.splitlines(keepends=True),
        f"a/{path}",
        f"b/{path}",
    )
    end = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + end for line in lines)


def write_repaired(source: SourceFile, changed: str) -> None:
    """Write a file whole, with its own line ends. Raises BadInput when it cannot be written."""
    text = source.mark + changed.replace("\n", source.newline)
    try:
        write_whole(Path(source.path), text)
    except OSError as error:
        raise BadInput(f"Cannot write {source.path}: {error.strerror}.") from error
