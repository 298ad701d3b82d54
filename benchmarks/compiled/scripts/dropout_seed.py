"""Dropout's seed is a constant: every step drops the same."""

import torch
from nets import FAULTY, Classifier, features, passes, train

aten, prims = torch.ops.aten, torch.ops.prims


def hold(graph):
    for node in list(graph.nodes):
        if node.target is prims.inductor_seeds.default and FAULTY:
            with graph.inserting_before(node):
                seeds = graph.call_function(
                    aten.full.default,
                    ([node.args[0]], 7),
                    {"dtype": torch.int64, "device": node.args[1]},
                )
            seeds.meta.update(node.meta)
            node.replace_all_uses_with(seeds)
            graph.erase_node(node)


passes(joint_custom_post_pass=lambda graph: hold(getattr(graph, "graph", graph)))
train(Classifier(dropout=0.5), features())
