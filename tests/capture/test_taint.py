"""A non-finite value keeps the trail to the op that made it, through every op in its way.

Oracle: one overflow is planted in a module (``exp`` of 12 in fp16, 162,755 > 65,504). Whatever
comes between it and the result, that op, module and line are the root; and the same path without
the overflow names no op, though its masks hold -inf.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, softmax

from ampscope.observations import BadOp
from tests.helpers.script_watching import Watched, watched

HERE = Path(__file__)
INF, NAN = math.inf, math.nan
SIZE = 4
CAUSAL = torch.ones(SIZE, SIZE, dtype=torch.bool).triu(1)  # True is masked
Way = Callable[[Tensor], Tensor]


class Source(nn.Module):
    """Overflows in fp16 where its input is 12 (exp(12) = 162,755)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)  # the planted overflow


def _source_line() -> str:
    lines = HERE.read_text().splitlines()
    return f"{HERE.name}:{1 + next(n for n, x in enumerate(lines) if '# the planted' in x)}"


def _input(planted: bool) -> Tensor:
    """[4, 4] in fp16; entry (2, 1), which a causal mask leaves, overflows when ``planted``."""
    x = torch.linspace(-1, 1, SIZE * SIZE).reshape(SIZE, SIZE).half()
    if planted:
        x[2, 1] = 12.0
    return x


def _run(path: Way, planted: bool, *, gradients: bool = False) -> tuple[Watched, Tensor]:
    model = nn.Sequential(nn.Identity(), Source())
    with watched() as seen:
        x = _input(planted).requires_grad_(gradients)
        result = path(model(x))
    return seen, result


def _bad(seen: Watched) -> list[BadOp]:
    return [b for b in seen.watch.records() if b.kind == "nonfinite"]


