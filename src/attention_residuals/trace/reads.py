"""What is kept of a read and of a write: copies on the CPU, and numbers that need the vectors to compute."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_residuals.errors import NonFiniteError
from attention_residuals.layers.tap import Pass, Read, Write
from attention_residuals.ops.depth_read import compute_dtype
from attention_residuals.trace.site import SiteTrace

__all__ = ["contribution", "kept", "kept_norms", "kept_read", "real_of"]


def kept(tensor: Tensor) -> Tensor:
    """Returns a detached copy on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def real_of(run: Pass | None) -> Bool[Tensor, "B T"] | None:
    """Returns the pass's mask of real tokens, cached ones left out; None where it has none."""
    if run is None or run.mask is None or run.mask.ndim != 2:
        return None
    return kept(run.mask[:, -run.tokens.shape[1] :])


def contribution(weights: Float[Tensor, "*SBTH"], value: Float[Tensor, "*SBT D"]) -> Float[Tensor, "*SBT D"]:
    """Multiplies values by their weights, group of channels by group where they have weights apart.

    Example:
        >>> contribution(torch.tensor([[[1.0, 2.0]]]), torch.ones(1, 1, 4))
        tensor([[[1., 1., 2., 2.]]])
    """
    if weights.ndim < value.ndim:
        return weights[..., None] * value
    groups: Tensor = weights[..., None] * value.unflatten(-1, (weights.shape[-1], -1))
    return groups.flatten(-2)


def kept_read(read: Read, real: Bool[Tensor, "B T"] | None, *, values: bool) -> SiteTrace:
    """Keeps what a site reads, with how long each contribution is and how much of it lies along the state.

    Args:
        read: As it is used.
        real: Tokens that must be finite; all by default.
        values: Keep what is mixed, too.

    Raises:
        NonFiniteError: NaN or infinity at a real token.
    """
    with torch.no_grad():
        dtype = compute_dtype(read.values[0].dtype)
        weights = read.weights.to(dtype)
        # One source at a time, so that no more than two vectors a token are made.
        state = contribution(weights[0], read.values[0])
        for weight, value in zip(weights[1:], read.values[1:], strict=True):
            state = state + contribution(weight, value)
        norms, projections = [], []
        for weight, value in zip(weights, read.values, strict=True):
            part = contribution(weight, value)
            norms.append(part.norm(dim=-1))
            projections.append((part * state).sum(-1))
        state_norms = state.norm(dim=-1)
        site = SiteTrace(
            site=str(read.site),
            part=read.part,
            source_names=read.source_names,
            same_as=_same_as(read.values),
            weights=kept(read.weights),
            logits=None if read.logits is None else kept(read.logits),
            inverse_norms=None if read.inverse_norms is None else kept(read.inverse_norms),
            source_norms=kept(torch.stack([source.to(dtype).norm(dim=-1) for source in read.sources])),
            contribution_norms=kept(torch.stack(norms)),
            projections=kept(torch.stack(projections) / state_norms.square()),
            state_norms=kept(state_norms),
            writers=read.writers,
            membership=kept(read.membership),
            values=kept(torch.stack(read.values)) if values else None,
        )
    _require_finite(site.state_norms + site.token_weights.sum(0), real, f"the read at {site.name}")
    return site


def kept_norms(write: Write, real: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T"]:
    """Keeps the length of what a writer wrote.

    Raises:
        NonFiniteError: NaN or infinity at a real token.
    """
    output = write.output.detach()
    norms = kept(output.to(compute_dtype(output.dtype)).norm(dim=-1))
    _require_finite(norms, real, f"what {write.writer} wrote")
    return norms


def _require_finite(numbers: Float[Tensor, "B T"], real: Bool[Tensor, "B T"] | None, where: str) -> None:
    numbers = numbers.flatten() if real is None else numbers[real]
    count = int((~numbers.isfinite()).sum())
    if count:
        raise NonFiniteError(
            got=f"NaN, infinity or numbers near the end of their range in {where}, "
            f"at {count} of {numbers.numel()} tokens",
            expected="finite activations",
            do="look at what that sublayer reads and at its weights; nothing before it was like that",
        )


def _same_as(values: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Numbers for each value the first one that holds the same numbers."""
    # A few numbers of the last token tell nearly all apart; only those that agree are compared.
    samples = torch.stack([value.detach()[-1, -1, :8] for value in values]).tolist()
    firsts: list[int] = []
    for number, value in enumerate(values):
        equal = (
            first
            for first in sorted(set(firsts))
            if samples[first] == samples[number] and torch.equal(values[first], value)
        )
        firsts.append(next(equal, number))
    return tuple(firsts)
