"""The head has the embedding's weights."""

from parts import GPT, nn, sentences, torch, train

net = GPT()
nn.init.normal_(net.embed.weight, std=0.1)
net.head.weight = net.embed.weight
train(torch.compile(net), sentences, net.parameters())
