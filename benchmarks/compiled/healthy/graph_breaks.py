"""A forward pass that prints: two graphs, and eager code between them."""

from parts import WORDS, Block, F, nn, sentences, torch, train


class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(WORDS, 32), Block(32), Block(32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens):
        x = self.one(self.embed(tokens))
        torch._dynamo.graph_break()
        size = float(x.detach().float().norm())
        if size != size:
            print("no number")
        return self.head(F.relu(self.two(x)))


net = Talks()
train(torch.compile(net), sentences, net.parameters())
