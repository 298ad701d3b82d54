"""The index of an embedding is narrowed to 8 bits inside the generated code."""

import torch
from nets import FAULTY, Tagger, passes, sentences, train

aten = torch.ops.aten


def narrow(graph):
    for node in list(graph.nodes):
        if node.target is aten.embedding.default:
            table, index = node.args[:2]
            with graph.inserting_before(node):
                bits = 0xFF if FAULTY else 0xFFFF
                short = graph.call_function(aten.bitwise_and.Scalar, (index, bits))
                short.meta["val"] = index.meta["val"]
            node.args = (table, short, *node.args[2:])


passes(post_grad_custom_pre_pass=narrow)
train(Tagger(), sentences())
