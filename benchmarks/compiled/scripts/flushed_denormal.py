"""Subnormal fp16 numbers become zero inside the generated code."""

import torch
from nets import FAULTY, Classifier, features, nn, passes, train

aten, prims = torch.ops.aten, torch.ops.prims
SMALLEST = 2.0**-14 if FAULTY else 0.0


class Faint(nn.Module):
    """Puts out numbers around 2^-15, which fp16 holds as subnormals."""

    def forward(self, x):
        return torch.tanh(x) * 2.0**-15


def flush(graph):
    for node in list(graph.nodes):
        if node.target is not prims.convert_element_type.default or node.args[1] != torch.float16:
            continue
        wide = node.args[0]
        if wide.meta["val"].dtype is not torch.float32 or wide.op != "call_function":
            continue
        with graph.inserting_before(node):
            size = graph.call_function(aten.abs.default, (wide,))
            lost = graph.call_function(aten.lt.Scalar, (size, SMALLEST))
            nothing = graph.call_function(aten.mul.Scalar, (wide, 0.0))
            kept = graph.call_function(aten.where.self, (lost, nothing, wide))
        node.args = (kept, torch.float16)


passes(post_grad_custom_pre_pass=flush)
net = Classifier(Faint())
with torch.no_grad():
    net.blocks[0].down.weight.mul_(2.0**14)
train(net, features(), dtype=torch.float16, scale=16.0)
