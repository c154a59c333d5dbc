"""Optimizers: which parameter is stepped how, and their state as named tensors."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.train.muon import StackedMuon

__all__ = ["AdamW", "Muon", "Optimizer", "by_layout", "kind_of", "local"]

TABLES = {
    "embedding",
    "head",
    "embed_tokens",
    "lm_head",
    "wte",
    "wpe",
    "embed_in",
    "embed_out",
    "word_embeddings",
}
"""What the tables of tokens are called, here and in Transformers."""


FUSED = ".gate_up_proj"
"""How the names end of experts in Transformers that hold two matrices in one."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW for every parameter, with weight decay on matrices only.

    Args:
        learning_rate: The schedule's peak, > 0.
        weight_decay: Per step and unit of learning rate, >= 0.
        beta1: Decay of the mean of gradients, 0 to below 1.
        beta2: Decay of the mean of their squares, 0 to below 1.
        eps: Added to the root of that mean, > 0.
        clip_norm: Largest global gradient norm, > 0; longer gradients are scaled down. None clips nothing.
        trains: ``"residual"`` steps the parameters of the residual rule alone, and leaves the others.

    Raises:
        ConfigError: A value out of range.

    Source:
        Loshchilov and Hutter, arXiv:1711.05101.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    trains: Literal["all", "residual"] = "all"

    def __post_init__(self) -> None:
        _check(self, "beta1", "beta2")
        if self.trains not in ("all", "residual"):
            raise ConfigError(
                got=f"trains={self.trains!r}", expected="'all' or 'residual'", do="all is usual"
            )


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon for the matrices of attention and MLP, AdamW for everything else.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate and one weight decay serve
    both.

    Args:
        learning_rate: The schedule's peak, > 0.
        weight_decay: Per step and unit of learning rate, >= 0; on matrices, the embedding and the head.
        momentum: Of Muon, 0 to below 1.
        beta1: Of AdamW, 0 to below 1.
        beta2: Of AdamW, 0 to below 1.
        eps: Of AdamW, > 0.
        clip_norm: Largest global gradient norm, > 0; longer gradients are scaled down. None clips nothing.

    Raises:
        ConfigError: A value out of range.

    Source:
        Liu et al. (Muon is Scalable for LLM Training), arXiv:2502.16982.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    trains: ClassVar[str] = "all"

    def __post_init__(self) -> None:
        _check(self, "momentum", "beta1", "beta2")


def kind_of(name: str, parameter: Tensor) -> Literal["matrix", "stack", "table", "vector"]:
    """Tells how a parameter of a model is stepped.

    Vectors (gains, pseudo-queries, whatever the residual rule learns) are never decayed and never given to
    Muon; tables (embedding, head, convolutions) are decayed, but not given to Muon; matrices, and stacks of
    the matrices of experts, are both.

    Example:
        >>> kind_of("layers.0.mlp.up.weight", torch.zeros(4, 2)), kind_of("norm.gain", torch.zeros(2))
        ('matrix', 'vector')
    """
    is_row = parameter.ndim > 2 and sum(size > 1 for size in parameter.shape) < 2
    if parameter.ndim < 2 or is_row or name.startswith("residual."):
        return "vector"
    if parameter.ndim == 3 and "experts" in name.split("."):
        return "stack"
    return "table" if TABLES.intersection(name.split(".")) or parameter.ndim > 2 else "matrix"


