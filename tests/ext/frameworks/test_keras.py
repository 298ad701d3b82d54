"""Keras' adapter against plain Keras and NumPy, where a Python has it:

AMPSCOPE_KERAS_PYTHON=/venv-keras/bin/python      pip install tensorflow-cpu numba
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.numerics.histogram import (
    ABOVE,
    FIRST,
    LOWEST,
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
)
from ampscope.records import Cadence, Role, RunSpec, ScalerSpec, State
from ampscope.scalers.replay import POLICIES, ScalerSettings
from ampscope.store.reader import Reader
from tests.helpers import keras_children
from tests.helpers.keras_children import PYTHON, VARIABLE

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason=f"{VARIABLE} names no Python that has Keras"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def in_process() -> Any:
    return keras_children.program("keras_in_process")


def test_a_probe_counts_what_plain_keras_computes(tmp_path: Path) -> None:
    reference = keras_children.program("keras_reference")
    spec = RunSpec(
        "mlp", framework="keras", precision="fp16", steps=len(reference["steps"]), seed=5,
        scaler=ScalerSpec(2.0**24, growth_interval=2), cadence=Cadence(1, 0, 0),
    )  # fmt: skip
    info, errors = keras_children.probe(tmp_path / "runs.db", spec)
    assert info.state is State.FINISHED, (info.message, info.traceback, errors[-2000:])
    with Reader(tmp_path / "runs.db") as reader:
        steps = reader.steps(info.id)
        names = {m.index: m.path for m in reader.modules(info.id)}
        for number, (step, expected) in enumerate(zip(steps, reference["steps"], strict=True)):
            assert (step.loss, step.scale) == (expected["loss"], expected["scale"])
            found = {}
            for role in (Role.ACTIVATION, Role.GRAD_OUTPUT, Role.WEIGHT_GRAD):
                frame = reader.frame(info.id, role, number)
                assert frame is not None
                rows = zip(frame.modules, frame.rows, strict=True)
                for module, row in rows:
                    if names[module]:  # the root hands on its last layer's output
                        found[f"{names[module]} {role}"] = _as_counts(row)
            assert found == expected["counts"]
    assert any(step.skipped for step in steps)  # 2^24 is too high
    assert info.machine is not None
    assert info.machine.framework == "keras"
    assert "on TensorFlow" in info.machine.framework_version


def _as_counts(row: Any) -> dict[str, int]:
    found = {
        "zero": int(row[POS_ZERO] + row[NEG_ZERO]),
        "nonfinite": int(row[NAN] + row[POS_INF] + row[NEG_INF]),
    }
    found |= {str(e + LOWEST): int(n) for e, n in enumerate(row[FIRST:ABOVE])}
    return {key: count for key, count in found.items() if count}


@pytest.mark.parametrize(
    ("name", "precision", "args"),
    [
        ("lenet", "bf16", ()),
        ("transformer", "fp16-noscaler", ("--schedule=cosine",)),
        ("lenet", "fp16", ("--strategy=mirrored", "--schedule=exponential")),
    ],
)
def test_probes_of_the_shared_networks(
    tmp_path: Path, name: str, precision: str, args: tuple[str, ...]
) -> None:
    spec = RunSpec(name, framework="keras", precision=precision, steps=3, args=args)
    info, errors = keras_children.probe(tmp_path / "runs.db", spec)
    assert info.state is State.FINISHED, (info.message, info.traceback, errors[-2000:])
    with Reader(tmp_path / "runs.db") as reader:
        steps = reader.steps(info.id)
        paths = {m.path for m in reader.modules(info.id)}
        frame = reader.frame(info.id, Role.ACTIVATION, 1)
    assert frame is not None
    dtypes = set(frame.dtypes)
    assert dtypes == {"bf16" if precision == "bf16" else "fp16", "fp32"}  # logits in fp32
    assert {"fc1", "conv2"} <= paths if name == "lenet" else "blocks.1.attn.q" in paths
    assert all(2.0 < step.loss < 3.0 for step in steps)  # ten classes: ln 10 = 2.3
    rates = [step.lr for step in steps]
    if "--schedule=cosine" in args:
        expected = [0.1 * (1 + np.cos(np.pi * k / 3)) / 2 for k in range(3)]
        assert rates == pytest.approx(expected)
    elif "--schedule=exponential" in args:
        assert rates == pytest.approx([0.05 * 0.1 ** (k / 3) for k in range(3)])
    else:
        assert rates == pytest.approx([0.05] * 3)


@pytest.mark.parametrize(
    ("workload", "precision", "args", "words"),
    [
        ("resnet", "fp16", (), "There is no network 'resnet'"),
        ("mlp", "tf32", (), "not in 'tf32'"),
        ("mlp", "fp32", ("--strategy=tpu",), "--strategy is one of"),
    ],
)
def test_a_probe_that_cannot_be_run_says_so(
    tmp_path: Path, workload: str, precision: str, args: tuple[str, ...], words: str
) -> None:
    spec = RunSpec(workload, framework="keras", precision=precision, steps=1, args=args)
    info, _ = keras_children.probe(tmp_path / "runs.db", spec)
    assert info.state is State.FAILED
    assert words in info.message


def test_a_device_that_tensorflow_does_not_see_is_named(tmp_path: Path) -> None:
    """No machine has a hundred GPUs."""
    spec = RunSpec("mlp", framework="keras", steps=1, device="cuda:99")
    info, _ = keras_children.probe(tmp_path / "runs.db", spec)
    assert info.state is State.FAILED
    assert "There is no device 'cuda:99': TensorFlow here sees" in info.message


def test_watched_training_is_bit_identical(in_process: Any) -> None:
    assert len(in_process["cases"]) == 9
    for name, case in in_process["cases"].items():
        assert case["same"], name
        assert case["steps"] == 3, name
        assert case["notes"] == [], name
        if case["bad"]:
            continue
        assert np.mean(case["losses"]) == pytest.approx(case["loss"][0], rel=1e-6), name


def test_nothing_is_left_patched(in_process: Any) -> None:
    assert in_process["changed"]  # every one of them was
    assert in_process["left"] == []
    assert in_process["eager"] is False


def test_a_users_layer_is_looked_into_op_by_op(in_process: Any) -> None:
    case = in_process["cases"]["Overflowing mixed_float16"]
    ((module, op, fp32_finite, fp32_max, line, input_max),) = case["bad"]
    assert (module, op, fp32_finite) == ("inner", "aten.square", True)
    assert fp32_max == input_max**2  # the square of an fp16 number is exact in fp32
    assert fp32_max > 65504
    program = keras_children.HERE / "keras_in_process.py"
    text = program.read_text().splitlines()[int(line.partition(":")[2]) - 1]
    assert "tf.square(x)" in text
    for policy in ("float32", "mixed_bfloat16"):
        assert in_process["cases"][f"Overflowing {policy}"]["bad"] == []


def test_functional_models_show_what_is_between_their_layers(in_process: Any) -> None:
    paths = in_process["cases"]["functional mixed_float16"]["paths"]
    assert "shared" in paths
    assert "" in paths
    assert [p for p in paths if p.startswith("sin")]
    assert [p for p in paths if p.endswith(".cell")]  # of the LSTM


def test_two_tapes_side_by_side_have_each_its_loss_and_gradients(in_process: Any) -> None:
    for case in in_process["tapes"]:
        assert case["losses"] == case["true"]
        assert case["scaled"] == [True] * 4
        # By hand: eight entries of scale * factor / 8, of the layer and of its model.
        assert case["sums"] == [1024.0 * factor for factor in (2, 2, 3, 3)] * 2


def test_where_gradients_are_accumulated_a_move_of_the_weights_is_a_step(
    in_process: Any,
) -> None:
    assert in_process["accumulated"] == [1.0] * 3


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    store = tmp_path_factory.mktemp("watch") / "runs.db"
    return store, keras_children.program("keras_watch_cases", str(store))


NAMES = ("plain", "several fits", "eager", "two outputs", "custom step", "mirrored", "accumulated")


@pytest.mark.parametrize("name", NAMES)
def test_a_watched_fit_is_bit_identical_and_what_keras_says(
    fits: tuple[Path, Any], name: str
) -> None:
    store, case = fits[0], fits[1][name]
    assert case["watched"] == case["without"]
    assert case["watched"]["own_function"]
    oracle = case["without"]
    with Reader(store) as reader:
        infos = [reader.run(run) for run in case["runs"]]
        steps = [step for run in case["runs"] for step in reader.steps(run)]
        assert {i.state for i in infos} == {State.FINISHED}, [i.message for i in infos]
        assert {(i.spec.kind, i.spec.framework, i.spec.label) for i in infos} == {
            ("watch", "keras", name)
        }
        assert all(reader.modules(run) for run in case["runs"])
        frames = reader.frame(case["runs"][0], Role.GRAD_OUTPUT, 2)
    assert (frames is not None) is (name == "eager")
    assert len(steps) == len(oracle["steps"])
    assert [s.skipped for s in steps] == [not a for a in np.diff([0, *oracle["steps"]])]
    first = {"mirrored": 2.0**4, "two outputs": 2.0**15, "custom step": 2.0**15}.get(name, 2.0**22)
    assert [s.scale for s in steps] == [first, *oracle["scales"][:-1]]
    policy = POLICIES["keras"]
    settings = ScalerSettings(first, 2000 if first == 2.0**15 else 5)
    state = policy.start(settings)
    for step in steps:
        assert step.scale == state.scale
        state = policy.step(state, step.skipped, settings)
    if name == "custom step":  # its own loss, which Keras hands on after every batch
        assert [s.loss for s in steps] == oracle["reported"]
    else:
        epochs = np.array([s.loss for s in steps]).reshape(len(oracle["losses"]), -1)
        assert list(epochs.mean(axis=1)) == pytest.approx(oracle["losses"], rel=1e-4)
    assert any(s.skipped for s in steps) is (first == 2.0**22)


def test_a_fit_that_fails_ends_its_run(fits: tuple[Path, Any]) -> None:
    store, cases = fits
    with Reader(store) as reader:
        data, callback = (reader.run(cases[name]["run"]) for name in ("data", "callback"))
    assert (data.state, data.steps_done) == (State.FAILED, 3)
    assert "OSError: the disk is gone" in data.message
    assert "Traceback" in data.traceback
    assert (callback.state, callback.steps_done) == (State.FAILED, 10)
    assert "outside the training steps" in callback.message
    assert cases["callback"]["raised"] == "ValueError"


def test_a_store_that_cannot_be_made_leaves_the_fit_alone(fits: tuple[Path, Any]) -> None:
    found = fits[1]["without a store"]
    assert (found["runs"], found["built"]) == ([], True)
    (words,) = found["warned"]
    assert "does not record this training" in words


def test_a_watched_fit_holds_no_evidence_that_it_has_written(fits: tuple[Path, Any]) -> None:
    assert 0 < fits[1]["remembered"]["steps"] < 5  # of 20
    assert fits[1]["remembered"]["calls"] < 15


def test_the_graph_rewrite_op_by_op() -> None:
    done = CliRunner().invoke(main, ["frameworks", "rewrite", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    for rewrite, half in zip(report["rewrites"], ("float16", "bfloat16"), strict=True):
        assert rewrite["error"] == ""
        ops = {op["name"]: op for op in rewrite["ops"]}
        assert (ops["conv"]["before"], ops["conv"]["after"]) == ("float32", half)
        assert (ops["exp"]["before"], ops["exp"]["after"]) == ("float32", "float32")
        added = [op for op in rewrite["ops"] if not op["before"] and op["type"] == "Cast"]
        assert any(op["after"] == f"float32 -> {half}" for op in added)
    words = {op["name"]: op["list"] for op in report["rewrites"][0]["ops"]}
    assert (words["conv"], words["exp"], words["softmax"]) == ("allow", "deny", "infer")
    assert report["variable"]["does_something"] is False
    assert "does nothing here" in report["variable"]["sentence"]
