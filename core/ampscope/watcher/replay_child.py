"""The process of ``ampscope replay``: load the capsule and the model, run the step, print.

    python -m ampscope.watcher.replay_child CAPSULE --model file.py:build [--json]

Exit status 1 when a bad op was found, 0 when the replay was finite, 2 when it could not be run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ampscope.errors import AmpscopeError, BadInput
from ampscope.record_json import dumps
from ampscope.runner.probe import arithmetic
from ampscope.runner.run_server import end_with_parent
from ampscope.story.document import line, visible
from ampscope.watcher.capsule import Capsule, check, load
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.replay import StepReplay, replay
from ampscope.workloads.load import load_models

MAX_SENTENCE = 2_000  # characters


def main() -> int:
    """Returns the exit status."""
    end_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capsule", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        capsule = load(given.capsule)
        models = load_models(given.model)
        note = prepare(capsule, models)
        # A step of a GPU's is rehearsed on a CPU, under CUDA's rules.
        is_rehearsed = capsule.about.policy == "cuda" and not torch.cuda.is_available()
        with arithmetic("rehearsal" if is_rehearsed else "native"):
            result = replay(models, capsule.forwards, capsule.about.scale)
        result = result.explained(capsule.about.where)
    except AmpscopeError as error:
        return _refused(str(error))
    except KeyboardInterrupt:
        return _refused("The replay was stopped.")
    except Exception as error:  # a forged capsule, or the user's own model
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return _refused(f"The step could not be run again ({reason}).")
    print(_as_json(capsule, result, note) if given.json else _as_text(capsule, result, note))
    return 0 if result.where == "nowhere" else 1


def _refused(sentence: str) -> int:
    """Exit status 1 would mean that something was not finite."""
    print(f"ampscope: {line(sentence, MAX_SENTENCE)}", file=sys.stderr)
    return 2


def prepare(capsule: Capsule, models: Mapping[str, nn.Module]) -> str:
    """Give the models the capsule's weights, on CUDA where there is one. A sentence when the
    weights are not those of the failing step."""
    if capsule.is_of_a_part:
        raise BadInput(
            "The capsule is of a sharded training (FSDP): it holds no weights, and weights of "
            "another origin would give another result. Its inputs, norms and reason can be read; "
            "the step can only be run again by all ranks, from a checkpoint."
        )
    if torch.cuda.is_available():
        for model in models.values():
            model.cuda()
    named = {p.name: p.tensor for p in WatchedModels(models).parameters}
    missing = sorted(capsule.checks.keys() - named.keys())
    if missing:
        raise BadInput(
            f"The capsule is of another model: it has a parameter {missing[0]!r} and this one has "
            "none of that name."
        )
    with torch.no_grad():
        for name, weight in capsule.weights.items():
            if weight.shape != named[name].shape:
                raise BadInput(
                    f"Parameter {name!r} has the shape {tuple(named[name].shape)} here and "
                    f"{tuple(weight.shape)} in the capsule."
                )
            named[name].copy_(weight)
    if capsule.weights:
        return ""
    other = [n for n, total in capsule.checks.items() if not _agrees(check(named[n]), total)]
    if not other:
        return ""
    return (
        f"{len(other)} of {len(capsule.checks)} parameters are not those of the failing step (the "
        "capsule holds no weights): load the checkpoint nearest to it, or expect another result."
    )


def _agrees(here: float, there: float) -> bool:
    """Sums of the same numbers: another device adds in another order. NaN is in both or in none."""
    return math.isclose(here, there, rel_tol=1e-9, abs_tol=1e-12) or (
        math.isnan(here) and math.isnan(there)
    )


def _as_text(capsule: Capsule, result: StepReplay, note: str) -> str:
    about = capsule.about
    # Every text here came out of a file.
    lines = [f"Step {about.step} of run {about.run}, rank {about.rank}: {about.reason}"]
    lines.append(f"Capsule: {capsule.contents}.")
    lines.append(f"First bad op: {result.text}" if result.first else result.text)
    if result.first and result.first.code:
        lines.append(f"  {result.first.code}")
    lines += [text for text in (note, *result.notes) if text]
    return "\n".join(visible(text, MAX_SENTENCE) for text in lines)


def _as_json(capsule: Capsule, result: StepReplay, note: str) -> str:
    document = {
        "schema": 1,
        "about": dataclasses.asdict(capsule.about),
        "where": result.where,
        "text": result.text,
        "first": None if result.first is None else dataclasses.asdict(result.first),
        "shadows": [dataclasses.asdict(shadow) for shadow in result.shadows],
        "notes": [text for text in (note, *result.notes) if text],
    }
    return dumps(document, indent=2)


if __name__ == "__main__":
    sys.exit(main())
