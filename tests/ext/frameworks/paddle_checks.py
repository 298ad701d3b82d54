"""What only a Python with Paddle can compute for the tests: ``paddle_checks.py NAME FOLDER``.

Reads and writes .npz files in FOLDER and prints one JSON object as its last line. It needs ampscope
on its path, but no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.networks import network
from ampscope.ext.frameworks.paddle import Watch, WatchCallback
from ampscope.ext.frameworks.paddle.adapter import PaddleTraining
from ampscope.ext.frameworks.paddle.applied_settings import Scalers
from ampscope.ext.frameworks.paddle.decorated import HalfParameters
from ampscope.ext.frameworks.paddle.emulation import Emulation
from ampscope.ext.frameworks.paddle.instruments import machine, watching
from ampscope.ext.frameworks.paddle.plan import (
    NOT_COUNTED,
    PlannedOps,
    collected,
    differences,
    on_a_cpu,
    planned,
)
from ampscope.ext.frameworks.paddle.regions import OpenRegion
from ampscope.ext.frameworks.paddle.rounding import MARK
from ampscope.ext.frameworks.paddle.seen_ops import OpCounts, OpRun
from ampscope.ext.frameworks.paddle.shared_networks import model_of
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.patches import Patches
from ampscope.records import Cadence, RunSpec

F: Any = paddle.nn.functional


def linear(folder: Path) -> dict[str, Any]:
    """One Linear in emulated fp16, forward and backward, on the arrays of linear_in.npz."""
    given = np.load(folder / "linear_in.npz")
    layer = paddle.nn.Linear(*given["weight"].shape)
    layer.weight.set_value(given["weight"])
    layer.bias.set_value(given["bias"])
    x = paddle.to_tensor(given["x"], stop_gradient=False)
    with Emulation(OpenRegion()).active():
        with paddle.amp.auto_cast():
            y = layer(x)
        marks = [getattr(y, MARK, None)]
        y.backward(paddle.to_tensor(given["gradient"]))
    np.savez(
        folder / "linear_out.npz", y=y.numpy(), x=x.grad.numpy(), w=layer.weight.grad.numpy(),
        b=layer.bias.grad.numpy(),
    )  # fmt: skip
    return {"marks": marks}


def lenet(folder: Path) -> dict[str, Any]:
    """The shared LeNet's first step in emulated fp16 O1 at a scale of 1024."""
    chosen = network("lenet", 0)
    model = model_of(chosen)
    images, labels = next(chosen.batches())
    with Emulation(OpenRegion()).active():
        with paddle.amp.auto_cast():
            logits = model(paddle.to_tensor(images))
            loss = F.cross_entropy(logits, paddle.to_tensor(labels))
        (loss * 1024.0).backward()
    arrays = {n.replace(".", "_"): p.grad.numpy() for n, p in model.named_parameters()}
    np.savez(folder / "lenet_out.npz", logits=logits.numpy(), **arrays)
    return {"loss": float(loss)}


