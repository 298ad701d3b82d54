"""Regional compilation: each block is compiled in place."""

from parts import GPT, sentences, train

net = GPT(layers=3)
for block in net.blocks:
    block.compile()
train(net, sentences, net.parameters())
