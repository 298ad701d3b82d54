"""Tensors saved for backward are kept with two bits of mantissa."""

import torch
from nets import FAULTY, Classifier, features, passes, train

aten = torch.ops.aten
MASK = -32 if FAULTY else -1  # of bf16's seven bits


def narrow(graph):
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    if not any(n.name.startswith("tangents") for n in inputs):
        return
    for node in inputs:
        value = node.meta.get("val")
        is_saved = not node.name.startswith(("tangents", "primals", "permute"))
        if not is_saved or getattr(value, "dtype", None) is not torch.bfloat16:
            continue
        with graph.inserting_before(node.next):
            bits = graph.call_function(aten.view.dtype, (node, torch.int16))
            fewer = graph.call_function(aten.bitwise_and.Scalar, (bits, MASK))
            back = graph.call_function(aten.view.dtype, (fewer, torch.bfloat16))
        node.replace_all_uses_with(back, delete_user_cb=lambda user, own=bits: user is not own)


passes(post_grad_custom_pre_pass=narrow)
train(Classifier(), features())
