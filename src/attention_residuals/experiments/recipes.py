"""The recipes that studies share: tiny for trying, narrow and deep for a laptop, and those of the paper's Table 2."""

from collections.abc import Mapping
from dataclasses import replace

from attention_residuals.data import StandardLibrary, StepDocuments, step_tokenizer
from attention_residuals.experiments.cell import Text
from attention_residuals.experiments.experiment import Scale
from attention_residuals.experiments.recipe import KimiPreset, Recipe, Shape
from attention_residuals.layers.residual import AttnRes, ResidualConfig, StandardResidual
from attention_residuals.models import presets
from attention_residuals.train import Muon

__all__ = [
    "LAPTOP",
    "MAIN_ARMS",
    "PAPER_RUNS",
    "SMOKE",
    "kimi_recipe_at",
    "main_arms",
    "paper_recipe",
    "recipe_at",
    "texts_at",
]

SMOKE = Recipe(
    shape=Shape(num_layers=3, width=16, num_heads=2, head_width=8, mlp_width=24),
    num_steps=4,
    batch_size=2,
    sequence_length=48,
    optimizer=Muon(learning_rate=4e-3),
)
"""Tries the machinery in seconds; its numbers mean nothing."""

LAPTOP = Recipe(
    shape=Shape(num_layers=10, width=48, num_heads=3, head_width=16, mlp_width=128),
    num_steps=1500,
    batch_size=16,
    sequence_length=128,
    optimizer=Muon(learning_rate=4e-3),
)
"""Narrow and deep: 20 sublayers, 276,480 parameters in the layers; 3.1 M tokens. To be settled by a pilot."""

PAPER_RUNS: Mapping[str, tuple[float, float, int]] = {
    "paper-194m": (38.7e9, 2.99e-3, 192),
    "paper-241m": (45.4e9, 2.80e-3, 256),
    "paper-296m": (62.1e9, 2.50e-3, 320),
    "paper-436m": (87.9e9, 2.20e-3, 384),
    "paper-528m": (119.0e9, 2.02e-3, 432),
}
"""Tokens, peak learning rate and sequences a step of the paper's Table 2, by the name of the preset."""


def paper_recipe(name: str) -> Recipe:
    """Makes the recipe of a row of the paper's Table 2, as far as it is published.

    Layers, heads, widths, context, tokens, learning rate and batch are the paper's; the model is the dense stand-in of
    ``presets.paper``. Muon is a guess, since the optimizer of these runs is not published.

    Args:
        name: One of ``PAPER_RUNS``.

    Example:
        >>> paper_recipe("paper-436m").num_steps
        27943
    """
    tokens, rate, batch = PAPER_RUNS[name]
    model = presets.paper(name, vocab_size=1)
    return Recipe(
        shape=Shape(
            num_layers=model.num_layers,
            width=model.width,
            num_heads=model.num_heads,
            head_width=model.head_width,
            mlp_width=model.mlp_width,
            tied=model.tied,
        ),
        num_steps=round(tokens / (batch * model.max_tokens)),
        batch_size=batch,
        sequence_length=model.max_tokens,
        optimizer=Muon(learning_rate=rate),
        micro_batch_size=1,
        for_gpus=True,
    )


def recipe_at(scale: Scale) -> Recipe:
    """Returns the recipe of studies that train one size: the paper's ablations are on its 436 M row."""
    if scale == "paper":
        return paper_recipe("paper-436m")
    return LAPTOP if scale == "laptop" else SMOKE


def kimi_recipe_at(scale: Scale) -> Recipe:
    """Returns the recipe of studies of the paper's own architecture: that of ``recipe_at`` with another shape.

    On a laptop it is the tiny preset, and a million tokens; at paper size the 436 M row, not its stand-in.

    Example:
        >>> recipe = kimi_recipe_at("laptop")
        >>> recipe.shape.preset, recipe.num_steps * recipe.tokens_per_step
        ('kimi-linear-tiny', 1024000)
    """
    recipe = recipe_at(scale)
    if scale == "paper":
        return replace(recipe, shape=KimiPreset(preset="kimi-linear-436m"))
    recipe = replace(recipe, shape=KimiPreset(preset="kimi-linear-tiny"))
    return replace(recipe, num_steps=500) if scale == "laptop" else recipe


def texts_at(scale: Scale) -> Mapping[str, Text]:
    """Returns the text of studies of language: Python's own library on a laptop; at paper size, you bring it."""
    if scale == "paper":
        return {"text": Text(None)}
    if scale == "laptop":
        return {"text": Text(StandardLibrary(), vocab_size=1024)}
    return {"text": Text(StepDocuments(num_documents=300), tokenizer=step_tokenizer())}


MAIN_ARMS = ("standard", "block", "full")
"""Names of the three rules that most studies compare."""


def main_arms(num_layers: int) -> dict[str, ResidualConfig]:
    """Returns the rules of ``MAIN_ARMS``; Block has about 8 blocks, as in the paper.

    Example:
        >>> main_arms(16)["block"].sublayers_per_block
        4
    """
    block = AttnRes(sublayers_per_block=max(1, round(2 * num_layers / 8)))
    return dict(zip(MAIN_ARMS, (StandardResidual(), block, AttnRes(sublayers_per_block=1)), strict=True))