def names(folder: Path) -> dict[str, Any]:
    """Many functions, each counted by ampscope and by Paddle's own statistics."""
    x, y = paddle.rand([4, 4]) + 0.5, paddle.rand([4, 4]) + 0.5
    image, labels = paddle.rand([1, 2, 8, 8]), paddle.to_tensor([0, 1, 2, 3])
    heads = [paddle.rand([1, 4, 2, 8]) for _ in range(3)]
    layers = {
        "conv": paddle.nn.Conv2D(2, 3, 3), "bn": paddle.nn.BatchNorm2D(2),
        "ln": paddle.nn.LayerNorm(4), "gn": paddle.nn.GroupNorm(2, 2), "fc": paddle.nn.Linear(4, 3),
    }  # fmt: skip
    functions = {
        "add": lambda: x + y, "add number": lambda: x + 1, "radd": lambda: 1 + x,
        "sub": lambda: x - y, "rsub": lambda: 1 - x, "mul": lambda: x * y, "scale": lambda: x * 2,
        "div": lambda: x / y, "div number": lambda: x / 2, "rdiv": lambda: 1 / x,
        "pow": lambda: x**2, "pow tensor": lambda: x**y, "mod": lambda: x % y,
        "matmul": lambda: x @ y, "T": lambda: x.T, "neg": lambda: -x, "item": lambda: x[0],
        "slice": lambda: x[:, 1:3], "in place": lambda: x.clone().add_(y),
        "exp in place": lambda: x.clone().exp_(), "mean": lambda: x.mean(), "sum": lambda: x.sum(),
        "max": lambda: x.max(), "min": lambda: x.min(), "prod": lambda: x.prod(),
        "norm": lambda: x.norm(), "exp": lambda: x.exp(), "log": lambda: x.log(),
        "square": lambda: x.square(), "sqrt": lambda: x.sqrt(), "rsqrt": lambda: x.rsqrt(),
        "tanh": lambda: paddle.tanh(x), "maximum": lambda: paddle.maximum(x, y),
        "softmax": lambda: F.softmax(x), "log_softmax": lambda: F.log_softmax(x),
        "gelu": lambda: F.gelu(x), "silu": lambda: F.silu(x), "relu": lambda: F.relu(x),
        "dropout": lambda: F.dropout(x, 0.5), "pool": lambda: F.max_pool2d(image, 2),
        "mean pool": lambda: F.adaptive_avg_pool2d(image, 1),
        "interp": lambda: F.interpolate(image, scale_factor=2, mode="bilinear"),
        "bmm": lambda: paddle.bmm(image[0], image[0]), "mse": lambda: F.mse_loss(x, y),
        "einsum": lambda: paddle.einsum("ij,jk->ik", x, y), "nll": lambda: F.nll_loss(x, labels),
        "cross entropy": lambda: F.cross_entropy(x, labels), "kl": lambda: F.kl_div(x, y),
        "attention": lambda: F.scaled_dot_product_attention(*heads),
        "embedding": lambda: F.embedding(labels, x), "stack": lambda: paddle.stack([x, y]),
        "concat": lambda: paddle.concat([x, y]), "split": lambda: paddle.split(x, 2),
        "reshape": lambda: x.reshape([-1]), "transpose": lambda: x.transpose([1, 0]),
        "flatten": lambda: image.flatten(), "expand": lambda: x[0].expand([3, 4]),
        "pad": lambda: F.pad(image, [1, 1, 1, 1]), "topk": lambda: paddle.topk(x, 2),
        **{name: lambda n=name: layers[n](x if n in ("ln", "fc") else image) for name in layers},
    }  # fmt: skip
    wrong = {}
    ops = PlannedOps("fp16", lambda: None, list)
    with ops.active():
        for name, function in functions.items():
            ops.seen.clear()
            with collected() as statistics:
                function()
            if found := differences(on_a_cpu(ops.seen), statistics):
                wrong[name] = [difference.sentence for difference in found]
            elif not ops.seen or all(op in NOT_COUNTED for op in statistics):
                wrong[name] = ["nothing was counted"]
    return {"functions": len(functions), "wrong": wrong}


def plans(folder: Path) -> dict[str, Any]:
    """For each shared network: the plan of an fp32 run, and the ops that the emulation ran."""
    answer: dict[str, Any] = {}
    for name in ("lenet", "mlp", "transformer"):
        spec = RunSpec(workload=name, precision="fp32")

        def train(spec: RunSpec = spec) -> None:
            training = PaddleTraining(spec)
            training.step(*next(training.batches))

        plan = planned(train)
        answer[name] = {"differences": [d.sentence for d in plan.differences]}
        for level in ("O1", "O2"):
            predicted = {f"{op.module}|{op.op}|{op.dtypes[level]}|{op.count}" for op in plan.ops}
            answer[name][level] = [sorted(predicted), sorted(_emulated(name, level))]
    return answer


def _emulated(name: str, level: str) -> set[str]:
    """What ran in one training step: "layer|op|dtype|count" up to the backward pass."""
    with contextlib.ExitStack() as stack:
        recorder = FrameworkRecorder(Cadence(0, 1, 0))
        stack.enter_context(watching(recorder, ControlSettings()))
        spec = RunSpec(
            workload=name, precision="fp16-noscaler", framework="paddle", args=(f"--level={level}",)
        )
        training = PaddleTraining(spec)
        training.step(*next(training.batches))
        measured = recorder.take()
    layers = {module.index: module.path for module in measured.modules}
    ops = [op for _, found in measured.ops for op in found if not op.is_cast]
    return {
        f"{layers[op.module]}|{op.op.removeprefix('paddle.')}|{op.outputs}|{op.count}" for op in ops
    }


