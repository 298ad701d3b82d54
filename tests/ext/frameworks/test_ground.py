"""What every adapter stands on: recognition, settings, counting, records, environments, rules."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ampscope import pythons
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.cli.main import main
from ampscope.control import KINDS
from ampscope.diagnosis.findings import diagnose
from ampscope.errors import BadInput
from ampscope.ext.frameworks import FRAMEWORKS, KERAS, PADDLE, adapters, environments, tensors
from ampscope.ext.frameworks import cli as cli_frameworks
from ampscope.ext.frameworks import recorder as writing_room
from ampscope.ext.frameworks.adapters import parse
from ampscope.ext.frameworks.bad_layers import LayerCall
from ampscope.ext.frameworks.networks import NAMES, network
from ampscope.ext.frameworks.recorder import FrameworkRecorder, StepFacts
from ampscope.ext.frameworks.tensors import TensorBits, count_into, square_sum
from ampscope.launcher.launch import checked, launch
from ampscope.numerics.histogram import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, RAW_LEN
from ampscope.observations import Outcome
from ampscope.pythons import check_control, framework, framework_of
from ampscope.records import Cadence, Role, RunSpec, ScalerSpec, State
from ampscope.rules import framework_patches
from ampscope.rules.verdict import FIX_KINDS, Fix, Status
from ampscope.script_ends import ending
from tests.helpers.child_runs import wait_until
from tests.helpers.exponent_oracle import row_of

SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 6e-8, 5.96e-8, 65504.0, 1e-30, -1e30, 1e-44]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import keras", "keras"),
        ("from tensorflow import keras", "keras"),
        ("import tensorflow as tf", "keras"),
        ("import paddle.nn as nn", "paddle"),
        ("from paddle import nn", "paddle"),
        ("def f():\n    import paddle\n", "paddle"),
        ("import torch\nimport keras", "torch"),
        ("import numpy", "torch"),
        ("import keras_nlp_like_name", "torch"),
        ("x = (", "torch"),
        ("from helper import build", "paddle"),
        ("from lib.trainer import main", "keras"),
        ("import lib.trainer", "keras"),
        ("from lib import relative", "keras"),
        ("from bare.deep.one import main", "paddle"),  # folders without __init__.py
        ("import lib", "torch"),  # which imports nothing
        ("from .keras import x", "torch"),  # a file of its own
        ("from seeds import seed\nimport keras", "keras"),
        ("from seeds import seed\nimport paddle", "paddle"),
        ("from seeds import seed", "torch"),
        ("from seeds import seed\nimport torch, keras", "torch"),
        ("try:\n    import torch\nexcept (ImportError, OSError):\n    import keras", "torch"),
        ("try:\n    import torch\nexcept:\n    pass\nimport paddle", "paddle"),
        ("try:\n    import seeds, lib.trainer\nexcept ImportError:\n    pass", "torch"),
        ("try:\n    import torch\nexcept ValueError:\n    pass\nimport paddle", "torch"),
        ("try:\n    pass\nexcept ImportError:\n    pass\nfinally:\n    import keras", "keras"),
    ],
)
def test_a_script_is_known_by_its_imports(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "helper.py").write_text("import paddle\nimport train\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "bare" / "deep").mkdir(parents=True)
    (tmp_path / "lib" / "__init__.py").touch()
    (tmp_path / "lib" / "trainer.py").write_text("import os\nfrom keras import layers\n")
    (tmp_path / "lib" / "relative.py").write_text("from .trainer import main\n")
    (tmp_path / "bare" / "deep" / "one.py").write_text("from ..two import main\n")
    (tmp_path / "bare" / "two.py").write_text("import paddle\n")
    (tmp_path / "seeds.py").write_text(
        "def seed():\n"
        "    try:\n        import torch\n    except ImportError:\n        pass\n"
        "    try:\n        import tensorflow\n    except ImportError:\n        pass\n"
    )
    script = tmp_path / "train.py"
    script.write_text(text)
    assert framework_of(script) == expected


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("keras", "--framework keras."),
        ("tensorflow.keras", "--framework keras."),
        ("paddle", "--framework paddle."),
        ("pandas", "'pandas'."),
    ],
)
def test_a_script_that_was_taken_for_torch_is_told_what_to_say(module: str, says: str) -> None:
    text = f"No module named {module!r}"
    raised = Outcome("exception", error_type="ModuleNotFoundError", error_text=text)
    state, sentence = ending(raised, RunSpec("train.py", kind="script"))
    assert state is State.FAILED
    assert sentence.endswith(says)
    assert "--framework" not in ending(raised, RunSpec("train.py", framework="paddle"))[1]


def test_settings_are_pytorchs_words_and_nothing_else() -> None:
    assert set(adapters._PLAIN) | set(adapters._NUMBERS) <= set(KINDS)
    settings = parse("as_is;init_scale:1024;growth_interval:2e3;lr:0.1;fp32_modules:a.b,c")
    assert (settings.init_scale, settings.growth_interval) == (1024.0, 2000)
    assert (settings.lr_factor, settings.fp32_modules) == (0.1, ("a.b", "c"))
    assert parse("fp32").precision == "fp32"
    assert parse("scale:1").scale == 1.0
    for word in ("scale:abc", "lr", "growth_interval:inf", "growth_interval:nan"):
        with pytest.raises(BadInput, match=word):
            parse(word)
    check_control("keras", "bf16")
    for torch_only in ("unscale_first", "fp32_lines:a.py:3", "separate_scalers", "scale:x"):
        with pytest.raises(BadInput):
            check_control("keras", torch_only)
    with pytest.raises(BadInput, match="PyTorch alone"):
        parse("unscale_first")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("compiled", [True, False])
def test_counts_are_those_of_the_oracle(monkeypatch, dtype, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(tensors, "_kernel", lambda: None)
    generator = np.random.default_rng(3)
    with np.errstate(over="ignore"):
        spread = generator.standard_normal(5000) * 10.0 ** generator.integers(-40, 30, 5000)
        array = np.concatenate([spread, SPECIAL]).astype(dtype)
    row = np.zeros(RAW_LEN, np.int64)
    count_into(TensorBits.of(array.reshape(1, -1)), row)
    assert row.tolist() == row_of(array.astype(np.float64).tolist()).tolist()


def test_bf16_bits_are_bf16(monkeypatch) -> None:
    import torch

    tensor = torch.tensor([1.5, -0.0, math.inf, 1e-40, 3e38, math.nan]).bfloat16()
    bits = tensor.view(torch.int16).numpy().view(np.uint16)
    row = np.zeros(RAW_LEN, np.int64)
    count_into(TensorBits.bf16(bits), row)
    assert row.tolist() == row_of(tensor.double().tolist()).tolist()
    assert [row[i] for i in (POS_ZERO, NEG_ZERO, NAN, POS_INF, NEG_INF)] == [0, 1, 1, 1, 0]


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="floating-point"):
        TensorBits.of(np.arange(3))


def fp32(*numbers: float) -> TensorBits:
    return TensorBits.of(np.array(numbers, np.float32))


def test_a_step_is_recorded_with_unscaled_gradients() -> None:
    recorder = FrameworkRecorder(Cadence())
    recorder.step(
        StepFacts(
            loss=2.0,
            scale=1024.0,
            skipped=False,
            lr=0.5,
            gradients={"fc1.weight": fp32(3072.0, 0.0), "fc1.bias": fp32(4096.0)},
            before={"fc1.weight": fp32(1.0, 2.0), "fc1.bias": fp32(0.0)},
            after={"fc1.weight": fp32(-0.5, 2.0), "fc1.bias": fp32(-2.0)},
        )
    )
    (step,) = recorder.optimizer_steps
    assert (step.grad_total, step.grad_zero, step.grad_nonfinite) == (3, 1, 0)
    assert step.grad_norm == pytest.approx(5.0)  # 3 and 4
    assert step.grad_max == 4.0
    assert step.moved_share == pytest.approx(2 / 3)
    assert step.update_norm == pytest.approx(2.5)  # 1.5 and 2
    assert [call.name for call in recorder.calls] == ["scale", "backward", "scaler_step"]
    frames = {frame.role: frame for frame in recorder.take().frames}
    assert frames[Role.WEIGHT_GRAD].scale == 1024.0
    assert frames[Role.WEIGHT].scale == 1.0
    assert set(frames) == {Role.WEIGHT, Role.WEIGHT_GRAD, Role.UPDATE}


def forward(recorder: FrameworkRecorder, call: LayerCall) -> None:
    """As adapters record a call."""
    recorder.bad_layers.called(call)
    if recorder.outputs(call.path, call.type, call.outputs, call.is_training):
        recorder.bad(call)


def test_a_bad_layer_is_named_once_with_what_fp32_gives() -> None:
    recorder = FrameworkRecorder(Cadence())
    half = TensorBits.of(np.array([300.0], np.float16))
    overflown = TensorBits.of(np.array([np.inf], np.float16))
    call = LayerCall(
        "fc1", "Dense", "linear", (half,), (overflown,), "fp16", "train.py:3",
        in_fp32=lambda: fp32(90000.0),
    )  # fmt: skip
    later = LayerCall("fc2", "Dense", "linear", (overflown,), (overflown,), "fp16")
    for _ in range(2):
        forward(recorder, call)
        forward(recorder, later)  # it only hands on what came in
        recorder.step(StepFacts(loss=math.nan, scale=None, skipped=False, lr=0.1))
    (bad,) = recorder.bad_layers.records()
    assert (bad.module, bad.fp32_max, bad.count, bad.reached_loss) == ("fc1", 90000.0, 2, True)
    assert (bad.pos_inf, bad.nan, bad.last_step) == (1, 0, 1)


def test_what_holds_a_bad_layer_is_not_blamed_and_what_is_named_like_it_is() -> None:
    """Against every prefix spelled out, on trees with names that begin alike."""
    rng = np.random.default_rng(3)
    bad, good = TensorBits.of(np.array([np.inf], np.float16)), TensorBits.of(np.ones(1, np.float16))
    for _ in range(50):
        names = [".".join(rng.choice(["a", "ab", "0"], rng.integers(0, 4))) for _ in range(12)]
        recorder, blamed = FrameworkRecorder(Cadence()), list[str]()
        for at, path in enumerate(names):
            inside = f"{path}." if path else ""
            if not any(n != path and n.startswith(inside) for n in names[:at]):
                blamed.append(path)
            forward(recorder, LayerCall(path, "Dense", "linear", (good,), (bad,), "fp16"))
        found = recorder.bad_layers.records()
        assert [op.module for op in found] == list(dict.fromkeys(blamed))
        assert sum(op.count for op in found) == len(blamed)


@pytest.mark.parametrize("size", [1 << 16, 100_003])
def test_sums_in_fp32_lose_no_more_than_their_comment_says(size: int) -> None:
    """One number over and over is the worst: all its roundings go one way."""
    for value in np.random.default_rng(0).uniform(1e-3, 2, 40).astype(np.float32):
        exact = float(value) ** 2 * size
        assert square_sum(np.full(size, value)) == pytest.approx(exact, rel=4e-5)


class _Clock:
    """Time that passes only when the store is written."""

    def __init__(self) -> None:
        self.now = self.written_s = 0.0

    def monotonic(self) -> float:
        return self.now


def test_writing_takes_its_share_however_slow_the_store_is(monkeypatch) -> None:
    clock, recorder = _Clock(), FrameworkRecorder(Cadence())
    monkeypatch.setattr(writing_room, "time", clock)
    writing = writing_room.Writing(None, keeps_evidence=True)  # type: ignore[arg-type]

    def write(recorder: FrameworkRecorder, outcome: object) -> None:
        clock.now += 4.0
        clock.written_s += 4.0

    monkeypatch.setattr(writing, "write", write)
    recorder.steps = writing_room.FIRST_STEPS + 1
    for _ in range(10_000):
        clock.now += 0.1
        writing.write_if_due(recorder)
    assert 0.04 < clock.written_s / clock.now < 0.055


def evidence(failing: bool) -> Evidence:
    """An overflow in one layer in fp16, none in fp32."""

    def run(control: str, bad: bool) -> RunView:
        recorder = FrameworkRecorder(Cadence())
        for step in range(6):
            out = np.array([np.inf if bad else 1.0], np.float16)
            dtype = "fp32" if control == "fp32" else "fp16"
            forward(
                recorder,
                LayerCall("fc1", "Dense", "linear", (fp32(300.0),), (TensorBits.of(out),), dtype,
                          in_fp32=lambda: fp32(90000.0))
            )  # fmt: skip
            loss = math.nan if bad else 1.0 / (step + 1)
            gradient = fp32(math.nan if bad else 0.5)
            weights = {"fc1.weight": fp32(1.0 - step)}
            recorder.step(
                StepFacts(loss, 2.0**16, bad, 0.1, gradients={"fc1.weight": gradient},
                          before=weights, after={} if bad else {"fc1.weight": fp32(-step)})
            )  # fmt: skip
        from dataclasses import replace

        outcome = replace(recorder.outcome("returned"), framework="keras")
        return RunView(control, control, recorder.observations(outcome))

    return Evidence({"as_is": run("as_is", failing), "fp32": run("fp32", False)}, "native")


def test_an_overflow_in_a_layer_of_keras_is_named_with_keras_own_code() -> None:
    diagnosis = diagnose(evidence(failing=True))
    assert diagnosis.verdict == "fault"
    finding = diagnosis.findings[0]
    assert (finding.cause, finding.verdict.module) == ("activation_overflow", "fc1")
    assert "keras.layers" in finding.verdict.fix.patch
    assert "torch" not in finding.verdict.fix.patch
    apart = [v.reason for rule, v in diagnosis.answers if rule.needs_ops]
    assert apart
    assert all("PyTorch alone" in reason for reason in apart)


def test_a_healthy_run_of_keras_has_no_finding() -> None:
    diagnosis = diagnose(evidence(failing=False))
    assert diagnosis.verdict == "no_fault"
    judged = {v.status for rule, v in diagnosis.answers if not rule.needs_ops}
    assert judged <= {Status.PASSED, Status.NOT_APPLICABLE}


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("kind", sorted(FIX_KINDS))
def test_no_fix_speaks_of_torch(name: str, kind: str) -> None:
    patch = framework_patches.patch(Fix(kind, "", framework=name, controls=("init_scale:1024",)))
    assert "torch" not in patch
    if kind == "change_scale":
        assert "1024" in patch
    compile(patch, "patch", "exec")


def test_all_networks_give_the_same_numbers_again() -> None:
    for name in NAMES:
        one, other = network(name, 3), network(f"shared-{name}", 3)
        assert list(one.weights) == list(other.weights)
        assert all((one.weights[k] == other.weights[k]).all() for k in one.weights)
        first, second = next(one.batches()), next(other.batches())
        assert (first[0] == second[0]).all()
        assert not (network(name, 4).weights[next(iter(one.weights))]
                    == next(iter(one.weights.values()))).all()  # fmt: skip
    with pytest.raises(BadInput, match="lenet, mlp, transformer"):
        network("vgg", 0)
    with pytest.raises(BadInput, match="keras, paddle"):
        framework("jax")


def fake_python(folder: Path, body: str) -> str:
    """A stand-in for a Python: whatever it is asked, it does ``body``."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("kill -SEGV $$", "importing it crashed the process (SIGSEGV)"),
        ("exit 3", "it ended with status 3"),
        ("echo nothing", "no answer"),
        ('echo \'ampscope:{"paddle": "!ImportError: libx.so"}\'', "ImportError: libx.so"),
        ('echo \'ampscope:{"paddle": "3.3.1", "numpy": "2.4.0"}\'', "numpy<2.4"),
    ],
)
def test_check_says_in_one_sentence_what_is_wrong(monkeypatch, tmp_path, body, words) -> None:
    monkeypatch.setenv(PADDLE.variable, fake_python(tmp_path, body))
    result = environments.check("paddle")
    assert not result.works
    assert words in result.sentence
    assert "\n" not in result.sentence


