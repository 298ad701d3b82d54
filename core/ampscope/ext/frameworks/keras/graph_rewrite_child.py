"""The process that rewrites: a small training graph through TensorFlow's graph optimizer.

    python -m ampscope.ext.frameworks.keras.graph_rewrite_child fp16

prints one JSON line: every op of the optimized graph with its dtype before and after. Only the pass
for mixed precision runs, so that what it changed is all that changed. ``env`` runs the optimizer as
TensorFlow has it by default, for what an environment variable may switch on.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer

PASSES = {"fp16": "auto_mixed_precision_cpu", "bf16": "auto_mixed_precision_onednn_bfloat16"}
_OTHERS = (
    "constant_folding", "arithmetic_optimization", "remapping", "layout_optimizer",
    "function_optimization", "dependency_optimization", "shape_optimization",
    "common_subgraph_elimination", "loop_optimization",
)  # fmt: skip
_v1 = tf.compat.v1


def main() -> None:
    """Rewrite by the word on the command line."""
    mode = sys.argv[1]
    _v1.disable_eager_execution()
    graph = _training_graph()
    meta = _v1.train.export_meta_graph(graph=graph)
    before = {node.name: _dtype(node) for node in meta.graph_def.node}
    after = tf_optimizer.OptimizeGraph(_config(mode), meta)
    ops = [[n.name, n.op, before.get(n.name, ""), _dtype(n)] for n in after.node]
    print(json.dumps({"version": tf.__version__, "ops": ops}))


def _training_graph() -> Any:
    """A convolution, two matmuls, an exponential and a softmax, with their gradients."""
    generator = np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        return tf.constant(generator.normal(0.0, 0.1, shape).astype(np.float32))

    graph = tf.Graph()
    with graph.as_default():
        images = _v1.placeholder(tf.float32, (8, 8, 8, 1), name="images")
        kernel, dense, last = weights(3, 3, 1, 4), weights(64, 16), weights(16, 4)
        x = tf.nn.conv2d(images, kernel, 1, "SAME", name="conv")
        x = tf.nn.relu(tf.nn.bias_add(x, tf.constant([0.1] * 4), name="bias"), name="relu")
        x = tf.nn.max_pool2d(x, 2, 2, "SAME", name="pool")
        x = tf.matmul(tf.reshape(x, (8, 64), name="flat"), dense, name="dense")
        x = tf.math.log(1.0 + tf.exp(x, name="exp"), name="log")
        x = tf.nn.softmax(tf.matmul(x, last, name="logits"), name="softmax")
        loss = -tf.reduce_mean(tf.math.log(x[:, 0] + 1e-6), name="loss")
        found = _v1.gradients(loss, [kernel, dense, last], name="gradients")
        for tensor in (loss, *found):
            graph.add_to_collection("train_op", tf.identity(tensor).op)
    return graph


def _config(mode: str) -> Any:
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes = -1
    if mode in PASSES:
        for name in _OTHERS:
            setattr(options, name, rewriter_config_pb2.RewriterConfig.OFF)
        options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
        setattr(options, PASSES[mode], rewriter_config_pb2.RewriterConfig.ON)
    return config


def _dtype(node: Any) -> str:
    """The type that an op computes in; of a cast both, ``float32 -> float16``."""
    found = {key: tf.as_dtype(value.type).name for key, value in node.attr.items() if value.type}
    if node.op == "Cast":
        return f"{found['SrcT']} -> {found['DstT']}"
    return found.get("T") or found.get("dtype") or ""


if __name__ == "__main__":
    main()