def fp32_untouched(folder: Path) -> dict[str, Any]:
    """The same fp32 trainings watched and unwatched: the largest difference of any weight."""
    answer = {}
    for name in ("lenet", "mlp", "transformer"):
        ends = []
        for watched in (False, True):
            paddle.seed(0)
            with (
                watching(FrameworkRecorder(Cadence(1, 1, 0)), ControlSettings())
                if watched
                else _nothing()
            ):
                training = PaddleTraining(RunSpec(workload=name, precision="fp32"))
                for _ in range(4):
                    training.step(*next(training.batches))
            ends.append([p.numpy() for p in training.model.parameters()])
        answer[name] = all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))
    return answer


def put_back(folder: Path) -> dict[str, Any]:
    """Which attributes of Paddle are other objects after a watched fp16 training than before."""
    before = _attributes()
    settings = ControlSettings(lr_factor=2.0, eps=1e-4, add_scaler=True)
    with (
        contextlib.suppress(ZeroDivisionError),
        watching(FrameworkRecorder(Cadence(1, 1, 0)), settings),
    ):
        changed = sum(value is not before.get(key) for key, value in _attributes().items())
        training = PaddleTraining(RunSpec(workload="mlp", precision="fp16", args=("--level=O2",)))
        training.step(*next(training.batches))
        raise ZeroDivisionError
    after = _attributes()
    marks = [hasattr(p, MARK) for p in training.model.parameters()]
    different = [k for k in before if k in after and after[k] is not before[k]]
    return {"changed": changed, "different": different, "marks": sum(marks)}


def _attributes() -> dict[str, Any]:
    found = {}
    for key, module in list(sys.modules.items()):
        if key.split(".")[0] == "paddle" and module is not None:
            for name, value in list(vars(module).items()):
                if callable(value):
                    found[f"{key}:{name}"] = value
    owners = [paddle.Tensor, paddle.nn.Layer, paddle.amp.AmpScaler, paddle.amp.GradScaler]
    for kind in (*owners, paddle.optimizer.Optimizer, paddle.optimizer.SGD, paddle.optimizer.Adam):
        found |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items()}
    return found


def losses(folder: Path) -> dict[str, Any]:
    """Losses as they are recorded of backward passes of every kind, and as they are."""
    recorder, true = FrameworkRecorder(Cadence(0, 0, 0)), []
    with watching(recorder, ControlSettings()):
        model = paddle.nn.Linear(4, 1)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        scaler = paddle.amp.GradScaler(init_loss_scaling=64.0)
        for kind in ("own", "list", "alone", "several", "own", "seeded"):
            loss = model(paddle.ones([8, 4])).mean()
            scaled = scaler.scale(loss)
            if kind == "own":
                scaled.backward()
            elif kind == "seeded":
                paddle.autograd.backward([scaled], [paddle.ones_like(scaled)])
            else:
                given = {"list": [scaled], "alone": scaled, "several": [scaled, loss * 2.0]}
                paddle.autograd.backward(given[kind])
            true.append(float(loss) if kind in ("own", "list", "alone") else None)
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
    found = [a.loss for a in recorder.optimizer_steps]
    counts = [a.backwards for a in recorder.optimizer_steps]
    return {"recorded": found, "true": true, "backwards": counts}


def masters(folder: Path) -> dict[str, Any]:
    """O2 with SGD: weights after each step and the gradients that made them, for a simulation."""
    answer: dict[str, Any] = {}
    for master in (True, False):
        weights, gradients = [], []
        with HalfParameters().active(), Emulation(OpenRegion()).active():
            paddle.seed(3)
            layer = paddle.nn.Linear(8, 8)
            optimizer = paddle.optimizer.SGD(3e-4, parameters=[layer.weight])
            layer, optimizer = paddle.amp.decorate(
                layer, optimizer, level="O2", master_weight=master
            )
            for _ in range(30):
                weights.append(layer.weight.numpy())
                with paddle.amp.auto_cast(level="O2"):
                    loss = (layer(paddle.ones([2, 8])) * 3.0).mean()
                loss.backward()
                gradients.append(layer.weight.grad.numpy())
                optimizer.step()
                optimizer.clear_grad()
            weights.append(layer.weight.numpy())
        np.savez(folder / f"masters_{master}.npz", w=np.stack(weights), g=np.stack(gradients))
        answer[str(master)] = len(weights)
    return answer


