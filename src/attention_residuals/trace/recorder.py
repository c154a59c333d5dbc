"""Taps that look: the routing of a forward pass, and the gradients that reach each writer."""

import platform
from dataclasses import asdict

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from attention_residuals.configs import encode
from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import TapError
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Pass, Read, Write
from attention_residuals.models import LanguageModel
from attention_residuals.trace.trace import SiteTrace, Trace
from attention_residuals.version import __version__

__all__ = ["GradientRecorder", "Recorder", "record"]


class Recorder:
    """A tap that keeps what every site reads, and changes no bit of the result.

    One recorder is for one forward pass. Kept tensors are detached copies on the CPU.

    Example:
        >>> from attention_residuals.models import presets
        >>> model, recorder = Decoder(presets.scaled(2, vocab_size=300)), Recorder()
        >>> _ = model(torch.tensor([[5, 6, 7]]), tap=recorder)
        >>> recorder.trace(model)["L1.mlp"].source_names
        ('embedding', 'L0.attention', 'L0.mlp', 'L1.attention')
    """

    def __init__(self) -> None:
        self._run: Pass | None = None
        self._sites: list[SiteTrace] = []

    def begin(self, run: Pass) -> None:
        """Notes what the pass runs on.

        Raises:
            TapError: The recorder has seen a pass already.
        """
        if self._run is not None:
            raise TapError(
                got="a second forward pass", expected="one pass for each Recorder", do="make another Recorder"
            )
        self._run = run

    def read(self, read: Read) -> Read:
        """Keeps weights, logits, source norms and who wrote what."""
        norms = torch.stack([source.detach().float().norm(dim=-1) for source in read.sources])
        self._sites.append(
            SiteTrace(
                site=str(read.site),
                part=read.part,
                source_names=read.source_names,
                weights=_kept(read.weights),
                logits=None if read.logits is None else _kept(read.logits),
                source_norms=_kept(norms),
                writers=read.writers,
                membership=_kept(read.membership),
            )
        )
        return read

    def write(self, write: Write) -> Write:
        """Lets it pass."""
        return write

    def trace(self, model: nn.Module, *, tokenizer: Tokenizer | None = None) -> Trace:
        """Returns what was recorded.

        Args:
            model: The model that ran, with its residual rule as ``model.residual``.
            tokenizer: Turns the tokens into texts.

        Raises:
            TapError: Nothing was recorded.
        """
        if self._run is None or not self._sites:
            raise TapError(
                got="no forward pass",
                expected="one that began with tap.begin and has read something",
                do="run model(tokens, tap=recorder); a model of your own calls tap.begin(Pass(...)) first",
            )
        rule = model.residual
        assert isinstance(rule, ResidualRule)
        tokens, parameter = _kept(self._run.tokens), next(model.parameters())
        mask = self._run.mask
        texts = () if tokenizer is None else tuple(tuple(tokenizer.tokens(row)) for row in tokens.tolist())
        return Trace(
            sites=tuple(self._sites),
            tokens=tokens,
            positions=_kept(self._run.positions),
            mask=_kept(mask) if mask is not None and mask.ndim == 2 else None,
            token_texts=texts,
            width=rule.width,
            rule=encode(getattr(rule, "config", {"type": type(rule).__name__})),
            semantics=asdict(rule.semantics),
            about={
                "attention_residuals": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "dtype": str(parameter.dtype),
                "device": str(parameter.device),
            },
        )


def record(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    *,
    mask: Bool[Tensor, "B T"] | Bool[Tensor, "B T T"] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Trace:
    """Runs a model once, without gradients, and returns the trace.

    Args:
        model: Any decoder.
        tokens: What it reads.
        mask: As for the model; a mask of real tokens is kept in the trace, and averages leave the rest out.
        tokenizer: Turns the tokens into texts.

    Example:
        >>> from attention_residuals.models import presets
        >>> trace = record(Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]]))
        >>> trace["output"].weights[:, 0, 0]
        tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])
    """
    recorder = Recorder()
    with torch.no_grad():
        model(tokens, mask=mask, tap=recorder)
    return recorder.trace(model, tokenizer=tokenizer)


class GradientRecorder:
    """A tap that keeps the gradient of the loss with respect to every writer's output.

    Use it for one forward and one backward pass, then read ``magnitudes``.
    """

    def __init__(self) -> None:
        self._outputs: dict[str, Tensor] = {}

    def begin(self, run: Pass) -> None:
        """Starts anew."""
        self._outputs.clear()

    def read(self, read: Read) -> Read:
        """Lets it pass."""
        return read

    def write(self, write: Write) -> Write:
        """Asks autograd to keep this output's gradient."""
        write.output.retain_grad()
        self._outputs[write.writer] = write.output
        return write

    def magnitudes(self) -> dict[str, float]:
        """Returns, by writer, the root mean square over tokens and channels of the loss's gradient.

        Raises:
            TapError: There was no backward pass.
        """
        result = {}
        for writer, output in self._outputs.items():
            if output.grad is None:
                raise TapError(
                    got=f"no gradient at {writer}",
                    expected="a backward pass",
                    do="call loss.backward() first",
                )
            result[writer] = output.grad.float().square().mean().sqrt().item()
        return result


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
