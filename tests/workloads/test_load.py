"""Loading what a person typed: names, files, modules, and one clear sentence for each failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from ampscope.errors import BadInput
from ampscope.workloads.load import load
from ampscope.workloads.protocol import iterate

GOOD = """\
import torch, random
import numpy as np
from torch import nn
from ampscope import Workload
noise = torch.randn(3)

def build(seed: int) -> Workload:
    draws = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    data = [torch.tensor(draws + noise.tolist())]
    return Workload(nn.Linear(6, 1), data, lambda m, b: m(b).sum(),
                    lambda params: torch.optim.SGD(params, lr=0.1))

def sized(size, seed=5):
    workload = build(seed)
    workload.model.note = (size, seed)
    return workload

anything = lambda **given: sized(**given)
number = 3
nothing = lambda seed: None
other = lambda seed: {"model": 1}
needs = lambda seed, path: None

def raises(seed):
    import math
    return math.sqrt(
        -1)

def deep(seed):
    return nn.Linear("four", 3)

def long(seed):
    raise RuntimeError("first line\\nsecond line " + "x " * 500)

def exits(seed):
    raise SystemExit(3)

def refused(seed):
    return Workload(None, [], print, print)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with user files; imports made by a test are forgotten after it."""
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "neighbour.py").write_text("WIDTH = 6\n")
    (tmp_path / "random.py").write_text(f"from neighbour import WIDTH\n{GOOD}")
    (tmp_path / "syntax.py").write_text("x = 1\ndef build(:\n")
    (tmp_path / "broken.py").write_text("x = 1\nimport no_such_thing\n")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "models.py").write_text(GOOD)
    (tmp_path / "notes.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("lab", "neighbour") or name.startswith("ampscope_workload_"):
            del sys.modules[name]


def test_a_builtin_name_is_built_with_its_size() -> None:
    workload = load("lenet", size="small", seed=3)
    assert workload.name == "lenet-small"
    assert sum(p.numel() for p in workload.model.parameters()) == 431_080


@pytest.mark.parametrize(
    ("spec", "name"),
    [("good.py", "good"), ("./good.py:build", "good"), ("lab.models", "lab.models")],
)
def test_a_users_workload_is_loaded_and_the_path_is_restored(
    folder: Path, spec: str, name: str
) -> None:
    before = list(sys.path)
    workload = load(spec)
    assert workload.name == name
    assert isinstance(workload.model, torch.nn.Linear)
    assert sys.path == before


def test_a_module_with_a_function_is_loaded(folder: Path) -> None:
    assert load("lab.models:sized", size="small", seed=9).model.note == ("small", 9)


@pytest.mark.parametrize("function", ["sized", "anything"])
def test_a_factory_gets_the_size_and_seed_that_it_takes(folder: Path, function: str) -> None:
    assert load(f"good.py:{function}", size="medium", seed=2).model.note == ("medium", 2)


def test_a_file_may_import_its_neighbour_and_shadows_no_module(folder: Path) -> None:
    import random

    load("random.py")
    assert sys.modules["random"] is random
    assert "neighbour" in sys.modules


def test_the_seed_reaches_torch_numpy_and_random(folder: Path) -> None:
    def numbers(seed: int) -> list[float]:
        workload = load("good.py", seed=seed)
        batch = next(islice(iterate(workload), 1))
        return [*batch.tolist(), *workload.model.weight.flatten().tolist()]

    assert numbers(1) == numbers(1)
    assert all(a != b for a, b in zip(numbers(1), numbers(2), strict=True))


def test_a_loss_factor_reaches_a_users_workload(folder: Path) -> None:
    plain, factored = load("good.py"), load("good.py", loss_factor=0.25)
    batch = next(iterate(plain))
    assert factored.loss(plain.model, batch) == 0.25 * plain.loss(plain.model, batch)


FAILURES = {
    "gptt": "There is no workload 'gptt'. Did you mean gpt? Built in are gpt, lenet, mlp, resnet, ",
    "zzz": "There is no workload 'zzz'. Built in are",
    "a b:c": "There is no workload 'a b:c'.",
    "": "There is no workload ''.",
    "missing.py": "The workload file missing.py does not exist (current folder: {folder}).",
    "no/where.py:build": "The workload file no/where.py does not exist",
    "notes.txt": "'notes.txt' is not a Python file.",
    "lab/models": "'lab/models' is not a Python file.",
    "neighbour.py": "{folder}/neighbour.py has no function 'build'. Define `def build(seed: int)",
    "good.py:absent": "{folder}/good.py has no function 'absent'.",
    "good.py:number": "'number' in {folder}/good.py is not a function but of type int.",
    "good.py:nothing": "'nothing' in {folder}/good.py must return an ampscope.Workload, but it "
    "returned None.",
    "good.py:other": "'other' in {folder}/good.py must return an ampscope.Workload, but it "
    "returned an object of type dict.",
    "good.py:needs": "'needs' in {folder}/good.py is called with `seed` (and with `size`, if it "
    "has such a parameter), which does not fit: missing a required argument: 'path'.",
    "good.py:raises": "'raises' in {folder}/good.py raised ValueError at line 26: ",
    "good.py:deep": "'deep' in {folder}/good.py raised TypeError at line 30: ",
    "good.py:long": "'long' in {folder}/good.py raised RuntimeError at line 33: first line second "
    "line x x x",
    "good.py:exits": "'exits' in {folder}/good.py ended the program at line 36 (exit status 3).",
    "good.py:refused": "'refused' in {folder}/good.py failed at line 39: `model` of the workload "
    "must be a torch.nn.Module, but it is None.",
    "syntax.py": "Importing {folder}/syntax.py raised SyntaxError at line 2: ",
    "broken.py": "Importing {folder}/broken.py raised ModuleNotFoundError at line 2: No module "
    "named 'no_such_thing'",
    "broken:build": "Importing broken raised ModuleNotFoundError at line 2 of {folder}/broken.py: ",
    "nowhere.models:build": "There is no module 'nowhere' to take the workload 'nowhere.models' ",
    "lab.other": "There is no module 'lab.other' to take the workload 'lab.other' from.",
}


@pytest.mark.parametrize("spec", FAILURES)
def test_each_failure_has_its_sentence(folder: Path, spec: str) -> None:
    before = list(sys.path)
    with pytest.raises(BadInput) as caught:
        load(spec)
    message = str(caught.value)
    assert message.startswith(FAILURES[spec].format(folder=folder.resolve()))
    assert "\n" not in message
    assert len(message) < 300 + 200  # the exception's own text is cut at 300
    assert sys.path == before


def test_a_folder_named_like_a_file_is_refused(folder: Path) -> None:
    (folder / "odd.py").mkdir()
    with pytest.raises(BadInput, match=r"The workload file odd\.py is a folder"):
        load("odd.py")


def test_the_users_own_exception_is_kept_as_the_cause(folder: Path) -> None:
    with pytest.raises(BadInput) as caught:
        load("good.py:raises")
    assert isinstance(caught.value.__cause__, ValueError)
