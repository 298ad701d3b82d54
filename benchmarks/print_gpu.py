"""What the pages say about CUDA, printed from the files of ``benchmarks/gpu/run``.

python benchmarks/print_gpu.py            # prints all sections
python benchmarks/print_gpu.py --write    # puts each into its page, between its two marks

A figure that is not believable enters no page: its name and the reason stand there instead of it.
Without files, or with those of a dry run, every section says in one sentence that nothing was
measured. benchmarks/gpu/README.md describes the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
ABSENT = "–"
MODELS = {
    "gpt:small": "GPT small",
    "gpt:medium:256": "GPT medium, batch 256",
    "resnet:small": "ResNet small",
    "resnet:medium:2048": "ResNet medium, batch 2,048",
}
WATCHES = ("asleep", "default", "tenth", "everything")


@dataclass(frozen=True, slots=True)
class Results:
    """The files of a folder: which card was tried, and what each part found."""

    summary: dict[str, Any]
    documents: dict[str, dict[str, Any]]  # by part

    @property
    def is_measured(self) -> bool:
        """Whether a card was tried."""
        return bool(self.summary.get("card")) and not self.summary["dry"]

    def figures(self, part: str, pattern: str = "*") -> dict[str, dict[str, Any]]:
        """What the part found on the card, by name. A part that was not run again on this card, and
        still stands in the files from another, has found nothing."""
        document = self.documents.get(part, {})
        where = document.get("setting", {}).get("gpu")
        is_of_the_card = where in (None, self.summary.get("card", {}).get("name"))
        found = document["figures"] if is_of_the_card and not document.get("dry", True) else {}
        return {name: f for name, f in found.items() if fnmatchcase(name, pattern)}

    def value(self, part: str, name: str) -> float | None:
        """None where it was not measured, or is not believable."""
        figure = self.figures(part).get(name)
        return figure["value"] if figure and figure["believable"] else None

    def text(self, part: str, name: str, form: str = "") -> str:
        """The same for a cell of a table; with three digits where no format is asked for."""
        value = self.value(part, name)
        if value is None:
            return ABSENT
        return format(value, form) if form else digits(value)

    def card(self) -> str:
        """ "NVIDIA H100 80GB HBM3, driver 580.65.06, torch 2.13.0+cu130, 2026-01-31" """
        card = self.summary["card"]
        versions = self.documents.get("look", {}).get("setting", {}).get("versions", {})
        torch = [f"torch {versions['torch']}"] if "torch" in versions else []
        day = self.summary["began"][:10]
        return ", ".join([card["name"], f"driver {card.get('driver') or 'unknown'}", *torch, day])

    def left_out(self, *parts: str) -> list[str]:
        """A sentence on what no page shows, with the reasons."""
        names = [
            f"{name} ({figure['reason'] or 'not measured'})"
            for part in parts
            for name, figure in self.figures(part).items()
            if not figure["believable"]
        ]
        return ["", f"Left out, as not believable: {'; '.join(names)}."] if names else []


def digits(value: float) -> str:
    """1,453; 43.3; 0.0306; 8.08e-06"""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def read(folder: Path = RESULTS) -> Results:
    """The kept files, of which any may be absent."""
    documents: dict[str, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        if path.name == "summary.json":
            summary = found
            documents["look"] = found["look"]
        else:
            documents |= found["parts"]
    return Results(summary, documents)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The title and the rows that hold a figure; nothing where none does."""
    kept = [row for row in rows if any(cell != ABSENT for cell in row[1:])]
    if not kept:
        return []
    lines = [*([title, ""] if title else []), f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in kept), ""]


def joined(found: Results, lines: Sequence[str]) -> str:
    """A section, which names the card and ends without a blank line."""
    text = "\n".join(lines).strip("\n") or "Nothing of this was measured there."
    return f"{found.card()}.\n\n{text}"


def rows_of(found: Results, part: str, columns: Sequence[str], form: str = "") -> list[list[str]]:
    """A row for each first word or words that stand before the columns' names."""
    names = dict.fromkeys(
        name.removesuffix(f" {column}")
        for name in found.figures(part)
        for column in columns
        if name.endswith(f" {column}")
    )
    return [
        [MODELS.get(name, name), *(found.text(part, f"{name} {c}", form) for c in columns)]
        for name in names
    ]


# One function for each section.


def readme_line(found: Results) -> str:
    if not found.is_measured:
        return "- On CUDA nothing was measured: no GPU was at hand."
    parts = []
    quiet = [found.value("overhead", f"gpt:medium:256 {watch}") for watch in ("asleep", "default")]
    if None not in quiet:
        parts.append(
            f"a watched step of GPT medium at batch 256 takes {quiet[0]:.2f} times as long asleep "
            f"and {quiet[1]:.2f} times by default"
        )
    faster = found.value("compare", "fp32 over bf16")
    if faster is not None:
        parts.append(f"bf16 is {faster:.1f} times as fast as fp32 there")
    said = f": {'; '.join(parts)}" if parts else ""
    return f"- On CUDA ({found.card()}){said}. See [hardware.md](docs/hardware.md#on-a-gpu)."


def readme_limits(found: Results) -> str:
    if not found.is_measured:
        return (
            "- No GPU was at hand for this version. CUDA paths were tested on a CPU and in "
            "Triton's interpreter only."
        )
    parts = found.summary["parts"]
    worked = sum(part["status"] == "ok" for part in parts.values())
    passed, failed = (found.value("tests", name) for name in ("passed", "failed"))
    tests = (
        ""
        if passed is None
        else f" {passed:.0f} tests on the GPU passed, {failed or 0:.0f} failed."
    )
    return (
        f"- CUDA was tried on one card: {found.card()}. {worked} of {len(parts)} parts of "
        f"[the measurements](benchmarks/gpu/README.md) worked.{tests}"
    )


