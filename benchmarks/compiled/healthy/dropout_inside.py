"""Dropout in attention and behind it: compiled code draws random numbers of its own."""

from parts import GPT, sentences, torch, train

net = GPT(dropout=0.1)
train(torch.compile(net), sentences, net.parameters())
