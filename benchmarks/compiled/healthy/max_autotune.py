"""mode="max-autotune-no-cudagraphs"."""

from parts import features, mlp, torch, train

net = mlp(width=64)
train(torch.compile(net, mode="max-autotune-no-cudagraphs"), features, net.parameters())
