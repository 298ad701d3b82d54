"""Numbers read out of what scripts print."""

from __future__ import annotations

import math

import pytest

from ampscope.analysis.printed_numbers import MOST_PATTERNS, MOST_VALUES, printed_numbers


def read(text: str) -> dict[str, tuple[float, ...]]:
    return {printed.words: printed.values for printed in printed_numbers(text)}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("epoch 3: loss 0.31, acc 90.2% (4.1s)", {"epoch": 3, "loss": 0.31, "acc": 90.2}),
        ("{'eval_loss': 0.3, 'epoch': 2.0, 'eval_runtime': 12.3}", {"eval_loss": 0.3, "epoch": 2}),
        ("[val] step 40 loss 4e-1", {"val step": 40, "val loss": 0.4}),
        ("train loss 1 acc 2 val loss 3 acc 4", {
            "train loss": 1, "train acc": 2, "val loss": 3, "val loss acc": 4}),
        ("2026-11-28 13:04:06,123 - train - INFO - loss: 1,234.5 mem 12.3GB, 4.1 it/s",
         {"train loss": 1234.5}),
        ("loss tensor(0.25, dtype=torch.bfloat16, grad_fn=<NllLossBackward0>)", {"loss": 0.25}),
        ("top-1=0.93 recall@10 0.55 f1 .6", {"top-1": 0.93, "recall@10": 0.55, "f1": 0.6}),
        (" 50%|##   | 10/20 [00:01<00:01,  9.8it/s, loss=0.5]", {"loss": 0.5}),
        ("saved /tmp/run3/ck_3.pt, conv2d, train.py:41, 0x7f33, in 3 s", {}),
        ("\x1b[32mval acc=0.5\x1b[0m", {"val acc": 0.5}),
        ("7 0.25", {"number 1 of 2": 7, "number 2 of 2": 0.25}),
        ("ampscope: 3 files were put back", {}),
    ],
)  # fmt: skip
def test_lines(line: str, found: dict[str, float]) -> None:
    assert read(line) == {words: (value,) for words, value in found.items()}


def test_nonfinite() -> None:
    found = read("loss nan\nloss -inf\nloss Infinity\nname nano inform 3")
    assert math.isnan(found["loss"][0])
    assert found["loss"][1:] == (-math.inf, math.inf)
    assert found["name nano inform"] == (3,)


def test_written_over() -> None:
    bar = " 10%|#  | 1/10 [00:00<00:09, loss=2.1]\r100%|###| 10/10 [00:09<00:00, loss=0.1]\n"
    assert read(bar + "done, loss 0.2\r\n")["loss"] == (0.1,)


def test_tables() -> None:
    text = "epoch  loss  acc\n0   0.5   0.7\n1   0.4   0.8\n\n"
    assert read(text) == {"epoch": (0, 1), "loss": (0.5, 0.4), "acc": (0.7, 0.8)}
    text = "   precision  recall\n\n  0   0.9   0.8\nmacro avg   0.85   0.75\n"
    assert read(text)["macro avg recall"] == (0.75,)
    assert read("Final accuracy:\n0.93") == {"final accuracy": (0.93,)}


def test_warnings_and_tracebacks_are_left_out() -> None:
    text = (
        "a/b.py:3: FutureWarning: use 3 of them\n  x = f(3)\nloss 1\n"
        "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n    f(4)\n"
        "ValueError: bad 5\nloss 2\n"
    )  # fmt: skip
    assert read(text) == {"loss": (1, 2)}


def test_bounds() -> None:
    words = [f"word{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(300)]
    text = "".join(f"{word} {n}\n" for n, word in enumerate(words))
    text += "".join(f"loss {n}\n" for n in range(MOST_VALUES + 5))
    found = {printed.words: printed for printed in printed_numbers(text)}
    assert len(found) == MOST_PATTERNS
    assert found["loss"].values == tuple(range(MOST_VALUES))
    assert found["loss"].rows[0] == 300
    assert [found[words].ended for words in ("loss", "wordaa")] == [False, True]
