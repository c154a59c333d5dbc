"""What the demo measures on each trained model, and what it says about both in words."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attention_residuals.data import Corpus, sequential
from attention_residuals.stats import (
    embedding_share,
    gradient_magnitude,
    normalised_entropy,
    output_magnitude,
    site_means,
)
from attention_residuals.trace import Trace, record
from attention_residuals.train import evaluate, load_checkpoint_model, load_run
from attention_residuals.train.evaluation import document_mask

__all__ = ["PROMPT", "Findings", "measure", "verdict"]

PROMPT = 'def add(a, b):\n    """Return the sum."""\n    return a + b\n'


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was measured on one model.

    Args:
        name: For people.
        curve: (tokens seen, bits per byte of the first held-out files) through training.
        bits_per_byte: At the end, on all held-out files.
        num_held_out: Tokens in those.
        seconds: Of training.
        num_parameters: All of them.
        magnitudes: By layer, root mean square of the state after it.
        gradients: By layer, root mean square of the loss's gradient at its MLP's output.
        trace: Depth routing on a batch of held-out text.
        prompt: Depth routing on ``PROMPT``.
    """

    name: str
    curve: tuple[tuple[float, float], ...]
    bits_per_byte: float
    num_held_out: int
    seconds: float
    num_parameters: int
    magnitudes: tuple[float, ...]
    gradients: tuple[float, ...]
    trace: Trace = field(repr=False)
    prompt: Trace = field(repr=False)

    def numbers(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        names = (
            "name",
            "bits_per_byte",
            "curve",
            "num_held_out",
            "seconds",
            "num_parameters",
            "magnitudes",
            "gradients",
        )
        return {name: getattr(self, name) for name in names}


def measure(name: str, folder: Path, corpus: Corpus) -> Findings:
    """Measures a finished run.

    Magnitudes, gradients and routing are taken on the first 16 sequences of the validation split.
    """
    run, model = load_run(folder), load_checkpoint_model(folder)
    length = run.config.sequence_length
    batch = next(iter(sequential(corpus.valid, sequence_length=length, batch_size=16)))
    mask = document_mask(batch.documents_BT)
    trace = record(model, batch.tokens_BT, mask=mask, tokenizer=corpus.tokenizer)
    held_out = evaluate(
        model,
        corpus.valid,
        bytes_per_token=corpus.tokenizer.bytes_per_token,
        sequence_length=length,
        batch_size=32,
    )
    gradients = gradient_magnitude(model, batch.tokens_BT, batch.targets_BT, mask)
    prompt = torch.tensor([[corpus.tokenizer.end_of_text, *corpus.tokenizer.encode(PROMPT)]])[:, :length]
    valid = [row for row in run.metrics if row["split"] == "valid"]
    return Findings(
        name=name,
        curve=tuple((float(row["tokens"]), row["bits_per_byte"]) for row in valid),
        bits_per_byte=held_out.bits_per_byte,
        num_held_out=held_out.num_tokens,
        seconds=[row for row in run.metrics if row["split"] == "train"][-1]["seconds"],
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        magnitudes=output_magnitude(trace),
        gradients=gradients,
        trace=trace,
        prompt=record(model, prompt, tokenizer=corpus.tokenizer),
    )


def verdict(standard: Findings, routed: Findings) -> tuple[str, ...]:
    """Says in words and numbers what was seen of the paper's claims, and what was not."""
    return (
        _loss(standard, routed),
        _magnitude(standard, routed),
        _gradient(standard, routed),
        _departure(routed.trace),
        _locality(routed.trace),
        _embedding(routed.trace),
    )


def _loss(standard: Findings, routed: Findings) -> str:
    difference = routed.bits_per_byte - standard.bits_per_byte
    share = difference / standard.bits_per_byte
    return (
        f"{_judged(-share, 0.005)}: a lower loss. After {standard.curve[-1][0]:,.0f} tokens the {routed.name} "
        f"model needs {routed.bits_per_byte:.3f} bits per byte on all held-out files, the standard model "
        f"{standard.bits_per_byte:.3f}: a difference of {difference:+.3f} ({share:+.1%}). This is one seed of "
        "each and a short training, so it cannot tell an effect from luck."
    )


def _magnitude(standard: Findings, routed: Findings) -> str:
    """Compares layers that end a block, where the routed model's sums have the same number of terms."""
    size = int(routed.trace.rule["sublayers_per_block"])
    ends = [layer for layer in range(len(routed.magnitudes)) if 2 * (layer + 1) % size == 0]
    first, last = ends[0], ends[-1]
    growth = {found.name: found.magnitudes[last] / found.magnitudes[first] for found in (standard, routed)}
    grows, bounded = growth[standard.name] >= 1.5, growth[routed.name] <= 1.25
    seen = "Seen" if grows and bounded else "Seen in part" if grows or bounded else "Not seen"
    return (
        f"{seen}: a state that grows through the standard model and stays bounded in the routed one. From layer "
        f"{first} to layer {last}, the ends of the first and the last block, its root mean square changes "
        f"{growth[standard.name]:.2f}-fold in the standard model (1.5-fold or more counts as growth) and "
        f"{growth[routed.name]:.2f}-fold under {routed.name} (1.25-fold or less counts as bounded)."
    )


def _gradient(standard: Findings, routed: Findings) -> str:
    spread = {found.name: max(found.gradients) / min(found.gradients) for found in (standard, routed)}
    less = 1 - spread[routed.name] / spread[standard.name]
    return (
        f"{_judged(less, 0.2)}: gradients that are more even over depth. The gradient at a layer's MLP output "
        f"differs {spread[standard.name]:.1f}-fold between the strongest and the weakest layer of the standard "
        f"model, {spread[routed.name]:.1f}-fold under {routed.name}."
    )


def _judged(gain: float, least: float) -> str:
    """Says whether a share that was gained counts: seen, its opposite, or neither."""
    return (
        "Seen" if gain >= least else "Not seen, but the opposite" if gain <= -least else "No clear difference"
    )


def _departure(trace: Trace) -> str:
    entropies = site_means(trace, normalised_entropy)
    sharpest = min(entropies, key=lambda site: entropies[site])
    mean = sum(entropies.values()) / len(entropies)
    seen = "Seen" if mean < 0.98 else "Hardly seen"
    return (
        f"{seen}: routing that has left the uniform mean it started from. Entropy over sources, 1 for uniform "
        f"and 0 for a single source, is {mean:.2f} on average over sites; the sharpest site is {sharpest} "
        f"with {entropies[sharpest]:.2f}."
    )


def _locality(trace: Trace) -> str:
    sites = [site for site in trace.sites if len(site.source_names) > 1]
    means = {site.site: site.weights[:, trace.real].mean(1) for site in sites}
    newest_first = sum(int(weights.argmax()) == len(weights) - 1 for weights in means.values())
    excess = sum(float(weights[-1]) - 1 / len(weights) for weights in means.values()) / len(sites)
    side = "above" if excess >= 0 else "below"
    seen = "Seen" if newest_first > len(sites) / 2 else "Not seen"
    return (
        f"{seen}: locality, the strongest weight on the newest source. It is so at {newest_first} of "
        f"{len(sites)} sites; on average the newest source's weight is {abs(excess):.2f} {side} an equal share."
    )


def _embedding(trace: Trace) -> str:
    means, shares = site_means(trace, embedding_share), {}
    for kind in ("attention", "mlp"):
        own = [mean for name, mean in means.items() if name.endswith(kind)]
        shares[kind] = sum(own) / len(own)
    used, more = min(shares.values()) > 0.02, shares["attention"] > shares["mlp"]
    seen = "Seen" if used and more else "Seen in part" if used or more else "Not seen"
    return (
        f"{seen}: an embedding that stays in use, more before attention than before MLPs. It has "
        f"{shares['attention']:.2f} of the weight at attention sites (the first left out, which has no choice) "
        f"and {shares['mlp']:.2f} at MLP sites. Weights are not causes: what a site would do without the "
        "embedding is another question."
    )
