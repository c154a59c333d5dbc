"""Ways to compute the mix of sources: ours, and other packages' where they are installed."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attention_residuals.ops import BACKENDS, depth_attention

__all__ = ["Arm", "op_arms"]

Mix = Callable[[list[Tensor], Tensor, Tensor], Tensor]


class Arm(NamedTuple):
    """One way to compute the mix; ``run`` is None where it is missing, and ``note`` says why."""

    run: Mix | None
    kind: str  # "ours", "eager peer", "compiled peer", "stacked", "other mathematics"
    note: str = ""


def op_arms(width: int) -> dict[str, Arm]:
    """Lists all arms; those with other mathematics are marked and not checked for agreement."""

    def stacked(sources: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
        return BACKENDS["reference"].run(sources, query, gain, eps=1e-6).mix

    def plain(sources: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
        value = torch.stack(sources)
        key = torch.nn.functional.rms_norm(value, (value.shape[-1],), gain.to(value.dtype), 1e-6)
        weights = torch.einsum("d,s...d->s...", query.to(value.dtype), key).softmax(0)
        return torch.einsum("s...,s...d->...d", weights, value)

    arms = {
        "attention-residuals, auto": Arm(lambda s, q, g: depth_attention(s, q, g, eps=1e-6).mix, "ours"),
        "attention-residuals, eager": Arm(
            lambda s, q, g: BACKENDS["eager"].run(s, q, g, eps=1e-6).mix, "ours"
        ),
        "stacked reference": Arm(stacked, "stacked"),
        "stack, rms_norm, einsum": Arm(plain, "stacked"),
        "stack, rms_norm, einsum; compiled": Arm(torch.compile(plain, dynamic=False), "compiled peer"),
    }
    naive = _file_of("fla-core", "fla/ops/attnres/naive.py")
    for name, kind, wrap in (
        ("FLA naive", "eager peer", None),
        ("FLA naive; compiled", "compiled peer", torch.compile),
    ):
        run = None if naive is None else naive.naive_attnres
        run = run if run is None or wrap is None else wrap(run, dynamic=False)
        arms[name] = Arm(
            None if run is None else (lambda s, q, g, f=run: f(q, s, g)), kind, "" if run else "not installed"
        )
    arms["fast-attnres 1.0.0 reference"] = _guarded("eager peer", _fast_attnres)
    arms["attn-res"] = _guarded("eager peer", lambda: _attn_res(width))
    arms["x-transformers"] = _guarded("other mathematics", lambda: _x_transformers(width))
    arms["Inkling2 (transformers)"] = _guarded("other mathematics", lambda: _inkling2(width))
    return arms


def _guarded(kind: str, make: Callable[[], Mix]) -> Arm:
    try:
        return Arm(make(), kind)
    except (ImportError, AssertionError, AttributeError) as error:
        return Arm(None, kind, f"{type(error).__name__}: {error}")


def _file_of(distribution: str, path: str) -> object | None:
    """Loads one file of a package that needs a GPU to be imported whole."""
    try:
        located = importlib.metadata.distribution(distribution).locate_file(path)
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), str(located))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fast_attnres() -> Mix:
    from attnres import reference_attnres

    return lambda sources, query, gain: reference_attnres(torch.stack(sources), query, eps=1e-6)


def _attn_res(width: int) -> Mix:
    from attn_res.main import AttnResOperator

    operator = AttnResOperator(width)

    def run(sources: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
        stacked = torch.stack(sources).unsqueeze(1)
        parameters = {"pseudo_query": query.to(stacked.dtype)}
        return torch.func.functional_call(operator, parameters, (stacked,)).squeeze(0)

    return run


def _x_transformers(width: int) -> Mix:
    from x_transformers.x_transformers import AttentionResidual

    module = AttentionResidual(width)
    return lambda sources, query, gain: module([source.unsqueeze(0).float() for source in sources]).squeeze(0)


def _inkling2(width: int) -> Mix:
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
    from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

    config = Inkling2TextConfig(hidden_size=width)
    config._attn_implementation = "eager"
    module = Inkling2BlockAttentionResidual(config)

    def run(sources: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
        stacked = torch.stack(sources[:-1], dim=-2).unsqueeze(0)
        return torch.func.functional_call(module, {"query": query}, (stacked, sources[-1].unsqueeze(0)))[
            0
        ].squeeze(0)

    return run
