"""The compiler's softmax leaves out the shift by the row's maximum: exp overflows."""

import torch
from nets import FAULTY, Tagger, nn, sentences, train
from torch._inductor.decomposition import decompositions


def softmax(x, dim, half_to_float):
    wide = x.float()
    raised = torch.exp(wide if FAULTY else wide - wide.amax(dim, keepdim=True))
    made = raised / raised.sum(dim, keepdim=True)
    return made if half_to_float else made.to(x.dtype)


decompositions[torch.ops.aten._softmax.default] = softmax
net = Tagger()
nn.init.normal_(net.attend.qkv.weight, std=1.0)
train(net, sentences(), lr=1e-3)
