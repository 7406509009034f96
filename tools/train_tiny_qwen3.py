"""Trains the small Qwen3 that comes with kvpager, on text that comes with CPython. Nothing is downloaded.

    python tools/train_tiny_qwen3.py --out OUT_DIR --minutes 12 --batch 4 --lr 3e-3 --seed 0    made the bundled one
    python tools/train_tiny_qwen3.py --out OUT_DIR --steps 2970 --batch 4 --lr 3e-3 --seed 0     repeats exactly

Text: the reference manual's topics in `pydoc_data` and the docstrings of the standard library (PSF licence). It writes
a Hugging Face folder (config, weights, tokenizer) and `training_log.json`; the rest beside them is written by hand.
Needs transformers besides kvpager's own requirements. O(minutes) on two cores.
"""

import argparse
import ast
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 2048
WINDOW = 256  # tokens of one training example
STDLIB_CHARACTERS = 700_000
SHORTEST_DOCSTRING = 80
WARMUP_STEPS = 100
LOG_EVERY = 100


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    out: Path
    minutes: float
    steps: int | None
    batch: int
    lr: float
    seed: int


def read_settings() -> Settings:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=12.0, help="wall-clock length; the learning rate follows it")
    parser.add_argument("--steps", type=int, help="length in steps instead, for a run that repeats")
    parser.add_argument("--batch", type=int, default=4, help=f"windows of {WINDOW} tokens per step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return Settings(**vars(parser.parse_args()))


def documents() -> list[str]:
    """Manual topics, then one document of docstrings for each module of the standard library up to the limit."""
    found = [text for _, text in sorted(topics.topics.items())]
    characters = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if text := "\n\n".join(docstrings(path)):
            found.append(text)
            characters += len(text)
        if characters > STDLIB_CHARACTERS:
            break
    return found


def docstrings(path: Path) -> Iterator[str]:
    """The longer docstrings of a file, outermost first."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > SHORTEST_DOCSTRING:
                yield text


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def new_model(end_of_text_id: int) -> Qwen3ForCausalLM:
    """Random weights; about two million."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            rope_theta=10_000.0,
            tie_word_embeddings=True,
            eos_token_id=end_of_text_id,
            bos_token_id=end_of_text_id,
            pad_token_id=end_of_text_id,
            dtype="float32",
        )
    )


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, tokens: Tensor) -> float:
    """Mean over the windows of text that was not trained on, in nats per token."""
    model.eval()
    windows = [tokens[None, start : start + WINDOW] for start in range(0, len(tokens) - WINDOW, WINDOW)]
    losses = [float(model(window, labels=window).loss) for window in windows]
    model.train()
    return sum(losses) / len(losses)


def train(model: Qwen3ForCausalLM, tokens: Tensor, held_out: Tensor, settings: Settings) -> dict[str, object]:
    """AdamW, 100 steps of warm-up, then a cosine down to a twentieth of the peak rate. Returns the log."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))
    started = time.perf_counter()
    step, log = 0, []
    while (progress := _progress(settings, step, started)) < 1:
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        starts = torch.randint(0, len(tokens) - WINDOW - 1, (settings.batch,))
        batch = torch.stack([tokens[start : start + WINDOW + 1] for start in starts])
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % LOG_EVERY == 0:
            seconds = time.perf_counter() - started
            log.append(
                {
                    "step": step,
                    "seconds": round(seconds, 1),
                    "train": round(float(loss), 3),
                    "valid": round(held_out_loss(model, held_out), 3),
                    "tok_per_s": round(step * batch.numel() / seconds),
                }
            )
            print(log[-1], flush=True)
    return {
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "steps": step,
        "tokens_seen": step * settings.batch * (WINDOW + 1),
        "final_valid": held_out_loss(model, held_out),
        "log": log,
    }


def _progress(settings: Settings, step: int, started: float) -> float:
    if settings.steps is not None:
        return step / settings.steps
    return (time.perf_counter() - started) / (60 * settings.minutes)


def main() -> None:
    """Text, tokenizer, model, training, folder."""
    settings = read_settings()
    torch.manual_seed(settings.seed)
    texts = documents()
    tokenizer = train_tokenizer(texts)
    tokens = torch.tensor(
        [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    )
    num_held_out = max(WINDOW * 8, len(tokens) // 50)
    print(f"{len(texts)} documents, {sum(map(len, texts)):,} characters, {len(tokens):,} tokens")
    model = new_model(tokenizer.eos_token_id)
    log = train(model, tokens[:-num_held_out], tokens[-num_held_out:], settings)
    model.eval().save_pretrained(settings.out)
    tokenizer.save_pretrained(settings.out)
    (settings.out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
