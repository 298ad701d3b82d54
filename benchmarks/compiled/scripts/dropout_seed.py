"""Dropout's seed is a constant: every step drops the same."""

import torch
from nets import FAULTY, Classifier, features, passes, train

aten, prims = torch.ops.aten, torch.ops.prims


def hold(graph):
    for node in list(graph.nodes):
        if node.target is prims.inductor_lookup_seed.default and FAULTY:
            options = {"dtype": torch.int64, "device": node.meta["val"].device}
            with graph.inserting_before(node):
                seed = graph.call_function(aten.full.default, ([], 7 + node.args[1]), options)
            seed.meta.update(node.meta)
            node.replace_all_uses_with(seed)
            graph.erase_node(node)


passes(joint_custom_post_pass=hold)
train(Classifier(dropout=0.5), features())
