"""The demo's pictures and its page."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from attention_residuals.data import Corpus, TextSource
from attention_residuals.demo.findings import PROMPT, Findings, verdict
from attention_residuals.page import PageContent, Recorded, ReportFigure, Section, write
from attention_residuals.plots import layer_profile, loss_curves, png_bytes, routing_map, save, token_map
from attention_residuals.stats import average_routing

__all__ = ["write_demo_report"]


def write_demo_report(
    folder: Path, findings: tuple[Findings, ...], source: TextSource, corpus: Corpus
) -> None:
    """Writes the pictures as PNG files, and report.html with all of them and the routed model's trace inside."""
    standard, routed = findings
    figures = _figures(standard, routed)
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)  # left by a demo that was stopped before its report was written
        save(figure, path)
    sections = _sections(standard, routed, figures)
    splits = corpus.manifest["splits"]
    content = PageContent(
        first=Recorded(trace=routed.trace, name=routed.name),
        title="Attention residuals beside standard residuals",
        lead=(
            f"Two transformers of {len(standard.magnitudes)} layers, trained on the {source.name} corpus "
            f"({splits['train']['bytes'] / 1e6:.1f} MB for training) with the same seed, data order and "
            "settings. They differ in one thing: how a layer gets its input from the layers before it. In the "
            f"standard model it is their sum; in the {routed.name} model each attention and each MLP chooses, "
            "for every token, how much it reads of the embedding and of each block of 4 sublayers."
        ),
        sections=sections,
        about={
            "Text": f"{source.name}, {source.licence}",
            "Training": f"{standard.curve[-1][0]:,.0f} tokens for each model; "
            + ", ".join(f"{found.name} {found.seconds:.0f} s" for found in findings),
            "Parameters": ", ".join(f"{found.name} {found.num_parameters:,}" for found in findings),
            "Measured on": f"loss: {routed.num_held_out:,} tokens of held-out files; magnitudes, gradients and "
            f"routing: {int(routed.trace.real.sum()):,} of the first {routed.trace.tokens.numel():,} of them, "
            "ends of texts left out of routing and magnitudes",
            "Software": f"attention-residuals {routed.trace.about['attention_residuals']}, "
            f"torch {routed.trace.about['torch']}, Python {routed.trace.about['python']}",
        },
    )
    write(content, folder / "report.html")


def _figures(standard: Findings, routed: Findings) -> dict[str, Figure]:
    both = (standard, routed)
    footer = f"n = {int(routed.trace.real.sum())} held-out tokens, float32, 1 seed"
    num_layers = len(standard.magnitudes)
    shown = [
        f"L{num_layers // 2}.attention",
        f"L{num_layers - 1}.attention",
        f"L{num_layers - 1}.mlp",
        "output",
    ]
    return {
        "loss": loss_curves(
            {found.name: found.curve for found in both},
            x_label="tokens seen",
            y_label="bits per byte, first held-out files",
            title="Loss through training",
            footer="1 seed each, same data order",
        ),
        "magnitude": layer_profile(
            {found.name: found.magnitudes for found in both},
            y_label="RMS of the state after the layer",
            title="Output magnitude by layer",
            footer=footer,
        ),
        "gradient": layer_profile(
            {found.name: found.gradients for found in both},
            y_label="RMS of the gradient at the MLP's output",
            title="Gradient magnitude by layer",
            footer=footer,
        ),
        "routing": routing_map(
            {
                "attention sites": average_routing(routed.trace, "attention"),
                "MLP sites": average_routing(routed.trace, "mlp"),
                "output": average_routing(routed.trace, "output"),
            },
            title=f"Average depth routing of the {routed.name} model",
            footer=footer,
        ),
        "prompt": token_map(
            routed.prompt,
            row=0,
            sites=shown,
            title="Depth routing of one prompt, token by token",
            footer="float32, 1 seed",
        ),
    }


def _sections(standard: Findings, routed: Findings, figures: dict[str, Figure]) -> Sequence[Section]:
    def shown(name: str, caption: str, alt: str) -> ReportFigure:
        return ReportFigure(png=png_bytes(figures[name]), caption=caption, alt=alt)

    final = f"{standard.curve[-1][1]:.3f} (standard) and {routed.curve[-1][1]:.3f} ({routed.name})"
    return (
        Section(heading="What was seen, and what was not", paragraphs=verdict(standard, routed)),
        Section(
            heading="Loss",
            paragraphs=(
                "Bits per byte of files that were not trained on: what it takes to store them with the model "
                "as the compressor. 8 would be no compression. The table is over all of those files, the curve "
                "over the first of them.",
            ),
            table=(
                ("model", "bits per byte", "parameters"),
                *(
                    (found.name, f"{found.bits_per_byte:.3f}", f"{found.num_parameters:,}")
                    for found in (standard, routed)
                ),
            ),
            figures=(
                shown(
                    "loss",
                    "Held-out bits per byte through training.",
                    f"Two falling curves, ending at {final}.",
                ),
            ),
        ),
        Section(
            heading="Magnitudes over depth",
            paragraphs=(
                "Forward: the root mean square of the newest source after each layer, which is the residual "
                "stream of the standard model and the sum so far of the newest block of the routed one. "
                "Backward: the root mean square of the loss's gradient at the output of each layer's MLP. The "
                "paper shows both for its large models (Fig. 5) without defining the statistic; these are our "
                "definitions.",
            ),
            figures=(
                shown(
                    "magnitude",
                    "The state after each layer.",
                    f"Standard from {standard.magnitudes[0]:.2f} to {standard.magnitudes[-1]:.2f}, "
                    f"{routed.name} from {routed.magnitudes[0]:.2f} to {routed.magnitudes[-1]:.2f}.",
                ),
                shown(
                    "gradient",
                    "The gradient that reaches each layer.",
                    f"Standard from {standard.gradients[0]:.2e} to {standard.gradients[-1]:.2e}, "
                    f"{routed.name} from {routed.gradients[0]:.2e} to {routed.gradients[-1]:.2e}.",
                ),
            ),
        ),
        Section(
            heading="Where each site reads",
            paragraphs=(
                "Each row is one site, the place before an attention or an MLP where the model chooses what to "
                "read; each column is a source: the embedding, or block 1, 2, ... (B1, B2, ...), the sum of 4 "
                "sublayers' outputs. A number is the average weight over tokens; a row sums to 1. Hatched "
                "cells are sources that do not exist yet at that site. The paper's Fig. 8 shows the same for its "
                "436M model.",
            ),
            figures=(
                shown(
                    "routing",
                    "Average weights over held-out tokens.",
                    "Maps of weights by site and source; the numbers are in trace.safetensors.",
                ),
            ),
        ),
        Section(
            heading="One prompt, token by token",
            paragraphs=(
                "The prompt is: " + " ⏎ ".join(PROMPT.strip().splitlines()),
                "The query of a site is the same for every token, so tokens differ in what they read only "
                "because their sources differ.",
            ),
            figures=(
                shown(
                    "prompt",
                    "Weights of four sites at every token of the prompt.",
                    "Maps of weights by source and token for four sites.",
                ),
            ),
        ),
    )