def test_a_framework_that_is_missing_says_what_to_run(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv(KERAS.variable, raising=False)
    monkeypatch.setenv("AMPSCOPE_FRAMEWORKS", str(tmp_path))
    monkeypatch.setattr(pythons.importlib.util, "find_spec", lambda name: None)
    assert "ampscope frameworks install keras" in environments.check("keras").sentence
    with pytest.raises(BadInput, match="frameworks install keras"):
        pythons.python_for("keras")
    monkeypatch.setenv(KERAS.variable, str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match="no such file"):
        pythons.python_for("keras")


def test_a_python_may_be_named_as_in_a_shell(monkeypatch, tmp_path: Path) -> None:
    """A name on PATH, or below the home: what `check` finds is what a probe starts."""
    (tmp_path / "bin").mkdir()
    body = 'echo \'ampscope:{"paddle": "3.3.1", "numpy": "2.3.0"}\''
    python = fake_python(tmp_path / "bin", body)
    linked = tmp_path / "bin" / "paddle-python"
    linked.symlink_to(python)  # as in a virtual environment: the link is what counts
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("paddle-python", "~/bin/paddle-python"):
        monkeypatch.setenv(PADDLE.variable, named)
        assert pythons.python_for("paddle") == str(linked)
        assert environments.check("paddle").works


def test_what_is_missing_is_left_out_of_a_comparison(monkeypatch, tmp_path: Path) -> None:
    started: list[RunSpec] = []

    def start(specs: list[RunSpec], store: Path) -> list[object]:
        started.extend(specs)
        raise BadInput("enough")

    monkeypatch.setattr(cli_frameworks, "start_together", start)
    monkeypatch.setenv(KERAS.variable, str(tmp_path / "nowhere"))
    monkeypatch.setenv(PADDLE.variable, sys.executable)
    done = CliRunner().invoke(main, ["frameworks", "compare", "mlp"])
    assert [spec.framework for spec in started] == ["torch", "paddle"]
    assert f"Left out: {KERAS.variable} names {tmp_path / 'nowhere'}" in done.stderr
    assert "Paddle" not in done.stderr
    monkeypatch.setenv(PADDLE.variable, str(tmp_path / "nowhere"))
    done = CliRunner().invoke(main, ["frameworks", "compare", "mlp"])
    assert (done.exit_code, len(started)) == (2, 2)
    assert "Neither Keras nor Paddle is here." in done.stderr
    assert PADDLE.variable in done.stderr


@pytest.mark.parametrize("home", ["kept", "cannot be written"])
def test_an_installed_package_brings_no_neighbour_along(tmp_path: Path, home: str) -> None:
    """As a wheel puts it: in site-packages, among what the framework's Python must not see."""
    site = tmp_path / "site-packages"
    package = Path(pythons.__file__).parent
    shutil.copytree(package, site / "ampscope", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "neighbour.py").touch()
    (tmp_path / "file").touch()
    folder = tmp_path / ("made" if home == "kept" else "file")  # nothing is made below a file
    child = (
        "import importlib.util, json, sys, ampscope;"
        "print(json.dumps([ampscope.__file__, importlib.util.find_spec('neighbour') is None]))"
    )
    parent = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from ampscope.pythons import run_in\n"
        f"status, out, err = run_in(sys.executable, '-c', {child!r}); print(out or err)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"AMPSCOPE_FRAMEWORKS": str(folder), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", parent]
    for _ in range(2):  # the second finds what the first has made
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        where, is_alone = json.loads(done.stdout)
        assert Path(where).resolve() == site / "ampscope" / "__init__.py"
        assert is_alone


