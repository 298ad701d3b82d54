"""Whisper fine-tuning on short keyword phrases (synthetic audio), fp16 autocast."""
import math
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import WhisperConfig, WhisperForConditionalGeneration, get_cosine_schedule_with_warmup

torch.set_num_threads(1)
torch.manual_seed(11)
SR, HOP, N_FFT, MELS, FRAMES = 8000, 80, 256, 32, 32
PAD, BOS, EOS, VOCAB = 0, 1, 2, 24


def mel_bank():
    freqs = torch.linspace(0, SR / 2, N_FFT // 2 + 1)
    mel = lambda f: 2595 * math.log10(1 + f / 700)
    pts = torch.linspace(mel(0.0), mel(SR / 2), MELS + 2)
    hz = 700 * (10 ** (pts / 2595) - 1)
    up = (freqs[None] - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    down = (hz[2:, None] - freqs[None]) / (hz[2:] - hz[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0)


BANK = mel_bank()
WINDOW = torch.hann_window(N_FFT)


def extract_features(wave):
    spec = torch.stft(wave, N_FFT, HOP, window=WINDOW, return_complex=True)
    power = spec.abs() ** 2
    feats = BANK @ power[..., :FRAMES]
    return feats


class Phrases(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(5)
        t = torch.arange(FRAMES * HOP // 2) / SR
        self.items = []
        for _ in range(n):
            words = torch.randint(0, 8, (2,), generator=g)
            parts = [torch.sin(2 * math.pi * (300 + 280 * w) * t) for w in words.tolist()]
            wave = 0.5 * torch.cat(parts) + 0.01 * torch.randn(FRAMES * HOP, generator=g)
            wave = (wave * 32767).round()
            labels = torch.cat([words + 4, torch.tensor([EOS])])
            self.items.append((extract_features(wave), labels))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def main():
    cfg = WhisperConfig(vocab_size=VOCAB, num_mel_bins=MELS, d_model=32, encoder_layers=1, decoder_layers=1,
                        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
                        decoder_ffn_dim=64, max_source_positions=FRAMES // 2, max_target_positions=16,
                        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=BOS,
                        dropout=0.0, suppress_tokens=None, begin_suppress_tokens=None)
    model = WhisperForConditionalGeneration(cfg)
    loader = DataLoader(Phrases(160), batch_size=8, shuffle=True, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    epochs = 7
    sched = get_cosine_schedule_with_warmup(opt, 10, epochs * len(loader))
    scaler = torch.amp.GradScaler("cpu")
    step = 0
    for epoch in range(epochs):
        for feats, labels in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(input_features=feats, labels=labels).loss
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            sched.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} grad_norm {norm.item():.3f}", flush=True)
            step += 1


if __name__ == "__main__":
    main()
