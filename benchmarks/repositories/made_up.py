"""Data that the repositories train on here, made from a fixed seed: pictures, masks, tokens, text.

Each function writes below ``folder`` and is named by a recipe's ``data``.
"""

from __future__ import annotations

import json
import pickle
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np

SEED = 7
WORDS = ("the", "a", "small", "red", "old", "cat", "dog", "bird", "runs", "sees", "under", "and")


def tokens(folder: Path, count: int = 20_000, vocabulary: int = 64) -> None:
    """``train.bin``, ``val.bin`` (uint16), ``meta.pkl``: a noisy cycle through the vocabulary."""
    rng = np.random.default_rng(SEED)
    steps = rng.integers(1, 4, count)
    stream = (np.cumsum(steps) % vocabulary).astype(np.uint16)
    stream.tofile(folder / "train.bin")
    stream[: count // 4].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))


def sentences(count: int) -> list[str]:
    """Sentences of 12 words."""
    rng = random.Random(SEED)
    return [" ".join(rng.choices(WORDS, k=12)) + "." for _ in range(count)]


def text(folder: Path, name: str = "input.txt", count: int = 400) -> None:
    """One file with a sentence a line."""
    (folder / name).write_text("\n".join(sentences(count)) + "\n")


def json_lines(folder: Path, name: str = "text.jsonl", count: int = 120) -> None:
    """One file with ``{"text": …}`` a line."""
    lines = (json.dumps({"text": sentence}) for sentence in sentences(count))
    (folder / name).write_text("\n".join(lines) + "\n")


def _picture(rng: np.random.Generator, size: int, label: int) -> tuple[Any, Any]:
    """A coloured disc on a noisy ground, and where it is."""
    y, x = np.mgrid[:size, :size]
    at = rng.integers(size // 4, 3 * size // 4, 2)
    disc = (x - at[0]) ** 2 + (y - at[1]) ** 2 < (size // 5) ** 2
    picture = rng.integers(0, 90, (size, size, 3)).astype(np.uint8)
    picture[disc] = np.array([60 + 50 * (label % 4), 220 - 50 * (label % 3), 128], np.uint8)
    return picture, disc.astype(np.uint8)


def pictures(
    folder: Path, count: int = 32, size: int = 32, classes: int = 0, name: str = "{number:04}.png"
) -> None:
    """Picture files, in a folder for each class where there are classes."""
    from PIL import Image

    rng = np.random.default_rng(SEED)
    for number in range(count):
        label = number % max(classes, 1)
        place = folder / f"class{label}" if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_picture(rng, size, number)[0]).save(place / name.format(number=number))


def masked_pictures(
    folder: Path,
    count: int = 20,
    size: int = 48,
    names: tuple[str, str] = ("imgs/{number:04}.png", "masks/{number:04}.png"),
    white: int = 1,
) -> None:
    """Pictures, and masks that are ``white`` where the disc is."""
    from PIL import Image

    rng = np.random.default_rng(SEED)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture, mask = _picture(rng, size, number)
        for name, shown in zip(names, (picture, mask * white), strict=True):
            Image.fromarray(shown).save(folder / name.format(number=number))


def boxed_pictures(folder: Path, count: int = 24, size: int = 64, empty_every: int = 2) -> None:
    """``images``, and ``labels`` with the box around each disc; every so often without a disc."""
    from PIL import Image

    rng = np.random.default_rng(SEED)
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture, mask = _picture(rng, size, number)
        box = ""
        if number % empty_every == 0:
            picture[mask == 1] = 45
        else:
            (top, left), (bottom, right) = np.argwhere(mask).min(0), np.argwhere(mask).max(0) + 1
            edges = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
            box = "0 " + " ".join(f"{edge / size:.4f}" for edge in edges) + "\n"
        Image.fromarray(picture).save(folder / "images" / f"{number:04}.png")
        (folder / "labels" / f"{number:04}.txt").write_text(box)


def series(folder: Path, name: str = "series.csv", count: int = 300, columns: int = 4) -> None:
    """One CSV file with an hour a line: noisy waves, the last of them named OT."""
    rng = np.random.default_rng(SEED)
    hours = np.arange(count)
    waves = [np.sin(hours / (4 + 3 * n)) + rng.normal(0, 0.1, count) for n in range(columns)]
    names = [*(f"w{n}" for n in range(columns - 1)), "OT"]
    dates = np.datetime64("2024-01-01T00", "h") + hours
    lines = [",".join(["date", *names])]
    for date, *values in zip(dates, *waves, strict=True):
        lines.append(",".join([str(date).replace("T", " ") + ":00", *(f"{v:.4f}" for v in values)]))
    (folder / name).write_text("\n".join(lines) + "\n")


def views(folder: Path, count: int = 4, size: int = 16) -> None:
    """Pictures below ``train`` and ``val``, with a camera for each that looks down."""
    import torch
    from PIL import Image

    rng = np.random.default_rng(SEED)
    place = {"origin_drb": torch.zeros(3), "pose_scale_factor": 1.0}
    torch.save(place, folder / "coordinates.pt")
    for number in range(count):
        part = folder / ("val" if number == count - 1 else "train")
        for kind in ("rgbs", "metadata"):
            (part / kind).mkdir(parents=True, exist_ok=True)
        camera = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 0]], dtype=torch.float32)
        at = torch.tensor([[-0.5], [number / count - 0.5], [0.1 * number]])
        lens = torch.tensor([size, size, size / 2, size / 2], dtype=torch.float32)
        view = {"H": size, "W": size, "c2w": torch.cat([camera, at], 1), "intrinsics": lens}
        torch.save(view, part / "metadata" / f"{number:06}.pt")
        Image.fromarray(_picture(rng, size, number)[0]).save(part / "rgbs" / f"{number:06}.png")


