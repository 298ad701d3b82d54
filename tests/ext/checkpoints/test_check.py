"""`ampscope check` against torch's and NumPy's own numbers, and on damaged files."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from ampscope.cli.main import main
from ampscope.errors import BadInput
from ampscope.ext.checkpoints import child as checkpoint_child
from ampscope.ext.checkpoints import counting
from ampscope.ext.checkpoints.check import check_checkpoint
from ampscope.ext.checkpoints.child import read
from ampscope.ext.checkpoints.files import safetensors
from ampscope.ext.checkpoints.torch_files import TorchFiles


@pytest.fixture(autouse=True)
def _in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch files are opened here, as this process has torch already, but for one test's."""
    if "child" not in request.node.name:
        ask = staticmethod(read)
        monkeypatch.setattr(TorchFiles, "ask", ask)


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_count_is_that_of_torch(dtype: str) -> None:
    """Random bits, and the bits next to every limit."""
    kind = counting.FLOATS[dtype][1]
    width = 8 * np.dtype(kind).itemsize
    bits = np.random.default_rng(0).integers(0, 1 << width, 40_000, dtype=kind, endpoint=False)
    limits = counting.bits_of(dtype)
    near = [int(x) + d for x in limits[:9] for d in (-1, 0, 1) if 0 <= int(x) + d < 1 << width]
    bits = np.concatenate([bits, np.array(near, kind)])
    found = np.zeros(counting.LENGTH, np.uint64)
    counting.count(bits, limits, found)
    signed = torch.from_numpy(bits.view(f"i{width // 8}"))
    values = signed.view(DTYPES[dtype])
    wide = values.double()
    half = torch.from_numpy(_to_half(wide.numpy()))
    finite = wide.isfinite()
    least = torch.finfo(DTYPES[dtype]).smallest_normal
    expected = [
        wide.isnan(), wide == torch.inf, wide == -torch.inf, wide == 0,
        (wide != 0) & (wide.abs() < least), wide < 0, finite & ~half.isfinite(),
        finite & (wide != 0) & (half == 0), (half != 0) & (half.abs() < 2.0**-14),
    ]  # fmt: skip
    assert found[: counting.LARGEST].tolist() == [int(e.sum()) for e in expected]


def _to_half(wide: Any) -> Any:
    with np.errstate(all="ignore"):
        return wide.astype(np.float16).astype(np.float64)


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 16)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _state(trained: tuple[nn.Module, torch.optim.Optimizer]) -> dict[str, Any]:
    model, optimizer = trained
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    return {
        "model": weights,
        "ema": {k: v * 1.5 if v.is_floating_point() else v for k, v in weights.items()},
        "optimizer": {
            "state": {i: {k: v.clone() for k, v in s.items()}
                      for i, s in optimizer.state_dict()["state"].items()},
            "param_groups": optimizer.state_dict()["param_groups"],
        },
    }  # fmt: skip


def test_a_healthy_torch_file_is_clean(
    trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    path = tmp_path / "ok.pt"
    torch.save(_state(trained), path)
    found = check_checkpoint(path)
    assert found.findings == []
    assert {(r.kind, r.dtype): r.tensors for r in found.dtypes()} == {
        ("ema", "F32"): 6, ("ema", "I64"): 1, ("model", "F32"): 6, ("model", "I64"): 1,
        ("optimizer", "F32"): 12,
    }  # fmt: skip
    assert {a.weight.removeprefix("model.") for a in found.averages} == {
        k for k, v in trained[0].state_dict().items() if v.is_floating_point()
    }
    away = [a.relative_distance for a in found.averages if a.relative_distance is not None]
    assert away == pytest.approx([0.5] * len(away))


def test_a_child_reads_a_torch_file(tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([torch.nan])}, tmp_path / "a.pt")
    found = CliRunner().invoke(main, ["check", str(tmp_path / "a.pt")])
    assert (found.exit_code, "nan: a (model, fp32, 1)" in found.output) == (1, True)


