"""A frozen encoder with flex_attention, compiled, below a head that is trained."""

from parts import DEVICE, WORDS, F, nn, sentences, torch, train
from torch.nn.attention.flex_attention import flex_attention


def nearer_counts_more(score, batch, head, q, k):
    return score - 0.1 * (q - k).abs()


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(WORDS, width), nn.Linear(width, 3 * width)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + flex_attention(q, k, v, score_mod=nearer_counts_more).transpose(1, 2).flatten(2)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.up, self.head = Encoder(), nn.Linear(32, 64), nn.Linear(64, WORDS)
        self.encoder.requires_grad_(False)
        self.encoder.compile()

    def forward(self, tokens):
        with torch.no_grad(), torch.autocast(DEVICE, enabled=False):
            x = self.encoder(tokens)
        return self.head(F.gelu(self.up(x)))


net = Tagger()
train(net, sentences, [p for p in net.parameters() if p.requires_grad])
