"""The import contracts of pyproject.toml cover rooms that they do not name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]


def contract(name: str) -> dict[str, list[str]]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = [c for c in config["contracts"] if c["id"] == name]
    return found


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    made = grimp.build_graph(
        "ampscope", "app", include_external_packages=True, exclude_type_checking_imports=True
    )
    for line in contract("running")["ignore_imports"]:
        importer, imported = line.split(" -> ")
        made.remove_import(importer=importer, imported=imported)
    return made


def test_a_room_that_is_not_named_never_loads_torch(graph: grimp.ImportGraph) -> None:
    """Not through other rooms either: whatever is not among torch's importers is torch-free."""
    named = set(contract("torch")["allowed_importers"])
    free = (graph.find_children("ampscope") | {"app"}) - named - {"ampscope.ext"}
    assert "ampscope.cli" in free
    loaded = {
        room: chains
        for room in free
        if (chains := graph.find_shortest_chains(importer=room, imported="torch"))
    }
    assert loaded == {}


def test_extensions_load_torch_where_it_is_named_alone(graph: grimp.ImportGraph) -> None:
    named = set(contract("torch")["allowed_importers"])
    for module in graph.find_descendants("ampscope.ext"):
        if any(f"{module}.".startswith(f"{name}.") for name in named):
            continue
        assert not graph.find_shortest_chain(importer=module, imported="torch"), module


def test_a_room_that_is_not_named_never_reaches_what_runs_a_training(
    graph: grimp.ImportGraph,
) -> None:
    """The contract forbids direct imports alone; as it names all that it protects as importers,
    no way leads there from any other room."""
    rule = contract("running")
    protected = rule["protected_modules"]
    assert set(rule["allowed_importers"]) <= {*protected, "app"}
    for room in graph.find_children("ampscope") - set(protected):
        for target in protected:
            assert not graph.find_shortest_chains(importer=room, imported=target)
