"""Batches of another size at every step, compiled for any size."""

import random

from parts import GPT, sentences, torch, train

sizes = random.Random(0)
net = GPT()
model = torch.compile(net, dynamic=True)
train(model, lambda: sentences(sizes.choice((4, 9, 16))), net.parameters())
