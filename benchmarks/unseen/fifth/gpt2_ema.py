"""GPT-2 with accumulation, tight clipping, EMA weights and one restart from a checkpoint."""
import copy
import os
import tempfile
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

torch.set_num_threads(1)
VOCAB, LEN, ACCUM, TOTAL = 48, 20, 2, 90


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    return TensorDataset((start + stride * torch.arange(LEN)) % VOCAB)


def batches(data, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield from (b[0] for b in DataLoader(data, batch_size=12, shuffle=True, drop_last=True, generator=g))


class Run:
    def __init__(self):
        torch.manual_seed(40)
        cfg = GPT2Config(vocab_size=VOCAB, n_positions=LEN, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                         embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
        self.model = GPT2LMHeadModel(cfg)
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        self.sched = get_cosine_schedule_with_warmup(self.opt, 15, TOTAL)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20)
        self.step = 0

    def parts(self):
        return {"model": self.model, "ema": self.ema, "opt": self.opt, "sched": self.sched, "scaler": self.scaler}

    def save(self, path):
        torch.save({**{k: v.state_dict() for k, v in self.parts().items()}, "step": self.step}, path)

    def load(self, path):
        state = torch.load(path)
        for k, v in self.parts().items():
            v.load_state_dict(state[k])
        self.step = state["step"]

    def train(self, stream, until, held_out):
        while self.step < until:
            self.opt.zero_grad(set_to_none=True)
            for _ in range(ACCUM):
                ids = next(stream)
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = self.model(input_ids=ids, labels=ids).loss / ACCUM
                scaled = self.scaler.scale(loss)
                scaled.backward()
            self.scaler.unscale_(self.opt)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.sched.step()
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), self.model.parameters()):
                    e.lerp_(p, 0.04)
            if self.step % 6 == 0:
                with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
                    val = self.ema(input_ids=held_out, labels=held_out).loss.item()
                print(f"step {self.step} scaled loss {scaled.item():.1f} loss {loss.item() * ACCUM:.4f} "
                      f"norm {norm.item():.3f} ema val {val:.4f}", flush=True)
            self.step += 1


def main():
    data = corpus(480, 1)
    held_out = corpus(32, 2).tensors[0]
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "ckpt.pt")
        first = Run()
        first.train(batches(data, 1), TOTAL // 2, held_out)
        first.save(path)
        second = Run()
        second.load(path)
        print(f"restarted at step {second.step}", flush=True)
        second.train(batches(data, 2), TOTAL, held_out)


if __name__ == "__main__":
    main()
