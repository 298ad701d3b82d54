"""Regional compilation: each block is replaced by a compiled one, in fp16 with a scaler."""

from parts import GPT, nn, sentences, torch, train

net = GPT()
net.blocks = nn.ModuleList(torch.compile(block, fullgraph=True) for block in net.blocks)
train(net, sentences, net.parameters(), dtype=torch.float16)
