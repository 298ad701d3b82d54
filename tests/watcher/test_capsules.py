"""Capsules of failing steps: what they keep, their limits, and that a replay is the step again."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ampscope
from ampscope.errors import BadInput
from ampscope.records import Role
from ampscope.watcher import capsule as capsule_file
from ampscope.watcher.capsule import _described
from ampscope.watcher.flight import Autocast, Forward, Randomness
from ampscope.watcher.packed_values import NotKept, first_not_kept, packed, unpacked
from tests.helpers.overflowing import overflow
from tests.helpers.watched import recorded, small_net, train_fp16, watching

LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5)
TREES = st.recursive(
    LEAVES | st.integers(0, 3).map(lambda n: torch.arange(n).float()),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), parts, max_size=3)
    ),
    max_leaves=12,
)


def same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and [*first] == [*second]
            and all(same(first[key], second[key]) for key in first)
        )
    if isinstance(first, list | tuple):
        return (
            type(first) is type(second)
            and len(first) == len(second)
            and all(map(same, first, second))
        )
    return type(first) is type(second) and first == second


@given(TREES)
@settings(max_examples=200)
def test_arguments_come_back_as_they_went_in(value: object) -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = json.loads(json.dumps(packed(value, "x", tensors)))
    assert same(unpacked(tree, tensors), value)


def test_the_file_holds_no_secret_among_the_texts(tmp_path: Path) -> None:
    kept = {"password": ["zqtail"], "token": "cls", "mode": "mean", "x": "user password=zqtail"}
    forward = Forward(
        "", "", (), kept, [], Autocast("cpu", None), Randomness(torch.zeros(8), None), True,
        {}, 1, {}, [],
    )  # fmt: skip
    tree: Any = _described(forward, 0, {})
    assert "zqtail" not in json.dumps(tree)
    read: Any = unpacked(tree["kwargs"], {})
    secret = NotKept("secret text")
    assert read == kept | {"password": [secret], "x": secret}
    assert first_not_kept(read) == "secret text"  # so no replay runs with another
    assert kept["password"] == ["zqtail"]


def test_what_cannot_be_kept_is_named() -> None:
    value = unpacked(packed({"a": [1, object()]}, "x", {}), {})
    assert value == {"a": [1, NotKept("object")]}
    assert first_not_kept(value) == "object"


@pytest.mark.parametrize(
    "tree",
    [
        {"dtype": "nn"},
        {"dtype": "ones"},
        {"device": "nowhere"},
        {"call": "os.system"},
        {"tensor": "absent"},
        {},
        {"tuple": [1]},
    ],
)
def test_a_forged_tree_is_refused(tree: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, RuntimeError)):
        unpacked(tree, {})


def test_a_planted_overflow_is_named_in_the_process(tmp_path: Path) -> None:
    run, model, outputs = overflow(tmp_path / "runs.db")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    result = run.replay()
    assert result.first is not None
    assert (result.where, result.first.module, result.first.op) == ("forward", "second", "aten.mm")
    assert result.first.fp32_finite is True
    assert result.first.fp32_max == pytest.approx(float(4096 * 64 * 6), rel=0.5)
    assert {s.role for s in result.shadows} >= {Role.ACTIVATION}
    # Without a trace: weights, buffers, gradients, generators.
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert torch.equal(generator, torch.get_rng_state())
    run.close()
    assert torch.isinf(outputs[2]).any()


def test_a_replay_computes_what_the_step_computed(tmp_path: Path) -> None:
    """Dropout's mask, BatchNorm's statistics and the gradients, to the last bit."""
    from ampscope.watcher.rerun import Rerun

    torch.manual_seed(1)
    model, store = small_net(), tmp_path / "runs.db"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, optimizer, store=store, policy="ignore") as run:
        for step in range(3):
            optimizer.zero_grad()
            output = model(torch.randn(16, 8))
            (output.square().mean() * (1e39 if step == 2 else 1.0)).backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            if step == 2:
                break
            optimizer.step()
        optimizer.step()
    capsule = capsule_file.load(run.capsules[0])
    fresh = small_net()
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            parameter.copy_(capsule.weights[name])
    rerun = Rerun(fresh, capsule.forwards[0], 1.0)
    with rerun.prepared():
        outputs, again = rerun.as_it_was()
    assert torch.equal(outputs[0], output.detach())
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again, gradients, strict=True)
    )


def test_a_fresh_process_names_the_same_op(tmp_path: Path) -> None:
    run, _, _ = overflow(tmp_path / "runs.db")
    run.close()
    (capsule,) = run.capsules
    model = tmp_path / "mine.py"
    model.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.helpers.overflowing import Overflowing\n\n\n"
        "def build():\n    return Overflowing()\n"
    )
    command = [sys.executable, "-m", "ampscope.cli.main", "replay", str(capsule)]
    done = subprocess.run(
        [*command, "--model", f"{model}:build", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["first"]["module"], found["first"]["op"]) == ("second", "aten.mm")
    assert found["about"]["step"] == 2
    text = subprocess.run(
        [*command, "--model", f"{model}:build"], capture_output=True, text=True, check=False
    )
    assert "First bad op: aten.mm in module 'second'" in text.stdout


def test_replay_at_once_is_an_event_of_the_step(tmp_path: Path) -> None:
    run, _, _ = overflow(tmp_path / "runs.db", replay=True)
    run.close()
    (event,) = recorded(run.store, run.id).of("replay")
    assert event.step == 2
    assert "'second'" in event.text


class Broken(torch.autograd.Function):
    """Divides by zero in its backward, and nowhere else."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient - gradient)


