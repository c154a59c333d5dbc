"""What if no later site could read the embedding? A tap changes each read on its way."""

import torch

from attention_residuals import Decoder, Pass, Read, Write, presets


class WithoutEmbedding:
    """Takes the embedding's weight away at every site that has another source, and counts how often."""

    def __init__(self) -> None:
        self.fired = 0

    def begin(self, run: Pass) -> None:
        self.fired = 0

    def read(self, read: Read) -> Read:
        if read.logits is None or len(read.sources) == 1:
            return read
        self.fired += 1
        logits = read.logits.clone()
        logits[read.source_names.index("embedding")] = -torch.inf
        return read._replace(weights=logits.softmax(0))

    def write(self, write: Write) -> Write:
        return write


torch.manual_seed(0)
model, tokens, edit = (
    Decoder(presets.scaled(4, vocab_size=100)),
    torch.randint(100, (1, 12)),
    WithoutEmbedding(),
)
with torch.no_grad():
    before, after = model(tokens), model(tokens, tap=edit)
divergence = (before.softmax(-1) * (before.log_softmax(-1) - after.log_softmax(-1))).sum(-1).mean()
print(f"the edit fired at {edit.fired} sites; mean KL to the clean run {divergence:.4f} nats")