def watch(folder: Path) -> dict[str, Any]:
    """A training under Watch, forced fp16; then Model.fit with the callback. Their run ids."""
    store = folder / "watch.db"
    with Patches() as patches, Emulation(OpenRegion()).active():
        Scalers(ControlSettings(), on_cpu=True).put_on(patches)
        spec = RunSpec(workload="mlp", precision="fp16", args=("--loop=minimize",))
        training = PaddleTraining(spec)
        training.scaler.set_init_loss_scaling(2.0**30)
        scales = []
        with Watch(histograms_every=5, store=store, label="watched") as run:
            for _ in range(30):
                scales.append(float(training.scaler._scale))
                training.step(*next(training.batches))
    network_ = paddle.Model(paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Linear(8, 2)))
    network_.prepare(
        paddle.optimizer.Adam(1e-2, parameters=network_.parameters()), paddle.nn.CrossEntropyLoss()
    )
    inputs = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    labels = np.arange(64)[:, None] % 2
    data = paddle.io.TensorDataset([paddle.to_tensor(inputs), paddle.to_tensor(labels)])
    callback = WatchCallback(store=store)
    network_.fit(data, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    return {"loop": run.runs[-1], "scales": scales, "fit": callback.runs[-1]}


def _model() -> Any:
    paddle.seed(1)
    model = paddle.Model(paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Linear(8, 2)))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    model.prepare(optimizer, paddle.nn.CrossEntropyLoss())
    return model


