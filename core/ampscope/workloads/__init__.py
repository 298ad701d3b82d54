"""What a probe trains: five healthy built-in models, and the protocol of a user's own file.

    catalog       names, sentences and sizes of the built-in models; what is a script. No torch
    protocol      `Workload`, and how its batches are drawn and moved
    digit_models  LeNet, an MLP and a small ResNet with batch normalisation, on handwritten digits
    text_models   a GPT and a gated recurrent network on character text
    training_data 8x8 digits, shipped in data/; text from the Python standard library
    load          what a person types (a name, `file.py:build`, `package.module:build`) -> Workload;
                  the built-in ones; runs a user's `build`, and explains its failures

This file imports nothing, so that `ampscope.workloads.catalog` stays free of torch.
"""
