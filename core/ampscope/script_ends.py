"""How a script's run ended, in one sentence, and whether that leaves anything to judge: for the
child process that stores it, and for a reader of a run without it.
"""

from __future__ import annotations

import re
import sys

from ampscope import extensions
from ampscope.control import BASELINE
from ampscope.observations import Outcome
from ampscope.pythons import TORCH
from ampscope.records import RunSpec, State

MAX_TEXT = 200
# torch/cuda/__init__.py (_lazy_init), c10/cuda/CUDAFunctions.cpp, torch/serialization.py.
_NO_CUDA = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "torch.cuda.is_available() is False",
    "PyTorch is not linked with support for cuda devices",
    "Distributed package doesn't have NCCL built in",
    "ProcessGroupNCCL is only supported with GPUs",
)

# What libraries and scripts say in words of their own: a device and its lack in one line.
_DEVICE = r"(?:(?<![a-z/])cuda|\bgpus?\b|\bnvidia\b|\bnccl\b|\baccelerators?\b)"
_LACK = (
    r"(?:\bno\b|\bnot\b|n't\b|\bcannot\b|\bnone\b|\bwithout\b|\bonly\b|\bneed|\brequire|\bmust\b"
    r"|\bmissing\b|\blacks?\b|\bunavailable\b|\bunable\b|\bat least\b|\bis False\b|\bassert\b|\[\])"
)
_SAYS_NO_CUDA = re.compile(
    f"{_DEVICE}.{{0,120}}{_LACK}|{_LACK}.{{0,120}}{_DEVICE}|your machine only has: \\[\\]",
    re.IGNORECASE,
)
_MAY_WANT_CUDA = (
    "This machine has no CUDA device. If the script needs one, --policy cuda simulates it."
)

# What code that is compiled for CUDA says where there is no device, and what the script could do
# instead. {0} is what the pattern's group holds.
_CUDA_CODE = (
    (r"(lib(?:cu\w+|c10_cuda|torch_cuda|nccl|nv\w+)\.so[.\d]*): cannot open shared object",
     "code that is compiled for CUDA (it needs {0})", "let the script run without this import"),
    (r"(undefined symbol): \w*[cC][uU][dD][aA]",
     "code that is compiled for CUDA ({0})", "let the script run without this import"),
    (r"(CUDA_HOME|nvcc)\b.* (?:is not set|not found|could not be found)|No such file.*'\S*(nvcc)'",
     "a CUDA extension, which is compiled with {0},", "let the script run without it"),
    (r"\d+ active drivers|(No CUDA-capable|Triton) .*driver",
     "a Triton kernel", "let the script run without it"),
    (r"(bitsandbytes) (?:native )?library|(cget_managed_ptr)|(bitsandbytes)\b.*CUDA",
     "bitsandbytes", "take torch's own optimizer and layers"),
    (r"[Nn]o operator found for `?(memory_efficient_attention)|xFormers wasn't build with",
     "xformers' attention", "take torch's scaled_dot_product_attention"),
    (r"requires (cuda) extensions|without (--cuda_ext)|(amp_C)",
     "apex's CUDA code", "take torch's own optimizer and layers"),
    (r"FSDP does not support (CPU) only execution", "FullyShardedDataParallel",
     "take torch.distributed.fsdp.fully_shard"),
    (r"Backend gloo does not (?:implement|support) (\w+)|ProcessGroupGloo.*?support (\w+)"
     r"|Cannot use (\S+) with Gloo", "{0}, which NCCL alone has,", "take another collective"),
)  # fmt: skip
_SEES_CPU = r"CUDA tensor|on (?:CUDA|cuda|GPU|the GPU)\b|'CPU' backend"
# Packages that hold kernels for CUDA alone, by what is imported.
_FOR_CUDA = (
    "triton", "flash_attn", "flash_attn_interface", "apex", "amp_C", "bitsandbytes", "xformers",
    "transformer_engine", "causal_conv1d", "mamba_ssm", "tinycudann", "spconv", "torchsparse",
    "MinkowskiEngine", "cupy", "pycuda", "nvdiffrast", "diff_gaussian_rasterization", "deep_gemm",
    "flashinfer", "fused_adam",
)  # fmt: skip