def _copied(x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    """``change`` in place on a copy of ``x``."""
    copy = x.clone()
    change(copy)
    return copy


def _into(x: Tensor, write: Callable[[Tensor, Tensor], object]) -> Tensor:
    """``write`` gets an empty tensor beside ``x``."""
    target = torch.empty_like(x)
    write(x, target)
    return target


def _buffer_mask(dtype: torch.dtype) -> Tensor:
    return torch.zeros(SIZE, SIZE, dtype=dtype).masked_fill(CAUSAL, -INF)


BUFFER = _buffer_mask(torch.float32)
HALF_BUFFER = _buffer_mask(torch.float16)


def _view_write(x: Tensor) -> Tensor:
    target = torch.zeros(SIZE, 2 * SIZE, dtype=x.dtype)
    target[:, SIZE:] = x
    return target


def _two_views(x: Tensor) -> Tensor:
    target = torch.zeros(2, SIZE, SIZE, dtype=x.dtype)
    first, second = target[0], target.view(-1)
    first.copy_(x)
    return second


def _stale_target(x: Tensor) -> Tensor:
    """What is overwritten leaves no trail: the target held NaN of its own before."""
    target = torch.full_like(x, NAN)
    return torch.add(x, 0.0, out=target)


THROUGH: dict[str, Way] = {
    # masks, each with -inf at places that the overflow does not lie in
    "masked_fill": lambda x: x.masked_fill(CAUSAL, -INF),
    "masked_fill of a tensor": lambda x: x.masked_fill(CAUSAL, torch.tensor(-INF)),
    "masked_fill_": lambda x: _copied(x, lambda c: c.masked_fill_(CAUSAL, -INF)),
    "masked_fill twice": lambda x: x.masked_fill(CAUSAL, -INF).masked_fill(CAUSAL, -INF),
    "where scalar": lambda x: torch.where(CAUSAL, -INF, x),
    "where tensor": lambda x: torch.where(CAUSAL, torch.tensor(-INF).half(), x),
    "where method": lambda x: x.where(~CAUSAL, torch.tensor(-INF).half()),
    "where out": lambda x: _into(x, lambda a, o: torch.where(CAUSAL, BUFFER.half(), a, out=o)),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([3]), -INF),
    "index_fill_": lambda x: _copied(x, lambda c: c.index_fill_(1, torch.tensor([3]), -INF)),
    "masked write": lambda x: _copied(x, lambda c: c.__setitem__(CAUSAL, -INF)),
    "row write": lambda x: _copied(x, lambda c: c.__setitem__(0, -INF)),
    "row fill_": lambda x: _copied(x, lambda c: c[0].fill_(-INF)),
    "masked_scatter": lambda x: x.masked_scatter(CAUSAL, torch.full((16,), -INF).half()),
    "scatter value": lambda x: x.scatter(1, torch.full((SIZE, 1), 3), -INF),
    "scatter_ tensor": lambda x: _copied(
        x, lambda c: c.scatter_(1, torch.full((SIZE, 1), 3), torch.full((SIZE, 1), -INF).half())
    ),
    "index_put": lambda x: torch.index_put(
        x, (torch.tensor([0]), torch.tensor([0])), torch.tensor(-INF).half()
    ),
    "added mask": lambda x: x + HALF_BUFFER,
    "mask first": lambda x: HALF_BUFFER + x,
    "cast mask first": lambda x: BUFFER.to(x.dtype) + x,
    "mask in place": lambda x: _copied(x, lambda c: c.add_(HALF_BUFFER)),
    "made mask": lambda x: torch.full((SIZE, SIZE), -INF, dtype=x.dtype).triu(1) + x,
    "padding": lambda x: nn.functional.pad(x, (0, 2), value=-INF),
    # ops that take bounds
    "clamp min": lambda x: x.clamp(min=-INF),
    "clamp max": lambda x: x.clamp(max=INF),
    "clamp_": lambda x: _copied(x, lambda c: c.clamp_(min=0.0)),
    "clamp tensor": lambda x: torch.clamp(x, torch.tensor(-INF).half(), torch.tensor(INF).half()),
    "clamp_min": lambda x: torch.clamp_min(x, -INF),
    "clamp out": lambda x: _into(x, lambda a, o: torch.clamp(a, min=-INF, out=o)),
    "nan_to_num keeps inf": lambda x: torch.nan_to_num(x, posinf=INF),
    "nan_to_num_": lambda x: _copied(x, lambda c: c.nan_to_num_(nan=0.0, posinf=INF)),
    "nan_to_num of a NaN": lambda x: torch.nan_to_num(x - x, nan=INF),
    "nan_to_num out": lambda x: _into(x, lambda a, o: torch.nan_to_num(a, posinf=INF, out=o)),
    "maximum": lambda x: torch.maximum(x, torch.full_like(x, -INF)),
    "hardtanh": lambda x: nn.functional.hardtanh(x, -1.0, INF),
    "threshold": lambda x: nn.functional.threshold(x, 0.0, -INF),
    # indexing, views, shapes
    "integer index": lambda x: x[2],
    "slice": lambda x: x[1:3, 1:],
    "strided slice": lambda x: x[::2],
    "list index": lambda x: x[[2, 0]],
    "boolean index": lambda x: x[~CAUSAL],
    "gather": lambda x: x.gather(1, torch.ones(SIZE, 1, dtype=torch.long)),
    "take": lambda x: x.take(torch.tensor([0, 9])),
    "index_select": lambda x: x.index_select(0, torch.tensor([2])),
    "masked_select": lambda x: x.masked_select(~CAUSAL),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "view": lambda x: x.view(-1),
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.view(2, 2, 4).permute(2, 0, 1),
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "diagonal": lambda x: x.diagonal(-1),
    "chunk": lambda x: x.chunk(2, -1)[0],
    "split": lambda x: x.split(1)[2],
    "unbind": lambda x: x.unbind(1)[1],
    "as_strided": lambda x: x.as_strided((SIZE, SIZE), (1, SIZE)),
    "movedim": lambda x: x.movedim(0, 1),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "flatten": lambda x: x.t().flatten(),
    "contiguous": lambda x: x.t().contiguous(),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "data": lambda x: x.data,
    "view as bits": lambda x: x.view(torch.int16).view(torch.float16),
    "real view": lambda x: torch.view_as_real(torch.complex(x.float(), x.float())),
    "tril": lambda x: x.tril(),
    "cast": lambda x: x.float(),
    "cast in a call": lambda x: x.to(torch.bfloat16),
    "type_as": lambda x: x.type_as(BUFFER),
    "writes through a view": _view_write,
    "another view of what was written": _two_views,
    "select_scatter": lambda x: torch.zeros(SIZE, 2).half().select_scatter(x[:, 1], 1, 0),
    "slice_scatter": lambda x: torch.zeros(8, SIZE).half().slice_scatter(x, 0, 4),
    "swap of data": lambda x: _copied(torch.zeros(SIZE, SIZE).half(), lambda c: c.copy_(x)),
    # several tensors at once
    "cat": lambda x: torch.cat([torch.ones_like(x), x]),
    "cat of a mask": lambda x: torch.cat([HALF_BUFFER, x]),
    "cat out": lambda x: torch.cat([x, x], out=torch.empty(8, SIZE, dtype=x.dtype)),
    "stack": lambda x: torch.stack([x * 0.5, x]),
    "hstack": lambda x: torch.hstack((HALF_BUFFER, x)),
    "block_diag": lambda x: torch.block_diag(x, x),
    "meshgrid": lambda x: torch.meshgrid(x[2], x[2], indexing="ij")[0],
    "foreach add": lambda x: torch._foreach_add([torch.ones_like(x), x], 1.0)[1],
    "foreach mul_": lambda x: _copied(x, lambda c: torch._foreach_mul_([c, x.clone()], 0.5)),
    "foreach copy_": lambda x: _copied(
        torch.zeros(SIZE, SIZE).half(), lambda c: torch._foreach_copy_([c], [x])
    ),
    "foreach addcdiv": lambda x: torch._foreach_addcdiv(
        [torch.ones_like(x)] * 2, [torch.ones_like(x), x], [torch.ones_like(x)] * 2
    )[1],
    "foreach norm": lambda x: torch._foreach_norm([torch.ones_like(x), x])[1],
    "foreach lerp_": lambda x: _copied(
        torch.zeros(SIZE, SIZE).half(), lambda c: torch._foreach_lerp_([c], [x], 0.5)
    ),
    "foreach clamp": lambda x: torch._foreach_clamp_min([x], -INF)[0],
    # out= forms
    "add out": lambda x: _into(x, lambda a, o: torch.add(a, 1.0, out=o)),
    "mul out": lambda x: _into(x, lambda a, o: torch.mul(a, 2.0, out=o)),
    "matmul out": lambda x: _into(x, lambda a, o: torch.mm(a, torch.eye(SIZE).half(), out=o)),
    "out over old NaN": _stale_target,
    "masked add": lambda x: torch.add(x, x.masked_fill(CAUSAL, -INF)),
    # arithmetic and reductions
    "mul": lambda x: x * 0.5,
    "in-place mul": lambda x: _copied(x, lambda c: c.mul_(0.5)),
    "add a constant -inf": lambda x: x + -INF,
    "NaN of inf": lambda x: x - x,
    "zero times inf": lambda x: x * 0.0,
    "matmul": lambda x: x @ torch.ones(SIZE, 1).half(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "cumsum": lambda x: x.cumsum(0),
    "max": lambda x: x.max(),
    "max of rows": lambda x: x.max(-1).values,
    "topk": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort(0).values,
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(),
    "relu": lambda x: torch.relu(x),
    "gelu": lambda x: nn.functional.gelu(x),
    "dropout": lambda x: nn.functional.dropout(x, 0.0),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (SIZE,)),
    "batch_norm": lambda x: nn.functional.batch_norm(x.float(), None, None, training=True),
    # softmax, fused and by hand, behind a mask
    "softmax": lambda x: softmax(x.masked_fill(CAUSAL, -INF), -1),
    "softmax with a dtype": lambda x: softmax(x + HALF_BUFFER, -1, dtype=torch.float32),
    "log_softmax": lambda x: torch.log_softmax(x.masked_fill(CAUSAL, -INF), -1),
    "softmax by hand": lambda x: _softmax_by_hand(x.masked_fill(CAUSAL, -INF)),
    "cross_entropy": lambda x: nn.functional.cross_entropy(x.float(), torch.tensor([0, 1, 1, 3])),
}


