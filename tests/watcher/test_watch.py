"""ampscope.watch: what it records of a training, against what the training itself knows."""

from __future__ import annotations

import copy
import io
import math
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.errors import BadInput
from ampscope.numerics.histogram import FIRST, LOWEST, POS_ZERO
from ampscope.records import Role, State
from ampscope.store.reader import Reader
from ampscope.watcher.alarms import AmpscopeWarning
from tests.helpers.trainers import assert_nothing_left
from tests.helpers.watched import recorded, small_net, train_bf16, train_fp16, watching


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def test_training_is_bit_identical(store: Path) -> None:
    watched, _ = watching(store, every=1)
    _, bare = train_fp16(12, bad_at=(5,))
    _, seen = train_fp16(12, watched, bad_at=(5,))
    assert all(a == b or (a != a and b != b) for a, b in zip(bare.losses, seen.losses, strict=True))
    assert bare.scales == seen.scales
    assert all(map(torch.equal, bare.weights, seen.weights))


class Answering(nn.Linear):
    """Has a module for every attribute that is asked of it, once it is made."""

    is_made = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self.is_made:
                raise
            return nn.Linear(1, 1)


def test_a_model_with_an_answer_for_everything_is_no_wrapper(store: Path) -> None:
    model = Answering(2, 1)
    model.is_made = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, optimizer, store=store, every=1) as run:
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    frames = recorded(store, run.id).frames
    assert [frame.rows.sum() for frame in frames[Role.ACTIVATION]] == [3]


def test_steps_are_what_the_loop_saw(store: Path) -> None:
    watched, ids = watching(store, every=4)
    _, seen = train_fp16(12, watched, bad_at=(5, 6))
    run = recorded(store, ids[0])
    assert run.info.state is State.FINISHED
    np.testing.assert_array_equal([s.loss for s in run.steps], seen.losses)
    assert [s.scale for s in run.steps] == seen.scales
    assert [s.step for s in run.steps if s.skipped] == [5, 6]
    assert {s.lr for s in run.steps} == {0.01}
    assert [s.growth_counter for s in run.steps[4:9]] == [5, 0, 0, 1, 2]


def test_the_gradient_norm_is_of_unscaled_gradients(store: Path) -> None:
    torch.manual_seed(1)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    norms = []
    with ampscope.watch(model, optimizer, scaler, store=store) as run:
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(16, 8)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
            norms.append(math.sqrt(squares))
            scaler.step(optimizer)
            scaler.update()
    np.testing.assert_allclose(
        [s.grad_norm for s in recorded(store, run.id).steps], norms, rtol=1e-5
    )


def test_histograms_are_taken_when_due_and_count_every_element(store: Path) -> None:
    model = small_net()
    run = ampscope.watch(model, store=store, every=3)
    train_bf16(7, model)
    run.close()
    found = recorded(store, run.id)
    assert found.at(Role.WEIGHT_GRAD) == found.at(Role.ACTIVATION) == [0, 3, 6]
    assert found.at(Role.WEIGHT) == found.at(Role.UPDATE) == [0]  # each tenth recorded step
    elements = sum(p.numel() for p in model.parameters())
    assert all(int(f.rows.sum()) == elements for f in found.frames[Role.WEIGHT_GRAD])
    # Two micro-batches; four modules put out 16 x 16 numbers and the last one 16.
    assert all(int(f.rows.sum()) == 2 * (4 * 256 + 16) for f in found.frames[Role.ACTIVATION])


def test_every_1_records_everything(store: Path) -> None:
    model = small_net()
    train_bf16(3, model, run := ampscope.watch(model, store=store, every=1))
    assert all(recorded(store, run.id).at(role) == [0, 1, 2] for role in Role)


