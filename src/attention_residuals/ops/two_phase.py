"""Depth attention in two phases: finished sources for many sites at once, then each site's live sources.

Pseudo-queries are learned and the sources of finished blocks stay, so all sites of a block can read those in
one go, before the block runs. What changes while it runs is the open block alone: each site scores it when
its turn comes and merges it by online softmax. The numbers are those of one read over all sources.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import ShapeError
from attention_residuals.ops import fused_two_phase, traffic
from attention_residuals.ops.depth_read import DepthRead, checked_sources, compute_dtype, require_finite
from attention_residuals.ops.eager import inverse_rms, mixed, without_autocast
from attention_residuals.ops.phases import Phase1, Phase2, checked_blocks, checked_live, chosen_for_phases

__all__ = ["merge", "phase_1", "phase_2", "read_open_block"]


def phase_1(
    blocks: Sequence[Float[Tensor, "*BT D"]],
    pseudo_queries: Float[Tensor, "Q D"],
    key_gains: Float[Tensor, "Q D"],
    *,
    eps: float,
    inverse_norms: Float[Tensor, "known *BT"] | None = None,
    backend: str = "auto",
) -> Phase1:
    """Reads the finished sources for all sites at once.

    Gradients flow through everything but ``maxima``, which cancel in the merge and count as constants. The
    CPU kernels have no backward pass: where a gradient is asked for, ``"auto"`` takes eager.

    Args:
        blocks: The finished sources, at least one: block sums, or single outputs of earlier partitions.
        pseudo_queries: The learned vectors of the sites.
        key_gains: The learned gains of their key norms.
        eps: Added to the mean square of a source, >= 0.
        inverse_norms: Those of the first sources, as an earlier phase 1 with this ``eps`` returned them; they
            are not computed again.
        backend: ``"cpu"``, ``"eager"``, ``"reference"`` (sources stacked), or ``"auto"``.

    Raises:
        BackendError: There is no backend of that name, or it cannot do this call.
        ShapeError: The tensors do not fit together.
        NonFiniteError: A source holds NaN or infinity (checked on the CPU).

    Source:
        Attention Residuals (arXiv:2603.15031), algorithm 1.

    Example:
        >>> found = phase_1([torch.ones(2, 3), torch.ones(2, 3)], torch.zeros(4, 3), torch.ones(4, 3), eps=0.0)
        >>> found.outputs.shape, found.denominators[0]
        (torch.Size([4, 2, 3]), tensor([2., 2.]))
    """
    sources = checked_blocks(blocks, pseudo_queries, key_gains, eps, inverse_norms)
    name = chosen_for_phases(backend, sources[0], (*sources, pseudo_queries, key_gains, inverse_norms))
    if name == "cpu":
        found = fused_two_phase.phase_1(sources, pseudo_queries, key_gains, eps, inverse_norms)
    else:
        dtype = compute_dtype(sources[0].dtype)
        known = () if inverse_norms is None else inverse_norms.to(dtype).unbind(0)
        with without_autocast(sources[0].device.type):
            direction_QD = pseudo_queries.to(dtype) * key_gains.to(dtype)
            found = (_stacked if name == "reference" else _unstacked)(sources, direction_QD, eps, known)
    traffic.note(sources, (found.outputs,))
    require_finite(DepthRead(found.outputs, found.logits, found.inverse_norms))
    return found


def phase_2(
    live: Float[Tensor, "*BT D"] | Sequence[Float[Tensor, "*BT D"]],
    pseudo_query: Float[Tensor, " D"],
    key_gain: Float[Tensor, " D"],
    *,
    eps: float,
) -> Phase2:
    """Scores the live sources at one site.

    Args:
        live: The open block; or several sources, the outputs so far of an open partition.
        pseudo_query: The learned vector of the site.
        key_gain: The learned gain of its key norm.
        eps: Added to the mean square of a source, >= 0.

    Raises:
        ShapeError: The tensors do not fit together.
        NonFiniteError: A source holds NaN or infinity (checked on the CPU).

    Source:
        Attention Residuals (arXiv:2603.15031), algorithm 1.

    Example:
        >>> phase_2(2 * torch.ones(1, 4), torch.ones(4), torch.ones(4), eps=0.0)
        Phase2(logits=tensor([[4.]]), inverse_norms=tensor([[0.5000]]))
    """
    together = (live,) if isinstance(live, Tensor) else live
    sources = checked_sources(together, pseudo_query, key_gain, None, None, eps, None)
    dtype = compute_dtype(sources[0].dtype)
    with without_autocast(sources[0].device.type):
        direction_D = pseudo_query.to(dtype) * key_gain.to(dtype)
        inverse_norms = torch.stack([inverse_rms(source.to(dtype), eps) for source in sources])
        logits = torch.stack([source.to(dtype) @ direction_D for source in sources]) * inverse_norms
    require_finite(DepthRead(sources[0], logits, inverse_norms))
    return Phase2(logits, inverse_norms)


def merge(
    phase_1: Phase1,
    site: int,
    live: Float[Tensor, "*BT D"] | Sequence[Float[Tensor, "*BT D"]] | None,
    phase_2: Phase2 | None,
    *,
    output_gain: Float[Tensor, " D"] | None = None,
    output_eps: float | None = None,
) -> Float[Tensor, "*BT D"]:
    """Merges what both phases found by online softmax, exactly.

    Args:
        phase_1: Of all sites of the block.
        site: Which of them reads, counted from 0.
        live: The sources that ``phase_2`` scored; None at the first read of a block.
        phase_2: Their scores; None where there are none.
        output_gain: Gain of the reader's RMSNorm; when given, the mix is normalised.
        output_eps: The eps of that norm; given together with ``output_gain``.

    Raises:
        ShapeError: The tensors do not fit together.

    Source:
        Attention Residuals (arXiv:2603.15031), algorithm 1.

    Example:
        >>> query, gain, open_block = torch.zeros(3), torch.ones(3), 4 * torch.ones(1, 3)
        >>> finished = phase_1([torch.ones(1, 3), torch.ones(1, 3)], query[None], gain[None], eps=0.0)
        >>> merge(finished, 0, open_block, phase_2(open_block, query, gain, eps=0.0))
        tensor([[2., 2., 2.]])
    """
    sources = checked_live(phase_1, site, live, None, None, output_gain, 0.0, output_eps)
    num_scored = 0 if phase_2 is None else len(phase_2.logits)
    if len(sources) != num_scored:
        raise ShapeError(
            got=f"{len(sources)} live source(s), and the scores of {num_scored}",
            expected="as many scores as live sources",
            do="pass the sources that phase_2 scored, or None for both",
        )
    output, maximum, denominator = (tensor[site] for tensor in phase_1[:3])
    if phase_2 is None:
        mix = output / denominator[..., None]
    else:
        top = torch.maximum(maximum, phase_2.logits.detach().amax(0))
        old, new = (maximum - top).exp(), (phase_2.logits - top).exp()
        total = old * denominator + new.sum(0)
        mix = output * (old / total)[..., None]
        for weight, source in zip(new / total, sources, strict=True):
            mix.addcmul_(source.to(mix.dtype), weight[..., None])
    return _finished(mix, phase_1.like.dtype, output_gain, output_eps)


def read_open_block(
    phase_1: Phase1,
    site: int,
    live: Float[Tensor, "*BT D"] | Sequence[Float[Tensor, "*BT D"]] | None,
    pseudo_query: Float[Tensor, " D"],
    key_gain: Float[Tensor, " D"],
    *,
    eps: float,
    output_gain: Float[Tensor, " D"] | None = None,
    output_eps: float | None = None,
    backend: str = "auto",
) -> DepthRead:
    """Finishes a site's read: phase 2, merge and the reader's norm in one.

    Returns what one read over the finished sources and then the live ones returns, in this order.

    Args:
        phase_1: Of all sites of the block.
        site: Which of them reads, counted from 0.
        live: The open block; several sources, the outputs so far of an open partition; or None at the first
            read of a block.
        pseudo_query: The learned vector of the site, as phase 1 had it.
        key_gain: The learned gain of its key norm, as phase 1 had it.
        eps: Added to the mean square of a source, >= 0.
        output_gain: Gain of the reader's RMSNorm; when given, the mix is normalised.
        output_eps: The eps of that norm; given together with ``output_gain``.
        backend: ``"cpu"``, ``"eager"``, ``"reference"`` (one softmax over all logits), or ``"auto"``.

    Raises:
        BackendError: There is no backend of that name, or it cannot do this call.
        ShapeError: The tensors do not fit together.
        NonFiniteError: A live source holds NaN or infinity (checked on the CPU).

    Source:
        Attention Residuals (arXiv:2603.15031), algorithm 1.

    Example:
        >>> query, gain = torch.zeros(3), torch.ones(3)
        >>> finished = phase_1([torch.ones(1, 3), torch.ones(1, 3)], query[None], gain[None], eps=0.0)
        >>> read = read_open_block(finished, 0, 4 * torch.ones(1, 3), query, gain, eps=0.0)
        >>> read.mix, read.logits.shape
        (tensor([[2., 2., 2.]]), torch.Size([3, 1]))
    """
    sources = checked_live(phase_1, site, live, pseudo_query, key_gain, output_gain, eps, output_eps)
    given = (*phase_1[:5], *sources, pseudo_query, key_gain, output_gain)
    name = chosen_for_phases(backend, phase_1.like, given)
    if name == "cpu":
        read = fused_two_phase.read(
            phase_1, site, sources, pseudo_query, key_gain, eps, output_gain, output_eps
        )
        traffic.note((*sources, phase_1.outputs[site]), (read.mix,))
        return read
    scores = phase_2(sources, pseudo_query, key_gain, eps=eps) if sources else None
    logits, inverse_norms = phase_1.logits[:, site], phase_1.inverse_norms
    if scores is not None:
        logits = torch.cat([logits, scores.logits])
        inverse_norms = torch.cat([inverse_norms, scores.inverse_norms])
    if name == "reference":
        finished = phase_1.outputs[site] / phase_1.denominators[site][..., None]
        mix = _mix_of_all(finished, sources, logits.softmax(0))
        mix = _finished(mix, phase_1.like.dtype, output_gain, output_eps)
    else:
        mix = merge(phase_1, site, sources, scores, output_gain=output_gain, output_eps=output_eps)
    traffic.note((*sources, phase_1.outputs[site]), (mix,))
    return DepthRead(mix, logits, inverse_norms)


def _unstacked(
    sources: Sequence[Tensor], direction_QD: Tensor, eps: float, known: Sequence[Tensor]
) -> Phase1:
    dtype = direction_QD.dtype
    norms = [*known, *(inverse_rms(source.to(dtype), eps) for source in sources[len(known) :])]
    logits = torch.stack([
        (source.to(dtype) @ direction_QD.T * norm[..., None]).movedim(-1, 0)
        for source, norm in zip(sources, norms, strict=True)
    ])  # fmt: skip
    maxima = logits.detach().amax(0)
    weights = (logits - maxima).exp()
    outputs = mixed(weights, sources, dtype)
    return Phase1(outputs, maxima, weights.sum(0), logits, torch.stack(norms), sources[0].new_empty(0))


def _stacked(sources: Sequence[Tensor], direction_QD: Tensor, eps: float, known: Sequence[Tensor]) -> Phase1:
    value = torch.stack(tuple(sources)).to(direction_QD.dtype)
    inverse_norms = (value.square().mean(-1) + eps).rsqrt()
    if known:
        inverse_norms = torch.cat([torch.stack(tuple(known)), inverse_norms[len(known) :]])
    key = value * inverse_norms[..., None]
    logits = torch.einsum("n...d,qd->nq...", key, direction_QD)
    maxima = logits.detach().amax(0)
    weights = (logits - maxima).exp()
    outputs = torch.einsum("nq...,n...d->q...d", weights, value)
    return Phase1(outputs, maxima, weights.sum(0), logits, inverse_norms, sources[0].new_empty(0))


def _mix_of_all(finished: Tensor, sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Mixes with one softmax over all sources: the finished ones have the sum of their weights together."""
    num_finished = len(weights) - len(sources)
    mix = finished * weights[:num_finished].sum(0)[..., None]
    if sources:
        mix = mix + (weights[num_finished:, ..., None] * torch.stack(tuple(sources))).sum(0)
    return mix


def _finished(
    mix: Tensor, dtype: torch.dtype, output_gain: Tensor | None, output_eps: float | None
) -> Tensor:
    """Normalises a mix where a gain is given, and casts it."""
    if output_gain is not None and output_eps is not None:
        with without_autocast(mix.device.type):
            mix = mix * inverse_rms(mix, output_eps)[..., None] * output_gain.to(mix.dtype)
    return mix.to(dtype)
