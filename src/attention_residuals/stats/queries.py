"""The learned directions of a model's reads: how long they are, and how alike."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual.sources import DepthReader, SourceRule, reader_name
from attention_residuals.models import LanguageModel

__all__ = ["Queries", "queries"]


class Queries(NamedTuple):
    """What reads look for, in the order in which they read; ``cosines`` are between all pairs of them.

    Norms are 0 (a mean of all sources) or more. A score changes by at most the norm times root D between
    two sources. Cosines are -1 (opposite) to 1 (the same); NaN beside a query of zero.
    """

    names: tuple[str, ...]
    norms: Float[Tensor, " R"]
    cosines: Float[Tensor, "R R"]


def queries(model: LanguageModel) -> Queries:
    """Compares the pseudo-queries of a model, each times the gain of its keys, which is what scores are made of.

    The reads of one source, whose query has no effect, are left out.

    Args:
        model: With a rule that has pseudo-queries.

    Raises:
        ConfigError: The rule has none.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> queries(Decoder(presets.scaled(2, vocab_size=9))).norms.tolist()
        [0.0, 0.0, 0.0, 0.0]
    """
    rule, found = model.residual, {}
    readers = rule.readers if isinstance(rule, SourceRule) else nn.ModuleDict()
    for site in rule.sites() if len(readers) else ():
        for part in rule.parts(site):
            direction = _direction(readers[reader_name(site, part)])
            if direction is not None and rule.num_sources(site) > 1:
                found[str(site) if part == "in" else f"{site}.{part}"] = direction.detach().double().cpu()
    if not found:
        raise ConfigError(
            got=f"a model with {type(rule).__name__}",
            expected="a rule with a learned pseudo-query at each read",
            do="look at the weights of a trace",
        )
    direction_RD = torch.stack(list(found.values()))
    norms = direction_RD.norm(dim=1)
    return Queries(tuple(found), norms, direction_RD @ direction_RD.T / norms / norms[:, None])


def _direction(reader: nn.Module) -> Tensor | None:
    if isinstance(reader, DepthReader):
        return reader.direction()
    query = getattr(reader, "pseudo_query", None)
    return query if isinstance(query, Tensor) else None
