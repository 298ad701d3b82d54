import torch


class LeanAdam(torch.optim.Optimizer):
    """Adam with compact moments: two bytes per entry and moment."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, store=torch.float16):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.store = store

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["t"] = 0
                    st["m"] = torch.zeros_like(p, dtype=self.store)
                    st["v"] = torch.zeros_like(p, dtype=self.store)
                st["t"] += 1
                m = st["m"].float().lerp_(p.grad, 1 - b1)
                v = st["v"].float().mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                st["m"].copy_(m)
                st["v"].copy_(v)
                m_hat = st["m"].float() / (1 - b1 ** st["t"])
                v_hat = st["v"].float() / (1 - b2 ** st["t"])
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(m_hat, v_hat.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss
