"""The residual state in the place of the hidden states that a Transformers model passes on.

A pre-norm layer does three things with the residual stream: it hands it to norms, adds to it and returns it.
``Stream`` answers these by reading, writing and handing the state on, so that the model's own forward passes
run around another residual rule without a line of them being written again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm

from attention_residuals.errors import ConversionError
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Site, Tap

__all__ = ["Depth", "Stream", "opened_by", "read_by"]


class Depth:
    """What all streams of a model share.

    Args:
        owner: Has the residual rule, or what stands in for one, as ``attention_residuals``.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._running: tuple[Any, Tap | None] = (None, None)

    @property
    def rule(self) -> Any:
        """How sites read; PEFT may have put a copy that trains in the rule's place."""
        rule = self.owner.attention_residuals
        if "modules_to_save" not in getattr(rule, "_modules", {}):
            return rule
        active = next((name for name in rule.active_adapters if name in rule.modules_to_save), None)
        is_off = active is None or rule.disable_adapters
        return rule.original_module if is_off else rule.modules_to_save[active]

    def open(self, embedding: Tensor) -> "Stream":
        """Starts the state of a pass with what the model has made of its tokens."""
        other, tap = self._running
        rule = self.rule if other is None else other
        return Stream(rule, rule.open(embedding, tap), embedding, tap)

    @contextmanager
    def running(self, rule: ResidualRule[Any] | None, tap: Tap | None) -> Iterator[None]:
        """Lets the passes inside run under a tap, and by another schedule of the rule if one is given."""
        before = self._running
        self._running = (rule, tap)
        try:
            yield
        finally:
            self._running = before


class Stream:
    """A residual state that a layer may norm, add to and return, and do nothing else with.

    A stream is never changed by what it is asked, so that a checkpointed layer can be run again on it.
    """

    def __init__(self, rule: Any, state: Any, like: Tensor, tap: Tap | None) -> None:
        self.rule, self.state, self.tap = rule, state, tap
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self._like = like
        self._read: tuple[Site | str, Any] | None = None

    def read(self, site: Site | str, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the normalised input of a site."""
        inputs, state = self.rule.read(self.state, site, norm, self.tap)
        # Kept beside the state: a layer that is run again reads the state that it read before.
        self._read = (site, state)
        only: Tensor = inputs[0]
        return only

    def __add__(self, output: Tensor) -> "Stream":
        return self._written(output)

    __radd__ = __add__

    def _written(self, output: Tensor) -> "Stream":
        if self._read is None:
            _refuse("a residual stream that is written to twice after one read (parallel sublayers)")
        site, state = self._read
        return Stream(self.rule, self.rule.write(state, site, output, self.tap), self._like, self.tap)

    def size(self, dim: int | None = None) -> Any:
        """Returns the shape, as of the tensor in whose place this stands."""
        return self.shape if dim is None else self.shape[dim]

    def mixed(self, site: Site) -> Tensor:
        """Returns what a site would read, before its norm; no tap sees it."""
        inputs, _ = self.rule.read(self.state, site, _itself)
        mixed: Tensor = inputs[0]
        return mixed

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Adds, and refuses every other function of tensors."""
        if function in (torch.add, Tensor.add, Tensor.__add__) and not kwargs and len(args) == 2:
            stream, output = args if isinstance(args[0], Stream) else reversed(args)
            return stream._written(output)  # not +, which torch.compile would send here again
        return _refuse(f"{getattr(function, '__name__', function)} of the residual stream")

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name) and not name.startswith("_"):
            _refuse(f"{name} of the residual stream")
        raise AttributeError(name)


class OwnNorm:
    """A norm of a model as it was before it read a stream, for a depth read to run or to fold into itself.

    Args:
        own: Its class.
        norm: The module.
    """

    def __init__(self, own: Any, norm: nn.Module) -> None:
        self.own, self.norm = own, norm

    def __call__(self, mixed: Tensor) -> Tensor:
        """Runs it."""
        normalised: Tensor = self.own.forward(self.norm, mixed)
        return normalised

    def folded(self) -> tuple[Tensor, float] | None:
        """Returns gain and eps where it is Kimi Linear's, in float32: others may differ in a detail."""
        weight = getattr(self.norm, "weight", None)
        if self.own is not KimiLinearRMSNorm or "forward" in self.norm.__dict__:
            return None
        assert isinstance(weight, Tensor)
        eps: Any = self.norm.variance_epsilon
        return (weight, float(eps)) if weight.dtype == torch.float32 else None


def read_by(norm: nn.Module, site: Site | str) -> None:
    """Makes a norm read a site where it is given a stream; tensors it norms as before."""
    own: Any = type(norm)
    norm.__class__ = _reading(own)
    norm.__dict__["depth_site"] = site


def opened_by(layer: nn.Module, depth: Depth) -> None:
    """Makes a model's first layer start the stream."""
    own: Any = type(layer)
    layer.__class__ = _opening(own)
    layer.__dict__["depth"] = depth


@cache
def _reading(own: Any) -> Any:
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(hidden_states, Stream):
            return hidden_states.read(self.depth_site, OwnNorm(own, self))
        return own.forward(self, hidden_states, *args, **kwargs)

    return _extended(own, forward)


@cache
def _opening(own: Any) -> Any:
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return own.forward(self, self.depth.open(hidden_states), *args, **kwargs)

    return _extended(own, forward)


def _extended(own: Any, forward: Callable[..., Any]) -> Any:
    """Makes a subclass under the same name, since some code of Transformers goes by names of classes."""
    return type(own.__name__, (own,), {"forward": wraps(own.forward)(forward), "__module__": own.__module__})


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _refuse(what: str) -> NoReturn:
    raise ConversionError(
        got=what,
        expected="a pre-norm model, whose layers only norm the stream and add to it",
        do="convert a model whose residual connections are plain additions around pre-norm sublayers",
    )
