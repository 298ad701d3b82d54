"""With what, and where, a run takes place."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import keras
import tensorflow as tf

from ampscope.records import Machine, RunSpec


def versions() -> str:
    """``3.15.1 on TensorFlow 2.21.0``."""
    return f"{keras.__version__} on TensorFlow {tf.__version__}"


def machine(spec: RunSpec) -> Machine:
    """The first GPU that TensorFlow sees, unless ``spec`` asks for the CPU."""
    gpus = tf.config.list_physical_devices("GPU") if spec.device != "cpu" else []
    capability = ""
    if gpus:
        details = tf.config.experimental.get_device_details(gpus[0])
        name = str(details.get("device_name", "GPU"))
        capability = ".".join(map(str, details.get("compute_capability", ())))
    else:
        name = _cpu_name()
    return Machine(
        device="cuda:0" if gpus else "cpu",
        device_name=name,
        policy="cuda" if gpus else "native",
        capability=capability,
        python=platform.python_version(),
        platform=platform.platform(),
        host=platform.node(),
        framework="keras",
        framework_version=versions(),
        arithmetic="real",
        scaler="real" if spec.kind != "probe" or spec.precision == "fp16" else "",
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or f"CPU with {os.cpu_count()} cores"
