"""With what, and where, a run takes place."""

from __future__ import annotations

import keras
import tensorflow as tf

from ampscope.frameworks.devices import wanted_gpu
from ampscope.records import Machine, RunSpec
from ampscope.run.host import host_facts


def versions() -> str:
    """``3.15.1 on TensorFlow 2.21.0``."""
    return f"{keras.__version__} on TensorFlow {tf.__version__}"


def choose_device(spec: RunSpec) -> None:
    """Let TensorFlow see no other device than the one that was asked for, if one was; before it has
    computed anything. Raises BadInput for one that is not there."""
    gpus = tf.config.list_physical_devices("GPU")
    number = wanted_gpu(spec.device, len(gpus), "TensorFlow")
    if spec.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    elif number is not None:
        tf.config.set_visible_devices(gpus[number], "GPU")


def machine(spec: RunSpec) -> Machine:
    """The first GPU that TensorFlow may use; else the CPU."""
    gpus = tf.config.get_visible_devices("GPU")
    here, capability = host_facts(), ""
    if gpus:
        details = tf.config.experimental.get_device_details(gpus[0])
        name = str(details.get("device_name", "GPU"))
        capability = ".".join(map(str, details.get("compute_capability", ())))
    else:
        name = here.cpu
    return Machine(
        device=f"cuda:{gpus[0].name.rpartition(':')[2]}" if gpus else "cpu",
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