def _poison(code: str, state: dict[str, Any]) -> None:
    moments = state["optimizer"]["state"][0]
    match code:
        case "nan":
            state["model"]["0.weight"] = state["model"]["0.weight"].t()
            state["model"]["0.weight"][3, 4] = torch.nan
        case "inf":
            state["model"]["1.running_var"][0] = torch.inf
        case "ema_poisoned":
            state["ema"]["0.bias"][1] = torch.nan
        case "negative_moment":
            moments["exp_avg_sq"][0, 0] = -1e-9
        case "vanished_moment":
            moments["exp_avg_sq"] = torch.full_like(moments["exp_avg_sq"], 1e-9).half()
            moments["exp_avg"].fill_(1e-4)
        case "frozen_moment":
            moments["exp_avg_sq"] = moments["exp_avg_sq"].bfloat16()


@pytest.mark.parametrize(
    "code", ["nan", "inf", "ema_poisoned", "negative_moment", "vanished_moment", "frozen_moment"]
)
def test_what_is_poisoned_is_named(
    code: str, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    state = _state(trained)
    _poison(code, state)
    torch.save(state, tmp_path / "bad.pt")
    found = check_checkpoint(tmp_path / "bad.pt")
    expected = {"nan", code} if code == "ema_poisoned" else {code}
    assert {f.code for f in found.findings} == expected


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_numbers_are_looked_at(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor(
        [1, complex(0, float("nan")), 1, complex(float("inf"), 1), 1], dtype=dtype
    )
    torch.save({"a": values}, tmp_path / "x.pt")
    found = check_checkpoint(tmp_path / "x.pt")
    assert [(f.code, f.count) for f in found.findings] == [("nan", 1), ("inf", 1)]
    assert "1 of 10 real and imaginary parts" in found.findings[0].text


def _big_endian(content: bytes) -> bytes:
    return np.frombuffer(content, "<f4").astype(">f4").tobytes()


def test_an_archive_of_a_big_endian_machine_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.tensor([torch.nan, 65_536.0, 1.0, -2.0])}, path)
    _rewritten(path, "data/0", _big_endian)
    _rewritten(path, "byteorder", lambda _: b"big")
    before = path.read_bytes()
    assert torch.load(path)["w"][1:].tolist() == [65_536.0, 1.0, -2.0]
    found = check_checkpoint(path)
    t = found.tensors[0]
    assert (t.nan, t.fp16_overflow, t.negative, t.subnormal) == (1, 1, 1, 0)
    assert [f.code for f in found.findings] == ["nan"]
    assert path.read_bytes() == before


def test_a_transposed_view_of_a_big_endian_machine_is_written_aside_beside_its_storage(
    tmp_path: Path,
) -> None:
    weight = torch.arange(40_000.0).reshape(200, 200)
    weight[3, 4] = torch.nan
    torch.save({"w": weight, "t": weight.t()}, tmp_path / "a.pt")
    _rewritten(tmp_path / "a.pt", "data/0", _big_endian)
    _rewritten(tmp_path / "a.pt", "byteorder", lambda _: b"big")
    found = check_checkpoint(tmp_path / "a.pt")
    assert {f.code for f in found.findings} == {"nan"}
    assert [(t.name, t.nan) for t in found.tensors] == [("w", 1), ("t", 1)]


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.tensor([torch.nan, 1.0])}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert [f.code for f in check_checkpoint(tmp_path / "a.pt").findings] == ["nan"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e8m0fnu])
def test_a_format_that_is_not_read_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(5).to(dtype)}, tmp_path / "x.pt")
    assert "a: not looked at, for" in check_checkpoint(tmp_path / "x.pt").left_out[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps({"a": 1}), "a pickle that torch.save did not write"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", "git lfs pull"),
    ],
    ids=["pickle", "lfs"],
)
def test_what_only_looks_like_a_checkpoint_is_named(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=words):
        check_checkpoint(path)


def test_rows_that_fp16_overflows_are_findings_where_that_is_meant(tmp_path: Path) -> None:
    weight = torch.ones(6, 5)
    weight[1, 2], weight[4] = 65520.0, -1e9  # the first number that rounds to infinity
    weight[2, 2] = 65519.0
    save_file({"w": weight}, tmp_path / "w.safetensors")
    plain = check_checkpoint(tmp_path / "w.safetensors")
    assert plain.findings == []
    assert plain.tensors[0].overflowing_rows == 2
    (found,) = check_checkpoint(tmp_path / "w.safetensors", "fp16").findings
    assert (found.code, found.count) == ("fp16_overflow", 6)
    assert "2 of 6 output channels" in found.text


