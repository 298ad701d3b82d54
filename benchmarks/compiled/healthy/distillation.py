"""A compiled teacher in evaluation, a compiled student in training."""

from parts import F, features, mlp, torch, train

teacher, net = mlp(width=64).eval(), mlp()
soft = torch.compile(teacher)


def batch():
    x, _ = features()
    with torch.no_grad():
        return x, soft(x).softmax(1)


def loss_of(logits, wanted):
    return F.kl_div(logits.float().log_softmax(1), wanted, reduction="batchmean")


train(torch.compile(net), batch, net.parameters(), loss_of=loss_of)
