"""T5 learns to copy a sequence with a token shift; fp16 autocast."""
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import T5Config, T5ForConditionalGeneration, get_cosine_schedule_with_warmup

torch.set_num_threads(1)
torch.manual_seed(17)
VOCAB, LEN = 40, 6


def pairs(n):
    g = torch.Generator().manual_seed(3)
    src = torch.randint(3, 19, (n, 1), generator=g) + torch.arange(LEN)
    return TensorDataset(src, (src - 3 + 7) % (VOCAB - 3) + 3)


def main():
    cfg = T5Config(vocab_size=VOCAB, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4,
                   dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    model = T5ForConditionalGeneration(cfg)
    loader = DataLoader(pairs(512), batch_size=16, shuffle=True, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    epochs = 4
    sched = get_cosine_schedule_with_warmup(opt, 20, epochs * len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 30, growth_interval=40)
    skipped, step = 0, 0
    for epoch in range(epochs):
        for src, tgt in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(input_ids=src, labels=tgt).loss
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            sched.step()
            if scaler.get_scale() < before:
                skipped += 1
                print(f"step {step} gradient overflow, norm {norm.item()}, scale -> {scaler.get_scale():g}", flush=True)
            if step % 8 == 0:
                print(f"step {step} loss {loss.item():.4f} skipped {skipped}", flush=True)
            step += 1


if __name__ == "__main__":
    main()
