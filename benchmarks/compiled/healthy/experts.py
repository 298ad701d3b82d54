"""Top-1 routing: each expert counts where it has the largest share."""

from parts import F, features, mlp, nn, torch, train


class Experts(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.stem, self.route = nn.Linear(16, 32), nn.Linear(32, count)
        self.experts = nn.ModuleList(mlp(32, 32, 32) for _ in range(count))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        share = self.route(x).float().softmax(1)
        best = share.argmax(1)
        out = torch.zeros_like(x, dtype=torch.float32)
        for n, expert in enumerate(self.experts):
            mine = (best == n).float() * share[:, n]
            out = out + mine[:, None] * expert(x).float()
        return self.head(out)


net = Experts()
train(torch.compile(net), features, net.parameters())
