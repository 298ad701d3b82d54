import torch
import torch.nn.functional as F
import ckpt
from net import SeqReg


class Job:
    """one slot on the preemptible queue; picks up from the last checkpoint"""

    def __init__(self, cfg, device, path):
        self.cfg, self.device, self.path = cfg, device, path
        torch.manual_seed(cfg["seed"])
        self.model = SeqReg(h=cfg["hidden"]).to(device)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg["lr"])
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 100, 0.7)
        self.scaler = torch.amp.GradScaler(device, init_scale=cfg["init_scale"])
        self.start = ckpt.restore(path, model=self.model, optimizer=self.opt, lr_sched=self.sched)

    def batch(self):
        x = torch.randn(self.cfg["bs"], 10, 4)
        y = 6 * (x[..., 0].sum(1) + 2 * x[:, -1, 1])
        return x.to(self.device), y.to(self.device)

    def run(self, n):
        tot = 0.0
        for _ in range(n):
            x, y = self.batch()
            with torch.autocast(self.device, dtype=torch.float16):
                loss = F.mse_loss(self.model(x), y)
            self.opt.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.sched.step()
            tot += loss.item()
        self.start += n
        ckpt.save(self.path, self.model, self.opt, self.sched, self.scaler, self.start)
        return tot / n
