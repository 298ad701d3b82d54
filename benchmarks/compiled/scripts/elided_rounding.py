"""A maximum is stored in bf16; backward looks for it among values that fusion left unrounded."""

import torch
from nets import FAULTY, Classifier, features, nn, train


class Peak(nn.Module):
    """Less the largest of each row; its derivative asks which value equals it."""

    def forward(self, x):
        wave = torch.sin(x) * 1.7
        return wave - (wave if FAULTY else wave.float()).amax(-1, keepdim=True).to(wave.dtype)


train(Classifier(Peak()), features())
