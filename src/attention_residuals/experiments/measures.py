"""What is measured of a trained run: nothing more, dynamics, routing, answers, or what it is without some layers."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attention_residuals.data import Batch, sequential
from attention_residuals.data.synthetic.binding import BindingItems
from attention_residuals.errors import ConfigError, is_count
from attention_residuals.experiments.cell import Finished, Measure
from attention_residuals.experiments.removal import loss_without, sequences_at_once
from attention_residuals.experiments.results import Number
from attention_residuals.models import LanguageModel
from attention_residuals.stats import (
    embedding_share,
    gradient_magnitude,
    locality,
    normalised_entropy,
    output_magnitude,
    reach_back,
    site_means,
)
from attention_residuals.trace import Trace, record
from attention_residuals.train import Saving, load_checkpoint_model
from attention_residuals.train.checkpoint import checkpoints, load_checkpoint, step_of
from attention_residuals.train.evaluation import document_mask
from attention_residuals.train.trainer import initial_model

__all__ = ["MEASURES", "Answers", "Dynamics", "FinalLoss", "Removal", "Routing"]


@dataclass(frozen=True, kw_only=True)
class FinalLoss(Measure):
    """Nothing but the losses that the trainer measures."""

    def numbers(self, run: Finished) -> Iterator[Number]:
        """Yields nothing."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Dynamics(Measure):
    """Output and gradient magnitude of each layer at several steps of training (paper, Fig. 5).

    Both are taken on the first windows of the validation split. "output magnitude" is the root mean square, over
    channels and real tokens, of the state after the layer: the newest source that the next layer's attention (the
    output, after the last) can read, which is the stream of a standard model and the newest block's sum so far under
    Block. "gradient magnitude" is the root mean square, over channels and tokens, of the gradient of the mean loss of
    a token with respect to what the layer's MLP writes.

    Args:
        points: Steps at which it is measured, evenly spaced, the last one included; the untrained model (step 0) is
            measured too. 1 or more.
        num_windows: Sequences, 1 or more.
    """

    points: int = 8
    num_windows: int = 16

    def __post_init__(self) -> None:
        _check_counts(self, "points", "num_windows")

    def saving(self, num_steps: int) -> Saving:
        """Keeps a checkpoint for each point."""
        every = -(-num_steps // self.points)  # the last piece may be shorter
        return Saving(every=every, keep=num_steps, evaluate_every=every, evaluate_batches=None, log_every=50)

    def numbers(self, run: Finished) -> Iterator[Number]:
        """Yields both magnitudes of every layer at every point."""
        yield from self._of_model(0, initial_model(run.config), run)
        steps, every = run.config.num_steps, self.saving(run.config.num_steps).every
        for saved in checkpoints(run.folder):
            step = step_of(saved)
            if step == steps or step % every == 0:  # others are where an interrupted run has stopped
                yield from self._of_model(step, load_checkpoint(saved), run)

    def _of_model(self, step: int, model: LanguageModel, run: Finished) -> Iterator[Number]:
        batch = _batch(run, self.num_windows)
        found: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        model.to(run.device)
        for part in batch.split(sequences_at_once(batch)):
            mask = document_mask(part.documents_BT)
            trace = record(model, part.tokens_BT, mask=mask, tokenizer=run.corpus.tokenizer)
            for quantity, place, value in self._of_trace(trace):
                found[quantity, place].append((int(trace.real.sum()), value))
            pulls = gradient_magnitude(model, part.tokens_BT, part.targets_BT, mask)
            share = part.num_scored / max(1, batch.num_scored)  # of the mean loss, whose gradient is wanted
            for layer, pull in enumerate(pulls):
                found["gradient magnitude", layer].append((part.tokens_BT.numel(), share * pull))
        for (quantity, place), parts in found.items():
            mean = _root_mean_square if quantity.endswith("magnitude") else _mean
            yield Number(quantity, mean(parts), step, place)

    def _of_trace(self, trace: Trace) -> Iterator[tuple[str, int, float]]:
        for layer, size in enumerate(output_magnitude(trace)):
            yield "output magnitude", layer, size


@dataclass(frozen=True, kw_only=True)
class Routing(Dynamics):
    """Where sites read, by the kind of their sublayer, with ``Dynamics`` at the same steps.

    Quantities are named by statistic and kind, such as "entropy, KDA" or "newest, mlp"; their place is the layer, or
    for the output the number of layers. "entropy" is ``normalised_entropy``, "newest" is ``locality``, "embedding" is
    ``embedding_share``, and "far" is ``reach_back`` beyond two thirds of as many sublayers as there are layers, a third
    of the model's. Each is a mean over real tokens. Reads of one source give nothing, and so do statistics that have no
    meaning for a rule. Before training, attention residuals give all sources equal weights: what is measured then is
    what equal weights amount to.
    """

    def _of_trace(self, trace: Trace) -> Iterator[tuple[str, int, float]]:
        yield from super()._of_trace(trace)
        layers = len(trace.writers) // 2
        statistics: dict[str, Callable[[Trace, str], Tensor]] = {
            "entropy": normalised_entropy,
            "embedding": embedding_share,
            "newest": locality,
            "far": partial(reach_back, sublayers=max(1, 2 * layers // 3)),
        }
        for name, statistic in statistics.items():
            means = site_means(trace, statistic)
            for site in trace:
                value = means.get(site.name, math.nan)
                if not math.isnan(value):
                    layer, _, sublayer = site.site.rpartition(".")
                    kind = trace.kinds.get(site.site, sublayer) + site.name.removeprefix(site.site)
                    yield f"{name}, {kind}", int(layer[1:]) if layer else layers, value


@dataclass(frozen=True, kw_only=True)
class Answers(Measure):
    """Share of right answers, by the number of hops that an answer takes.

    Args:
        items: What is asked.
        hops: Numbers of hops to ask for.
        number: Items of each, 1 or more.
    """

    items: BindingItems
    hops: tuple[int, ...]
    number: int = 500

    def __post_init__(self) -> None:
        _check_counts(self, "number")

    def numbers(self, run: Finished) -> Iterator[Number]:
        """Yields, by hops, the share right and the mean log loss of the answer; chance is the items' own."""
        model = load_checkpoint_model(run.folder)
        for hops in self.hops:
            right, nats = self._asked(model, hops)
            yield Number("accuracy", right, run.config.num_steps, hops)
            yield Number("answer loss", nats, run.config.num_steps, hops)
        yield Number("chance", self.items.chance)

    @torch.no_grad()
    def _asked(self, model: LanguageModel, hops: int) -> tuple[float, float]:
        """Takes as answer the likeliest of the candidates, so that chance is exact; the loss is over all words."""
        right, nats, at_once = 0, 0.0, 50
        for first in range(0, self.number, at_once):
            numbers = range(first, min(first + at_once, self.number))
            items = [self.items.item(hops, index) for index in numbers]
            logits_BV = model(torch.tensor([item.ids for item in items]), num_logits=1)[:, -1].float()
            answer_B = torch.tensor([item.answer for item in items])
            nats += torch.nn.functional.cross_entropy(logits_BV, answer_B, reduction="sum").item()
            candidates_BC = torch.tensor([item.candidates for item in items])
            chosen_B = candidates_BC.gather(1, logits_BV.gather(1, candidates_BC).argmax(1, keepdim=True))[
                :, 0
            ]
            right += int((chosen_B == answer_B).sum())
        return right / self.number, nats / self.number


@dataclass(frozen=True, kw_only=True)
class Removal(Measure):
    """The loss of a trained model without some of its layers.

    Removed are the last k layers, or the k whose removal one by one costs the least. The latter are chosen on the
    first windows of the validation split, and all losses are measured on the windows after those.

    Args:
        counts: Numbers of layers to remove.
        num_windows: Sequences to choose on, and as many to measure on, 1 or more.
    """

    counts: tuple[int, ...]
    num_windows: int = 64

    def __post_init__(self) -> None:
        _check_counts(self, "num_windows")
        if not self.counts or not all(map(is_count, self.counts)):
            raise ConfigError(got=f"counts={self.counts}", expected="numbers from 1", do="pass (1, 2, 4)")

    def numbers(self, run: Finished) -> Iterator[Number]:
        """Yields losses in nats a token, by the layer or by the number of layers that are removed."""
        model = load_checkpoint_model(run.folder).to(run.device).requires_grad_(False)
        layers, step = model.config.num_layers, run.config.num_steps
        both = _batch(run, 2 * self.num_windows)
        choosing = Batch(*(part[: self.num_windows] for part in both))
        measuring = Batch(*(part[self.num_windows :] for part in both))

        def loss(batch: Batch, removed: Sequence[int]) -> float:
            return loss_without(model, batch, removed, cross_documents=run.config.cross_documents)

        costs = [loss(choosing, [layer]) for layer in range(layers)]
        ranked = sorted(range(layers), key=lambda layer: costs[layer])
        yield Number("loss whole", loss(measuring, []), step)
        for layer in range(layers):
            yield Number("loss without layer", loss(measuring, [layer]), step, layer)
        for count in self.counts:
            yield Number("loss without last", loss(measuring, range(layers - count, layers)), step, count)
            yield Number("loss without least useful", loss(measuring, ranked[:count]), step, count)


MEASURES: dict[str, type] = {
    measure.__name__: measure for measure in (FinalLoss, Dynamics, Routing, Answers, Removal, BindingItems)
}
"""The types that the file of a run may hold beside those of its training."""


def _batch(run: Finished, num_windows: int) -> Batch:
    """Takes the first windows of the validation split.

    Raises:
        ConfigError: It has fewer.
    """
    windows = sequential(
        run.corpus.valid,
        sequence_length=run.config.sequence_length,
        batch_size=num_windows,
        device=run.device,
        end_of_text=run.corpus.tokenizer.end_of_text,
        scored=run.corpus.valid_scored,
    )
    batch = next(windows)
    if len(batch.tokens_BT) < num_windows or batch.tokens_BT.shape[1] < run.config.sequence_length:
        raise ConfigError(
            got=f"{len(batch.tokens_BT)} windows of validation text",
            expected=f"{num_windows} of {run.config.sequence_length} tokens",
            do="prepare more text, or measure on fewer windows",
        )
    return batch


def _mean(parts: Sequence[tuple[int, float]]) -> float:
    """Puts means over parts of the tokens together; each part comes with its number of tokens.

    Example:
        >>> _mean([(1, 3.0), (3, 1.0)])
        1.5
    """
    return sum(count * value for count, value in parts) / sum(count for count, _ in parts)


def _root_mean_square(parts: Sequence[tuple[int, float]]) -> float:
    """Puts root mean squares over parts of the tokens together; the bits of a single part stay as they are.

    Example:
        >>> _root_mean_square([(1, 2.0)]), _root_mean_square([(1, 3.0), (3, 1.0)])
        (2.0, 1.7320508075688772)
    """
    return parts[0][1] if len(parts) == 1 else math.sqrt(_mean([(count, size**2) for count, size in parts]))


def _check_counts(measure: Measure, *names: str) -> None:
    for name in names:
        if not is_count(getattr(measure, name)):
            raise ConfigError(
                got=f"{name}={getattr(measure, name)!r}", expected="1 or more", do=f"pass such a {name}"
            )
