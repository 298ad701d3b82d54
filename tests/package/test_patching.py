"""One room patches: `ampscope.patches`. What replaces attributes of others by itself is named here
with the reason."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "ampscope"
WRITTEN_BY_USERS = ("zoo/scripts", "ext/lessons/scripts")
# File -> the attributes of imported modules and classes that it sets, and why it may.
MAY = {
    "capture/taps.py": ({"inductor.post_grad_custom_post_pass"}, "a setting: passes are in a list"),
    "cli/stopping.py": ({"sys.unraisablehook"}, "made to be set, until the process ends"),
    "ext/frameworks/paddle/plan.py": ({"sys.argv"}, "the script's own arguments"),
    "ext/frameworks/script.py": ({"sys.argv"}, "the script's own arguments"),
    "measure/matmuls.py": ({"torch.backends.cuda.matmul.fp32_precision"}, "a setting, put back"),
    "measure/rates.py": ({"torch.backends.cudnn.conv.fp32_precision"}, "a setting, put back"),
    "runner/private_files.py": ({"tempfile.tempdir"}, "a setting, until the process ends"),
    "runner/script_main.py": ({"sys.argv", "dynamo.config.disable"}, "arguments; a setting"),
    "runner/script_ranks.py": ({"sys.argv"}, "the script's own arguments"),
    "runner/step_clock.py": ({"sys.argv"}, "the script's own arguments"),
}


def patched(text: str) -> set[str]:
    """Attributes of imported modules and classes that are set: ``os._exit``; ``?.name`` where
    ``setattr`` sets a computed name of something that is called an owner."""
    tree = ast.parse(text)
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):  # ``module: Any = late_import("…")``
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "late_import":
            imported |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {"Any"}
    found = set()
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and root(target) in imported:
                found.add(ast.unparse(target))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            owner, name = node.args[0], node.args[1]
            if root(owner) in imported or ast.unparse(owner).endswith("owner"):
                found.add(f"{ast.unparse(owner)}.{{{ast.unparse(name)}}}")
    return found


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_patches_alone_replaces_attributes_of_others() -> None:
    found = {}
    for path in CORE.rglob("*.py"):
        name = str(path.relative_to(CORE))
        if name != "patches.py" and not name.startswith(WRITTEN_BY_USERS):
            found[name] = patched(path.read_text())
    assert {name: attributes for name, attributes in found.items() if attributes} == {
        name: set(attributes) for name, (attributes, _) in MAY.items()
    }
