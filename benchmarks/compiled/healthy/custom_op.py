"""A custom op with a fake form and a derivative."""

from parts import features, nn, torch, train


@torch.library.custom_op("healthy::squared_relu", mutates_args=())
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0).square()


@squared_relu.register_fake
def _(x):
    return torch.empty_like(x)


def backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * 2 * x.clamp(min=0)


squared_relu.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.down(squared_relu(self.up(x)))


net = Net()
train(torch.compile(net), features, net.parameters())