class Optimizer:
    """Steps every parameter of a model that requires a gradient.

    Args:
        named: The parameters by name, as a decoder's ``named_parameters`` gives them.
        config: AdamW or Muon.
        muon: What steps matrices; where they are spread over ranks it has to put them together.

    Example:
        >>> from attention_residuals.models import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> optimizer = Optimizer(model.named_parameters(), AdamW())
        >>> model(torch.tensor([[5, 6]])).sum().backward()
        >>> optimizer.step(1e-3)
        >>> [name for name in optimizer.tensors() if name.endswith("/norm.gain")]
        ['step/norm.gain', 'exp_avg/norm.gain', 'exp_avg_sq/norm.gain']
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        config: AdamW | Muon,
        muon: type[torch.optim.Muon] = torch.optim.Muon,
    ) -> None:
        self.named = {name: value for name, value in named if value.requires_grad}
        kinds: dict[str, list[Tensor]] = {"matrix": [], "stack": [], "table": [], "vector": []}
        for name, parameter in self.named.items():
            kinds[kind_of(name, parameter)].append(parameter)
        self.parts: list[torch.optim.Optimizer] = []
        if isinstance(config, Muon) and kinds["matrix"]:
            matrices = muon(
                kinds.pop("matrix"),
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            self.parts.append(matrices)
        if isinstance(config, Muon) and kinds["stack"]:
            fused = {id(value) for name, value in self.named.items() if self._is_gate_and_up(name, value)}
            stacks = [
                {"params": [stack], "rows": 2 if id(stack) in fused else 1} for stack in kinds.pop("stack")
            ]
            rate, decay = config.learning_rate, config.weight_decay
            self.parts.append(StackedMuon(stacks, lr=rate, weight_decay=decay, momentum=config.momentum))
        groups: list[dict[str, Any]] = [
            {"params": parameters, "weight_decay": 0.0 if kind == "vector" else config.weight_decay}
            for kind, alike in kinds.items()
            for parameters in by_layout(alike)
        ]
        betas = (config.beta1, config.beta2)
        adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)
        self.parts.append(adamw)

    @property
    def parameters(self) -> list[Tensor]:
        """What is stepped."""
        return list(self.named.values())

    def _is_gate_and_up(self, name: str, stack: Tensor) -> bool:
        """Whether each matrix of a stack is two, one above the other; some models put them side by side."""
        down = self.named.get(name.removesuffix(FUSED) + ".down_proj")
        return name.endswith(FUSED) and down is not None and stack.shape[2] == down.shape[1]

    def step(self, learning_rate: float) -> None:
        """Makes one step with the gradients that are there, and drops them."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            part.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Returns the whole state, each tensor by ``<what>/<parameter's name>``."""
        return {
            f"{what}/{name}": tensor
            for part, name in self._owners()
            for what, tensor in part.state.get(self.named[name], {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor], where: object) -> None:
        """Puts back what ``tensors`` gave.

        Raises:
            CheckpointError: State of a parameter that is not stepped here, or of another shape.
        """
        owners = {name: part for part, name in self._owners()}
        for key, tensor in tensors.items():
            what, _, name = key.partition("/")
            if name not in owners or (tensor.ndim and tensor.shape != self.named[name].shape):
                raise CheckpointError(
                    got=f"{where} with {key} of shape {list(tensor.shape)}",
                    expected="the state of this model's parameters",
                    do="go on with the config that the run began with",
                )
            parameter = self.named[name]
            owners[name].state[parameter][what] = tensor.to(parameter.device, copy=True)

    def _owners(self) -> Iterator[tuple[torch.optim.Optimizer, str]]:
        names = {id(parameter): name for name, parameter in self.named.items()}
        for part in self.parts:
            for group in part.param_groups:
                yield from ((part, names[id(parameter)]) for parameter in group["params"])


def by_layout(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups parameters that lie on the same ranks in the same way, since one operation cannot take others.

    Example:
        >>> [len(alike) for alike in by_layout([torch.zeros(1), torch.zeros(2)])]
        [2]
    """
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        # Asked for by name: only a DTensor has them, and importing that class takes seconds.
        mesh, placements = (getattr(parameter, name, None) for name in ("device_mesh", "placements"))
        groups.setdefault((mesh, placements), []).append(parameter)
    return list(groups.values())


def local(tensor: Tensor) -> Tensor:
    """Returns what lies in this process of a tensor that may be spread over ranks."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def _check(config: AdamW | Muon, *decays: str) -> None:
    wrong = [name for name in decays if not 0 <= getattr(config, name) < 1]
    wrong += [name for name in ("learning_rate", "eps") if not 0 < getattr(config, name) < math.inf]
    if not 0 <= config.weight_decay < math.inf:
        wrong.append("weight_decay")
    if config.clip_norm is not None and not config.clip_norm > 0:
        wrong.append("clip_norm")
    if wrong:
        raise ConfigError(
            got=", ".join(f"{name}={getattr(config, name)}" for name in wrong),
            expected=f"learning_rate, eps, clip_norm > 0, weight_decay >= 0, {', '.join(decays)} in [0, 1)",
            do=f"the defaults are {type(config)()}",
        )
