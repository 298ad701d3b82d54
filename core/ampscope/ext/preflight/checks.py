"""Preflight of files: every check, messages, repairs, suppression.

:func:`check_source` gives the findings of one file, :func:`check_paths` those of files and folders.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from ampscope.causes import Code
from ampscope.errors import BadInput
from ampscope.ext.preflight import precision, protocol, spelling
from ampscope.ext.preflight.codes import CODES, find_code
from ampscope.ext.preflight.protocol import Fault
from ampscope.ext.preflight.roles import Roles
from ampscope.ext.preflight.source import (
    Source,
    TooMuchWorkError,
    argument,
    bounded_looks,
    dotted,
    read_source,
)
from ampscope.ext.preflight.spelling import Edit
from ampscope.files import write_whole

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}

# What the protocol's faults are reported as, and their sentence.
_FAULTS: dict[str, tuple[str, str]] = {
    "clip_before_unscale": (
        "clip_before_unscale",
        "Gradients are clipped while they still carry the loss scale: {scaler}.unscale_ is not "
        "called between backward and here.",
    ),
    "unscaled_twice": (
        "scaler_protocol_error",
        "{scaler}.unscale_({optimizer}) is called a second time before {scaler}.update(): it "
        "raises RuntimeError.",
    ),
    "unscaled_after_step": (
        "scaler_protocol_error",
        "{scaler}.unscale_({optimizer}) is called after {scaler}.step({optimizer}) and before "
        "{scaler}.update(): it raises RuntimeError.",
    ),
    "stepped_twice": (
        "scaler_protocol_error",
        "{scaler}.step({optimizer}) is called a second time before {scaler}.update(): it raises "
        "RuntimeError.",
    ),
    "update_without_step": (
        "scaler_protocol_error",
        "{scaler}.update() is called before {scaler}.step since the last backward or update.",
    ),
    "never_updated": (
        "scaler_protocol_error",
        "{scaler}.step({optimizer}) is called and {scaler}.update() nowhere in the file: the scale "
        "never changes, and the next unscale_ or step raises RuntimeError.",
    ),
    "never_scaled": (
        "scaler_protocol_error",
        "{scaler}.step({optimizer}) is called and {scaler}.scale(loss) nowhere in the file: step "
        "divides gradients by a scale that they were never multiplied by.",
    ),
    "unscaled_backward": (
        "scaler_bypassed",
        "backward starts from a loss without the scale, and {scaler}.step({optimizer}) divides "
        "its gradients by the scale.",
    ),
    "optimizer_stepped": (
        "scaler_bypassed",
        "{optimizer}.step() applies gradients that still carry the loss scale; {scaler}.step is "
        "bypassed.",
    ),
    "optimizer_stepped_too": (
        "scaler_bypassed",
        "{optimizer}.step() is called after {scaler}.step({optimizer}): the optimizer steps "
        "twice, also where the scaler skipped.",
    ),
    "scaled_onto_unscaled": (
        "accumulation_scale_mismatch",
        "A scaled loss is sent backward onto gradients that were unscaled and not stepped: the "
        "sum mixes two scales.",
    ),
    "update_between": (
        "shared_scaler_interference",
        "{scaler}.update() is called between the steps of two optimizers of one iteration; each "
        "overflow of one changes the scale of the other.",
    ),
}
_TRAITS: dict[str, str] = {
    "unsafe_op_under_autocast": "{0} is called inside autocast: CUDA's autocast raises "
    "RuntimeError on it.",
    "gradient_underflow": "The loss of an fp16 autocast region is sent backward without a "
    "GradScaler: gradients below 6e-8 become zero.",
    "fp16_params_with_scaler": "{0} is cast to fp16 and its optimizer is stepped by a "
    "GradScaler: unscale_ raises ValueError on fp16 gradients.",
    "optimizer_state_range": "{0} keeps its state in the half precision of the parameters: {1}.",
    "mask_constant_overflow": "{0} does not fit into fp16, which ends at 65,504.",
    "norm_eps_underflow": "The epsilon {0} rounds to zero in fp16.",
    "scaler_for_bf16": "A GradScaler is enabled, and every autocast region is bfloat16, which "
    "needs no loss scale.",
    "scaler_never_enabled": "The scaler is never enabled: the precision is compared with {0!r} "
    "and can only be {1}.",
    "scaler_state_lost": "The checkpoint {0} the optimizer's state and not that of {1}: after a "
    "resume the loss scale starts anew.",
    "scaled_gradient_penalty": "The penalty's gradients still carry the loss scale, so its value "
    "depends on the scale.",
    "evaluation_outside_autocast": "{0} is trained inside autocast and evaluated here outside.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One place, with the sentence about it. Lines and columns count from 1; ``edits`` are a
    safe repair, or empty."""

    code: Code
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    message: str
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """``[tool.ampscope.preflight]`` of a pyproject.toml: codes to ignore, codes to report alone,
    glob patterns of paths to leave out."""

    ignore: frozenset[str] = frozenset()
    select: frozenset[str] = frozenset()
    exclude: tuple[str, ...] = ()

    def wants(self, code: Code) -> bool:
        return code.code not in self.ignore and (not self.select or code.code in self.select)


