"""From a text file to a trained model and its routing, in Python; ``attnres train`` does the same."""

import tempfile
from pathlib import Path

import torch

from attention_residuals import AttnRes, presets, record, routing_table
from attention_residuals.data import TextFiles, prepare
from attention_residuals.train import AdamW, Cosine, TrainConfig, load_checkpoint_model, train

folder = Path(tempfile.mkdtemp())
lines = [
    f"In the year {year} the tower had {year % 7 + 2} bells and {year % 5} clocks."
    for year in range(1500, 1900)
]
(folder / "tower.txt").write_text("\n".join(lines))  # your own text file

# Each line is a document; documents are split into training and validation by their hash.
corpus = prepare(TextFiles(path=str(folder / "tower.txt"), separator="\n"), folder / "corpus", vocab_size=300)
config = TrainConfig(
    model=presets.scaled(4, vocab_size=corpus.vocab_size, residual=AttnRes(sublayers_per_block=2)),
    optimizer=AdamW(learning_rate=5e-3),
    schedule=Cosine(warmup_steps=10),
    num_steps=100,
    batch_size=8,
    sequence_length=64,
)
result = train(config, corpus, folder / "run", progress=False)  # started again, it resumes
print(f"{result.bits_per_byte:.2f} bits per byte on held-out lines")

model = load_checkpoint_model(folder / "run")
tokens = torch.tensor([corpus.tokenizer.end_of_text, *corpus.tokenizer.encode("In the year 1700")])
print(routing_table(record(model, tokens[None], tokenizer=corpus.tokenizer)))
