"""The backward pass is compiled as one graph, too."""

import torch._dynamo
from parts import features, mlp, torch, train

torch._dynamo.config.compiled_autograd = True
net = mlp()
train(torch.compile(net), features, net.parameters())
