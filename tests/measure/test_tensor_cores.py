"""Matmuls of a step: FLOPs, bytes and places against numbers worked out by hand; kernels by name;
calls made again alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ampscope.analysis.tensor_core_use import CoreVerdict, core_use
from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import _of_attention
from ampscope.errors import BadInput, Cancelled
from ampscope.measure import tensor_cores
from ampscope.measure.kernel_log import OneDnnLog, implementations, kernels_by_matmul
from ampscope.measure.matmuls import MatmulCall, TensorArgument
from ampscope.measure.tensor_cores import Found, StepTrace, ceiling, copy_ceiling, measured
from ampscope.records import Machine, Matmul, Result, StepMatmuls
from ampscope.runner.device import choose_device

CPU = torch.device("cpu")
aten = torch.ops.aten


class NoKernels:
    """Matmuls without names."""

    def mark(self, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def traced(model: nn.Module, x: Tensor) -> list[Found]:
    """One forward and backward pass of the sum of squares."""
    with StepTrace(ModelMap(model), NoKernels()) as trace:
        model(x).square().sum().backward()
    return trace.found


def by_place(found: list[Found], model: nn.Module) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(module, phase, part) -> (FLOPs, bytes)."""
    names = {r.index: r.path for r in ModelMap(model).records()}
    return {
        (names[index], phase, one.call.part or "".join(map(str, one.call.dimensions()))): (
            one.flops,
            one.moved_bytes,
        )
        for one in found
        for index, phase in one.places
    }


def test_an_mlps_matmuls_by_hand() -> None:
    """Batch 8; 12 -> 20 -> 10. The input needs no gradient, so layer 0 has one backward matmul."""
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 10))
    found = traced(model, torch.randn(8, 12))
    sizes = Counter((tuple(f.call.dimensions().values()), f.flops, f.moved_bytes) for f in found)
    assert sizes == {
        # m, n, k; 2mnk; (mk + kn + mn, and n of the bias) x 4 bytes
        ((8, 20, 12), 3840, 4 * (96 + 240 + 160 + 20)): 1,
        ((8, 10, 20), 3200, 4 * (160 + 200 + 80 + 10)): 1,
        ((8, 20, 10), 3200, 4 * (80 + 200 + 160)): 1,  # gradient of layer 2's input
        ((10, 20, 8), 3200, 4 * (80 + 160 + 200)): 1,  # of its weight
        ((20, 12, 8), 3840, 4 * (160 + 96 + 240)): 1,  # of layer 0's weight
    }
    assert {f.dtype for f in found} == {"fp32"}


