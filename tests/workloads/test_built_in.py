"""The built-in workloads: their data, their sizes, and that they learn, the same each time."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ampscope.errors import BadInput
from ampscope.workloads import text_models, training_data
from ampscope.workloads.catalog import BUILTIN
from ampscope.workloads.load import build_builtin
from ampscope.workloads.protocol import Workload, iterate
from ampscope.workloads.training_data import digit_batches, enlarge, read_digits

CLASS_COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # UCI's own, of the test part
DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower, and far less predictable, on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(workload: Workload, steps: int) -> list[float]:
    optimizer = workload.optimizer(workload.model.parameters())
    losses = []
    for batch in islice(iterate(workload), steps):
        optimizer.zero_grad()
        loss = workload.loss(workload.model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def to_bytes(image: torch.Tensor) -> bytes:
    return image.numpy().tobytes()


def test_digits_are_the_published_ones() -> None:
    images, labels = read_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert labels.bincount().tolist() == CLASS_COUNTS
    pixels = (images * 16).to(torch.uint8).numpy()
    assert pixels.max() == 16
    raw = pixels.tobytes() + labels.to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(raw).hexdigest() == DIGITS_SHA256
    assert pixels[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]  # first row of the first image


def test_enlarge_equals_a_kronecker_product_with_a_border() -> None:
    image = np.arange(64, dtype=np.float32).reshape(8, 8)
    expected = np.pad(np.kron(image, np.ones((3, 3), np.float32)), 2)
    enlarged = enlarge(torch.from_numpy(image)[None, None])
    assert np.array_equal(enlarged[0, 0].numpy(), expected)


def test_every_image_keeps_its_label_and_comes_once_an_epoch() -> None:
    images, labels = read_digits()
    numbers = list(zip(map(to_bytes, images), labels.tolist(), strict=True))
    seen = list(islice(digit_batches(3, 599)(), 3))  # 3 * 599 = 1797: exactly one epoch
    drawn = [pair for x, y in seen for pair in zip(map(to_bytes, x), y.tolist(), strict=True)]
    assert sorted(drawn) == sorted(numbers)


def test_text_is_encoded_by_position_in_the_vocabulary() -> None:
    assert len(training_data.VOCABULARY) == 96
    indices = training_data.encode(training_data.VOCABULARY)
    assert indices.tolist() == list(range(96))
    decoded = "".join(training_data.VOCABULARY[i] for i in training_data.encode("a\tb é\n"))
    assert decoded == "a b ?\n"
    assert len(training_data.read_text()) > 1_000_000


def test_targets_are_the_characters_that_follow() -> None:
    characters, targets = next(training_data.text_batches(0, 5, 16)())
    assert characters.shape == targets.shape == (5, 16)
    assert torch.equal(characters[:, 1:], targets[:, :-1])


def test_text_falls_back_with_a_warning_when_there_are_no_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(training_data.sysconfig, "get_path", lambda name: str(tmp_path))
    training_data.read_text.cache_clear()
    try:
        with pytest.warns(UserWarning, match="short text that ships with ampscope"):
            short = training_data.read_text()
        assert 2_000 < len(short) < 10_000
        assert next(training_data.text_batches(0, 8, 128)())[0].shape == (8, 128)
    finally:
        training_data.read_text.cache_clear()


@pytest.mark.parametrize("name", BUILTIN)
def test_parameter_counts_are_those_of_the_catalog(name: str) -> None:
    for size, expected in BUILTIN[name].parameters.items():
        model = build_builtin(name, size).model
        assert sum(p.numel() for p in model.parameters()) == expected, size
    assert 28e6 < BUILTIN[name].parameters["medium"] < 32e6


def test_small_lenet_is_the_classic() -> None:
    conv1, conv2 = 20 * (25 + 1), 50 * (20 * 25 + 1)
    fc1, fc2 = 500 * (50 * 4 * 4 + 1), 10 * (500 + 1)
    assert BUILTIN["lenet"].parameters["small"] == conv1 + conv2 + fc1 + fc2 == 431_080


@pytest.mark.parametrize("name", BUILTIN)
def test_logits_have_a_class_in_the_last_dimension(name: str) -> None:
    workload = build_builtin(name)
    inputs, targets = next(iterate(workload))
    logits = workload.model(inputs)
    classes = 96 if name in ("gpt", "rnn") else 10
    assert logits.shape == (*targets.shape, classes)
    guess = math.log(classes)
    assert workload.loss(workload.model, (inputs, targets)).item() == pytest.approx(guess, rel=0.1)


@pytest.mark.parametrize("name", BUILTIN)
def test_thirty_steps_learn(name: str) -> None:
    workload = build_builtin(name)
    batch = next(iterate(workload))
    before = workload.loss(workload.model, batch).item()
    losses = train(workload, 30)
    after = workload.loss(workload.model, batch).item()
    assert after < 0.85 * before
    assert np.mean(losses[-5:]) < 0.85 * np.mean(losses[:5])


def _held_out_losses(name: str, seed: int, steps: int) -> list[float]:
    """The loss on data that is not trained on, before every step: free of the noise of batches."""
    held_out = list(islice(iterate(build_builtin(name, seed=seed + 1000)), 4))
    workload = build_builtin(name, seed=seed)
    optimizer = workload.optimizer(workload.model.parameters())
    found = []
    for batch in islice(iterate(workload), steps):
        buffers = [buffer.clone() for buffer in workload.model.buffers()]
        with torch.no_grad():
            losses = [workload.loss(workload.model, each).item() for each in held_out]
            for buffer, kept in zip(workload.model.buffers(), buffers, strict=True):
                buffer.copy_(kept)
        found.append(sum(losses) / len(losses))
        optimizer.zero_grad()
        workload.loss(workload.model, batch).backward()
        optimizer.step()
    return found


@pytest.mark.quick(*(f"0-{name}" for name in BUILTIN))
@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("seed", range(10))
def test_training_in_fp32_is_stable(name: str, seed: int) -> None:
    """What half precision does can only be read off a training that is calm without it: the loss
    never rises above its lowest by more than a tenth of where it started."""
    losses = _held_out_losses(name, seed, 30)
    lowest = losses[0]
    for loss in losses:
        assert loss - lowest <= 0.1 * losses[0]
        lowest = min(lowest, loss)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", BUILTIN)
def test_a_seed_gives_the_same_bits_and_another_seed_others(name: str) -> None:
    first, again, other = (train(build_builtin(name, seed=s), 3) for s in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_step_is_finite_in_half_precision(name: str, dtype: torch.dtype) -> None:
    workload = build_builtin(name)
    batch = next(iterate(workload))
    with torch.autocast("cpu", dtype):
        loss = workload.loss(workload.model, batch)
    loss.backward()
    grads = [p.grad for p in workload.model.parameters() if p.grad is not None]
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert len(grads) == len(list(workload.model.parameters()))


def test_gpt_has_six_blocks_or_more_and_attention_matches_torchs_own() -> None:
    assert min(size.blocks for size in text_models.GPT_SIZES.values()) >= 6
    torch.manual_seed(0)
    attention = text_models.Attention(text_models.GPT_SIZES["tiny"])
    x = torch.randn(2, 20, 64)  # shorter than the context
    q, k, v = (
        linear(x).unflatten(2, (4, 16)).transpose(1, 2)
        for linear in (attention.q, attention.k, attention.v)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = attention.projection(mixed.transpose(1, 2).reshape(2, 20, 64))
    torch.testing.assert_close(attention(x), expected)


def test_catalog_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, ampscope.workloads.catalog as c; c.unknown_workload('x'); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("lenett", "tiny", "There is no workload 'lenett'. Did you mean lenet"),
        (
            "lenet",
            "huge",
            "Workload 'lenet' has no size 'huge'. Choose one of: tiny, small, medium.",
        ),
    ],
)
def test_unknown_name_or_size_is_refused(name: str, size: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        build_builtin(name, size)
    assert str(caught.value).startswith(message)