def _softmax_by_hand(scores: Tensor) -> Tensor:
    shifted = (scores - scores.amax(-1, keepdim=True)).exp()
    return shifted / shifted.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", THROUGH)
def test_the_trail_goes_through(name: str) -> None:
    seen, result = _run(THROUGH[name], planted=True)
    assert not bool(torch.isfinite(result).all())
    root = {b.id: b for b in _bad(seen)}.get(seen.watch.taint_of(result) or 0)
    assert root is not None
    assert (root.op, root.module, root.line) == ("aten.exp", "1", _source_line())
    assert seen.watch.taint_of(result) == root.id


@pytest.mark.parametrize("name", THROUGH)
def test_the_same_path_without_the_overflow_names_no_op(name: str) -> None:
    seen, result = _run(THROUGH[name], planted=False)
    taint = seen.watch.taint_of(result)
    assert _bad(seen) == []
    assert taint is None or taint < 0


ENDS: dict[str, Way] = {
    "masked away": lambda x: x.masked_fill(~CAUSAL, 0.0),
    "masked away by -inf": lambda x: softmax(x[:, :3].masked_fill(~CAUSAL[:, :3], -INF)[:1], -1),
    "clamped": lambda x: x.clamp(max=60_000.0),
    "nan_to_num": lambda x: x.nan_to_num(),
    "not taken": lambda x: torch.where(CAUSAL, x, torch.zeros_like(x)),
    "left out": lambda x: x[:2],
    "overwritten": lambda x: _copied(x, lambda c: c.fill_(1.0)),
    "overwritten with out": lambda x: torch.zeros(SIZE, out=x.clone().view(-1)[:SIZE]),
}


