from torch import nn
from layers import GLUBlock


class Tagger(nn.Module):
    def __init__(self, vocab, dim, hid, depth, n_tags, eps):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim, padding_idx=0)
        self.blocks = nn.ModuleList(GLUBlock(dim, hid, eps) for _ in range(depth))
        self.cls = nn.Linear(dim, n_tags)

    def forward(self, ids):
        x = self.tok(ids)
        for b in self.blocks:
            x = b(x)
        return self.cls(x)
