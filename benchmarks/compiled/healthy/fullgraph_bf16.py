"""One graph, bf16 autocast."""

from parts import GPT, sentences, torch, train

net = GPT()
train(torch.compile(net, fullgraph=True), sentences, net.parameters())