@dataclass(slots=True)
class Result:
    """Findings of a run, files looked at, and one sentence for each file that could not be."""

    findings: list[Finding] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
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


# ---- one file


def check_source(source: Source, settings: Settings | None = None) -> list[Finding]:
    """The findings of one file, in the order of the text, without those suppressed. Where all would
    take more work than the file's size allows: those found until then, and ``source.is_cut``."""
    if not source.uses_torch:
        return []
    found: list[Finding] = []
    with bounded_looks(source):
        try:
            found += _all_findings(source)
        except TooMuchWorkError:
            source.is_cut = True
    settings = settings or Settings()
    kept: dict[tuple[str, int], Finding] = {}
    for f in sorted(found, key=lambda f: (f.line, f.column, f.code.code)):
        if settings.wants(f.code) and not source.is_ignored(f.code.code, f.line, f.end_line):
            kept.setdefault((f.code.code, f.line), f)
    return list(kept.values())


def _all_findings(source: Source) -> Iterator[Finding]:
    for old in spelling.old_spellings(source):
        message = f"{old.old} is deprecated; write {old.new}."
        yield _finding(source, CODES["deprecated_spelling"], old.node, message, old.edits)
    roles = Roles(source)
    yield from _from_protocol(source, roles)
    for trait in precision.check(source, roles):
        yield _finding(
            source, CODES[trait.kind], trait.node, _sentence(trait), _repair(source, trait)
        )


_STATE_LOST = {  # instead of the sentence of scaler_state_lost
    "elsewhere": "The scaler's state is loaded into {1}, and {2} is the one that scales.",
    "again": "{2} is replaced by a new scaler where the state of {1} is loaded, and its own state "
    "is not loaded: the loss scale starts from its initial value.",
}


def _sentence(trait: precision.Trait) -> str:
    if trait.kind == "scaler_state_lost" and trait.words[0] in _STATE_LOST:
        return _STATE_LOST[trait.words[0]].format(*trait.words)
    return _TRAITS[trait.kind].format(*trait.words)


def _from_protocol(source: Source, roles: Roles) -> Iterator[Finding]:
    faults = protocol.check(source, roles)
    raising = {
        id(source.function(f.node)) for f in faults if f.kind in ("unscaled_twice", "stepped_twice")
    }
    for fault in faults:
        if fault.kind == "scaled_onto_unscaled" and id(source.function(fault.node)) in raising:
            continue  # one and the same mistake, which raises before it can mix anything
        name, sentence = _FAULTS[fault.kind]
        scaler = fault.scaler or min(roles.scalers, default="scaler")
        message = sentence.format(scaler=scaler, optimizer=fault.optimizer or "optimizer")
        yield _finding(
            source, CODES[name], fault.node, message, _protocol_repair(source, roles, fault)
        )