def test_a_conv_nets_matmuls_by_hand() -> None:
    """2 x 3 x 8 x 8, 6 filters of 3 x 3, then 12 in 3 groups without padding: 6 x 6 are left."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 12, 3, groups=3, bias=False))
    found = by_place(traced(model, torch.randn(2, 3, 8, 8)), model)
    first = 2 * 2 * 6 * 64 * (3 * 9)  # 2, batch, filters, places, matmuls for each
    second = 2 * 2 * 12 * 36 * (2 * 9)  # a filter sees the 2 channels of its group
    x, w0, y, w1, z = 2 * 3 * 64, 6 * 3 * 9, 2 * 6 * 64, 12 * 2 * 9, 2 * 12 * 36
    channels = "input channelsoutput channels"
    assert found == {
        ("0", "forward", channels): (first, 4 * (x + w0 + 6 + y)),
        ("1", "forward", channels): (second, 4 * (y + w1 + z)),
        ("1", "backward", "input gradient"): (second, 4 * (z + w1 + y)),
        ("1", "backward", "weight gradient"): (second, 4 * (z + y + w1)),
        ("0", "backward", "weight gradient"): (first, 4 * (y + x + w0 + 6)),
    }


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution(groups: int) -> None:
    """Each of 4 x 4 inputs meets every weight of its group: 2 * N * 16 * Cin * (Cout/g) * 9."""
    model = nn.ConvTranspose2d(4, 8, 3, stride=2, groups=groups, bias=False)
    found = traced(model, torch.randn(2, 4, 4, 4, requires_grad=True))
    assert [f.flops for f in found] == [2 * 2 * 16 * 4 * (8 // groups) * 9] * 3
    dimensions = {"input channels": 4 // groups, "output channels": 8 // groups}
    assert all(f.call.dimensions() == dimensions for f in found)


def test_gradients_are_the_same_as_without_the_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    x = torch.randn(2, 3, 8, 8)
    model(x).square().sum().backward()
    before = [p.grad for p in model.parameters()]
    model.zero_grad()
    traced(model, x)
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True))


def test_equal_matmuls_are_one_with_several_places() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    found = traced(model, torch.randn(4, 16, requires_grad=True))
    forward = [f for f in found if f.call.name == "addmm"]
    assert len(forward) == 1
    assert sorted(forward[0].places.items()) == [((1, "forward"), 1), ((2, "forward"), 1)]


def test_attention_is_a_matmul_on_a_cpu_too() -> None:
    q = torch.randn(2, 4, 16, 8)
    with StepTrace(ModelMap(nn.Identity()), NoKernels()) as trace:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    (found,) = trace.found
    assert found.call.dimensions() == {"head size": 8}
    assert found.flops == 2 * (2 * (2 * 4) * 16 * 16 * 8)  # scores and mix
    assert measured(found, {0: ""}, (), CPU).timing is not None


def test_grouped_query_attention_has_the_flops_of_all_query_heads() -> None:
    """Four query heads share two heads of keys and values; torch 2.11 has no formula for that."""
    q, k = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 2, 12, 8)
    with StepTrace(ModelMap(nn.Identity()), NoKernels()) as trace:
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
        out[0].sum().backward()
    one = 2 * (2 * 4) * 16 * 12 * 8  # scores, or the mix of values
    assert [f.flops for f in trace.found] == [2 * one, 5 * one]


def test_a_formula_that_knows_only_equal_heads_is_given_equal_heads() -> None:
    def equal_heads(q: tuple[int, ...], k: tuple[int, ...], *rest: object, out_val: object) -> int:
        assert q[1] == k[1]
        return q[0] * q[1]

    q, k = torch.empty(2, 4, 16, 8), torch.empty(2, 1, 12, 8)
    assert _of_attention(equal_heads)(q, k, k, 0.0, out_val=q) == 8


def test_a_matmul_without_a_formula_for_its_form_is_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*shapes: object, **rest: object) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(tensor_cores._FORMULAS, aten.mm, refuses)
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 10))
    found = traced(model, torch.randn(8, 12))
    assert {bool(f.unknown) for f in found if f.call.name == "mm"} == {True}
    assert {f.flops for f in found if f.unknown} == {0}
    assert sum(f.flops for f in found) == 2 * 8 * (12 * 20 + 20 * 10)  # the forward's addmm
    names = dict.fromkeys(range(3), "")
    alone = measured(next(f for f in found if f.unknown), names, (), CPU)
    assert alone.timing is not None
    assert "AssertionError" in tensor_cores.notes(found, [alone], CPU)


@pytest.mark.parametrize(("median_s", "device", "says"), [
    (4e-6, "cuda", True), (4e-6, "cpu", False), (4e-5, "cuda", False),
])  # fmt: skip
def test_a_rate_of_launches_is_called_so(median_s: float, device: str, says: bool) -> None:
    (found,) = traced(nn.Linear(4, 4, bias=False), torch.randn(2, 4))[:1]
    alone = measured(found, dict.fromkeys(range(3), ""), (), CPU)
    assert alone.timing is not None
    alone = replace(alone, timing=replace(alone.timing, median_s=median_s))
    said = tensor_cores.notes([found], [alone], torch.device(device))
    assert ("1 of 1 matmuls last less than 10 µs" in said) is says


@pytest.mark.parametrize(
    ("tensor", "elements"),
    [
        (torch.empty(4, 6), 24),
        (torch.empty(4, 6).t(), 24),
        (torch.empty(1, 6).expand(4, 6), 6),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), 120),
        (torch.empty(8, 8)[::2, ::2], 16),
    ],
)
def test_a_tensor_is_made_again_as_it_lay(tensor: Tensor, elements: int) -> None:
    call = MatmulCall.of(aten.relu.default, (tensor,), {})
    argument = call.args[0]
    assert isinstance(argument, TensorArgument)
    made = argument.made(CPU)
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert argument.elements == elements


def matmul_of(module: nn.Module, x: Tensor, name: str, part: str = "") -> MatmulCall:
    found = traced(module, x)
    return next(f.call for f in found if f.call.name == name and f.call.part == part)


def test_padding_enlarges_a_linear_layers_output_everywhere() -> None:
    call = matmul_of(nn.Linear(12, 10), torch.randn(8, 12), "addmm").padded({"n": 16})
    assert [t.shape for t in call.tensors()] == [(16,), (8, 12), (12, 16)]
    assert [t.stride for t in call.tensors()] == [(1,), (12, 1), (1, 12)]  # still transposed
    assert call.made(CPU)().shape == (8, 16)  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["input gradient", "weight gradient"])
def test_padding_enlarges_channels_of_a_convolutions_backward(part: str) -> None:
    conv = nn.Conv2d(3, 10, 3)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    call = matmul_of(conv, x, "convolution_backward", part)
    padded = call.padded({"input channels": 8, "output channels": 16})
    out = padded.made(CPU)()
    assert isinstance(out, tuple)
    assert (out[0] if part == "input gradient" else out[1]).shape[:2] == (
        (2, 8) if part == "input gradient" else (16, 8)
    )


def test_a_matmul_alone_has_a_control_and_padded_sizes() -> None:
    model = nn.Linear(64, 10).to(torch.bfloat16)
    (forward, _) = traced(model, torch.randn(32, 64, dtype=torch.bfloat16))
    matmul = measured(forward, {0: ""}, ("name",), CPU)
    assert matmul.dtype == "bf16"
    assert matmul.timing is not None
    assert matmul.timing.repeats >= 5
    assert matmul.control is not None
    assert [p.changes for p in matmul.padded] == [((10, 16),)]
    assert matmul.padded[0].flops == 2 * 32 * 64 * 16
    assert matmul.note == ""


def test_a_matmul_that_cannot_be_run_alone_says_so() -> None:
    call = MatmulCall.of(aten.mm.default, (torch.ones(2, 3), torch.ones(4, 5)), {})
    matmul = measured(Found(call, "fp32", 1, 1), {}, (), CPU)
    assert matmul.timing is None
    assert matmul.note.startswith("It could not be run alone: RuntimeError")


def test_ceilings_are_plausible() -> None:
    """Two ways to the same number: FLOPs over the median time."""
    rate = ceiling("fp32", CPU)
    assert rate is not None
    assert rate.timing is not None
    m, n, k = rate.shape
    assert rate.flops_s == pytest.approx(2 * m * n * k / rate.timing.median_s)
    assert ceiling("e5m2", CPU) is None
    copied = copy_ceiling(CPU)
    assert copied.bytes_s is not None
    assert copied.bytes_s > 1e8


LOG = """\
ampscope,0
onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71049cd69a3df32adcccb623b12cd7baa22)
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:bf16::blocked:abcd::f0,,,16x3,0.1
onednn_verbose,v1,primitive,exec,cpu,convolution,jit_bf16:avx512_core_bf16,forward,src,,alg,mb4,1.2
epoch 3 loss 0.25
ampscope,none
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core,undef,src:f32,,,8x8:8x8,0.1
ampscope,1
onednn_verbose,primitive,exec,cpu,matmul,brg:avx512_core_amx,undef,src_bf16,,,8x8:8x8,0.1
onednn_verbose,primitive,exec,cpu,matmul,brg:avx512_core_amx,undef,src_bf16,,,8x8:8x8,0.1
ampscope,none
"""


def test_onednns_lines_go_to_the_matmul_before_them() -> None:
    assert implementations(LOG) == {
        0: ("convolution jit_bf16:avx512_core_bf16",),
        1: ("matmul brg:avx512_core_amx",),
    }


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_onednns_real_log_and_what_others_print(capfd: pytest.CaptureFixture[str]) -> None:
    """An fp32 convolution goes to oneDNN on x86; the log leaves standard output as it was."""
    weight, x = torch.randn(16, 8, 3, 3), torch.randn(2, 8, 16, 16)
    log = OneDnnLog()
    with log:
        with log.mark(3):
            torch.conv2d(x, weight)
        print("said by the training", flush=True)
        with log.mark(4):
            x.add(1)
    print("after")
    assert list(log.kernels) in ([3], [])  # a CPU for which oneDNN has no convolution has no line
    assert all(name.startswith("convolution ") for names in log.kernels.values() for name in names)
    assert capfd.readouterr().out == "said by the training\nafter\n"


def test_a_kernel_belongs_to_the_range_that_its_op_ran_in() -> None:
    """The profiler's tree: range > aten::addmm > cudaLaunchKernel, kernels linked to the op."""

    def event(name: str, *children: object, kernels: tuple[str, ...] = ()) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            device_type=torch.autograd.DeviceType.CPU,
            kernels=[SimpleNamespace(name=k) for k in kernels],
            cpu_children=list(children),
        )

    mm = event("aten::mm", kernels=("nvjet_tst", "Memset (Device)"))
    reduce = event("aten::sum", kernels=("reduce_kernel",))
    events = [
        event("ampscope-matmul-0", mm, kernels=("ampscope-matmul-0",)),
        event("ampscope-matmul-1", event("aten::convolution", event("aten::cudnn", mm), reduce)),
        event("aten::sum", kernels=("outside",)),
    ]
    assert kernels_by_matmul(events) == {0: ("nvjet_tst",), 1: ("nvjet_tst", "reduce_kernel")}


