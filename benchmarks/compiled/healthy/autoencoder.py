"""A variational autoencoder: noise is drawn inside compiled code."""

from parts import F, features, mlp, nn, torch, train


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = mlp(16, 32, 8), mlp(4, 32, 16)

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(drawn), mean, log_var


def loss_of(made, x):
    seen, mean, log_var = (t.float() for t in made)
    divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
    return F.mse_loss(seen, x) + 0.01 * divergence


def batch():
    x, _ = features()
    return x, x


net = Autoencoder()
train(torch.compile(net), batch, net.parameters(), loss_of=loss_of)
