"""Counts what each schedule of depth reads moves through memory, beside the paper's Table 1."""

import torch

from attention_residuals import AttnRes, Decoder, ResidualConfig, StandardResidual, presets
from attention_residuals.layers.residual import ManifoldHyperConnections, ResidualRule, TwoPhaseRule
from attention_residuals.ops.traffic import counting

__all__ = ["table"]

NUM_SUBLAYERS, NUM_BLOCKS, STREAMS = 128, 8, 4
"""The paper's "typical" setting: L, N and m; S is their ratio."""

SIZE = NUM_SUBLAYERS // NUM_BLOCKS


def table() -> str:
    """Runs every schedule on a narrow model of the paper's depth and returns a table in Markdown."""
    full, block = AttnRes(), AttnRes(sublayers_per_block=SIZE)
    rows: list[tuple[str, str, float, ResidualConfig, int | None]] = [
        ("standard", "3d", 3, StandardResidual(), None),
        (
            "mHC, m = 4",
            "(8m+2)d + 2m^2 + 4m",
            8 * STREAMS + 2,
            ManifoldHyperConnections(streams=STREAMS),
            None,
        ),
        ("Full, two phases", "(S+N)d", SIZE + NUM_BLOCKS, full, SIZE),
        ("Full, one phase", "O(L)d", float("nan"), full, None),
        ("Block, two phases", "(N/S+5)d", NUM_BLOCKS / SIZE + 5, block, SIZE),
        ("Block, one phase", "O(N)d", float("nan"), block, None),
    ]
    lines = [
        "| schedule | paper, symbolic | paper, typical | read here | written here | sum here |",
        "|---|---|---|---|---|---|",
    ]
    for name, symbols, typical, config, partition in rows:
        read, written = measured(config, partition)
        paper = "-" if typical != typical else f"{typical:g}d"
        lines.append(
            f"| {name} | {symbols} | {paper} | {read:.2f}d | {written:.2f}d | {read + written:.2f}d |"
        )
    return "\n".join(lines)


def measured(config: ResidualConfig, partition: int | None) -> tuple[float, float]:
    """Returns vectors of the model's width read and written per token and sublayer, the output read included."""
    torch.manual_seed(0)
    model = Decoder(presets.scaled(2, vocab_size=8))
    rule: ResidualRule[object] = config.build(num_layers=NUM_SUBLAYERS // 2, width=32)
    if partition is not None:
        rule = TwoPhaseRule(rule, partition)
    tokens = torch.randn(1, 3, 32)
    with torch.no_grad(), counting() as traffic:
        state = rule.open(tokens)
        for site in rule.sites()[:-1]:
            inputs, state = rule.read(state, site, model.norm)
            state = rule.write(state, site, inputs[0])
        rule.read(state, rule.sites()[-1], model.norm)
    vectors = 4 * tokens.numel() * NUM_SUBLAYERS
    return traffic.read / vectors, traffic.written / vectors


if __name__ == "__main__":
    print(table())