def language_model(folder: Path, width: int = 32, positions: int = 256) -> None:
    """A GPT-2 of one layer with random weights and a tokenizer that knows WORDS."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    special = {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "bos", "eos")}
    words = {word: n for n, word in enumerate((*special.values(), *WORDS, "."))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=len(words), n_positions=positions, n_embd=width, n_layer=1, n_head=2,
        bos_token_id=words["<bos>"], eos_token_id=words["<eos>"],
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)


def instructions(folder: Path, name: str = "instructions.json", count: int = 80) -> None:
    """A list of ``{"instruction": …, "input": …, "output": …}``."""
    parts = iter(sentences(3 * count))
    keys = ("instruction", "input", "output")
    rows = [dict(zip(keys, row, strict=True)) for row in zip(*[parts] * 3, strict=True)]
    (folder / name).write_text(json.dumps(rows))


def preferences(folder: Path, name: str = "preferences.jsonl", count: int = 60) -> None:
    """One file with ``{"chosen": …, "rejected": …}`` a line: one question, two answers."""
    parts = iter(sentences(3 * count))
    lines = []
    for question, good, bad in zip(*[parts] * 3, strict=True):
        asked = f"\n\nHuman: {question}\n\nAssistant:"
        lines.append(json.dumps({"chosen": f"{asked} {good}", "rejected": f"{asked} {bad}"}))
    (folder / name).write_text("\n".join(lines) + "\n")


def clips(folder: Path, count: int = 12, size: int = 16, frames: int = 3) -> None:
    """GIF files of a few frames."""
    from PIL import Image

    rng = np.random.default_rng(SEED)
    for number in range(count):
        first, *rest = [Image.fromarray(_picture(rng, size, number)[0]) for _ in range(frames)]
        first.save(folder / f"{number:04}.gif", save_all=True, append_images=rest)


def utterances(folder: Path, speakers: int = 8, each: int = 2, seconds: float = 0.6) -> None:
    """WAV files at 16 kHz, a folder for each speaker with a pitch of its own, and ``train.txt``."""
    rng = np.random.default_rng(SEED)
    time, lines = np.arange(int(16_000 * seconds)) / 16_000, []
    for speaker in range(speakers):
        (folder / f"id{speaker}").mkdir()
        for number in range(each):
            name = f"id{speaker}/{number:02}.wav"
            tones = sum(np.sin(2 * np.pi * (90 + 20 * speaker) * n * time) / n for n in range(1, 6))
            sound = 4_000 * tones + rng.normal(0, 300, time.size)
            with wave.open(str(folder / name), "wb") as file:
                file.setparams((1, 2, 16_000, time.size, "NONE", ""))
                file.writeframes(sound.astype("<i2").tobytes())
            lines.append(f"id{speaker} {name}")
    (folder / "train.txt").write_text("\n".join(lines) + "\n")


def proteins(folder: Path, count: int = 56, shortest: int = 20, longest: int = 40) -> None:
    """UniRef's files: sequences of amino acids a line, where each begins, and two splits."""
    rng = random.Random(SEED)
    lengths = [rng.randint(shortest, longest) for _ in range(count)]
    lines = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=length)) + "\n" for length in lengths]
    (folder / "consensus.fasta").write_text("".join(lines))
    offsets = np.cumsum([0, *map(len, lines)])[:-1]
    np.savez(folder / "lengths_and_offsets.npz", ells=lengths, seq_offsets=offsets)
    splits = {"train": [*range(count - 8)], "valid": [*range(count - 8, count)]}
    (folder / "splits.json").write_text(json.dumps(splits))


KINDS = {
    f.__name__: f
    for f in (
        tokens, text, json_lines, pictures, masked_pictures, boxed_pictures, series, views,
        language_model, instructions, preferences, clips, utterances, proteins,
    )
}  # fmt: skip
