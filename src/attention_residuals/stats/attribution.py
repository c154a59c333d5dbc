"""Exact splits of scores and logits among writers."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.residual.cumulative import BiasedReader
from attention_residuals.layers.residual.sources import DepthReader, SourceRule, reader_name
from attention_residuals.models import Decoder, LanguageModel
from attention_residuals.ops.eager import without_autocast
from attention_residuals.stats.contributions import writer_contributions, writes_of
from attention_residuals.trace import SiteTrace, Trace

__all__ = ["KeySplit", "key_split", "logit_attribution"]


class KeySplit(NamedTuple):
    """Why sources have their scores: the logit of source s is the sum over writers w, plus its bias."""

    by_writer: Float[Tensor, "S W B T"] | Float[Tensor, "S W B T H"]
    bias: Float[Tensor, " S"]


def key_split(trace: Trace, site: str, model: LanguageModel) -> KeySplit:
    """Splits the score of every source among the writers in it: w . (g * f_i) / rms(b), with rms(b) as it was.

    Exact, given the sizes of the sources: without a writer its block would have another size, too.

    Args:
        trace: Recorded with ``keep="values"``, without edits of values at this read.
        site: A read by name.
        model: The model that ran, whose reader has a pseudo-query.

    Returns:
        In units of the logits, without bounds; below 0 a writer makes its source less attractive.

    Raises:
        ConfigError: The trace holds no writes, or scores are not made of a pseudo-query and normalised keys.
    """
    read = trace[site]
    reader = _reader(model.residual, read)
    if reader is None or read.inverse_norms is None:
        raise ConfigError(
            got=f"the read at {site} of {type(model.residual).__name__}",
            expected="scores that a pseudo-query makes of normalised keys, as in AttnRes",
            do="split the scores of AttnRes, SlidingWindow, Delta, ValueQuery, MultiHead, Sigmoid or Cumulative",
        )
    inverse_norms = read.inverse_norms if read.inverse_norms.ndim == 4 else read.inverse_norms[..., None]
    # Groups of channels may share one norm of the whole source.
    num_heads = 1 if read.weights.ndim == 3 else read.weights.shape[3]
    with torch.no_grad():
        keys = writes_of(trace)[: len(read.writers)] * reader.direction().cpu()
        score_WBTH = keys.unflatten(-1, (num_heads, -1)).sum(-1)
        held = read.membership.to(score_WBTH.dtype)
        held = held[..., None, None, None] if held.ndim == 2 else held[..., None]
        by_writer = held * score_WBTH * inverse_norms[:, None]
        bias = torch.zeros(len(read.source_names), dtype=by_writer.dtype)
        if isinstance(reader, BiasedReader):
            bias[-1] = reader.recency_bias.item()
    return KeySplit(by_writer.squeeze(-1) if read.weights.ndim == 3 else by_writer, bias)


def logit_attribution(
    trace: Trace, model: LanguageModel, targets: Int[Tensor, "B T"]
) -> Float[Tensor, "W B T"]:
    """Splits a token's logit among the writers: beta_i (u * g) . f_i / rms(h), one rms(h) for all of them.

    They sum to the logit. What the output read does by itself, such as its choice of weights, is not
    attributed: weights and size are as they were. The difference of two tokens' logits is the difference of
    their attributions.

    Args:
        trace: Recorded with ``keep="values"``.
        model: The decoder that ran.
        targets: The token at each position whose logit is split, such as the next one.

    Returns:
        In units of the logits, without bounds; below 0 a writer speaks against the token.

    Raises:
        ConfigError: The trace holds no writes, or the model is no ``Decoder``.

    Source:
        Direct logit attribution: Elhage et al., A Mathematical Framework for Transformer Circuits (2021).
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            got=f"a {type(model).__name__}",
            expected="a Decoder, whose logits are its head times an RMSNorm of the state",
            do="other models may scale, shift or cap their logits: split those by hand from writer_contributions",
        )
    if targets.shape != trace.tokens.shape:
        raise ConfigError(
            got=f"targets of shape {list(targets.shape)}",
            expected=f"{list(trace.tokens.shape)}, a token id at each position",
            do="repeat one token with torch.full_like(trace.tokens, token)",
        )
    part_WBTD = writer_contributions(trace, "output")
    head_VD = model.embedding.weight if model.head is None else model.head.weight
    with torch.no_grad():
        state_BTD = part_WBTD.sum(0)
        scale_BT = (state_BTD.square().mean(-1) + model.norm.eps).rsqrt()
        direction_BTD = head_VD[targets.to(head_VD.device)].cpu() * model.norm.gain.cpu()
        with without_autocast("cpu"):
            return torch.einsum("wbtd,btd->wbt", part_WBTD, direction_BTD.to(part_WBTD.dtype)) * scale_BT


def _reader(rule: ResidualRule[Any], read: SiteTrace) -> DepthReader | None:
    """Returns what a read learns, if it is a pseudo-query with a key gain."""
    if not isinstance(rule, SourceRule):
        return None
    site = next(site for site in rule.sites() if str(site) == read.site)
    reader = rule.readers[reader_name(site, read.part)]
    return reader if isinstance(reader, DepthReader) else None