@pytest.mark.parametrize("name", ENDS)
def test_where_the_value_is_gone_the_trail_ends(name: str) -> None:
    seen, result = _run(ENDS[name], planted=True)
    assert bool(torch.isfinite(result).all())
    assert seen.watch.taint_of(result) is None


def test_an_overflow_that_the_mask_covers_is_not_the_root_of_the_masked_scores() -> None:
    """-inf stands at every place where the overflow was: what is left was written on purpose."""
    everything = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    everything[2] = True
    for path in (
        lambda x: x.masked_fill(everything, -INF),
        lambda x: torch.where(everything, torch.tensor(-INF).half(), x),
        lambda x: _copied(x, lambda c: c.masked_fill_(everything, -INF)),
    ):
        seen, result = _run(path, planted=True)
        taint = seen.watch.taint_of(result)
        assert taint is None or taint < 0


BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "chosen": None,
}
MASKS: dict[str, Callable[[], dict[str, object]]] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "bool": lambda: {"attn_mask": ~CAUSAL},
    "half": lambda: {"attn_mask": HALF_BUFFER},
    "made": lambda: {"attn_mask": torch.full((SIZE, SIZE), -INF).triu(1).half()},
}


@contextmanager
def _backend(name: str) -> Iterator[None]:
    chosen = BACKENDS[name]
    if chosen is None:
        yield
        return
    with sdpa_kernel(chosen):
        yield


def _attention(x: Tensor, mask: str, place: str) -> Tensor:
    q = k = v = x.new_ones(1, 2, SIZE, SIZE)
    heads = x.expand(1, 2, SIZE, SIZE)
    operands = {"q": q, "k": k, "v": v, place: heads}
    return scaled_dot_product_attention(
        operands["q"], operands["k"], operands["v"], **MASKS[mask]()
    )


@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_trail_goes_through_attention(backend: str, mask: str, place: str) -> None:
    with _backend(backend):
        seen, result = _run(lambda x: _attention(x, mask, place), planted=True)
        healthy, fine = _run(lambda x: _attention(x, mask, place), planted=False)
    assert bool(torch.isfinite(fine).all())
    assert _bad(healthy) == []
    if bool(torch.isfinite(result).all()):
        assert seen.watch.taint_of(result) is None  # the mask, or the softmax, has ended it
        return
    (root,) = [b for b in _bad(seen) if b.id == seen.watch.taint_of(result)]
    assert (root.op, root.module, root.line) == ("aten.exp", "1", _source_line())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_trail_goes_back_through_attention(backend: str) -> None:
    with _backend(backend), watched() as seen:
        x = _input(True).requires_grad_(True)
        model = nn.Sequential(nn.Identity(), Source())
        _attention(model(x), "bool", "v").sum().backward()
    assert not bool(torch.isfinite(x.grad).all())
    (root,) = [b for b in _bad(seen) if b.id == seen.watch.taint_of(x.grad)]
    assert (root.op, root.phase, root.module) == ("aten.exp", "forward", "1")


