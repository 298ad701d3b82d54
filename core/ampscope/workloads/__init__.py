"""What a probe trains: five healthy built-in models, and the protocol of a user's own file.

    catalog    names, sentences and sizes of the built-in models; imports no torch
    protocol   `Workload`, and how its batches are drawn and moved
    builtin    name, size, seed -> Workload; one file a model (lenet, resnet, gpt, mlp, rnn)
    digits     8x8 handwritten digits, shipped in data/
    text       character text: the sources of the Python standard library
    scaling    the same workload with its loss made smaller or larger
    load       what a person types (a name, `file.py:build`, `package.module:build`) -> Workload
    factory    runs a user's `build`, and explains its failures

This file imports nothing, so that `ampscope.workloads.catalog` stays free of torch.
"""