def ending(
    outcome: Outcome, spec: RunSpec, processes: int = 0, *, has_cuda: bool = True
) -> tuple[State, str]:
    """(state, sentence) of a run that ended by itself; "" where there is nothing to add.

    ``processes``: how many others it started. ``has_cuda``: the machine has a CUDA device. FAILED
    means that there is nothing to judge, whatever the run has recorded.
    """
    state, sentence = _ending(outcome, spec, processes)
    if outcome.steps or state is not State.FINISHED or outcome.is_out_of_memory:
        return state, sentence  # FAILED: the sentence names the reason
    return state, with_hint(sentence, spec, has_cuda=has_cuda)


def with_hint(sentence: str, spec: RunSpec, *, has_cuda: bool) -> str:
    """How a run that made no step ended, with what may help on a machine without CUDA. A control is
    run where the unchanged script trains: no device is missing there."""
    if spec.control not in ("", BASELINE):
        return sentence
    if has_cuda or spec.policy == "cuda" or not sentence or "--policy cuda" in sentence:
        return sentence
    return f"{sentence}{'' if sentence.endswith(('.', '!', '?')) else '.'} {_MAY_WANT_CUDA}"


def _ending(outcome: Outcome, spec: RunSpec, processes: int) -> tuple[State, str]:
    when = _when(outcome)
    if outcome.ended == "exception":
        return _raised(outcome, spec, when)
    if outcome.ended == "exit" and not outcome.steps and outcome.error_type:
        handled = _raised(outcome, spec, when)  # what the script caught before it left
        if handled[0] is State.FAILED:
            return handled
    if outcome.ended == "cancelled":
        return State.CANCELLED, f"Cancelled {when}."
    if outcome.steps or outcome.ended == "steps":
        return State.FINISHED, ""
    if spec.skip_to:
        why = "within the time limit" if outcome.ended == "time" else "in all"
        return State.FINISHED, (
            f"The script made {outcome.slept:,} optimizer steps {why}, and --skip-to "
            f"{spec.skip_to:,} waits for more. Skip fewer, or raise --time-limit."
        )
    if outcome.ended == "time":
        return State.FINISHED, "The script made no optimizer step within the time limit."
    if processes:
        return State.FAILED, (
            "The script made no optimizer step in its own process, but it started "
            f"{processes} other{'s' if processes > 1 else ''}: training in a child process is not "
            "watched. Let the script train in its main process."
        )
    if outcome.ended == "exit":
        return State.FINISHED, f"The script ended with exit status {outcome.exit_code} {when}."
    if outcome.backwards:
        return State.FINISHED, (
            "The script computed gradients but never called an optimizer's step: a training that "
            "changes its weights by hand cannot be followed."
        )
    return State.FINISHED, "The script ended without calling backward: there is no training in it."


def passed_limit(limit_s: float, steps: int) -> str:
    """The sentence for a script that was ended because it did not get on."""
    done = f"{steps} optimizer step{'s' if steps > 1 else ''}" if steps else "no step"
    return (
        f"The script was stopped: it passed the time limit of {limit_s:g} s after {done} and did "
        "not come to a next one. It hangs, or needs a higher --time-limit."
    )


def lacks_cuda(outcome: Outcome, output: str = "") -> bool:
    """torch told the script that there is no CUDA device. ``output`` is what it printed: a launcher
    raises an error of its own, and the rank's stands there."""
    said = (
        outcome.error_text
        if outcome.steps or not outcome.error_text
        else (f"{outcome.error_text}\n{output}")
    )
    return any(s in said for s in _NO_CUDA)


def may_want_cuda(outcome: Outcome, said: str) -> bool:
    """Whether the script ended itself before its first step, and somewhere it is said that there is
    no CUDA device. ``said``: what it printed, with the tracebacks of all errors that led to its
    end: libraries have words of their own, and others wrap them."""
    if outcome.steps or outcome.ended not in ("exception", "exit", "returned"):
        return False
    lines = "\n".join(s for s in said.splitlines() if "No such file" not in s)  # paths say nothing
    return _cuda_code(outcome.error_text) is None and bool(_SAYS_NO_CUDA.search(lines))