def test_shards_and_folders(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "m-1.safetensors")
    save_file({"b": torch.tensor([torch.nan])}, tmp_path / "m-2.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    table = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    index.write_text(json.dumps({"weight_map": table}))
    torch.save(nn.Linear(1, 1), tmp_path / "training_args.bin")  # as a trainer leaves one
    for path in (index, tmp_path):
        found = check_checkpoint(path)
        assert [t.name for t in found.tensors] == ["a", "b"]
        assert [f.tensor for f in found.findings] == ["b"]
    assert len(check_checkpoint(tmp_path).left_out) == 1
    for shard, words in (("../m-1.safetensors", "outside"), ("m-3.safetensors", "missing"),
                         ("m-1.safetensors", "does not hold 'b'")):  # fmt: skip
        index.write_text(json.dumps({"weight_map": table | {"b": shard}}))
        with pytest.raises(BadInput, match=words):
            check_checkpoint(index)


@pytest.mark.parametrize("code", ["negative_moment", "ema_poisoned", "vanished_moment"])
def test_epochs_of_one_folder_are_told_apart(
    code: str, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Each is judged by its own tensors, and a finding names the file."""
    state = _state(trained)
    for name in ("1.pt", "3.pt"):
        torch.save(state, tmp_path / name)
    assert check_checkpoint(tmp_path).findings == []
    _poison(code, state)
    torch.save(state, tmp_path / "2.pt")
    of_file = [f for f in check_checkpoint(tmp_path / "2.pt").findings if f.code == code]
    of_folder = [f for f in check_checkpoint(tmp_path).findings if f.code == code]
    assert [f"2.pt: {f.tensor}" for f in of_file] == [f.tensor for f in of_folder] != []


def test_moments_of_two_epochs_are_not_paired(
    trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    """A second moment that is zero in one epoch, beside a first moment of another one."""
    state = _state(trained)
    moments = next(iter(state["optimizer"]["state"].values()))
    moments["exp_avg_sq"] = torch.zeros_like(moments["exp_avg_sq"])
    moments["exp_avg"] = torch.zeros_like(moments["exp_avg"])
    torch.save(state, tmp_path / "1.pt")
    moments["exp_avg_sq"] = torch.ones_like(moments["exp_avg_sq"])
    moments["exp_avg"] = torch.ones_like(moments["exp_avg"])
    torch.save(state, tmp_path / "2.pt")
    assert check_checkpoint(tmp_path).findings == []


def test_a_broken_file_of_a_folder_hides_no_other(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([torch.nan])}, tmp_path / "1.pt")
    torch.save({"w": torch.ones(99)}, tmp_path / "2.pt")
    _cut(tmp_path / "2.pt")
    (tmp_path / "m.index.json").write_text('{"weight_map": {"w": "gone.safetensors"}}')
    found = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert found.exit_code == 2
    assert "nan: w (model, fp32, 1): 1 of 1 elements" in found.output
    assert "2.pt is no whole torch file" in found.output
    assert "gone.safetensors, which is missing" in found.output
    (tmp_path / "1.pt").unlink()
    torch.save({"w": torch.ones(1)}, tmp_path / "1.pt")
    found = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert found.exit_code == 2
    assert "clean" not in found.output


def test_a_newline_in_a_name_ends_no_sentence(tmp_path: Path) -> None:
    (tmp_path / "a\nampscope: clean.pt").write_bytes(b"x")
    found = CliRunner().invoke(main, ["check", str(tmp_path / "a\nampscope: clean.pt")])
    assert (found.exit_code, found.output.count("\n")) == (2, 1)


def test_an_index_of_indices_is_refused(tmp_path: Path) -> None:
    """One that names itself, and two that name each other; what lies beside them is looked at."""
    for name, shard in (("a", "a"), ("b", "c"), ("c", "b")):
        index = {"weight_map": {"w": f"{shard}.index.json"}}
        (tmp_path / f"{name}.index.json").write_text(json.dumps(index))
    alone = CliRunner().invoke(main, ["check", str(tmp_path / "a.index.json")])
    assert (alone.exit_code, alone.output.count("\n")) == (2, 1)
    assert "a.index.json names the shard a.index.json, which is an index itself" in alone.output
    save_file({"w": torch.tensor([torch.nan])}, tmp_path / "m.safetensors")
    found = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert (found.exit_code, found.output.count("is an index itself")) == (2, 3)
    assert "nan: w (model, fp32, 1)" in found.output


def _compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"0" * 100_000)


BAD: dict[str, Callable[[Path], object]] = {
    "empty": lambda p: p.write_bytes(b""),
    "garbage": lambda p: p.write_bytes(random.Random(0).randbytes(100_000)),
    "cut_archive": lambda p: (torch.save({"a": torch.ones(99)}, p), _cut(p)),
    "compressed_archive": _compressed,
    "foreign_archive": lambda p: zipfile.ZipFile(p, "w").close() or p.write_bytes(b"PK\3\4"),
    "code": lambda p: torch.save(nn.Linear(1, 1), p),
    "old_code": lambda p: torch.save(nn.Linear(1, 1), p, _use_new_zipfile_serialization=False),
    "cut_pickle": lambda p: p.write_bytes(b"\x80\x02}q\x00"),
    "folder": lambda p: p.mkdir(),
    "pipe": lambda p: os.mkfifo(p),
    "device": lambda p: p.symlink_to("/dev/zero"),
    "script": lambda p: p.write_text("import torch\n"),
    "safetensors_cut": lambda p: (save_file({"a": torch.ones(999)}, p), _cut(p)),
    "pickle": lambda p: p.write_bytes(pickle.dumps({"a": 1, "b": [print]})),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_status_2(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    BAD[name](path)
    found = CliRunner().invoke(main, ["check", str(path)])
    assert found.exit_code == 2, found.output
    assert found.output.count("\n") == 1
    assert "Traceback" not in found.output
    assert str(path) in found.output


# Where not everything was looked at.


def _with_attribute(value: Any, attribute: object) -> Any:
    value.extra = attribute
    return value


def _deep(value: Any) -> Any:
    for _ in range(70):
        value = [value]
    return value


BAD_TENSOR = torch.full((3,), torch.nan)
PASSED_OVER: dict[str, tuple[object, str]] = {
    "a storage": (BAD_TENSOR.untyped_storage(), "x: a storage without a tensor."),
    "a typed storage": (
        torch.TypedStorage(
            wrap_storage=BAD_TENSOR.untyped_storage(), dtype=torch.float32, _internal=True
        ),
        "x: a storage without a tensor.",
    ),
    "meta": ([torch.empty(2**40, device="meta")] * 3, "x.0 and 2 more: on the device meta"),
    "a number": ({"loss": float("nan")}, "x.loss: nan is no tensor's"),
    "numbers": ([float("inf"), 1.0, float("inf")], "x.0 and 1 more: inf is no tensor's"),
    "a complex number": (complex(0, float("inf")), "x: infj is no tensor's"),
    "too deep": (_deep(BAD_TENSOR), "more than 64 deep"),
}


@pytest.mark.parametrize("what", PASSED_OVER)
def test_what_was_not_looked_at_is_named_and_not_called_clean(what: str, tmp_path: Path) -> None:
    value, said = PASSED_OVER[what]
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2), "x": value}, path)
    found = CliRunner().invoke(main, ["check", str(path)])
    assert (found.exit_code, "clean" in found.output) == (0, False)
    assert f"left out: {path}: " in found.output
    assert said in found.output
    torch.save({"x": value}, path)
    alone = CliRunner().invoke(main, ["check", str(path)])
    assert (alone.exit_code, "holds no tensor" in alone.output) == (2, True)
    assert said in alone.output


def test_a_file_without_tensors_is_not_clean(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors")
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    for path in tmp_path.iterdir():
        found = CliRunner().invoke(main, ["check", str(path)])
        assert (found.exit_code, found.output.count("\n")) == (2, 1)
        assert f"{path} holds no tensor: nothing to look at." in found.output


def _quantized(scale: float) -> Any:
    return torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.qint8)


def _per_channel(*scales: float) -> Any:
    zeros = torch.zeros(len(scales), dtype=torch.long)
    ones = torch.ones(len(scales), 2)
    return torch.quantize_per_channel(ones, torch.tensor(scales), zeros, 0, torch.qint8)


HIDDEN: dict[str, tuple[Callable[[], object], str]] = {
    "attribute of a tensor": (lambda: _with_attribute(torch.ones(1), BAD_TENSOR), "x.extra"),
    "attribute of a parameter": (
        lambda: _with_attribute(nn.Parameter(torch.ones(1)), {"a": [BAD_TENSOR]}), "x.extra.a.0"),
    "attribute of an OrderedDict": (
        lambda: _with_attribute(OrderedDict(w=torch.ones(1)), BAD_TENSOR), "x.extra"),
    "key": (lambda: {BAD_TENSOR: 1}, "x.a key"),
    "part of a key": (lambda: {(1, BAD_TENSOR): 1}, "x.a key.1"),
    "set": (lambda: {BAD_TENSOR}, "x.0"),
    "scale": (lambda: _quantized(float("inf")), "x.scale"),
    "scale of a channel": (lambda: _per_channel(1.0, float("inf")), "x.scale"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("where", HIDDEN)
def test_a_tensor_is_found_wherever_torch_saves_it(where: str, tmp_path: Path) -> None:
    made, name = HIDDEN[where]
    torch.save({"w": torch.ones(2), "x": made()}, tmp_path / "x.pt")
    found = check_checkpoint(tmp_path / "x.pt")
    assert [f.tensor for f in found.findings] == [name]
    assert found.left_out == []


# Files that ask for more than their size.


def _nested(path: Path, made: Callable[[Any], Any], times: int) -> None:
    value: Any = [torch.ones(1)]
    for _ in range(times):
        value = made(value)
    torch.save(value, path)


def _within_itself(path: Path) -> None:
    value: list[Any] = [torch.ones(1)]
    value += [value, value, {"again": value}]
    torch.save(value, path)


def _rewritten(path: Path, part: str, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, change(content) if name.endswith(part) else content)


def _claiming(path: Path) -> None:
    """127 elements of a storage of 10."""
    torch.save({"a": torch.ones(127), "b": torch.full((127,), torch.nan)}, path)
    _rewritten(path, "data/0", lambda content: content[:40])


def _pickled(path: Path, pickled: bytes) -> None:
    torch.save({}, path)
    _rewritten(path, "data.pkl", lambda _: pickled)


def _header(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def _views(path: Path, count: int, length: int) -> None:
    whole = torch.ones(count + length)
    torch.save([whole[n : n + length] for n in range(count)], path)


def _turned(path: Path, count: int, length: int) -> None:
    whole = torch.ones(count, length)
    torch.save([whole[n:].t() for n in range(count)], path)


# What is said, "" where the file is let in; and how it is made, larger where memory is measured.
COSTLY: dict[str, tuple[str, Callable[[Path, int], object]]] = {
    "itself.pt": ("", lambda p, n: _within_itself(p)),
    "pairs.pt": ("", lambda p, n: _nested(p, lambda v: [v, v], 40)),
    "expanded.pt": ("", lambda p, n: torch.save(torch.ones(1).expand(n * 10**5), p)),
    "csr.pt": ("", lambda p, n: torch.save(torch.sparse_csr_tensor(
        torch.zeros(n + 1, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.ones(0),
        (n, n), check_invariants=True), p)),
    "claims.pt": ("claims more elements", lambda p, n: _claiming(p)),
    "views.pt": ("overlap", lambda p, n: _views(p, 200, 100 * n)),
    "turned.pt": ("more than its size", lambda p, n: _turned(p, 20, 10 * n)),
    "one.pt": ("names more tensors", lambda p, n: torch.save([torch.ones(1)] * 20 * n, p)),
    "names.pt": ("names more tensors", lambda p, n: torch.save(
        {"n" * 100_000: [torch.ones(1) for _ in range(100)]}, p)),
    "lists.pt": ("no tensor", lambda p, n: _pickled(p, b"\x80\x02](" + n * 100 * b"]" + b"e.")),
    "index.index.json": ("need", lambda p, n: p.write_bytes(
        b'{"weight_map": {"a": "b"}, "c": [' + n * 1000 * b"[]," + b"0]}")),
    "header.safetensors": ("need", lambda p, n: _header(
        p, b'{"a": [' + n * 1000 * b"[]," + b"0]}")),
    "brackets.safetensors": ("need", lambda p, n: _header(p, n * 1000 * b"[]")),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", COSTLY)
def test_a_file_that_asks_for_more_than_its_size(name: str, tmp_path: Path) -> None:
    said, make = COSTLY[name]
    path = tmp_path / name
    make(path, 1000)
    if said:
        with pytest.raises(BadInput, match=said):
            check_checkpoint(path)
    else:
        found = check_checkpoint(path)
        assert found.findings == []
        assert sum(t.size for t in found.tensors) <= path.stat().st_size


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_a_child_and_its_parent_take_for_a_file(tmp_path: Path) -> None:
    """Memory of the larger of the two, beside that for a file of one number; time of both."""
    torch.save({"a": torch.ones(1)}, tmp_path / "plain.pt")
    _, least, _ = _cost(tmp_path / "plain.pt")
    for name, (said, make) in COSTLY.items():
        path = tmp_path / name
        make(path, 20_000 if name.endswith(".pt") else 33_000)
        status, most, seconds = _cost(path)
        assert status == (2 if said else 0), name
        size = path.stat().st_size
        print(f"{name}: {size:,} bytes, {(most - least) / 2**20:.0f} MiB, {seconds:.1f} s")
        assert most - least < 512 * 2**20 + 4 * size, name
        assert seconds < 40, name


def _cost(path: Path) -> tuple[int, int, float]:
    """Exit status, bytes held at most by the command or its child, and seconds of both."""
    command = [sys.executable, "-c", "from ampscope.cli.main import main; main()", "check"]
    with subprocess.Popen([*command, str(path)]) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_a_child_has_a_limit_of_memory_and_of_processor_time(tmp_path: Path) -> None:
    """One empty list a byte; and a key of 60 pairs of pairs, which has 2^60 parts to be hashed."""
    _pickled(tmp_path / "lists.pt", b"\x80\x02](" + 20_000_000 * b"]" + b"e.")
    pairs = b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
    _pickled(tmp_path / "hash.pt", b"\x80\x02K\x01q\x00" + pairs + b"}h\x3cK\x01s.")
    torch.save({"a": torch.ones(1)}, tmp_path / "ok.pt")
    with TorchFiles() as torch_files:
        for name, said in (("lists", "more memory"), ("hash", "more processor time")):
            with pytest.raises(BadInput, match=said):
                check_checkpoint(tmp_path / f"{name}.pt", torch_files=torch_files)
            assert check_checkpoint(tmp_path / "ok.pt", torch_files=torch_files).tensors


def test_a_child_computes_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of threads, one for each of a large machine's cores, are no memory of the file's."""
    for name, value in {
        "MKL_NUM_THREADS": "64",
        "MKL_DYNAMIC": "FALSE",
        "OMP_STACKSIZE": "64M",
    }.items():
        monkeypatch.setenv(name, value)
    torch.save({"a": torch.ones(1000, 2, 1000).transpose(0, 2)}, tmp_path / "a.pt")
    with TorchFiles() as torch_files:
        found = check_checkpoint(tmp_path / "a.pt", torch_files=torch_files)
    assert found.tensors[0].shape == (1000, 2, 1000)


def _said(path: Path) -> str:
    with pytest.raises(BadInput) as refused:
        check_checkpoint(path)
    return str(refused.value)


def test_a_file_of_many_tensors_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_child, "MOST_TENSORS", 10)
    path = tmp_path / "a.pt"
    torch.save([torch.ones(n) for n in range(10)], path)
    assert len(check_checkpoint(path).tensors) == 10
    torch.save([torch.ones(n) for n in range(11)], path)
    assert "more than 10 tensors" in _said(path)
    assert "may be whole" in _said(path)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("unable to mmap 80 bytes from file <a.pt>: Cannot allocate memory (12)"),
    ],
)
def test_a_file_that_does_not_fit_is_not_called_damaged(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise error

    torch.save([torch.ones(1)], tmp_path / "a.pt")
    monkeypatch.setattr(torch, "load", load)
    said = _said(tmp_path / "a.pt")
    assert "may be whole" in said
    assert "more memory" in said
    assert "no torch file" not in said


def test_a_parameter_without_state_counts_for_nothing(tmp_path: Path) -> None:
    """Of SGD: without momentum, and as older versions of torch keep it."""
    count = 100_000
    groups = [{"lr": 0.1, "params": list(range(count))}]
    for state in ({}, {n: {"momentum_buffer": None} for n in range(count)}):
        optimizer = {"state": state, "param_groups": groups}
        torch.save({"optimizer_states": [optimizer], "w": torch.ones(2)}, tmp_path / "a.pt")
        found = check_checkpoint(tmp_path / "a.pt")
        assert [t.name for t in found.tensors] == ["w"]
        assert found.left_out == []


def test_the_processor_time_grows_with_the_number_of_storages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second for each of some, and by no more than for the most that are read."""
    limits = [(40, 100)]
    monkeypatch.setattr(checkpoint_child.resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(checkpoint_child.resource, "setrlimit", lambda what, n: limits.append(n))
    monkeypatch.setattr(checkpoint_child, "RECORDS_A_SECOND", 5)
    monkeypatch.setattr(checkpoint_child, "MOST_TENSORS", 90)
    for count, most in ((50, range(50, 53)), (500, range(58, 59))):
        del limits[1:]
        torch.save([torch.ones(1) for _ in range(count)], tmp_path / "a.pt")
        read(tmp_path / "a.pt", tmp_path)
        assert limits[-1][0] in most
        assert limits[-1][1] == 100


def test_options_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for odd in ({"betas": [[0.9], [0.99]]}, {"params": 5}, {"params": [[1]]}, {"eps": [1e-8]}):
        group = {"betas": (0.9, 0.99), "eps": 1e-8, "params": [0]} | odd
        torch.save({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [group]}, path)
        found = check_checkpoint(path)
        assert len(found.tensors) == 1
        assert "param_groups.0 has betas, eps or params that no optimizer" in found.left_out[0]


def test_what_lies_too_deep_is_named(tmp_path: Path) -> None:
    _nested(tmp_path / "a.pt", lambda v: [v, torch.ones(1)], 80)
    assert "more than 64 deep" in check_checkpoint(tmp_path / "a.pt").left_out[0]


def test_what_lies_beside_something_too_deep_is_looked_at(tmp_path: Path) -> None:
    """Also where it was named too deep first; the depth is said once."""
    state = {"w": torch.tensor([torch.nan])}
    deep: list[Any] = [state]
    for _ in range(70):
        deep = [deep, deep]
    torch.save({"history": [deep, [deep]], "model": state}, tmp_path / "a.pt")
    found = check_checkpoint(tmp_path / "a.pt")
    assert [t.name for t in found.tensors] == ["model.w"]
    assert len(found.left_out) == 1


def test_a_tensor_without_elements_is_let_in(tmp_path: Path) -> None:
    state = {"a": torch.empty(0, 0), "b": torch.empty(0, 3, 0), "w": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt")
    shapes = {t.name: t.shape for t in check_checkpoint(tmp_path / "a.pt").tensors}
    assert shapes == {"a": (0, 0), "b": (0, 3, 0), "w": (2,)}


def test_repeated_elements_are_counted_where_they_are_stored(tmp_path: Path) -> None:
    row = torch.tensor([1.0, torch.nan, 3.0])
    torch.save(
        {"rows": row.expand(5, 3), "sum": torch.arange(8.0).unfold(0, 4, 1)}, tmp_path / "a.pt"
    )
    found = {t.name: t for t in check_checkpoint(tmp_path / "a.pt").tensors}
    assert (found["rows"].shape, found["rows"].nan) == ((3,), 1)
    assert (found["sum"].shape, found["sum"].zero) == ((8,), 1)


def test_one_child_reads_all_torch_files_and_another_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started anew where it ended; what lies in the folder of the user is not imported."""
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def counting(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    (tmp_path / "torch.py").write_text("raise SystemExit('imported from the current folder')")
    (tmp_path / "run").mkdir()
    for number in range(3):
        torch.save({f"w{number}": torch.ones(2)}, tmp_path / "run" / f"{number}.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", counting)
    with TorchFiles() as torch_files:
        found = check_checkpoint(tmp_path / "run", torch_files=torch_files)
        assert ([t.name for t in found.tensors], len(started)) == (["w0", "w1", "w2"], 1)
        started[0].kill()
        with pytest.raises(BadInput, match=r"was killed.* may be whole"):
            check_checkpoint(tmp_path / "run" / "0.pt", torch_files=torch_files)
        found = check_checkpoint(tmp_path / "run" / "0.pt", torch_files=torch_files)
        assert ([t.name for t in found.tensors], len(started)) == (["w0"], 2)
    assert all(child.poll() is not None for child in started)


def test_the_command(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "ok.safetensors")
    save_file({"evil\x1b[31m": torch.tensor([torch.nan])}, tmp_path / "bad.safetensors")
    run = CliRunner().invoke
    assert run(main, ["check", str(tmp_path / "ok.safetensors")]).exit_code == 0
    bad = run(main, ["check", str(tmp_path / "bad.safetensors")])
    assert bad.exit_code == 1
    assert "\x1b" not in bad.output
    both = run(main, ["check", "--json", *map(str, sorted(tmp_path.iterdir()))])
    assert both.exit_code == 1
    assert [len(c["findings"]) for c in json.loads(both.output)["checkpoints"]] == [1, 0]


def test_damaged_headers_are_refused_or_read(tmp_path: Path) -> None:
    """Bytes of a header are changed, cut and repeated: each file is read whole or refused in one
    sentence, and what is read lies inside the file."""
    path, rng = tmp_path / "x.safetensors", random.Random(1)
    save_file({"a": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.float16)}, path)
    whole = path.read_bytes()
    refused = read_whole = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 9)]
                case 2:
                    data[at:at] = data[at : at + rng.randint(1, 9)]
                case 3:
                    data[at : at + 1] = rng.choice([b"-1", b"9" * 30, b"[", b"{", b'"', b"1e9"])
        path.write_bytes(data)
        try:
            for tensor in safetensors(path):
                assert tensor.offset + tensor.size <= len(data)
            read_whole += 1
        except BadInput as error:
            refused += "\n" not in str(error)
    assert refused + read_whole == 300
    assert refused > 200
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{" * 64)
    with pytest.raises(BadInput, match="header would be"):
        safetensors(path)
    path.write_bytes(struct.pack("<Q", 50_000) + b"[" * 50_000)
    with pytest.raises(BadInput, match="not JSON"):
        safetensors(path)


def test_a_folder_is_looked_through_to_its_last_subfolder(tmp_path: Path) -> None:
    """Each folder that holds files is one checkpoint; what cannot be read below is told as well."""
    good, bad = tmp_path / "step-1", tmp_path / "run" / "step-2" / "model"
    for folder in (good, bad, tmp_path / "logs"):
        folder.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, good / "model.safetensors")
    save_file({"w": torch.tensor([1.0, torch.nan])}, bad / "model.safetensors")
    (tmp_path / "logs" / "events.txt").write_text("no checkpoint")
    (tmp_path / "again").symlink_to(good, target_is_directory=True)
    done = CliRunner().invoke(main, ["check", "--json", str(tmp_path)])
    found = json.loads(done.stdout)
    assert done.exit_code == 1, done.output
    assert [c["path"] for c in found["checkpoints"]] == [str(bad), str(good)]
    assert [[f["code"] for f in c["findings"]] for c in found["checkpoints"]] == [["nan"], []]
    (good / "cut.safetensors").write_bytes(b"")
    done = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert done.exit_code == 2
    assert str(good / "cut.safetensors") in done.stderr