class Applies(nn.Module):
    """The function alone, or between two layers of its own."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8) if inner else nn.Identity()
        self.after = nn.Linear(8, 8) if inner else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(Broken.apply(self.before(x)))


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("around", [nn.Identity, nn.ReLU, nn.GELU])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_function_of_the_users_own_is_its_modules_fault(
    tmp_path: Path, inner: bool, around: type[nn.Module], dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    layers = {
        "first": nn.Linear(8, 8),
        "act": around(),
        "mid": Applies(inner),
        "last": nn.Linear(8, 1),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampscope.watch(model, optimizer, store=tmp_path / "runs.db", policy="ignore") as run:
        with torch.autocast("cpu", dtype or torch.float16, enabled=dtype is not None):
            loss = model(torch.randn(4, 8)).float().mean()
        loss.backward()
        optimizer.step()
    first = run.replay().first
    assert first is not None
    assert (first.module, first.phase, first.op) == ("mid", "backward", "aten.div")
    assert first.function == "Broken"
    assert "test_capsules.py" in first.line


def test_a_bad_loss_is_told_from_a_bad_model(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, store=tmp_path / "runs.db", policy="ignore", replay=True) as run:
        (model(torch.ones(1, 2)).mean() * float("inf")).backward()
        optimizer.step()
    (event,) = recorded(run.store, run.id).of("replay")
    assert "look at the loss" in event.text


def failed(
    tmp_path: Path, model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]
) -> tuple[ampscope.Watch, str]:
    """One bad step in fp32; the run and the replay's sentence."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, optimizer, store=tmp_path / "runs.db", policy="ignore") as run:
        loss_of(model).backward()
        optimizer.step()
    # Weights are not finite any more: the fresh process has those of the capsule.
    capsule = capsule_file.load(run.capsules[0])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(capsule.weights[name])
    return run, run.replay().text


def test_what_held_nan_before_the_step_is_named(tmp_path: Path) -> None:
    bad_batch = torch.full((4, 2), float("nan"))
    _, text = failed(tmp_path / "a", nn.Linear(2, 1), lambda m: m(bad_batch).mean())
    assert "input 0 held NaN" in text
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[1].weight[0, 0] = float("inf")
    _, text = failed(tmp_path / "b", model, lambda m: m(torch.ones(4, 2)).mean())
    assert "parameter '1.weight' held NaN" in text


def test_a_loss_that_overflows_by_itself_is_named_as_such(tmp_path: Path) -> None:
    run, text = failed(
        tmp_path, nn.Linear(2, 1), lambda m: (m(torch.ones(4, 2)) + 300).half().pow(2).mean()
    )
    assert "the loss function, which is not part of it" in text
    assert "The model was finite throughout" in text
    assert run.replay().where == "outside"