def _raised(outcome: Outcome, spec: RunSpec, when: str) -> tuple[State, str]:
    lines = outcome.error_text.splitlines()  # torchrun's first one is a rule of "="
    text = next((s.strip()[:MAX_TEXT] for s in lines if any(map(str.isalnum, s))), "")
    at = f" at {outcome.error_line}" if outcome.error_line else ""
    kind = outcome.error_type
    if kind == "KeyboardInterrupt":
        return State.CANCELLED, f"The script was interrupted{at} {when}."
    if outcome.is_out_of_memory:
        limit = f" (limit {spec.memory_limit_mib} MiB)" if spec.memory_limit_mib else ""
        higher = ", or a higher --memory-limit" if spec.memory_limit_mib else ""
        return State.FAILED, (
            f"The script ran out of memory{at} {when}{limit}. Use a smaller model or batch{higher}."
        )
    if kind == "CannotRehearseError":
        return State.FAILED, f"The script stopped{at}: {text}"
    if lacks_cuda(outcome) and spec.policy == "cuda":
        return State.FAILED, (
            f"The script asks for a CUDA device{at} in a way that a CPU cannot stand in for: {text}"
            " Run it on a GPU."
        )
    if lacks_cuda(outcome):
        return State.FAILED, (
            f"The script asks for a CUDA device{at}, and this machine has none: "
            + (
                "--policy cuda rehearses one on the CPU."
                if extensions.simulated_device()
                else "run it on a GPU."
            )
        )
    if kind == "EOFError" and "EOF when reading a line" in outcome.error_text:
        return State.FAILED, (
            f"The script asks for input{at} {when}, and it gets none here: give it as an argument."
        )
    if not outcome.steps and (what := _cuda_code(outcome.error_text)):
        return State.FAILED, (
            f"The script stopped{at}: {what[0]} cannot be rehearsed on a CPU: {what[1]}, or run it "
            f"on a GPU. ({kind}: {text})"
        )
    if kind == "ModuleNotFoundError" and not outcome.steps:
        lacks = f"the Python at {sys.executable} lacks"
        words = f"The script needs a package{at} that {lacks}: {text}."
        return State.FAILED, f"{words} {_other(text, spec)}".strip()
    if spec.policy == "cuda" and not outcome.steps and re.search(_SEES_CPU, text):
        return State.FAILED, (
            f"The script stopped{at}: {text}. In a rehearsal all tensors are in the CPU's memory, "
            "and code that is compiled for CUDA takes none: let the script run without it, or run "
            "it on a GPU."
        )
    return State.FINISHED, f"The script raised {kind}{at} {when}: {text}"


def _cuda_code(text: str) -> tuple[str, str] | None:
    """What of CUDA's code an error is about, and what to do instead; None if about none."""
    for pattern, what, instead in _CUDA_CODE:
        if found := re.search(pattern, text):
            return what.format(next(filter(None, found.groups()), "")), instead
    return None


def _other(text: str, spec: RunSpec) -> str:
    """What to do about a missing package: it is another framework's, or holds code for CUDA."""
    missing = re.search(r"No module named '(\w+)", text)
    if missing is None or spec.framework != TORCH:
        return ""
    for framework in extensions.frameworks().values():
        if missing[1] in framework.modules:
            return (
                f"It was taken for a script of PyTorch: if it trains with {framework.title}, say "
                f"--framework {framework.name}."
            )
    if missing[1] in _FOR_CUDA:
        return (
            f"{missing[1]} holds code for CUDA, which cannot be rehearsed on a CPU: let the script "
            "run without it, or run it on a GPU."
        )
    return ""


def _when(outcome: Outcome) -> str:
    if not outcome.steps:
        return "before its first optimizer step"
    return f"after {outcome.steps} optimizer step{'s' if outcome.steps > 1 else ''}"
