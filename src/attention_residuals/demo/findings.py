"""What the demo measures on each trained model, and what it says about both in words."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attention_residuals.data import Corpus, sequential
from attention_residuals.stats import average_routing, embedding_share, normalised_entropy, output_magnitude
from attention_residuals.trace import GradientRecorder, Trace, record
from attention_residuals.train import load_checkpoint_model, load_run
from attention_residuals.train.evaluation import document_mask, total_nats

__all__ = ["PROMPT", "Findings", "measure", "verdict"]

PROMPT = 'def add(a, b):\n    """Return the sum."""\n    return a + b\n'


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was measured on one model.

    Args:
        name: For people.
        curve: (tokens seen, bits per byte of held-out files) through training.
        seconds: Of training.
        num_parameters: All of them.
        magnitudes: By layer, root mean square of the state after it.
        gradients: By layer, root mean square of the loss's gradient at its MLP's output.
        trace: Depth routing on a batch of held-out text.
        prompt: Depth routing on ``PROMPT``.
    """

    name: str
    curve: tuple[tuple[float, float], ...]
    seconds: float
    num_parameters: int
    magnitudes: tuple[float, ...]
    gradients: tuple[float, ...]
    trace: Trace = field(repr=False)
    prompt: Trace = field(repr=False)

    @property
    def bits_per_byte(self) -> float:
        """At the end of training, on held-out files."""
        return self.curve[-1][1]

    def numbers(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        names = ("name", "bits_per_byte", "curve", "seconds", "num_parameters", "magnitudes", "gradients")
        return {name: getattr(self, name) for name in names}


def measure(name: str, folder: Path, corpus: Corpus) -> Findings:
    """Measures a finished run.

    Magnitudes, gradients and routing are taken on the first 16 sequences of the validation split.
    """
    run, model = load_run(folder), load_checkpoint_model(folder)
    length = run.config.sequence_length
    batch = next(iter(sequential(corpus.valid, sequence_length=length, batch_size=16)))
    trace = record(model, batch.tokens_BT, mask=document_mask(batch.documents_BT), tokenizer=corpus.tokenizer)
    recorder = GradientRecorder()

    def tapped(*args: Any, **options: Any) -> torch.Tensor:
        logits: torch.Tensor = model(*args, tap=recorder, **options)
        return logits

    nats = total_nats(tapped, batch, precision="float32", cross_documents=False)
    (nats / batch.targets_BT.numel()).backward()
    gradients = recorder.magnitudes()
    prompt = torch.tensor([[corpus.tokenizer.end_of_text, *corpus.tokenizer.encode(PROMPT)]])[:, :length]
    valid = [row for row in run.metrics if row["split"] == "valid"]
    return Findings(
        name=name,
        curve=tuple((float(row["tokens"]), row["bits_per_byte"]) for row in valid),
        seconds=[row for row in run.metrics if row["split"] == "train"][-1]["seconds"],
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        magnitudes=output_magnitude(trace),
        gradients=tuple(gradients[f"L{layer}.mlp"] for layer in range(model.config.num_layers)),
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
    seen = "Seen" if difference < 0 else "Not seen"
    return (
        f"{seen}: a lower loss. After {standard.curve[-1][0]:,.0f} tokens the {routed.name} model needs "
        f"{routed.bits_per_byte:.3f} bits per byte on held-out files, the standard model "
        f"{standard.bits_per_byte:.3f}: a difference of {difference:+.3f} "
        f"({100 * difference / standard.bits_per_byte:+.1f} %). This is one seed of each and a few minutes of "
        "training, so it does not tell an effect from luck."
    )


def _magnitude(standard: Findings, routed: Findings) -> str:
    growth = {found.name: found.magnitudes[-1] / found.magnitudes[0] for found in (standard, routed)}
    spread = {found.name: max(found.magnitudes) / min(found.magnitudes) for found in (standard, routed)}
    rises = all(low < high for low, high in zip(standard.magnitudes, standard.magnitudes[1:], strict=False))
    seen = "Seen" if rises and growth[routed.name] < growth[standard.name] else "Not seen, or only in part"
    return (
        f"{seen}: the standard model's state grows at every layer and the routed one's stays bounded. From the "
        f"first layer to the last the state's root mean square changes {growth[standard.name]:.1f}-fold in the "
        f"standard model and {growth[routed.name]:.1f}-fold under {routed.name}; largest over smallest layer "
        f"is {spread[standard.name]:.1f} and {spread[routed.name]:.1f}. Under {routed.name} the state is the "
        "sum so far of one block and starts anew with each block."
    )


def _gradient(standard: Findings, routed: Findings) -> str:
    spread = {found.name: max(found.gradients) / min(found.gradients) for found in (standard, routed)}
    seen = "Seen" if spread[routed.name] < spread[standard.name] else "Not seen"
    return (
        f"{seen}: gradients that are more even over depth. The gradient at a layer's MLP output differs "
        f"{spread[standard.name]:.1f}-fold between the strongest and the weakest layer of the standard model, "
        f"{spread[routed.name]:.1f}-fold under {routed.name}."
    )


def _departure(trace: Trace) -> str:
    entropies = {site.site: normalised_entropy(trace, site.site).mean().item() for site in trace.sites[1:]}
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
    means = {site.site: site.weights.mean((1, 2)) for site in sites}
    newest_first = sum(int(weights.argmax()) == len(weights) - 1 for weights in means.values())
    excess = sum(float(weights[-1]) - 1 / len(weights) for weights in means.values()) / len(sites)
    seen = "Seen" if newest_first > len(sites) / 2 else "Not seen"
    return (
        f"{seen}: locality, the strongest weight on the newest source. It is so at {newest_first} of "
        f"{len(sites)} sites; the newest source has {excess:+.2f} weight beyond an equal share on average."
    )


def _embedding(trace: Trace) -> str:
    shares = {}
    for kind in ("attention", "mlp"):
        names = average_routing(trace, kind).sites
        names = names[1:] if kind == "attention" else names
        shares[kind] = sum(embedding_share(trace, name).mean().item() for name in names) / len(names)
    seen = "Seen" if shares["attention"] > shares["mlp"] > 0.02 else "Not seen, or only in part"
    return (
        f"{seen}: an embedding that stays in use, more before attention than before MLPs. It has "
        f"{shares['attention']:.2f} of the weight at attention sites (the first left out, which has no choice) "
        f"and {shares['mlp']:.2f} at MLP sites. Weights are not causes: what a site would do without the "
        "embedding is another question."
    )
