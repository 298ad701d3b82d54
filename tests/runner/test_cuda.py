"""Scripts that ask for AMP or for a device on CUDA, on a machine without it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import State
from tests.helpers.script_runner import OnDemand, Ran, Runner, quick, spec, write_script

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")

LOOP = """
import torch, warnings
warnings.simplefilter("ignore")
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
o = torch.optim.SGD(m.parameters(), 1e-3)
scaler = {scaler}
for i in range(4):
    o.zero_grad()
    with {autocast}:
        y = m(torch.randn(8, 4)); loss = y.exp().square().mean()
        inside = torch.is_autocast_enabled({device})
    scaler.scale(loss).backward(); scaler.step(o); scaler.update()
    print(repr(loss.item()), y.dtype, loss.dtype, scaler.get_scale(), inside)
"""
FUNCTION = """
import torch, warnings
warnings.simplefilter("ignore")
from base import *
class Double(torch.autograd.Function):
    @staticmethod
    @{forward}
    def forward(ctx, x): print(x.dtype); return 2 * x
    @staticmethod
    @{backward}
    def backward(ctx, g): return 2 * g
with torch.autocast({device}, torch.float16):
    Double.apply(m(torch.ones(1, 4))).sum().backward()
o.step()
"""
ON_CPU = LOOP.format(
    scaler='torch.amp.GradScaler("cpu", init_scale=2.0**17)',
    autocast='torch.autocast("cpu", torch.float16)',
    device='"cpu"',
)
SPELLINGS = {
    "old": ("torch.cuda.amp.GradScaler(init_scale=2.0**17)", "torch.cuda.amp.autocast()", ""),
    "old_dtype": (
        "torch.cuda.amp.GradScaler(2.0**17)", "torch.cuda.amp.autocast(True, torch.float16)", "",
    ),
    "new": (
        'torch.amp.GradScaler("cuda", init_scale=2.0**17)', 'torch.autocast("cuda")', '"cuda"',
    ),
    "mixed": (
        "torch.amp.GradScaler(init_scale=2.0**17)",
        'torch.amp.autocast(device_type="cuda", dtype=torch.float16)', '"cuda"',
    ),
}  # fmt: skip
CALLS = {
    "module_cuda": "m.cuda()",
    "tensor_cuda": "torch.ones(2).cuda()",
    "module_to": "m.to('cuda')",
    "tensor_to": "torch.ones(2).to('cuda:0')",
    "device": "torch.ones(2, device='cuda')",
    "set_default": "torch.set_default_device('cuda'); torch.ones(2)",
}


# What a rehearsal cannot do: line 3 of a script, what its sentence names, and what it says to do.
EXTENSION = "from torch.utils.cpp_extension import load; "
NOT_ON_A_CPU = {
    "compiled": (
        EXTENSION + "load('mine', [__file__.replace('compiled.py', 'mine.cu')])",
        "a CUDA extension, which is compiled with CUDA_HOME, cannot be rehearsed on a CPU",
    ),
    "library": (
        "import ctypes; ctypes.CDLL('libcudart.so.12')",
        "code that is compiled for CUDA (it needs libcudart.so.12) cannot be rehearsed on a CPU: "
        "let the script run without this import",
    ),
    "extension": (
        "import mine_cuda",
        "(it needs libcudart.so.12) cannot be rehearsed on a CPU: let the script run without this "
        "import, or run it on a GPU. (ImportError: import of mine_cuda: libcudart.so.12:",
    ),
    "package": (
        "import flash_attn",
        "No module named 'flash_attn'. flash_attn holds code for CUDA, which cannot be rehearsed",
    ),
    "apex": (
        "raise RuntimeError('apex.optimizers.FusedAdam requires cuda extensions')",
        "apex's CUDA code cannot be rehearsed on a CPU: take torch's own optimizer",
    ),
    "triton_kernel": (
        "raise RuntimeError('0 active drivers ([]). There should only be one.')",
        "a Triton kernel cannot be rehearsed on a CPU: let the script run without it",
    ),
    "bitsandbytes_step": (
        "raise RuntimeError(\"Attempted to use bitsandbytes native library functionality but it's "
        "not available.\")",
        "bitsandbytes cannot be rehearsed on a CPU: take torch's own optimizer",
    ),
    "xformers_attention": (
        "raise NotImplementedError('No operator found for `memory_efficient_attention_forward`')",
        "xformers' attention cannot be rehearsed on a CPU: take torch's scaled_dot_product",
    ),
    "collective": (
        "import collectives",
        "startCoalescing, which NCCL alone has, cannot be rehearsed on a CPU: take another",
    ),
    "fsdp": (
        "raise RuntimeError('FSDP does not support CPU only execution')",
        "FullyShardedDataParallel cannot be rehearsed on a CPU: take torch.distributed.fsdp.fully",
    ),
    "refuses": (
        "raise RuntimeError('x must be a CUDA tensor')",
        "x must be a CUDA tensor. In a rehearsal all tensors are in the CPU's memory",
    ),
}  # fmt: skip
# What torch.cuda.graph says while it records, around one of three steps.
GRAPH = """\
from base import *
step()
known = torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing
torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: True
step()
torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing = known
step()
"""
COLLECTIVES = """\
import torch
import torch.distributed as dist

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
with dist.distributed_c10d._coalescing_manager(device=torch.device("cuda")):
    dist.all_reduce(torch.ones(2, device="cuda"))