def test_weight_gradients_against_frexp(store: Path) -> None:
    """One step whose gradients are known: frexp gives their exponents."""
    torch.manual_seed(3)
    model = nn.Linear(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with ampscope.watch(model, optimizer, store=store, every=1) as run:
        model(torch.randn(8, 32)).square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
    (frame,) = recorded(store, run.id).frames[Role.WEIGHT_GRAD]
    expected = np.zeros(frame.rows.shape[1], np.int64)
    nonzero = gradients[gradients != 0]
    exponents = torch.frexp(nonzero).exponent - 1
    np.add.at(expected, exponents.numpy() - LOWEST + FIRST, 1)
    expected[POS_ZERO] = int((gradients == 0).sum())
    np.testing.assert_array_equal(frame.rows.sum(axis=0), expected)


def test_a_bad_step_tightens_the_schedule_and_relaxes_again(store: Path) -> None:
    watched, ids = watching(store, every=0)
    train_fp16(30, watched, bad_at=(15,))
    run = recorded(store, ids[0])
    assert run.at(Role.WEIGHT_GRAD) == [15, 16, 17, 18, 19]  # the bad step itself, always
    assert run.at(Role.ACTIVATION) == [16, 17, 18, 19]
    assert [(e.step, e.name) for e in run.of("schedule")] == [(15, "tightened")]
    assert {record.step for record in run.nonfinite} == {15}
    assert run.nonfinite[0].parameter in ("4.weight", "4.bias")


def test_two_optimizers_of_a_gan_are_both_recorded(store: Path) -> None:
    generator, judge = nn.Linear(4, 3), nn.Linear(3, 1)
    of_generator = torch.optim.Adam(generator.parameters())
    of_judge = torch.optim.Adam(judge.parameters())
    models = {"G": generator, "D": judge}
    with ampscope.watch(models, [of_generator, of_judge], store=store, every=2) as run:
        for _ in range(6):
            fake = generator(torch.randn(8, 4))
            of_judge.zero_grad()
            (judge(fake.detach()).mean() - judge(torch.randn(8, 3)).mean()).backward()
            of_judge.step()
            of_generator.zero_grad()
            (-judge(fake).mean()).backward()
            of_generator.step()
    found = recorded(store, run.id)
    assert len(found.steps) == 12
    assert found.paths == ["G", "D"]
    owners = {f.step: {found.paths[m] for m in f.modules} for f in found.frames[Role.WEIGHT_GRAD]}
    assert {frozenset(names) for names in owners.values()} == {frozenset("G"), frozenset("D")}


@pytest.mark.parametrize("with_scaler", [False, True])
def test_both_norms_of_a_training_that_clips(store: Path, with_scaler: bool) -> None:
    """Without a scaler the gradients are read after the clip, with one before it."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=with_scaler)
    before, after, limits = [], [], [1e-3, 1e9, 1e-2]
    with ampscope.watch(model, optimizer, scaler if with_scaler else None, store=store) as run:
        for limit in limits:
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 8)).square().sum()).backward()
            scaler.unscale_(optimizer)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            before.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            after.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
            scaler.step(optimizer)
            scaler.update()
    steps = recorded(store, run.id).steps
    assert [s.grad_norm for s in steps] == pytest.approx(after, rel=1e-4)
    expected = [before[0], None, before[2]]
    assert [s.unclipped_norm is None for s in steps] == [e is None for e in expected]
    assert [s.unclipped_norm for s in steps if s.unclipped_norm] == pytest.approx(
        [e for e in expected if e], rel=1e-4
    )


def test_a_clip_of_some_parameters_or_by_another_norm_is_no_second_norm(store: Path) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampscope.watch(model, optimizer, store=store) as run:
        for parameters, norm_type in ((list(model.parameters())[:1], 2.0), (model.parameters(), 1)):
            optimizer.zero_grad()
            model(torch.randn(8, 8)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1e-3, norm_type)
            optimizer.step()
    assert [s.unclipped_norm for s in recorded(store, run.id).steps] == [None, None]


class Tied(nn.Module):
    """Shared and frozen parameters, a module that runs twice, activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.twice = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.twice, self.embedding(tokens), use_reentrant=False)
        return self.head(self.twice(self.frozen(hidden)))


