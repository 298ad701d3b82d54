"""PaddlePaddle and TensorFlow/Keras: adapters that write the same records as PyTorch's instruments.

Each framework runs in a process of its own, with a Python that has it and need not have torch; the
dashboard and the command line import none of them.

environments `ampscope frameworks install|check`: the Pythons that have one (ampscope.pythons)
adapters     what every adapter offers, and the settings that all understand
tensors      a tensor as NumPy bits with its dtype's name; exponents counted by numba
recorder     an adapter's facts as records of a run: steps, frames, ops, optimizer steps, bad layers
watch_run    the run of a training that a user watches from inside, and how a fit ends
checks       what a probe or a control can ask for outside PyTorch
networks     one LeNet, MLP and small transformer: weights and batches for every framework
torch_networks  the same in PyTorch
differences  where the histograms of two frameworks differ
child        `python -m ampscope.ext.frameworks.child`: a probe
script       `python -m ampscope.ext.frameworks.script`: a user's script, untouched
server       starts the runs of one script, and says how each ended
keras/       imports keras and tensorflow; nothing else does
paddle/      imports paddle; nothing else does
"""

from ampscope.extensions import Extension, Framework, Page

KERAS = Framework(
    name="keras",
    title="TensorFlow/Keras",
    modules=("keras", "tensorflow", "tf_keras"),
    probe_module="tensorflow",
    requirements=("tensorflow-cpu>=2.16,<3", "keras>=3.3,<4"),
    variable="AMPSCOPE_KERAS_PYTHON",
    package=__name__,
)
PADDLE = Framework(
    name="paddle",
    title="PaddlePaddle",
    modules=("paddle",),
    probe_module="paddle",
    # GradScaler.update() of Paddle 3.3 raises TypeError with NumPy 2.4 at the first overflow.
    requirements=("paddlepaddle>=3.0,<4", "numpy<2.4"),
    variable="AMPSCOPE_PADDLE_PYTHON",
    package=__name__,
)
FRAMEWORKS = {framework.name: framework for framework in (KERAS, PADDLE)}
_BUILD = "ampscope.ext.frameworks.torch_networks:build"

EXTENSION = Extension(
    docs="docs/frameworks.md",
    commands={"frameworks": "ampscope.ext.frameworks.cli:frameworks"},
    pages=(Page("frameworks", "Frameworks", "hub", within="Reference"),),
    frameworks=tuple(FRAMEWORKS.values()),
    workloads={f"shared-{name}": _BUILD for name in ("lenet", "mlp", "transformer")},
)
