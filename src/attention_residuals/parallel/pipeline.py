"""A model that is trained in stages on the ranks of a group."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn import functional as F

from attention_residuals.configs import encode
from attention_residuals.data.batches import UNSCORED
from attention_residuals.errors import ConfigError, ShapeError, is_finite
from attention_residuals.models import LanguageModel
from attention_residuals.models.language_model import checked_positions
from attention_residuals.parallel.exchange import ExchangeStage, check_torch
from attention_residuals.parallel.forward import run_forward
from attention_residuals.parallel.plan import Transport, plan
from attention_residuals.parallel.ranks import add_up_gradients, agreeing, fingerprint
from attention_residuals.parallel.schedules import schedule_named
from attention_residuals.parallel.stages import Stage, cut, dtype_of_pieces, layout_of
from attention_residuals.parallel.store import Store
from attention_residuals.parallel.watch import Watch

__all__ = ["Pipeline", "mean_loss"]


def mean_loss(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Returns the mean cross-entropy in nats per token.

    Example:
        >>> mean_loss(torch.zeros(1, 3, 8), torch.tensor([[0, 1, 2]]))  # ln 8
        tensor(2.0794)
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(dtype), targets.flatten())


class Pipeline:
    """A model in stages, one part of it on each rank of a group; every rank makes one and calls ``step``.

    Every rank is given the same model and the same batches, of which all ranks make sure before they wait for
    one another; a rank keeps the parameters of its own stages.

    Args:
        model: The whole model, the same on every rank: what ``cut`` takes.
        layers: How many layers each stage has; ``even_layers`` spreads them.
        num_microbatches: M, into which a batch is cut; by default as many as stages.
        schedule: One of ``SCHEDULES``.
        transport: ``"cached"`` sends what the next rank lacks; the others are there to compare with.
        precision: ``"bfloat16"`` runs matrix products under autocast; weights stay as they are, and what is
            sent has the dtype of the rule's sources (``source_dtype``).
        loss: Mean loss of logits and targets.
        group: The ranks; by default all.
        device: Of this rank.

    Raises:
        ConfigError: The stages fit neither the model nor the ranks nor the schedule.
        BackendError: A PyTorch that this was not tested with.
        RankError: Ranks were given different models or options, or another rank refused its own.
    """

    def __init__(
        self,
        model: LanguageModel,
        layers: Sequence[int],
        *,
        num_microbatches: int | None = None,
        schedule: str = "1F1B",
        transport: Transport = "cached",
        precision: Literal["float32", "bfloat16"] = "float32",
        loss: Callable[[Tensor, Tensor], Tensor] = mean_loss,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.group, self.device, self.config = group, torch.device(device), model.config
        self.rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_microbatches = len(layers) if num_microbatches is None else num_microbatches
        self.precision, self.loss, self.store = precision, loss, Store()
        self.step_number = 0
        """Of what comes next, for messages; whoever takes several passes for a step sets it before each."""
        self.bytes_sent = Counter[str]()
        self.watch = Watch(group)
        self._stages: list[ExchangeStage] = []
        self._made_for: tuple[int, int, bool] | None = None
        self._runner: Any = None
        with self._together(), agreeing("started with", group, self.device) as told:
            check_torch()
            self.schedule = schedule_named(schedule)
            layout = layout_of(model, layers, num_ranks=num_ranks, placement=self.schedule.placement)
            self.schedule.check(layout.stages_per_rank, num_ranks, self.num_microbatches)
            self.plan = plan(layout, transport)
            told |= {"model": encode(model.config), "layers": list(layers), "transport": transport}
            told |= {"schedule": schedule, "num_microbatches": self.num_microbatches, "precision": precision}
            told["fingerprint of the weights"] = fingerprint(model.state_dict().values())
        modules = cut(model, layers)
        self.modules: dict[int, Stage] = {
            stage.stage: modules[stage.stage].to(self.device) for stage in self.plan.stages_of(self.rank)
        }
        self.is_tied = modules[0].is_tied
        self.dtype = dtype_of_pieces(model)

    def step(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        *,
        positions: Int[Tensor, "B T"] | None = None,
        mask: Bool[Tensor, "B U"] | Bool[Tensor, "B T U"] | None = None,
        share: float = 1.0,
    ) -> float:
        """Adds the gradients of a batch's mean loss to ``.grad`` of this rank's parameters.

        A batch of another shape rebuilds the stages' buffers. After an error gradients are of no use.

        Args:
            tokens: The whole batch, on every rank.
            targets: The tokens to predict.
            positions: As for the whole model.
            mask: As for the whole model.
            share: Of this batch in one that is accumulated over several steps, above 0; 1 if it is all of it.

        Returns:
            The mean loss of this batch, on every rank.

        Raises:
            ShapeError: The batch cannot be cut into the microbatches.
            ConfigError: The share is not above 0, or a stage compiled that must not be.
            RankError: Another rank died, hangs, failed, or was given another batch.
        """
        with self._together():
            given = self._given(tokens, targets, positions, mask, share)
            self._build(tokens, with_backward=True)
            scale, losses = share / self.num_microbatches, list[Tensor]()

            def loss(logits: Tensor, expected: Tensor) -> Tensor:
                with self.watch.doing("in the loss of a microbatch"):
                    return self.loss(logits, expected) * scale

            self._runner._loss_fn = loss
            tied = self.tied_weight()
            before = None if tied is None else tied.grad
            if tied is not None:
                tied.grad = None
            self._runner.step(tokens, target=targets, losses=losses, return_outputs=False, **given)
            assert not len(self.store), f"{len(self.store)} pieces were left in the store"
            total = torch.zeros(1, dtype=torch.float64, device=self.device)
            if losses:
                total += torch.stack(losses).sum().detach()
            self._share(total, tied)
            if tied is not None and before is not None:
                assert tied.grad is not None
                tied.grad += before
            return total.item() / share

    @torch.no_grad()
    def logits(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        positions: Int[Tensor, "B T"] | None = None,
        mask: Bool[Tensor, "B U"] | Bool[Tensor, "B T U"] | None = None,
    ) -> Float[Tensor, "B T V"] | None:
        """Computes the logits of a batch, on the rank of the last stage; None on the others.

        Arguments and errors are those of ``step``.
        """
        with self._together():
            given = self._given(tokens, None, positions, mask, None)
            self._build(tokens, with_backward=False)
            found = run_forward(self._stages, self._runner, tokens, given, self.num_microbatches)
            assert not len(self.store), f"{len(self.store)} pieces were left in the store"
            return found

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of this rank's stages, once each, by their names in the whole model."""
        seen: set[nn.Parameter] = set()
        for module in self.modules.values():
            for name, parameter in module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def tied_weight(self) -> nn.Parameter | None:
        """Returns the matrix that another rank has too: the embedding of the first is the head of the last."""
        if not self.is_tied or len(self._ends()) == 1 or self.rank not in self._ends():
            return None
        own = (module.table() for module in self.modules.values())
        weight = next(table.weight for table in own if table is not None)
        assert isinstance(weight, nn.Parameter)
        return weight

    def _given(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        positions: Tensor | None,
        mask: Tensor | None,
        share: float | None,
    ) -> dict[str, Tensor]:
        """Checks a batch as the first stage would, on every rank; returns what all stages are given."""
        with agreeing("given", self.group, self.device) as told:
            checked_positions(self.config, tokens, positions, mask, 0, None)
            if share is not None and not (is_finite(share) and share > 0):
                raise ConfigError(got=f"share={share}", expected="above 0", do="give 1 for a whole batch")
            if targets is not None and targets.shape != tokens.shape:
                raise ShapeError(
                    got=f"targets of shape {list(targets.shape)}",
                    expected=f"{list(tokens.shape)}, one for each token",
                    do="shift the tokens by one: row[:, :-1] and row[:, 1:]",
                )
            if targets is not None and self.loss is mean_loss and (targets == UNSCORED).any():
                raise ShapeError(
                    got=f"targets that do not count ({UNSCORED}) under mean_loss",
                    expected="microbatches with the same number of targets that count",
                    do="pass loss=, a sum divided by the batch's number of targets that count, and a share",
                )
            if len(tokens) % self.num_microbatches:
                raise ShapeError(
                    got=f"a batch of {len(tokens)} sequences for {self.num_microbatches} microbatches",
                    expected="microbatches of the same size",
                    do=f"use a batch of {-(-len(tokens) // self.num_microbatches) * self.num_microbatches}",
                )
            if self.schedule.splits_backward and any(map(_is_compiled, self._submodules())):
                raise ConfigError(
                    got=f"a compiled stage under {self.schedule.name}",
                    expected="stages that are not compiled: PyTorch cannot split their backward",
                    do="use Interleaved1F1B, 1F1B, GPipe or LoopedBFS, or do not compile",
                )
            every = {"tokens": tokens, "targets": targets, "positions": positions, "mask": mask}
            there = {name: tensor for name, tensor in every.items() if tensor is not None}
            told |= {f"shape of {name}": list(tensor.shape) for name, tensor in there.items()}
            told |= {f"fingerprint of {name}": fingerprint([tensor]) for name, tensor in there.items()}
            told["share"] = share
        return {name: there[name] for name in ("positions", "mask") if name in there}

    def _submodules(self) -> Iterator[nn.Module]:
        for module in self.modules.values():
            yield from module.modules()

    def _build(self, tokens: Tensor, *, with_backward: bool) -> None:
        """Makes the stages' buffers for batches of a shape."""
        batch, length = tokens.shape
        if self._made_for == (batch, length, with_backward):
            return
        shape = (batch // self.num_microbatches, length)
        self._stages = [
            ExchangeStage(
                module,
                self.plan,
                number,
                self.store,
                self.bytes_sent,
                self.watch,
                shape=shape,
                dtype=self.dtype,
                device=self.device,
                autocast=self.precision == "bfloat16",
                group=self.group,
            )
            for number, module in self.modules.items()
        ]
        self._runner = self.schedule.torch_class(
            self._stages[0] if self.schedule.stages_per_rank == 1 else self._stages,
            self.num_microbatches,
            loss_fn=self.loss if with_backward else None,
            scale_grads=False,  # of a tied weight, which two stages may share, it would be done twice
        )
        self._made_for = (batch, length, with_backward)

    def _ends(self) -> set[int]:
        """Returns the ranks of the first and the last stage."""
        layout = self.plan.layout
        return {layout.rank_of(0), layout.rank_of(layout.num_stages - 1)}

    def _share(self, total: Tensor, tied: nn.Parameter | None) -> None:
        """Tells all ranks the loss, and adds up the gradients of a matrix that two ranks have."""
        dist.all_reduce(total, group=self.group)  # zero but on the last stage's rank
        if tied is not None:
            (peer,) = self._ends() - {self.rank}
            add_up_gradients(tied, peer, self.group, own_first=self.rank == self.plan.layout.rank_of(0))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Counts a step, of which the start is 0; when it fails, names who ended it and forgets what it left."""
        finished = False
        try:
            with self.watch.during(self.step_number):
                yield
            finished = True
        finally:
            self.step_number += 1
            if not finished:
                self.store.clear()
                self._made_for = None  # buffers may be half written


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or isinstance(module, OptimizedModule)