class Results:
    """In place of a run's writer."""

    def __init__(self) -> None:
        self.found: list[Result] = []

    def add_result(self, record: Result) -> None:
        self.found.append(record)

    def flush(self) -> None:
        pass

    flush_if_due = flush


def measure_in(spec_fields: dict[str, object], cancels_after: int = 10**9) -> list[Result]:
    from ampscope.measure.tensor_cores import measure
    from ampscope.records import RunSpec

    results = Results()
    spec = RunSpec(kind="cores", **spec_fields)  # type: ignore[arg-type]

    def is_cancelled() -> bool:
        return sum(isinstance(r, Matmul) for r in results.found) >= cancels_after

    measure(spec, choose_device("cpu"), results, is_cancelled)  # type: ignore[arg-type]
    return results.found


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Timings that are short and of no use."""
    monkeypatch.setattr("ampscope.measure.tensor_cores.BUDGET_S", 0.0)
    monkeypatch.setattr("ampscope.measure.tensor_cores.LEAST_CALLS", 1)
    monkeypatch.setattr("ampscope.measure.tensor_cores.CEILING_SIZES", (64,))
    monkeypatch.setattr("ampscope.measure.tensor_cores.COPY_ELEMENTS", {"cpu": 1024})
    return


@pytest.mark.usefixtures("few_calls")
def test_the_whole_of_a_step() -> None:
    """The tiny MLP: what the step holds is what its matmuls add up to, the largest first."""
    found = measure_in({"workload": "mlp", "size": "tiny", "precision": "bf16"})
    (step,) = (r for r in found if isinstance(r, StepMatmuls))
    matmuls = [r for r in found if isinstance(r, Matmul)]
    assert len(matmuls) == step.distinct
    assert sum(p.count for p in matmuls) == step.calls
    assert sum(p.count * p.flops for p in matmuls) == step.flops
    assert [p.flops * p.count for p in matmuls] == sorted(
        (p.flops * p.count for p in matmuls), reverse=True
    )
    assert {p.dtype for p in matmuls} == {"bf16"}
    assert {place.phase for p in matmuls for place in p.places} == {"forward", "backward"}


@pytest.mark.usefixtures("few_calls")
def test_a_cancelled_measurement_keeps_what_it_has() -> None:
    with pytest.raises(Cancelled, match="after 2 of"):
        measure_in({"workload": "mlp", "size": "tiny", "precision": "fp32"}, cancels_after=2)


WITHOUT_MATMULS = """
import torch
from torch import nn
from ampscope import Workload

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))
    def forward(self, x):
        return x * self.by