def _data() -> Any:
    class Data(paddle.io.Dataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return np.full(4, index % 3, "float32"), np.array([index % 2])

        def __len__(self) -> int:
            return 24

    return Data()


def _fitted(callback: Any, data: Any, *others: Any) -> str:
    """The exception that came out of a ``fit``; "" for none. Shuffles nothing."""
    try:
        _model().fit(data, batch_size=4, shuffle=False, verbose=0, callbacks=[callback, *others])
    except Exception as error:
        return type(error).__name__
    return ""


def watch_ends(folder: Path) -> dict[str, Any]:
    """How runs end whose training, or store, fails: {case: [run or "", exception]}, and whether
    Paddle is as it was."""
    store = folder / "ends.db"
    before = [vars(paddle.optimizer.Optimizer)["step"], vars(paddle.nn.Layer)["__call__"]]
    sys.last_value = ValueError("of an earlier cell")  # as a notebook has it

    class Later(paddle.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise KeyError("another callback")

    class Bad(paddle.io.Dataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return np.ones(5 if index >= 8 else 4, "float32"), np.array([0])

        def __len__(self) -> int:
            return 24

    def seen(data: Any, *others: Any) -> list[Any]:
        callback = WatchCallback(store, 1)
        return [callback.runs, _fitted(callback, data, *others)]

    cases: dict[str, Any] = {
        "step": seen(Bad()), "callback": seen(_data(), Later()),
    }  # fmt: skip
    callback = WatchCallback(store)
    cases["again"] = [callback.runs, _fitted(callback, _data()) + _fitted(callback, _data())]
    after = [vars(paddle.optimizer.Optimizer)["step"], vars(paddle.nn.Layer)["__call__"]]
    cases["put back"] = all(a is b for a, b in zip(before, after, strict=True))
    return cases


def full_store(folder: Path) -> dict[str, Any]:
    """A training whose store fills up, one without a store, one that raises with a full store:
    weights, warnings, the exception."""
    weights, warned = [], []

    def trained(watch: Any, fill: bool = False, fail: bool = False) -> str:
        paddle.seed(1)
        layer = paddle.nn.Linear(64, 64)
        optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
        try:
            with warnings.catch_warnings(record=True, action="always") as said, watch:
                if fill:  # SQLite then says "database or disk is full"
                    run, recorder = watch._training.run, watch._training.recorder
                    # The second is full at its end, the first within: it writes at each step.
                    run._now = (lambda: 0.0) if fail else (lambda: float(recorder.steps))
                    connection = run.writer._connection
                    pages = connection.execute("PRAGMA page_count").fetchone()[0]
                    connection.execute(f"PRAGMA max_page_count = {pages}")
                for _ in range(60):
                    layer(paddle.ones([4, 64])).mean().backward()
                    optimizer.step()
                    optimizer.clear_grad()
                if fail:
                    raise KeyError("their own")
        except Exception as error:
            return type(error).__name__
        finally:
            weights.append(hash(layer.weight.numpy().tobytes()))
            warned.append([str(w.message) for w in said if "ampscope" in str(w.message)])
        return ""

    (folder / "file").touch()
    full = Watch(folder / "full.db", 1)
    raised = [
        trained(contextlib.nullcontext()),
        trained(full, fill=True),
        trained(Watch(folder / "file" / "runs.db")),
        trained(Watch(folder / "raising.db", 1), fill=True, fail=True),
    ]
    return {"weights": weights, "warned": warned, "raised": raised, "run": full.runs[-1]}


def arithmetics(folder: Path) -> dict[str, Any]:
    """What is said of the arithmetic under a control."""
    controls = ("as_is", "fp32", "fp32_modules:fc1", "lr:0.1;fp32", "bf16")
    specs = {c: RunSpec(workload="train.py", kind="script", control=c) for c in controls}
    return {c: [(m := machine(spec)).arithmetic, m.policy] for c, spec in specs.items()}


def overflowed_layer(folder: Path) -> dict[str, Any]:
    """What the planted layer of paddle_overflow.py gives in fp32 on its first batch, and how many
    of its entries fp16 cannot hold, with NumPy; no part of ampscope takes part."""
    script = (Path(__file__).parent / "scripts" / "paddle_overflow.py").read_text()
    setup, _, loop = script.partition("for step in range(40):\n")
    scope: dict[str, Any] = {}
    exec(setup, scope)  # the script's own model and data
    lines = [line.strip() for line in loop.splitlines()[:2]]
    exec("\n".join(lines), scope)
    model, half = scope["model"], np.float16

    def weights(layer: Any) -> tuple[Any, Any]:
        return layer.weight.numpy(), layer.bias.numpy()

    w, b = (a.astype(half).astype(np.float32) for a in weights(model.encoder))
    hidden = (scope["inputs"].astype(half).astype(np.float32) @ w + b).astype(half)
    hidden = np.tanh(hidden.astype(np.float32)).astype(half).astype(np.float32)
    w, b = weights(model.wide)
    wide = hidden @ w + b
    with np.errstate(over="ignore"):
        w16, b16 = w.astype(half).astype(np.float32), b.astype(half).astype(np.float32)
        out = (hidden @ w16 + b16).astype(half)
    return {
        "largest": float(np.abs(wide).max()), "inf": int(np.isinf(out).sum()),
        "nan": int(np.isnan(out).sum()), "total": out.size,
    }  # fmt: skip


def op_records(folder: Path) -> dict[str, Any]:
    """Inputs that a norm and a linear layer are recorded with."""
    seen: list[OpRun] = []
    emulation = Emulation(OpenRegion())
    emulation.op_seen = seen.append
    counts = OpCounts(lambda: 0)
    with emulation.active(), paddle.amp.auto_cast():
        paddle.nn.BatchNorm1D(4)(paddle.nn.Linear(4, 4)(paddle.ones([2, 4])))
    for run in seen:
        counts(run)
    return {"ops": [[op.op, op.inputs, op.outputs, op.count] for op in counts.take()]}


@contextlib.contextmanager
def _nothing() -> Any:
    yield


def rounding(folder: Path) -> dict[str, Any]:
    """Rounding in memory, on the values of rounding_in.npz."""
    from ampscope.ext.frameworks.paddle.rounding import round_memory

    given = np.load(folder / "rounding_in.npz")["values"]
    found = {}
    for half in ("fp16", "bf16"):
        values = given.copy()
        round_memory(values, half)
        found[half] = values
    np.savez(folder / "rounding_out.npz", **found)
    return {"finite": math.isfinite(float(given[0]))}


if __name__ == "__main__":
    chosen, place = sys.argv[1], Path(sys.argv[2])
    with contextlib.redirect_stdout(sys.stderr):
        result = globals()[chosen](place)
    print(json.dumps(result))
