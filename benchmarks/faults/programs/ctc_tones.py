"""Transcribe tone sequences with CTC; convolutions over time, utterances of different length."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
TONES, FRAMES, BINS = 4, 16, 8


class AcousticModel(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.conv1 = nn.Conv1d(BINS, hidden, 3, padding=1)
        self.conv2 = nn.Conv1d(hidden, hidden, 3, padding=1)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, TONES + 1)

    def forward(self, spec):
        h = F.relu(self.conv1(spec))
        h = F.relu(self.conv2(h))
        h = self.norm(h.transpose(1, 2))
        return self.out(h)


def utterances(n, gen):
    words = torch.randint(1, TONES + 1, (n, 3), generator=gen)
    length = torch.randint(1, 4, (n,), generator=gen)
    spec = 0.3 * torch.randn(n, BINS, FRAMES, generator=gen)
    for k in range(3):
        on = (k < length).float()
        frames = slice(5 * k + 1, 5 * k + 4)
        spec[torch.arange(n), words[:, k] * 2 - 1, frames.start : frames.stop] += (2.0 * on)[:, None]
    return spec, words, length


def ctc(logits, words, length):
    logp = F.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    steps = torch.full((len(words),), FRAMES)
    return F.ctc_loss(logp, words, steps, length, blank=0, zero_infinity=True)


def main():
    gen = torch.Generator().manual_seed(101)
    torch.manual_seed(101)
    net = AcousticModel()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for it in range(48):
        spec, words, length = utterances(16, gen)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(spec)
        loss = ctc(logits, words, length)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        if it % 12 == 0:
            print(f"{it:4d} ctc loss {loss.item():.4f}")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        spec, words, length = utterances(96, gen)
        print(f"eval ctc loss {ctc(net(spec), words, length).item():.4f}")


main()
