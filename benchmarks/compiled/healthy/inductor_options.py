"""Options of inductor's own."""

from parts import GPT, sentences, torch, train

net = GPT()
options = {"epilogue_fusion": False, "shape_padding": False, "fallback_random": True}
train(torch.compile(net, options=options), sentences, net.parameters())