def test_gradients_that_somebody_broke_after_backward(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ampscope.watch(model, optimizer, store=tmp_path / "runs.db", policy="ignore") as run:
        model(torch.ones(4, 2)).mean().backward()
        model.weight.grad.div_(0)
        optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert "Look at what changes .grad" in run.replay().text


def test_flipped_bits_are_noticed(tmp_path: Path) -> None:
    run, _, _ = overflow(tmp_path / "runs.db")
    run.close()
    good = run.capsules[0].read_bytes()
    path, rng = tmp_path / "flipped.safetensors", np.random.default_rng(0)
    for place in rng.integers(0, len(good), 150):
        path.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
        with pytest.raises(BadInput, match=r"damaged|not a capsule"):
            capsule_file.load(path)


@pytest.mark.parametrize("key", ["checks", "forwards", "past", "about", "parameters"])
@pytest.mark.parametrize("value", [None, "text", 3, [], {}, [None], {"a": []}])
def test_a_forged_text_is_refused_or_harmless(tmp_path: Path, key: str, value: object) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    run, _, _ = overflow(tmp_path / "runs.db")
    run.close()
    with safe_open(run.capsules[0], framework="pt") as file:
        text = json.loads(file.metadata()["ampscope"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    text[key] = value
    del text["digest"]
    text["digest"] = capsule_file.digest(text, tensors)  # who forges can count as well
    path = tmp_path / "forged.safetensors"
    save_file(tensors, path, {"ampscope": json.dumps(text)})
    try:
        capsule = capsule_file.load(path)
    except BadInput:
        return
    assert isinstance(capsule.contents, str)


def forged(source: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The capsule ``source`` with another text, and the digest of that."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(source, framework="pt") as file:
        text = json.loads(file.metadata()["ampscope"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    change(text)
    del text["digest"]
    text["digest"] = capsule_file.digest(text, tensors)
    save_file(tensors, path, {"ampscope": json.dumps(text)})
    return path


FORGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "a scale that is a text": lambda text: text["past"][0].__setitem__(2, "x"),
    "a step that is a text": lambda text: text["past"][0].__setitem__(0, "x"),
    "a loss that is a list": lambda text: text["past"][0].__setitem__(1, []),
    "more steps than norms": lambda text: text["past"].append([7, 1.0, 1.0]),
    "more parameters than norms": lambda text: text["parameters"].append("x"),
    "a parameter that is a number": lambda text: text["parameters"].__setitem__(0, 1),
    "args that are a number": lambda text: text["forwards"][0].update(args=5),
    "forwards that are numbers": lambda text: text.update(forwards=[5]),
    "no checks": lambda text: text.pop("checks"),
}


@pytest.mark.parametrize("what", FORGED)
def test_what_is_wrong_in_a_capsule_is_said_without_words_of_python(
    tmp_path: Path, what: str
) -> None:
    run, _, _ = overflow(tmp_path / "runs.db")
    run.close()
    path = forged(run.capsules[0], tmp_path / "odd.safetensors", FORGED[what])
    with pytest.raises(BadInput, match="is not a capsule, or damaged") as refusal:
        capsule_file.load(path)
    assert not re.search(r"Error|attribute|object|subscript|unpack", str(refusal.value))


def replayed(capsule: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    model = folder / "mine.py"
    model.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.helpers.overflowing import Overflowing\n\n\n"
        "def build():\n    return Overflowing()\n"
    )
    command = [sys.executable, "-m", "ampscope.cli.main", "replay", str(capsule)]
    command += ["--model", f"{model}:build"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_escapes_in_a_capsule_do_not_reach_the_terminal(tmp_path: Path) -> None:
    run, _, _ = overflow(tmp_path / "runs.db")
    run.close()
    evil = "\x1b]0;owned\x07\x1b[31m\r\u202e"

    def change(text: dict[str, Any]) -> None:
        text["about"].update(run=evil, reason=evil, left_out=[evil])
        text["parameters"] = [evil for _ in text["parameters"]]

    done = replayed(forged(run.capsules[0], tmp_path / "evil.safetensors", change), tmp_path)
    assert done.returncode == 1, done.stderr
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(done.stdout + done.stderr)
    assert "\\x1b" in done.stdout


def test_a_forged_capsule_ends_with_one_sentence_and_status_2(tmp_path: Path) -> None:
    run, _, _ = overflow(tmp_path / "runs.db")
    run.close()

    def change(text: dict[str, Any]) -> None:
        text["forwards"][0]["args"] = {"tuple": [{"value": "\x1b[31mtext"}] * 3}

    done = replayed(forged(run.capsules[0], tmp_path / "odd.safetensors", change), tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ampscope: ")
    assert len(done.stderr.splitlines()) == 1
    assert "\x1b" not in done.stderr


def test_a_capsule_is_bounded_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "bomb.safetensors"
    for text in (b"[" * 7_000_000, b"{}," * 2_000_000, b"," * 7_000_000):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(BadInput, match="more than any capsule"):
            capsule_file.load(path)
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}" * 99)
    with pytest.raises(BadInput, match="beyond bounds"):
        capsule_file.load(path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(BadInput, match="no ordinary file"):
        capsule_file.load(tmp_path / "pipe.safetensors")


def test_a_tensor_is_unpacked_as_often_as_it_was_kept(tmp_path: Path) -> None:
    """By 400 arguments, each of which would get a gradient of its own."""
    run, _, _ = overflow(tmp_path / "runs.db")
    run.close()

    def change(text: dict[str, Any]) -> None:
        (kept,) = text["forwards"][0]["args"]["tuple"]
        again = [[f"a{n}", {"tensor": kept["tensor"], "grad": True}] for n in range(400)]
        text["forwards"][0]["kwargs"] = {"dict": again}

    path = forged(run.capsules[0], tmp_path / "again.safetensors", change)
    with pytest.raises(BadInput, match="unpacks to more than its size"):
        capsule_file.load(path)


def test_a_capsule_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        run, _, _ = overflow(tmp_path / "runs.db")
        run.close()
    finally:
        os.umask(before)
    (capsule,) = run.capsules
    assert stat.S_IMODE(capsule.stat().st_mode) == 0o600
    assert stat.S_IMODE(capsule.parent.stat().st_mode) == 0o700


def test_a_calibration_is_no_failure(tmp_path: Path) -> None:
    watched, ids = watching(tmp_path / "runs.db")
    train_fp16(10, watched, init_scale=2.0**17)
    run = recorded(tmp_path / "runs.db", ids[0])
    assert any(s.skipped for s in run.steps), "the scale was meant to be too high at first"
    assert run.of("capsule") == []


def test_limits_of_count_and_size(tmp_path: Path) -> None:
    limits = ampscope.CapsuleLimits(count=2)
    watched, ids = watching(tmp_path / "runs.db", capsules=limits, policy="ignore")
    train_fp16(12, watched, bad_at=(2, 4, 6, 8))
    events = recorded(tmp_path / "runs.db", ids[0]).of("capsule")
    assert [e.step for e in events] == [2, 4, 6, 8]
    kept = sorted(path.name for path in (tmp_path / "runs.db.capsules").iterdir())
    assert kept == [Path(events[0].path).name, Path(events[-1].path).name]
    small = ampscope.CapsuleLimits(mib=1e-3)
    watched, ids = watching(tmp_path / "small.db", capsules=small, policy="ignore")
    train_fp16(4, watched, bad_at=(2,))
    (path,) = (tmp_path / "small.db.capsules").iterdir()
    capsule = capsule_file.load(path)
    assert not capsule.weights
    assert "the weights" in capsule.contents
    assert sum(t.numel() for f in capsule.forwards for t in f.args) * 4 <= 1024


def test_no_capsules_when_none_are_wanted(tmp_path: Path) -> None:
    limits = ampscope.CapsuleLimits(count=0)
    watched, _ = watching(tmp_path / "runs.db", capsules=limits)
    train_fp16(4, watched, bad_at=(2,))
    assert not (tmp_path / "runs.db.capsules").exists()


def test_the_last_steps_norms_are_kept(tmp_path: Path) -> None:
    run, model, _ = overflow(tmp_path / "runs.db")
    run.close()
    capsule = capsule_file.load(run.capsules[0])
    assert [past.step for past in capsule.past] == [0, 1]
    assert capsule.parameters == tuple(name for name, _ in model.named_parameters())
    assert all(len(past.norms) == len(capsule.parameters) for past in capsule.past)


@pytest.mark.parametrize("content", [b"", b"not a capsule", b"\x10\0\0\0\0\0\0\0{}              "])
def test_a_file_that_is_no_capsule(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="not a capsule"):
        capsule_file.load(path)
    with pytest.raises(BadInput, match="no capsule at"):
        capsule_file.load(tmp_path / "absent.safetensors")


def test_another_model_is_refused(tmp_path: Path) -> None:
    from ampscope.watcher.replay_child import prepare

    run, _, _ = overflow(tmp_path / "runs.db")
    run.close()
    capsule = capsule_file.load(run.capsules[0])
    with pytest.raises(BadInput, match="another model"):
        prepare(capsule, {"model": nn.Linear(4, 4)})


def test_overwritten_inputs_are_left_out_and_said(tmp_path: Path) -> None:
    model, inputs = nn.Linear(2, 1), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, store=tmp_path / "runs.db", policy="ignore") as run:
        loss = model(inputs.requires_grad_(False)).mean() * float("nan")
        loss.backward()
        inputs.zero_()
        optimizer.step()
    (event,) = recorded(run.store, run.id).of("capsule")
    assert "overwritten" in event.text
    with pytest.raises(BadInput, match="no forward call"):
        run.replay()
