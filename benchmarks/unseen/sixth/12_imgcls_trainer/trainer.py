import torch
import torch.nn.functional as F


class Trainer:
    def __init__(self, model, optimizer, device, amp=True, callbacks=()):
        self.model, self.optimizer, self.device = model.to(device), optimizer, device
        self.amp = amp
        self.scaler = torch.amp.GradScaler(device, enabled=amp)
        self.callbacks = list(callbacks)
        self.log, self.epoch = {}, 0

    def call(self, name):
        for c in self.callbacks:
            getattr(c, name)(self)

    def train_step(self, x, y):
        with torch.autocast(self.device, dtype=torch.float16, enabled=self.amp):
            out = self.model(x)
            loss = F.cross_entropy(out, y)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.call("after_backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.call("after_step")
        return loss.detach(), (out.argmax(1) == y).float().mean()

    def fit(self, loader, epochs):
        self.call("on_train_start")
        for self.epoch in range(epochs):
            ls, acc, n = 0.0, 0.0, 0
            for x, y in loader:
                l, a = self.train_step(x.to(self.device), y.to(self.device))
                ls, acc, n = ls + l.item(), acc + a.item(), n + 1
            self.log.update(epoch=self.epoch, loss=ls / n, acc=acc / n)
            self.call("on_epoch_end")