BACKWARD = ("masked_fill", "where scalar", "added mask", "index_fill", "mul", "softmax", "matmul",
            "cat", "stack", "slice", "boolean index", "gather", "clone", "cast", "layer_norm",
            "log_softmax", "norm", "NaN of inf", "cross_entropy", "softmax by hand",
            "writes through a view", "einsum", "permute", "logsumexp", "gelu")  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
def test_the_trail_goes_back_to_the_gradient(name: str) -> None:
    with watched() as seen:
        x = _input(True).requires_grad_(True)
        model = nn.Sequential(nn.Identity(), Source())
        result = THROUGH[name](model(x))
        result.float().sum().backward()
    if bool(torch.isfinite(x.grad).all()):
        pytest.skip("this derivative is finite")
    (root,) = [b for b in _bad(seen) if b.id == seen.watch.taint_of(x.grad)]
    assert (root.op, root.module, root.line) == ("aten.exp", "1", _source_line())


@pytest.mark.parametrize("name", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_weights_that_a_bad_gradient_broke_lead_to_its_root(
    kind: type[torch.optim.Optimizer], name: str
) -> None:
    layer = nn.Linear(SIZE, 1)
    settings = {"foreach": name == "foreach", "fused": name == "fused"}
    with watched() as seen:
        optimizer = kind(layer.parameters(), lr=0.1, **settings)
        model = nn.Sequential(nn.Identity(), Source())
        layer(model(_input(True)).float()).sum().backward()
        optimizer.step()
        loss = layer(torch.ones(1, SIZE)).sum()
        assert not bool(torch.isfinite(loss))
        (root,) = [b for b in _bad(seen) if b.id == seen.watch.taint_of(loss)]
    assert (root.op, root.phase) == ("aten.exp", "forward")


def test_a_running_statistic_that_an_overflow_broke_leads_to_it() -> None:
    norm = nn.BatchNorm1d(SIZE)
    with watched() as seen:
        model = nn.Sequential(nn.Identity(), Source())
        norm(model(_input(True)).float())
        result = norm.eval()(torch.ones(2, SIZE))
        assert not bool(torch.isfinite(result).all())
        (root,) = [b for b in _bad(seen) if b.id == seen.watch.taint_of(result)]
    assert root.op == "aten.exp"


def test_a_number_read_into_python_keeps_the_trail() -> None:
    seen, result = _run(lambda x: torch.ones(3) * x.max().item(), planted=True)
    (root,) = [b for b in _bad(seen) if b.id == seen.watch.taint_of(result)]
    assert root.op == "aten.exp"


def test_a_constant_that_makes_nan_of_finite_numbers_is_a_root_of_its_own() -> None:
    with watched() as seen:
        result = torch.zeros(3) * INF
    (root,) = [b for b in _bad(seen) if b.id == seen.watch.taint_of(result)]
    assert (root.op, root.nan) == ("aten.mul", 3)


def test_a_row_that_a_cast_mask_empties_is_a_root_of_its_own() -> None:
    scores = torch.ones(2, 3).half()
    mask = torch.full((2, 3), -INF)
    with watched() as seen:
        result = softmax(scores + mask.half(), -1)
    (root,) = [b for b in _bad(seen) if b.id == seen.watch.taint_of(result)]
    assert (root.op, root.nan) == ("aten._softmax", 6)


def test_an_in_place_op_on_bad_data_is_not_its_root() -> None:
    data = torch.tensor([1.0, NAN])
    with watched() as seen:
        data.mul_(2.0)
        assert seen.watch.taint_of(data.sum()) == -1
    assert _bad(seen) == []


def test_looking_again_at_a_random_op_leaves_the_generator_alone() -> None:
    x = torch.full((64,), 60_000.0, dtype=torch.float16)

    def draw(watch: bool) -> Tensor:
        torch.manual_seed(0)
        if not watch:
            nn.functional.dropout(x, 0.5)
            return torch.rand(3)
        with watched() as seen:
            nn.functional.dropout(x, 0.5)
        assert _bad(seen)
        return torch.rand(3)

    assert torch.equal(draw(True), draw(False))


def test_trails_do_not_keep_tensors_alive() -> None:
    with watched() as seen:
        for _ in range(2_000):
            torch.exp(torch.full((2,), 12.0, dtype=torch.float16))
        gc.collect()
        assert len(seen.watch.taints) <= 1_024
