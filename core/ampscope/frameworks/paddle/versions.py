"""Where a run of Paddle takes place: the fields of ``Machine``."""

from __future__ import annotations

import paddle

from ampscope.frameworks.devices import wanted_gpu
from ampscope.frameworks.settings import parse
from ampscope.records import Machine, RunSpec
from ampscope.run.host import host_facts


def on_cpu() -> bool:
    """Whether Paddle computes on a CPU now."""
    return str(paddle.get_device()).startswith("cpu")


def machine(spec: RunSpec) -> Machine:
    """The device that Paddle uses now. Half on a CPU is emulated, and its scaler forced on."""
    cpu, here = on_cpu(), host_facts()
    # A watched training is left as it is: on a CPU Paddle then computes everything in fp32.
    half = spec.kind != "watch" and "fp32" not in (spec.precision, parse(spec.control).precision)
    scaler = "" if not half else "forced" if cpu else "real"
    if spec.kind == "probe" and spec.precision != "fp16":
        scaler = ""
    return Machine(
        device="cpu" if cpu else str(paddle.get_device()).replace("gpu", "cuda"),
        device_name=here.cpu if cpu else str(paddle.device.cuda.get_device_name()),
        policy="rehearsal" if cpu and half else "native" if cpu else "cuda",
        capability="" if cpu else ".".join(map(str, paddle.device.cuda.get_device_capability())),
        python=here.python,
        platform=here.platform,
        host=here.host,
        framework="paddle",
        framework_version=str(paddle.__version__),
        arithmetic="emulated" if cpu and half else "real",
        scaler=scaler,
    )


def choose_device(spec: RunSpec) -> None:
    """Take the device that was asked for, if one was. Raises BadInput for one that is not there."""
    count = int(paddle.device.cuda.device_count())  # 0 in a build for CPUs
    if spec.device == "cpu":
        paddle.set_device("cpu")
    elif wanted_gpu(spec.device, count, "Paddle") is not None:
        paddle.set_device(spec.device.replace("cuda", "gpu"))