def cost(found: Results) -> str:
    if not found.is_measured:
        return "No GPU was at hand: no time was measured, and the goals above are open."
    steps = dict(rows_of(found, "overhead", ("bare_ms",)))
    bare = [[*row, steps.get(row[0], "")] for row in rows_of(found, "overhead", WATCHES, ".2f")]
    lines = table(
        "A step with a watch over the bare step, median:",
        ["model", *WATCHES, "bare step, ms"],
        bare,
    )
    lines += table(
        "What a watch adds to a step, and the bare step's own:",
        ["model, mode, watch", "waits", "launches", "host, ms"],
        rows_of(found, "price", ("waits", "launches", "host_ms")),
    )
    lines += table(
        "A training by CUDA graphs under a watch; 1 is yes:",
        ["how", "it goes on", "with the same bits"],
        rows_of(found, "graphs", ("survived", "alike")),
    )
    shares = [name.removesuffix(" share").split(" ", 2) for name in found.figures("kernel")]
    kinds = list(dict.fromkeys(f"{dtype} {kind}" for dtype, kind, _ in shares))
    lines += table(
        "Counting exponents, as a share of the bandwidth of a copy of the same memory:",
        ["how", *kinds],
        [
            [how, *(found.text("kernel", f"{kind} {how} share", ".2f") for kind in kinds)]
            for how in dict.fromkeys(how for *_, how in shares)
        ],
    )
    lines += found.left_out("overhead", "price", "graphs", "kernel")
    return joined(found, lines)


def hardware(found: Results) -> str:
    if not found.is_measured:
        return (
            "No GPU was at hand: the CUDA paths of these measurements (TF32, `_scaled_mm`, events, "
            "profiler names, NVML's counters) were tested on a CPU and on replayed NVML values, "
            "and there is no figure of a GPU on this page."
        )
    dtypes = ("fp64", "fp32", "tf32", "bf16", "fp16", "int8", "e4m3")
    lines = table(
        "",
        ["dtype", "reached, TFLOP/s"],
        [[dtype, found.text("ceilings", dtype)] for dtype in dtypes],
    )
    copied = found.value("ceilings", "copy")
    if copied is not None:
        lines += [f"A copy reads and writes {copied:.2f} TB/s.", ""]
    lines += table(
        "GPT medium at batch 256:",
        ["precision", "a step, ms", "peak memory, MiB", "energy of a step, J", "W"],
        rows_of(found, "compare", ("step_ms", "peak_mib", "joules", "watts")),
    )
    ratios = {
        "fp32 over bf16": "fp32 takes {:.2f} times the time of bf16",
        "tf32 over bf16": "TF32 {:.2f} times",
        "fp16 over bf16": "fp16 {:.2f} times",
        "as it comes fp32 over bf16": "at the model's own batch of 8 fp32 takes {:.2f} times",
        "memory bf16 over fp32": "bf16 takes {:.2f} times the memory of fp32",
    }
    values = [(form, found.value("compare", name)) for name, form in ratios.items()]
    said = [form.format(value) for form, value in values if value is not None]
    lines += ([f"There {'; '.join(said)}.", ""]) if said else []
    for part in ("cores", "more-cores"):
        lines += table(
            "",
            ["model and precision", "FLOPs on Tensor Cores", "unknown"],
            rows_of(found, part, ("used", "unknown"), ".1%"),
        )
    lines += found.left_out("ceilings", "compare", "cores", "more-cores")
    return joined(found, lines)


def rehearsal(found: Results) -> str:
    if not found.is_measured:
        return "No GPU was at hand: no rehearsal was compared with a run on a device."
    lines = table(
        "The same run on the device and rehearsed, at its first step:",
        ["run", "ops that differ", "elements in another bin, share"],
        rows_of(found, "rehearsed", ("ops_that_differ", "share_in_another_bin")),
    )
    lines += found.left_out("rehearsed")
    return joined(found, lines)


def accuracy(found: Results) -> str:
    if not found.is_measured:
        return "No GPU was at hand: no script was diagnosed on a device."
    lines = table(
        "Diagnosed on the device; 1 is yes:",
        ["script", "right cause", "fix verified", "seconds", "runs"],
        [
            row
            for part in ("diagnose", "zoo")
            for row in rows_of(found, part, ("right", "verified", "seconds", "runs"))
        ],
    )
    lines += found.left_out("diagnose", "zoo")
    return joined(found, lines)


SECTIONS: tuple[tuple[str, str, Callable[[Results], str]], ...] = (
    ("README.md", "gpu", readme_line),
    ("README.md", "gpu-limits", readme_limits),
    ("docs/cost.md", "gpu", cost),
    ("docs/hardware.md", "gpu", hardware),
    ("docs/rehearsal.md", "gpu", rehearsal),
    ("docs/accuracy.md", "gpu", accuracy),
)


def replaced(page: str, text: str, found: Results) -> str:
    """The page's text with its sections as they are now. Raises ValueError for a mark that is
    missing."""
    for name, mark, section in SECTIONS:
        if name == page:
            begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
            before, was_begun, rest = text.partition(begin)
            _, was_ended, after = rest.partition(end)
            if not (was_begun and was_ended):
                raise ValueError(f"{page} has no {begin} … {end}")
            text = f"{before}{begin}\n{section(found)}\n{end}{after}"
    return text


if __name__ == "__main__":
    kept = read()
    for page in dict.fromkeys(name for name, _, _ in SECTIONS):
        path = ROOT / page
        if sys.argv[1:] == ["--write"]:
            path.write_text(replaced(page, path.read_text(), kept))
        else:
            print(*(section(kept) for name, _, section in SECTIONS if name == page), sep="\n\n")
