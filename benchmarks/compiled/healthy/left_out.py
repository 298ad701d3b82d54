"""A part that torch.compiler.disable leaves out of the graph."""

from parts import WORDS, Block, nn, sentences, torch, train


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(WORDS, 32), Block(32), nn.Linear(32, WORDS)

    @torch.compiler.disable
    def centred(self, x):
        return x - x.mean(-1, keepdim=True)

    def forward(self, tokens):
        return self.head(self.centred(self.block(self.embed(tokens))))


net = Net()
train(torch.compile(net), sentences, net.parameters())