"""


def write_extension(folder: Path) -> None:
    """A module that is linked with the CUDA runtime, which is not there."""
    source, runtime = folder / "nothing.c", folder / "libcudart.so.12"
    source.write_text("void nothing(void) {}\n")
    shared = ["gcc", "-shared", "-fPIC", str(source)]
    subprocess.run([*shared, "-Wl,-soname,libcudart.so.12", "-o", str(runtime)], check=True)
    linked = ["-Wl,--no-as-needed", str(runtime), "-o", str(folder / "mine_cuda.so")]
    subprocess.run([*shared, *linked], check=True)
    runtime.unlink()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ran]]:
    folder = tmp_path_factory.mktemp("cuda")
    texts = {
        name: LOOP.format(scaler=s, autocast=a, device=d) for name, (s, a, d) in SPELLINGS.items()
    }
    texts["fp32"] = LOOP.format(
        scaler='torch.amp.GradScaler("cpu", enabled=False)',
        autocast='torch.autocast("cpu", enabled=False)',
        device='"cpu"',
    )
    fp32 = "cast_inputs=torch.float32"
    texts["function_cpu"] = FUNCTION.format(
        forward=f'torch.amp.custom_fwd(device_type="cpu", {fp32})',
        backward='torch.amp.custom_bwd(device_type="cpu")', device='"cpu"',
    )  # fmt: skip
    texts["function"] = FUNCTION.format(
        forward=f'torch.amp.custom_fwd(device_type="cuda", {fp32})',
        backward='torch.amp.custom_bwd(device_type="cuda")', device='"cuda"',
    )  # fmt: skip
    texts["function_old"] = FUNCTION.format(
        forward=f"torch.cuda.amp.custom_fwd({fp32})",
        backward="torch.cuda.amp.custom_bwd", device='"cuda"',
    )  # fmt: skip
    texts["off"] = LOOP.format(
        scaler="torch.amp.GradScaler(enabled=False)",
        autocast='torch.autocast("cuda", enabled=False)', device='"cuda"',
    )  # fmt: skip
    texts |= {name: f"from base import *\nstep()\n{call}\n" for name, call in CALLS.items()}
    texts["driver"] = "from base import *\nstep()\ntorch.cuda.caching_allocator_alloc(16)\n"
    texts |= {name: f"import torch\n\n{call}\n" for name, (call, _) in NOT_ON_A_CPU.items()}
    texts["collectives"] = COLLECTIVES
    texts["graph"] = GRAPH
    (folder / "mine.cu").write_text("__global__ void nothing() {}\n")
    if shutil.which("gcc") is not None:
        write_extension(folder)
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        run = Runner(runs)
        paths = {name: write_script(folder, f"{name}.py", text) for name, text in texts.items()}
        paths["cpu"] = write_script(folder, "cpu.py", ON_CPU)

        def made(name: str) -> Ran:
            rehearsed = name.startswith("cuda ")
            return run(paths[name.removeprefix("cuda ")], policy="cuda" if rehearsed else "native")

        yield OnDemand(made)


@pytest.mark.parametrize("name", quick(SPELLINGS, "old", "new"))
def test_a_rehearsal_runs_what_the_script_asks_of_cuda(name: str, ended: dict[str, Ran]) -> None:
    """Bit for bit what the same script gives that names the CPU and fp16 itself."""
    ran = ended[f"cuda {name}"]
    assert ran.out == ended["cuda cpu"].out, ran.err.decode()
    assert b"torch.float16 torch.float32" in ran.out  # exp in fp32: CUDA's list, not the CPU's
    assert ran.outcome.uses_autocast == "fp16"
    assert ran.outcome.scalers == ("scaler0",)
    (note,) = ran.outcome.notes
    assert "GradScaler and autocast on CUDA (first at" in note
    assert "redirected to the CPU" in note


@pytest.mark.parametrize("name", quick(SPELLINGS, "old", "new"))
def test_a_native_run_says_that_torch_switched_amp_off(name: str, ended: dict[str, Ran]) -> None:
    ran = ended[name]
    numbers = [line.split()[0] for line in ran.out.decode().splitlines()]
    assert numbers == [line.split()[0] for line in ended["fp32"].out.decode().splitlines()]
    (note,) = ran.outcome.notes
    assert "torch switched AMP off and this was an fp32 run: --policy cuda rehearses it" in note
    assert note.count(". ") == 0  # one sentence


@pytest.mark.parametrize("name", ["cpu", "cuda cpu", "off", "cuda off", "fp32"])
def test_who_asks_nothing_of_cuda_is_told_nothing(name: str, ended: dict[str, Ran]) -> None:
    assert ended[name].outcome.notes == ()


def test_the_run_says_what_a_cuda_graph_took_up_unseen(ended: dict[str, Ran]) -> None:
    ran = ended["graph"]
    (note,) = ran.outcome.notes
    assert "ops ran inside a CUDA graph: not seen" in note
    assert len(ran.steps) == 2
    assert ran.run.info.state is State.FINISHED


@pytest.mark.parametrize("name", ["function", "function_old"])
def test_custom_functions_cast_as_under_cuda(name: str, ended: dict[str, Ran]) -> None:
    assert ended["cuda function_cpu"].out == b"torch.float32\n"
    assert ended[f"cuda {name}"].out == b"torch.float32\n", ended[f"cuda {name}"].err.decode()


@pytest.mark.parametrize("name", quick(CALLS, "module_cuda", "tensor_to", "set_default"))
def test_a_cuda_device_that_is_not_there_is_one_sentence(name: str, ended: dict[str, Ran]) -> None:
    info = ended[name].run.info
    assert info.state is State.FAILED
    assert info.message.startswith(f"The script asks for a CUDA device at {name}.py:3, and this ")
    assert len(ended[name].steps) == 1
    assert "Traceback" in ended[name].err.decode()


@pytest.mark.usefixtures("stand_in")
def test_what_reaches_past_the_stand_in_is_not_told_to_rehearse(ended: dict[str, Ran]) -> None:
    info = ended["cuda driver"].run.info
    assert info.state is State.FAILED
    assert "at driver.py:3: torch.cuda.caching_allocator_alloc cannot be rehearsed" in info.message
    assert "--policy" not in info.message


@pytest.mark.parametrize("name", quick(NOT_ON_A_CPU, "library", "package"))
def test_code_for_cuda_alone_is_one_sentence_that_says_what_to_do(
    name: str, ended: dict[str, Ran]
) -> None:
    if name == "extension" and shutil.which("gcc") is None:
        pytest.skip("no compiler")
    info = ended[f"cuda {name}"].run.info
    assert info.state is State.FAILED
    at = "collectives.py:5" if name == "collective" else f"{name}.py:3"
    assert f" at {at}" in info.message
    assert NOT_ON_A_CPU[name][1] in info.message


def test_the_path_of_the_script_is_named(ended: dict[str, Ran]) -> None:
    assert "(first at old.py:7)" in ended["old"].outcome.notes[0]
    assert Path(ended["old"].run.info.spec.workload).name == "old.py"