def _finding(
    source: Source, code: Code, node: ast.AST, message: str, edits: Sequence[Edit] = ()
) -> Finding:
    line, end = node.lineno, node.end_lineno  # type: ignore[attr-defined]
    return Finding(
        code, source.path, line, source.column(line, node.col_offset),  # type: ignore[attr-defined]
        end, source.column(end, node.end_col_offset), message, tuple(edits),  # type: ignore[attr-defined]
    )  # fmt: skip


# ---- repairs


def _protocol_repair(source: Source, roles: Roles, fault: Fault) -> tuple[Edit, ...]:
    """A repair that changes nothing but the fault, where there is one."""
    statement = source.statement(fault.node)
    if not source.alone_on_its_lines(statement):
        return ()
    function = source.function(fault.node)
    near = [
        (owner, call)
        for owner, call in roles.by_method["unscale_"]
        if source.function(call) is function
    ]
    if fault.kind == "clip_before_unscale":
        return _unscale_before(source, roles, fault, statement, bool(near))
    if fault.kind in ("unscaled_twice", "stepped_twice"):
        block = source.block(statement)
        at = block.index(statement)
        text = source.segment(statement)
        twins = [s for s in block[:at] if source.segment(s) == text]
        if isinstance(statement, ast.Expr) and statement.value is fault.node and twins:
            return (_deleted(source, statement),)
    if fault.kind == "optimizer_stepped_too" and isinstance(statement, ast.Expr):
        block = source.block(statement)
        if len(block) > 1 and statement.value is fault.node:
            return (_deleted(source, statement),)
    return ()


def _unscale_before(
    source: Source, roles: Roles, fault: Fault, statement: ast.stmt, already: bool
) -> tuple[Edit, ...]:
    function = source.function(fault.node)
    steps = [
        (owner, dotted(call.args[0]))
        for owner, call in roles.by_method["step"]
        if owner in roles.scalers and call.args and source.function(call) is function
    ]
    block = source.block(statement)
    if already or len(set(steps)) != 1 or not steps[0][1]:
        return ()
    # The clip and the step have to run together, or unscale_ would run in every micro-batch.
    stepped = any(
        isinstance(s, ast.Expr) and source.segment(s) == f"{steps[0][0]}.step({steps[0][1]})"
        for s in block
    )
    if not stepped:
        return ()
    owner, optimizer = steps[0]
    at = source.line_start(statement.lineno)
    return (Edit(at, at, f"{source.indent(statement)}{owner}.unscale_({optimizer})\n"),)


def _deleted(source: Source, statement: ast.stmt) -> Edit:
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    end = (
        min(source.line_start(last + 1), len(source.text))
        if last < len(source.text.split("\n"))
        else len(source.text)
    )
    return Edit(source.line_start(first), end, "")


def _repair(source: Source, trait: precision.Trait) -> tuple[Edit, ...]:
    if trait.kind == "mask_constant_overflow" and isinstance(trait.node, ast.Call):
        call = trait.node
        if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("masked_fill"):
            name, value = call.func.value, argument(call, 1, "value")
            if (
                isinstance(name, ast.Name)
                and value is not None
                and source.imports.get("torch") == "torch"
            ):
                end = "min" if trait.words[0].startswith("-") else "max"
                new = f"torch.finfo({name.id}.dtype).{end}"
                return (Edit(source.start(value), source.end(value), new),)
    return ()


def repaired(source: Source, findings: Sequence[Finding]) -> str:
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


def difference(source: Source, changed: str) -> str:
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


def write_repaired(source: Source, changed: str) -> None:
    """Write a file whole, with its own line ends. Raises BadInput when it cannot be written."""
    text = source.mark + changed.replace("\n", source.newline)
    try:
        write_whole(Path(source.path), text)
    except OSError as error:
        raise BadInput(f"Cannot write {source.path}: {error.strerror}.") from error


# ---- files and folders


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
