"""A model without some of its layers, as if they had never been there."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from attention_residuals.data import Batch
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import StandardResidual
from attention_residuals.layers.residual.attnres import AttnRes
from attention_residuals.layers.tap import Onlooker, Read, Site, Write
from attention_residuals.models import LanguageModel
from attention_residuals.train.evaluation import total_nats

__all__ = ["TOKENS_AT_ONCE", "Without", "loss_without", "sequences_at_once"]

TOKENS_AT_ONCE = 2**13
"""Of a measure; a sequence of the paper's. With a vocabulary of 163,840 their logits take 5.4 GB."""


class Without(Onlooker):
    """A tap that takes layers out: they write nothing, and what only they would have written is no source.

    In a standard model a removed layer adds nothing. Under attention residuals, sources that hold none but removed
    writers get no weight, and the others share it as their softmax would without those; a block keeps its other
    layers. Removing the last layers is thus the same as a model that is that much shorter.

    Args:
        layers: Numbers of the layers that are taken out.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=9))
        >>> tokens = torch.tensor([[5, 6]])
        >>> torch.equal(model(tokens, tap=Without([1])), model(tokens))
        False
    """

    def __init__(self, layers: Collection[int]) -> None:
        self.removed = {str(Site(layer, kind)) for layer in layers for kind in ("attention", "mlp")}

    def write(self, write: Write) -> Write:
        """Makes zeros of what a removed layer writes."""
        if write.writer not in self.removed:
            return write
        return write._replace(output=torch.zeros_like(write.output))

    def read(self, read: Read) -> Read:
        """Takes the weight of sources that are left empty."""
        left = torch.tensor([writer not in self.removed for writer in read.writers])
        has_some = (read.membership[:, left] != 0).any(1)
        if has_some.all() or read.logits is None:
            return read
        logits = read.logits.masked_fill(~has_some[:, None, None].to(read.logits.device), -torch.inf)
        return read._replace(weights=logits.softmax(0))


@torch.no_grad()
def loss_without(
    model: LanguageModel, batch: Batch, layers: Collection[int], *, cross_documents: bool = False
) -> float:
    """Measures the loss of a model without some of its layers.

    Args:
        model: With the standard residual or attention residuals.
        batch: What it reads.
        layers: Numbers of the layers that are taken out.
        cross_documents: As in ``TrainConfig``.

    Returns:
        Nats per scored token.

    Raises:
        ConfigError: Another rule, in which a layer that writes nothing is not a layer that is not there, or a layer
            that the model does not have.
    """
    rule = model.config.residual
    if type(rule) not in (StandardResidual, AttnRes):  # not those made from it, such as Delta
        raise ConfigError(
            got=f"a model with {rule}",
            expected="StandardResidual or AttnRes",
            do="prune such models by hand: what a missing layer means there is a choice",
        )
    if not set(layers) <= set(range(model.config.num_layers)):
        raise ConfigError(
            got=f"layers {sorted(layers)}",
            expected=f"layers from 0 to {model.config.num_layers - 1}",
            do="leave out the others",
        )

    def tapped(*args: Any, **options: Any) -> Tensor:
        logits: Tensor = model(*args, tap=Without(layers), **options)
        return logits

    nats = sum(
        total_nats(tapped, part, precision="float32", cross_documents=cross_documents).item()
        for part in batch.split(sequences_at_once(batch))
    )
    return nats / max(1, batch.num_scored)


def sequences_at_once(batch: Batch) -> int:
    """Says how many sequences a measure reads at once: as many as have ``TOKENS_AT_ONCE`` tokens, 1 at least."""
    return max(1, TOKENS_AT_ONCE // batch.tokens_BT.shape[1])
