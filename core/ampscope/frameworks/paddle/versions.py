"""Where a run of Paddle takes place: the fields of ``Machine``."""

from __future__ import annotations

import platform
import socket
import sys

import paddle

from ampscope.records import Machine, RunSpec


def on_cpu() -> bool:
    """Whether Paddle computes on a CPU now."""
    return str(paddle.get_device()).startswith("cpu")


def machine(spec: RunSpec) -> Machine:
    """The device that Paddle uses. Half precision on a CPU is emulated, its scaler forced on."""
    cpu = choose_device(spec) == "cpu"
    # A watched training is left as it is: on a CPU Paddle then computes everything in fp32.
    half = spec.kind != "watch" and spec.precision != "fp32" and "fp32" not in spec.control
    scaler = "" if not half else "forced" if cpu else "real"
    if spec.kind == "probe" and spec.precision != "fp16":
        scaler = ""
    name = platform.processor() or platform.machine()
    return Machine(
        device="cpu" if cpu else str(paddle.get_device()).replace("gpu", "cuda"),
        device_name=name if cpu else str(paddle.device.cuda.get_device_name()),
        policy="rehearsal" if cpu and half else "native" if cpu else "cuda",
        capability="" if cpu else ".".join(map(str, paddle.device.cuda.get_device_capability())),
        python=platform.python_version(),
        platform=sys.platform,
        host=socket.gethostname(),
        framework="paddle",
        framework_version=str(paddle.__version__),
        arithmetic="emulated" if cpu and half else "real",
        scaler=scaler,
    )


def choose_device(spec: RunSpec) -> str:
    """Take the device that was asked for; "cpu" or "gpu:0"."""
    if spec.device == "cpu":
        paddle.set_device("cpu")
    elif spec.device.startswith("cuda"):
        paddle.set_device(spec.device.replace("cuda", "gpu"))
    device = str(paddle.get_device())
    return "cpu" if device.startswith("cpu") else device
