"""The tap that keeps the routing of a forward pass."""

import platform
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attention_residuals.configs import encode
from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError, TapError
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import ExpertChoice, Pass, Read, Write
from attention_residuals.models import LanguageModel
from attention_residuals.trace.reads import kept, kept_norms, kept_read, real_of
from attention_residuals.trace.site import SiteTrace
from attention_residuals.trace.texts import special_tokens
from attention_residuals.trace.trace import Trace
from attention_residuals.version import __version__

__all__ = ["Keep", "Recorder"]

Keep = Literal["routing", "values"]
"""What a trace holds: weights, scores and lengths, or also every vector that was mixed or written."""


class Recorder:
    """A tap that keeps what every site reads, and changes no bit of the result.

    One recorder is for one forward pass. Kept tensors are detached copies on the CPU.

    Args:
        keep: ``"routing"``: numbers for each source and token. ``"values"``: what is mixed and what is written,
            too, which takes D times the memory and which exact decompositions need.

    Example:
        >>> from attention_residuals.models import Decoder, presets
        >>> model, recorder = Decoder(presets.scaled(2, vocab_size=300)), Recorder()
        >>> _ = model(torch.tensor([[5, 6, 7]]), tap=recorder)
        >>> recorder.trace(model)["L1.mlp"].source_names
        ('embedding', 'L0.attention', 'L0.mlp', 'L1.attention')
    """

    def __init__(self, keep: Keep = "routing") -> None:
        if keep not in ("routing", "values"):
            raise ConfigError(
                got=f"keep={keep!r}", expected="'routing' or 'values'", do="'routing' is the default"
            )
        self._values = keep == "values"
        self._run: Pass | None = None
        self._real: Tensor | None = None
        self._sites: list[SiteTrace] = []
        self._norms: dict[str, Tensor] = {}
        self._writes: dict[str, Tensor] = {}
        self._experts: dict[str, Tensor] = {}

    def begin(self, run: Pass) -> None:
        """Notes what the pass runs on.

        Raises:
            TapError: The recorder has seen a pass already.
        """
        if self._run is not None:
            raise TapError(
                got="a second forward pass", expected="one pass for each Recorder", do="make another Recorder"
            )
        self._run, self._real = run, real_of(run)

    def read(self, read: Read) -> Read:
        """Keeps weights, logits, the lengths of sources and contributions, and who wrote what.

        Raises:
            NonFiniteError: NaN or infinity at a real token.
        """
        self._sites.append(kept_read(read, self._real, values=self._values))
        return read

    def write(self, write: Write) -> Write:
        """Keeps the length of an output, and where it was asked for the output.

        Raises:
            NonFiniteError: NaN or infinity at a real token.
        """
        self._norms[write.writer] = kept_norms(write, self._real)
        if self._values:
            self._writes[write.writer] = kept(write.output)
        return write

    def choose(self, choice: ExpertChoice) -> None:
        """Keeps which experts each token is sent to."""
        self._experts[choice.writer] = kept(choice.chosen).to(torch.int16)

    def next_read(self, rule: ResidualRule[Any]) -> str:
        """Names the read that comes after those that were recorded."""
        names = [f"{site} ({part})" for site in rule.sites() for part in rule.parts(site)]
        return names[min(len(self._sites), len(names) - 1)]

    def trace(self, model: nn.Module, *, tokenizer: Tokenizer | None = None) -> Trace:
        """Returns what was recorded.

        Args:
            model: The model that ran, with its residual rule as ``model.residual``.
            tokenizer: Turns the tokens into texts, and knows special ones.

        Raises:
            TapError: Nothing was recorded, or not all that was written.
        """
        if self._run is None or not self._sites:
            raise TapError(
                got="no forward pass",
                expected="one that began with tap.begin and has read something",
                do="run model(tokens, tap=recorder); a model of your own calls tap.begin(Pass(...)) first",
            )
        writers = self._sites[-1].writers
        if unseen := [writer for writer in writers if writer not in self._norms]:
            raise TapError(
                got=f"reads of what {unseen[0]} wrote, which the recorder was not offered",
                expected="the same tap at every read and write of a pass",
                do="pass it to open and write of the residual rule, too",
            )
        rule = model.residual
        assert isinstance(rule, ResidualRule)
        tokens, parameter = kept(self._run.tokens), next(model.parameters())
        texts = () if tokenizer is None else tuple(tuple(tokenizer.tokens(row)) for row in tokens.tolist())
        return Trace(
            sites=tuple(self._sites),
            tokens=tokens,
            positions=kept(self._run.positions),
            mask=self._real,
            special=None if tokenizer is None else special_tokens(tokens, tokenizer),
            token_texts=texts,
            writer_norms=torch.stack([self._norms[writer] for writer in writers]),
            writes=torch.stack([self._writes[writer] for writer in writers]) if self._values else None,
            width=rule.width,
            kinds=model.sublayer_kinds if isinstance(model, LanguageModel) else {},
            experts=dict(self._experts),
            num_experts={writer: model.routers[writer].num_experts for writer in self._experts}
            if isinstance(model, LanguageModel)
            else {},
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
