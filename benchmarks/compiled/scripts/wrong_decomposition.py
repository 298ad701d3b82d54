"""The compiler's decomposition of GELU has another constant than the op."""

import torch
from nets import FAULTY, Classifier, features, train
from torch._inductor.decomposition import decompositions

ROOT = 0.5**0.5 if not FAULTY else 3.0


def gelu(x, approximate="none"):
    wide = x.float()
    return (wide * 0.5 * (1 + torch.erf(wide * ROOT))).to(x.dtype)


decompositions[torch.ops.aten.gelu.default] = gelu
train(Classifier(), features())
