"""What the two phases of a depth read return, and the checks that all their backends share."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import BackendError, ShapeError, nearest
from attention_residuals.ops.backends import BACKENDS
from attention_residuals.ops.depth_read import checked_sources, compute_dtype, refuse_transforms
from attention_residuals.ops.fused import is_plain

__all__ = ["Phase1", "Phase2", "checked_blocks", "checked_live", "chosen_for_phases"]

_BACKENDS = ("cpu", "eager", "reference")


class Phase1(NamedTuple):
    """What all sites of a block found in the finished sources, in float32 (float64 for float64 sources).

    ``outputs`` are sums of the sources weighted with exp(logit - maximum), ``denominators`` the sums of those
    weights. They stay in float32 where the sources are bfloat16: an output is half a result, and rounding it
    would round the mix twice. ``like`` is empty and has the sources' dtype, which is that of the mix.
    """

    outputs: Float[Tensor, "Q *BT D"]
    maxima: Float[Tensor, "Q *BT"]
    denominators: Float[Tensor, "Q *BT"]
    logits: Float[Tensor, "N Q *BT"]
    inverse_norms: Float[Tensor, "N *BT"]
    like: Float[Tensor, " 0"]


class Phase2(NamedTuple):
    """Logits and inverse norms of the live sources at one site."""

    logits: Float[Tensor, "S *BT"]
    inverse_norms: Float[Tensor, "S *BT"]


def checked_blocks(
    blocks: Sequence[Tensor],
    pseudo_queries: Tensor,
    key_gains: Tensor,
    eps: float,
    inverse_norms: Tensor | None,
) -> tuple[Tensor, ...]:
    """Returns the finished sources as a tuple, or raises.

    Raises:
        ShapeError: Queries and gains are not one row per site, inverse norms are not one number for each
            source and token, or the sources do not fit together.
    """
    if pseudo_queries.ndim != 2 or not len(pseudo_queries) or key_gains.shape != pseudo_queries.shape:
        raise ShapeError(
            got=f"pseudo_queries of shape {list(pseudo_queries.shape)}, key_gains of {list(key_gains.shape)}",
            expected="[Q, D] each, a row for each of at least one site",
            do="stack the vectors of the block's sites: torch.stack(...)",
        )
    sources = checked_sources(blocks, pseudo_queries[0], key_gains[0], None, None, eps, None)
    if inverse_norms is not None:
        per_token = sources[0].shape[:-1]
        if len(inverse_norms) > len(sources) or inverse_norms.shape[1:] != per_token:
            raise ShapeError(
                got=f"inverse_norms of shape {list(inverse_norms.shape)}",
                expected=f"at most {len(sources)} rows of shape {list(per_token)}, those of the first sources",
                do="pass the inverse_norms that phase 1 of an earlier block returned",
            )
    return sources


def checked_live(
    found: Phase1,
    site: int,
    live: Tensor | Sequence[Tensor] | None,
    pseudo_query: Tensor | None,
    key_gain: Tensor | None,
    output_gain: Tensor | None,
    eps: float,
    output_eps: float | None,
) -> tuple[Tensor, ...]:
    """Returns the live sources as a tuple, empty for None, or raises.

    Raises:
        ShapeError: There is no such site, the tensors of phase 1 do not fit together, or the live sources do
            not fit together or to phase 1.
    """
    _require_whole(found)
    if not 0 <= site < len(found.outputs):
        raise ShapeError(
            got=f"site number {site}",
            expected=f"0 to {len(found.outputs) - 1}, one of the sites that phase 1 handled",
            do="count the sites of a block from 0, and run phase 1 at the first of them",
        )
    sources, shape = (live,) if isinstance(live, Tensor) else tuple(live or ()), found.outputs.shape[1:]
    checked_sources(sources or found.outputs[:1], pseudo_query, key_gain, None, output_gain, eps, output_eps)
    if sources and (sources[0].shape != shape or sources[0].dtype != found.like.dtype):
        raise ShapeError(
            got=f"a live source that is {sources[0].dtype}{list(sources[0].shape)}",
            expected=f"{found.like.dtype}{list(shape)}, as the finished ones",
            do="write every source with the shape and dtype of the embedding",
        )
    return sources


def _require_whole(found: Phase1) -> None:
    """Raises if the tensors of a phase 1 are not of one piece, as ``phase_1`` makes them; kernels trust them."""
    outputs, maxima, denominators, logits, inverse_norms, like = found
    sites, dtype, device = maxima.shape, compute_dtype(like.dtype), like.device
    if not (
        sites
        and outputs.shape[:-1] == denominators.shape == logits.shape[1:] == sites
        and inverse_norms.shape == logits.shape[:1] + sites[1:]
        and outputs.dtype
        is maxima.dtype
        is denominators.dtype
        is logits.dtype
        is inverse_norms.dtype
        is dtype
        and outputs.device == maxima.device == denominators.device == logits.device == device
        and inverse_norms.device == device
    ):
        given = zip(Phase1._fields, found, strict=True)
        raise ShapeError(
            got="a Phase1 of "
            + ", ".join(f"{name} {tensor.dtype}{list(tensor.shape)}" for name, tensor in given),
            expected=f"the same sites, sources and tokens in all, in {dtype} on {device}",
            do="pass what phase_1 returned; cut or cast all of its tensors alike",
        )


def chosen_for_phases(name: str, source: Tensor, given: Sequence[Tensor | None]) -> str:
    """Returns the name of the backend that a call runs on; ``given`` are all its tensors.

    Raises:
        BackendError: There is none of that name, or it cannot do the call.
    """
    if name not in ("auto", *_BACKENDS):
        raise BackendError(
            got=f"backend={name!r}",
            expected=f"'auto', or one that reads in two phases: {', '.join(_BACKENDS)}",
            do=nearest(name, _BACKENDS),
        )
    if name == "reference":
        return name
    refuse_transforms(name)
    if name == "eager":
        return name
    reason = BACKENDS["cpu"].refusal(source, with_bias=False)
    if reason is None and not is_plain(source):
        reason = "it takes plain tensors, outside of compiled graphs"
    if reason is None and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        reason = "it has no backward pass, and a tensor that came requires a gradient"
    if reason is None:
        return "cpu"
    if name == "auto":
        return "eager"
    raise BackendError(
        got=f"backend='cpu' for {source.dtype} sources on {source.device.type}: {reason}",
        expected="a call that it can do",
        do="pass backend='auto', or call it under torch.no_grad()",
    )