def test_the_ground_imports_no_framework() -> None:
    status, out, err = pythons.run_in(
        sys.executable,
        "-c",
        "import ampscope.ext.frameworks.script, ampscope.ext.frameworks.child, sys;"
        "print(sorted({'torch', 'tensorflow', 'keras', 'paddle', 'streamlit'} & set(sys.modules)))",
    )
    assert (status, out.strip()) == (0, "[]"), err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("kill -SEGV $$", "crashed in native code (SIGSEGV)"),
        ("echo 'ImportError: no libcuda' >&2; exit 1", "Its last line: ImportError: no libcuda"),
    ],
)
def test_a_probe_whose_process_dies_at_once_says_so(monkeypatch, tmp_path, body, words) -> None:
    monkeypatch.setenv(KERAS.variable, fake_python(tmp_path, body))
    spec = RunSpec(workload="shared-mlp", framework="keras", steps=1)
    run_id = launch(spec, tmp_path / "runs.db")

    info = wait_until(tmp_path / "runs.db", run_id)
    assert info.state is State.FAILED
    assert words in info.message


def test_a_probe_elsewhere_is_refused_before_it_starts(monkeypatch) -> None:
    monkeypatch.setenv(KERAS.variable, sys.executable)
    monkeypatch.setenv(PADDLE.variable, sys.executable)
    for wrong, words in (
        (RunSpec(workload="gpt", framework="keras"), "shared-lenet"),
        (RunSpec(workload="shared-mlp", framework="keras", precision="tf32"), "no precision"),
        (RunSpec(workload="shared-mlp", framework="jax"), "no framework"),
        (RunSpec("shared-mlp", framework="keras", control="op_lists:softmax=half"), "no --op-list"),
        (RunSpec("shared-mlp", framework="paddle", control="op_lists:mm=fp32"), "no --op-list"),
        (RunSpec("shared-mlp", framework="keras", memory_limit_mib=10), "PyTorch alone"),
        (RunSpec("shared-mlp", framework="paddle", memory_limit_mib=10), "PyTorch alone"),
        (RunSpec("shared-mlp", framework="keras", device="gpu:0"), "no device called"),
        (RunSpec("shared-mlp", framework="keras", scaler=ScalerSpec(growth_factor=3.0)), "doubles"),
        (RunSpec("shared-mlp", framework="paddle", device="cuda:x"), "no device called"),
    ):
        with pytest.raises(BadInput, match=words):
            checked(wrong)
    for right in (
        RunSpec("shared-mlp", framework="keras", device="cpu"),
        RunSpec("shared-mlp", framework="paddle", device="cuda:0"),  # whose Paddle says the rest
    ):
        assert checked(right) is right


def test_a_script_of_another_framework_has_no_memory_limit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import keras\n")
    store = tmp_path / "runs.db"
    for command in ("run", "diagnose"):
        given = [command, "--memory-limit", "10", "--store", str(store), str(tmp_path / "train.py")]
        done = CliRunner().invoke(main, given)
        assert done.exit_code == 2
        assert "A memory limit is for PyTorch alone" in done.stderr
    assert not store.exists()