def build(seed):
    return Workload(model=Scale(), batches=[torch.ones(2, 4)],
                    loss=lambda model, batch: model(batch).sum(),
                    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""


def test_a_step_without_matmuls_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "scale.py"
    file.write_text(WITHOUT_MATMULS)
    with pytest.raises(BadInput, match="no matmul"):
        measure_in({"workload": f"{file}:build", "precision": "fp32"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_large_half_matmul_uses_tensor_cores_and_fp32_does_not() -> None:
    from ampscope.measure.kernel_log import KernelProfile
    from ampscope.policy.precision import tf32_switches

    device = torch.device("cuda:0")
    model = nn.Linear(4096, 4096, bias=False).to(device)
    x = torch.randn(4096, 4096, device=device)
    model(x).sum().backward()
    kernels = KernelProfile()
    with (
        tf32_switches(False),
        kernels,
        StepTrace(ModelMap(model), kernels) as trace,
    ):
        with torch.autocast("cuda", torch.float16):
            model(x).sum()
        model(x).sum()
    half, plain = trace.found
    both = enumerate((half, plain))
    matmuls = [measured(one, {0: ""}, kernels.kernels[i], device) for i, one in both]
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    step = StepMatmuls("cuda", capability, None, 2, half.flops + plain.flops, 2, kernels.source)
    rates = [r for d in ("fp32", "fp16") if (r := ceiling(d, device))]
    machine = Machine("cuda:0", torch.cuda.get_device_name(), "cuda", capability)
    use = core_use([step, *rates, copy_ceiling(device), *matmuls], machine)
    assert use is not None
    verdicts = {u.matmul.dtype: u.verdict for u in use.uses}
    assert verdicts == {"fp16": CoreVerdict.USED, "fp32": CoreVerdict.NOT_USED}
