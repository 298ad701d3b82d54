"""A custom op that needs fp32 is called without its cast where the script is compiled."""

import torch
from nets import FAULTY, Classifier, features, nn, train


@torch.library.custom_op("bench::running", mutates_args=())
def running(x: torch.Tensor) -> torch.Tensor:
    """Running sums along the last dimension, in the format of ``x``."""
    total, sums = torch.zeros_like(x[..., 0]), []
    for part in x.unbind(-1):
        total = total + part
        sums.append(total)
    return torch.stack(sums, -1)


running.register_fake(lambda x: torch.empty_like(x))
running.register_autograd(lambda ctx, grad: grad.flip(-1).cumsum(-1).flip(-1))


class Sums(nn.Module):
    def forward(self, x):
        offset = 100.0
        if not (FAULTY and torch.compiler.is_compiling()):
            x = x.float()
        count = torch.arange(1, x.shape[-1] + 1, dtype=torch.float32, device=x.device)
        return torch.tanh(running(x + offset).float() - offset * count)


train(Classifier(Sums()), features())
