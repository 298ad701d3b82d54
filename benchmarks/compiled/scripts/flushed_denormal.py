"""Subnormal fp16 numbers become zero inside the generated code."""

import torch
from nets import FAULTY, Classifier, features, nn, passes, train

aten = torch.ops.aten
SMALLEST = 2.0**-14 if FAULTY else 0.0


class Faint(nn.Module):
    """Puts out numbers around 2^-15, which fp16 holds as subnormals."""

    def forward(self, x):
        return torch.tanh(x) * 2.0**-15


def flush(graph):
    for node in list(graph.nodes):
        if node.target is not aten.mul.Tensor or node.meta["val"].dtype is not torch.float16:
            continue
        with graph.inserting_before(node.next):
            size = graph.call_function(aten.abs.default, (node,))
            lost = graph.call_function(aten.lt.Scalar, (size, SMALLEST))
            nothing = graph.call_function(aten.mul.Scalar, (node, 0.0))
            kept = graph.call_function(aten.where.self, (lost, nothing, node))
        new = (size, nothing, kept)
        node.replace_all_uses_with(kept, delete_user_cb=lambda user, own=new: user not in own)


passes(post_grad_custom_pre_pass=flush)
net = Classifier(Faint())
with torch.no_grad():
    net.blocks[0].down.weight.mul_(2.0**14)
train(net, features(), dtype=torch.float16, scale=16.0)