def test_shared_frozen_repeated_and_checkpointed(store: Path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with ampscope.watch(model, store=store, every=1) as run:
        model(torch.randint(0, 20, (4, 5))).square().mean().backward()
        optimizer.step()
    found = recorded(store, run.id)
    (activations,) = found.frames[Role.ACTIVATION]
    counts = {found.paths[m]: int(activations.row_of(m).sum()) for m in activations.modules}
    assert counts["twice"] == 2 * 4 * 5 * 16
    assert counts["head"] == 4 * 5 * 20
    (gradients,) = found.frames[Role.WEIGHT_GRAD]
    assert {found.paths[m] for m in gradients.modules} == {"embedding", "twice"}
    assert int(gradients.rows.sum()) == 20 * 16 + 16 * 16 + 16  # the shared weight once


def test_a_compiled_model_is_not_broken_and_says_what_is_unseen(store: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(compiled, store=store, every=1) as run:
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    found = recorded(store, run.id)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert found.at(Role.WEIGHT_GRAD) == [0, 1, 2]
    assert found.at(Role.ACTIVATION) == []
    assert "compiled" in found.of("note")[0].text


def test_copies_and_pickles_of_a_watched_model_are_clean(store: Path) -> None:
    model = small_net()
    with ampscope.watch(model, store=store) as run:
        train_bf16(2, model)
        average = copy.deepcopy(model)
        thawed = pickle.loads(pickle.dumps(model))
        torch.save(model, io.BytesIO())
        average(torch.randn(4, 8)).sum().backward()
    assert b"ampscope" not in pickle.dumps(average)
    assert len(recorded(store, run.id).steps) == 2
    assert all(map(torch.equal, thawed.parameters(), model.parameters()))


def test_nothing_is_left_behind(store: Path) -> None:
    model, scaler = small_net(), torch.amp.GradScaler("cpu")
    before = (
        vars(torch.amp.GradScaler).copy(),
        torch.autograd.backward,
        vars(nn.Sequential).copy(),
    )
    first = ampscope.watch(model, store=store)
    second = ampscope.watch(nn.Sequential(model), scaler=scaler, store=store)
    train_bf16(2, model)
    first.close()  # in the order of their making, which is not that of a stack
    second.close()
    second.close()
    after = (vars(torch.amp.GradScaler).copy(), torch.autograd.backward, vars(nn.Sequential).copy())
    assert before == after
    assert_nothing_left()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert all(len(recorded(store, run.id).steps) == 2 for run in (first, second))


def test_two_optimizers_unscaled_before_either_steps(store: Path) -> None:
    """As torch's documentation has it for several optimizers of one scaler."""
    torch.manual_seed(0)
    models = {"A": nn.Linear(4, 1), "B": nn.Linear(4, 1)}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models.values()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    norms: list[float] = []
    with ampscope.watch(models, optimizers, scaler, store=store, every=1) as run:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            inputs = torch.randn(8, 4)
            first, second = (model(inputs).square().mean() for model in models.values())
            scaler.scale(first).backward()
            scaler.scale(second * 9).backward()
            for model, optimizer in zip(models.values(), optimizers, strict=True):
                scaler.unscale_(optimizer)
                squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
                norms.append(math.sqrt(squares))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    found = recorded(store, run.id)
    np.testing.assert_allclose([s.grad_norm for s in found.steps], norms, rtol=1e-5)
    assert all(s.scale == 8.0 and s.loss is not None for s in found.steps)
    owners = [{found.paths[m] for m in f.modules} for f in found.frames[Role.WEIGHT_GRAD]]
    assert owners == [{"A"}, {"B"}] * 3


def test_a_loop_that_leaves_bad_steps_out_by_itself(store: Path) -> None:
    """unscale_, look, and no step: what was read of it belongs to no step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    with ampscope.watch(model, optimizer, scaler, store=store, every=1) as run:
        for number in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() * (float("nan") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
                losses.append(float(loss.detach()))
                scaler.step(optimizer)
            scaler.update()
    assert [s.loss for s in recorded(store, run.id).steps] == pytest.approx(losses)


def test_arithmetic_on_scaled_losses_is_seen_through(store: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ampscope.watch(model, optimizer, scaler, store=store) as run:
        first, second = (model(torch.randn(8, 4)).square().mean() for _ in range(2))
        (scaler.scale(first) + scaler.scale(second)).backward()
        scaler.step(optimizer)
    (step,) = recorded(store, run.id).steps
    assert step.loss == pytest.approx(float((first + second).detach()))


def test_no_batch_is_kept_alive(store: Path) -> None:
    model, teacher = small_net(), small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = []
    with ampscope.watch({"model": model, "teacher": teacher}, optimizer, store=store) as run:
        for _ in range(40):
            inputs = torch.randn(8, 8)
            batches.append(weakref.ref(inputs))
            (model(inputs) - teacher(inputs)).square().mean().backward()
            optimizer.step()
        del inputs
        assert sum(ref() is not None for ref in batches) <= 10, "a teacher's last few at most"
    assert run.id


@pytest.mark.parametrize("every", [0, 1])
def test_complex_parameters_are_measured(store: Path, every: int) -> None:
    model = nn.Linear(4, 4, dtype=torch.cfloat)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, optimizer, store=store, every=every) as run:
        model(torch.randn(2, 4, dtype=torch.cfloat)).abs().square().mean().backward()
        norm = math.sqrt(sum(float(p.grad.abs().square().sum()) for p in model.parameters()))
        optimizer.step()
    assert recorded(store, run.id).steps[0].grad_norm == pytest.approx(norm, rel=1e-5)


def test_an_error_of_ours_ends_the_watching_and_not_the_training(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ampscope.watcher import session

    model = small_net()
    run = ampscope.watch(model, store=store)
    train_bf16(2, model)

    def broken(*_: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(session, "start_norms", broken)
    losses = train_bf16(3, model)
    run.close()
    assert len(losses) == 3
    said = capsys.readouterr().err
    assert said == "ampscope stopped watching: ValueError: on purpose\n"
    found = recorded(store, run.id)
    assert len(found.steps) == 2
    assert found.of("note")[0].name == "stopped watching"


def test_parameters_that_came_later_are_said_to_be_unseen(store: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with ampscope.watch(model, store=store) as run:
        model[1] = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    (note,) = recorded(store, run.id).of("note")
    assert "steps 2 parameters that the watched models did not have" in note.text


def test_two_scalers_of_a_gan(store: Path) -> None:
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=s) for s in (8.0, 32.0)]
    with ampscope.watch(models, optimizers, scalers, store=store) as run:
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            scaler.scale(model(torch.ones(2, 4)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [s.scale for s in recorded(store, run.id).steps] == [8.0, 32.0]


def test_other_peoples_optimizers_are_not_steps(store: Path) -> None:
    ours, other = small_net(), small_net()
    with ampscope.watch(ours, store=store) as run:
        train_bf16(3, other)
        train_bf16(2, ours)
    assert len(recorded(store, run.id).steps) == 2


def test_an_optimizer_with_a_closure(store: Path) -> None:
    model, inputs = nn.Linear(3, 1), torch.randn(10, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    with ampscope.watch(model, store=store, every=1) as run:
        for _ in range(3):
            optimizer.step(closure)
    found = recorded(store, run.id)
    assert len(found.steps) == 3
    assert found.at(Role.WEIGHT_GRAD) == [0, 1, 2]


def test_a_fused_optimizer_hides_its_skips_from_nobody(store: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    scales = []
    with ampscope.watch(model, optimizer, scaler, store=store, policy="ignore") as run:
        for _ in range(25):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.ones(10, 3)).float().square().mean()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    skipped = [s.skipped for s in recorded(store, run.id).steps]
    fell = [after < before for before, after in zip(scales, [*scales[1:], scales[-1]], strict=True)]
    assert skipped == fell
    assert any(skipped)


def test_a_given_loss_counts_more_than_the_seen_one(store: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, store=store) as run:
        for number in range(3):
            run.loss(torch.tensor(float(number)))
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert [s.loss for s in recorded(store, run.id).steps] == [0.0, 1.0, 2.0]


def test_record_next_asks_for_histograms(store: Path) -> None:
    model = small_net()
    run = ampscope.watch(model, store=store, every=0)
    train_bf16(2, model)
    run.record_next(2)
    train_bf16(4, model)
    run.close()
    assert recorded(store, run.id).at(Role.ACTIVATION) == [3, 4]


def test_a_reference_on_demand_tells_lost_from_zero(store: Path) -> None:
    """fp16 rounds 2^-30 to zero, and the fp32 reference does not."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        model[1].weight.fill_(2.0**-13)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    losses = []
    with ampscope.watch(model, optimizer, scaler, store=store, every=0, policy="ignore") as run:
        for step in range(4):
            if step == 1:
                run.record_next(1, reference=True)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(torch.ones(8, 4))
            loss = output.float().sum() * 2.0**-13
            losses.append(float(loss.detach()))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    with Reader(store) as reader:
        shadows = [s for s in reader.shadows(run.id) if s.role is Role.GRAD_OUTPUT]
        steps = reader.steps(run.id)
        ops = reader.ops(run.id, steps[2].op_set or 0)
        paths = {m.index: m.path for m in reader.modules(run.id)}
    # At the first layer's output the gradient is 2 * 2^-13 * 2^-13 = 2^-25, half of fp16's least.
    lost = {paths[s.module]: s.lost / s.total for s in shadows if s.step == 2}
    assert lost == {"0": 1.0, "1": 0.0}
    assert {s.step for s in shadows} == {2}
    assert [s.op_set is not None for s in steps] == [False, False, True, False]
    matmuls = {(paths[o.module], o.phase) for o in ops if o.op == "aten.mm"}
    assert matmuls >= {("0", "forward"), ("1", "forward"), ("0", "backward"), ("1", "backward")}
    assert len(set(losses)) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((3,), {}, "torch.nn.Module"),
        (({},), {}, "no model"),
        ((nn.ReLU(),), {}, "no parameters"),
        ((nn.Linear(1, 1), 3), {}, "torch.optim.Optimizer"),
        ((nn.Linear(1, 1), None, 3), {}, "GradScaler"),
        ((nn.Linear(1, 1),), {"every": -1}, "every"),
        ((nn.Linear(1, 1),), {"policy": "shout"}, "policy"),
        ((nn.LazyLinear(1),), {}, "lazy"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_bad_input_is_one_sentence(
    store: Path, arguments: tuple[object, ...], options: dict[str, object], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        ampscope.watch(*arguments, store=store, **options)
    assert not store.exists()


def test_an_exception_of_the_training_is_how_the_run_failed(store: Path) -> None:
    model, ids = small_net(), []

    def train() -> None:
        with ampscope.watch(model, store=store) as run:
            ids.append(run.id)
            train_bf16(2, model)
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        train()
    info = recorded(store, ids[0]).info
    assert info.state is State.FAILED
    assert "ZeroDivisionError: on purpose" in info.message
    assert info.steps_done == 2


def per_parameter(model: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
    """An optimizer for each parameter, stepped as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        if scaler is None:
            optimizers[parameter].step()
        else:
            scaler.step(optimizers[parameter])
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)


@pytest.mark.parametrize("scaled", [False, True])
def test_optimizers_that_step_inside_backward_make_one_step(store: Path, scaled: bool) -> None:
    """Numbers are those of all parameters, and a bad iteration is one bad step."""
    weights, norms = [], []
    for is_watched in (True, False):
        torch.manual_seed(0)
        model = small_net()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        per_parameter(model, scaler)
        if is_watched:
            run = ampscope.watch(model, store=store, every=2, policy="ignore")
        for step in range(10):
            loss = model(torch.randn(4, 8)).square().mean()
            if step == 6 and scaled:
                loss = loss * float("inf")
            before = [p.detach().clone() for p in model.parameters()]
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.update()
            moved = [(a - b).detach() for a, b in zip(before, model.parameters(), strict=True)]
            norms.append(math.sqrt(sum(float((m / 0.05).double().square().sum()) for m in moved)))
        weights.append([p.detach().clone() for p in model.parameters()])
        if is_watched:
            run.close()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    found = recorded(store, run.id)
    assert [s.step for s in found.steps] == list(range(10))
    assert [s.step for s in found.steps if s.skipped] == ([6] if scaled else [])
    taken = [(s.grad_norm, n) for s, n in zip(found.steps, norms, strict=False) if not s.skipped]
    np.testing.assert_allclose(*zip(*taken, strict=True), rtol=1e-3)
    assert all(s.loss is not None for s in found.steps)
    assert [f.step for f in found.frames[Role.WEIGHT_GRAD]][:3] == [0, 2, 4]
    first = found.frames[Role.WEIGHT_GRAD][0]
    assert int(first.rows.sum()) == sum(p.numel() for p in model.parameters())
    assert len(found.of("capsule")) == int(scaled)


def test_a_nan_of_optimizers_that_step_inside_backward_rings_once(store: Path) -> None:
    model = small_net()
    per_parameter(model)
    with ampscope.watch(model, store=store, policy="ignore") as run:
        for step in range(8):
            loss = model(torch.randn(4, 8)).square().mean()
            (loss * float("nan") if step == 3 else loss).backward()
    assert [(a.step, a.name) for a in run.alarms] == [
        (3, "nonfinite_loss"), (3, "nonfinite_gradient"), (3, "nonfinite_weight"),
    ]  # fmt: skip
    assert len(run.capsules) == 1


def test_a_stop_inside_backward_leaves_the_block_after_it(store: Path) -> None:
    model = small_net()
    per_parameter(model)
    with (  # noqa: PT031  # the warning comes at a step in the midst
        pytest.warns(AmpscopeWarning),
        ampscope.watch(model, store=store, policy={"nonfinite_loss": "stop"}) as run,
    ):
        for step in range(8):
            loss = model(torch.randn(4, 8)).square().mean()
            (loss * float("nan") if step == 3 else loss).backward()
    assert len(recorded(store, run.id).steps) == 4


def test_an_optimizer_that_takes_the_place_of_a_given_one_is_recorded(store: Path) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with ampscope.watch(model, optimizer, store=store) as run:
        for step in range(6):
            if step == 3:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            other.step()
            optimizer.zero_grad()
    found = recorded(store, run.id)
    assert [s.lr for s in found.steps] == [0.1] * 3 + [0.01] * 3
    (note,) = [e for e in found.of("note") if "optimizer" in e.text]
    assert (note.step, "steps parameters of one that watch() was given" in note.text) == (3, True)


@pytest.mark.parametrize("given", [False, True])
def test_a_model_whose_parameters_are_made_anew_is_said_to_be_lost(
    store: Path, given: bool
) -> None:
    """As `to_empty`, `reset` or a reload with ``assign=True`` do."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (  # noqa: PT031  # the warning comes at a step in the midst
        pytest.warns(AmpscopeWarning, match="parameters that the watched models did not have"),
        ampscope.watch(model, optimizer if given else None, store=store) as run,
    ):
        for step in range(6):
            if step == 3:
                model.load_state_dict(small_net().state_dict(), assign=True)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    notes = [e for e in recorded(store, run.id).of("note") if "did not have" in e.text]
    assert [(e.step, e.name) for e in notes] == [(3, "cannot be seen")]


def test_a_scaler_that_takes_the_place_of_a_given_one_is_followed(store: Path) -> None:
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with ampscope.watch(model, optimizer, scaler, store=store) as run:
        for step in range(6):
            if step == 3:
                scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = recorded(store, run.id)
    assert [s.scale for s in found.steps] == [8.0] * 3 + [32.0] * 3


def test_a_model_that_is_watched_again_is_watched_by_the_new_one_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A notebook's cell, run six times; the last time with another model beside it."""
    model, other, store = small_net(), small_net(), tmp_path / "runs.db"
    apart = ampscope.watch(other, store=store)
    runs = []
    for _ in range(5):
        runs.append(ampscope.watch(model, store=store))
        train_bf16(3, model)
    runs.append(ampscope.watch([model, small_net()], store=store))
    train_bf16(3, model)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 5
    assert all(run.id in line for run, line in zip(runs, said, strict=False))
    with Reader(store) as reader:
        for run in runs[:-1]:
            info = reader.run(run.id)
            assert (info.state, info.steps_done) == (State.FINISHED, 3)
    train_bf16(2, other)
    for run in (*runs, apart):
        run.close()
    with Reader(store) as reader:
        assert [reader.run(run.id).steps_done for run in (*runs, apart)] == [3] * 6 + [2]
    assert_nothing_left()
