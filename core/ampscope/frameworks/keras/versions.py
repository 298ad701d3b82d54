"""With what, and where, a run takes place."""

from __future__ import annotations

import keras
import tensorflow as tf

from ampscope.records import Machine, RunSpec
from ampscope.run.host import host_facts


def versions() -> str:
    """``3.15.1 on TensorFlow 2.21.0``."""
    return f"{keras.__version__} on TensorFlow {tf.__version__}"


def machine(spec: RunSpec) -> Machine:
    """The first GPU that TensorFlow sees, unless ``spec`` asks for the CPU."""
    gpus = tf.config.list_physical_devices("GPU") if spec.device != "cpu" else []
    here, capability = host_facts(), ""
    if gpus:
        details = tf.config.experimental.get_device_details(gpus[0])
        name = str(details.get("device_name", "GPU"))
        capability = ".".join(map(str, details.get("compute_capability", ())))
    else:
        name = here.cpu
    return Machine(
        device="cuda:0" if gpus else "cpu",
        device_name=name,
        policy="cuda" if gpus else "native",
        capability=capability,
        python=here.python,
        platform=here.platform,
        host=here.host,
        framework="keras",
        framework_version=versions(),
        arithmetic="real",
        scaler="real" if spec.kind != "probe" or spec.precision == "fp16" else "",
    )
