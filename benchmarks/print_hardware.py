"""The figures in docs/hardware.md, printed from the kept measurements.

python benchmarks/print_hardware.py            # prints them
python benchmarks/print_hardware.py --write    # puts them into docs/hardware.md, between two marks

The measurements are the commands' own output:

ampscope hardware --bench --json > benchmarks/results/hardware_cpu.json
ampscope compare gpt --size small --json benchmarks/results/compare_gpt_small_cpu.json
ampscope compare resnet --size small --json benchmarks/results/compare_resnet_small_cpu.json
ampscope compare gpt --size medium --precision fp32,bf16 --seeds 2 \\
    --json benchmarks/results/compare_gpt_medium_cpu.json
ampscope tensor-cores gpt --size small --precision bf16 --json
benchmarks/results/cores_gpt_small_cpu.json ampscope batch-size gpt --size small --memory-limit 1024
\\
    --json benchmarks/results/batch_gpt_small_cpu.json
ampscope batch-size resnet --size small --memory-limit 512 --power-of-two \\
    --json benchmarks/results/batch_resnet_small_cpu.json
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ampscope.number_words import seconds

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "hardware.md"
NAMES = {"gpt": "GPT", "resnet": "ResNet"}
BEGIN, END = "<!-- machine -->", "<!-- /machine -->"
COMPARED = ("compare_gpt_small_cpu", "compare_gpt_medium_cpu", "compare_resnet_small_cpu")
SEARCHED = ("batch_gpt_small_cpu", "batch_resnet_small_cpu")


def kept(name: str) -> Any:
    """A kept result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def section() -> str:
    """Everything between the two marks."""
    first = kept(COMPARED[0])
    machine = first["machine"]
    day = datetime.fromtimestamp(first["measured_at"], UTC).date()
    lines = [f"{machine['device_name']}, torch {machine['torch']}, {day}.", ""]
    lines += [*rates(), ""]
    for name in COMPARED:
        lines += [*comparison(name), ""]
    lines += [*cores(), ""]
    for name in SEARCHED:
        found = kept(name)
        limit = f"{found['memory_limit_mib']:,} MiB for training"
        lines.append(f"- {title(found)}, {limit}: {found['sentence']} ({link(name)})")
    return "\n".join(lines)


def rates() -> list[str]:
    """Matmuls alone, by dtype."""
    bench = kept("hardware_cpu")["bench"]
    lines = ["| dtype | reached, GFLOP/s | quartiles apart | side | |", "|---|---|---|---|---|"]
    for row in bench["ceilings"]:
        if row["flops_s"] is None:
            lines.append(f"| {row['dtype']} | not measured | | | {row['note']} |")
            continue
        why = row["reason"] if row["is_behind"] else ""
        lines.append(
            f"| {row['dtype']} | {row['flops_s'] / 1e9:,.3g} | {row['spread']:.1%} | "
            f"{row['shape'][0]:,} | {why} |"
        )
    return [*lines, "", f"({link('hardware_cpu')})"]


def comparison(name: str) -> list[str]:
    """One comparison: the verdict and a row per precision."""
    found = kept(name)
    beside = {row["precision"]: row for row in found["beside_the_base"]}
    lines = [f"**{title(found)}.** {found['verdict']['sentence']} ({link(name)})", ""]
    lines += [
        "| precision | a step | quartiles | speed | peak memory | loss against fp32 |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["precisions"]:
        step, split = row["times"]["step"], row["memory"]
        other = beside.get(row["precision"])
        speed = f"{other['speedup']['value']:.2f}×" if other else "1.00×"
        loss = other["loss"]["change"] if other else ""
        lines.append(
            f"| {row['precision']} | {seconds(step['median_s'])} | "
            f"{seconds(step['low_s'])} to {seconds(step['high_s'])} | {speed} | "
            f"{peak(split) / 2**20:,.1f} MiB | {loss} |"
        )
    spoiled = [f"Disturbed: {line}" for line in found["spoiled"]]
    return [*lines, *([""] if spoiled else []), *spoiled]


def peak(split: dict[str, Any]) -> int:
    """Sum of the split's parts."""
    parts = ("weights", "gradients", "optimizer_state", "activations", "cast_copies")
    return sum(split[part] for part in (*parts, "temporaries", "inputs"))


def cores() -> list[str]:
    """The answer of the Tensor Cores page."""
    found = kept("cores_gpt_small_cpu")
    return [f"- GPT small in bf16: {found['sentence']} ({link('cores_gpt_small_cpu')})"]


def title(found: dict[str, Any]) -> str:
    return (
        f"{found['workload'].upper() if found['workload'] == 'gpt' else 'ResNet'} {found['size']}"
    )


def link(name: str) -> str:
    return f"[{name}.json](../benchmarks/results/{name}.json)"


def replaced(text: str) -> str:
    """The page with the section as it is now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{section()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(replaced(PAGE.read_text()))
    else:
        print(section())
