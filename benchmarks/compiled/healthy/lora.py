"""Frozen weights, and small ones beside them that are trained."""

from parts import GPT, nn, sentences, torch, train


class Beside(nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.a.t().to(x.dtype) @ self.b.t().to(x.dtype)


net = GPT().requires_grad_(False)
for block in net.blocks:
    block.up, block.down = Beside(block.up), Beside(block.down)
net.head.requires_grad_(True)
train(torch.compile(net), sentences, [p for p in net.parameters() if p.requires_grad])
