"""A recorded run in the form that another program reads: TensorBoard, MLflow, Trackio, Weights
& Biases, Prometheus.

Gradients leave this room *unscaled*: what the loss scale had multiplied is divided by it again.
"""

from ampscope.extensions import Extension

EXTENSION = Extension(
    docs="docs/integrations.md",
    commands={
        "export": "ampscope.ext.trackers.cli:export",
        "metrics": "ampscope.ext.trackers.cli:metrics",
    },
)
