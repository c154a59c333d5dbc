"""The trainer's passes on several ranks: copies, shards, split matrices and pipelines."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from attention_residuals.configs import encode
from attention_residuals.data import Batch
from attention_residuals.models import Decoder, LanguageModel
from attention_residuals.parallel.launch import Ranks
from attention_residuals.parallel.muon import GatheringMuon
from attention_residuals.parallel.pipeline import Pipeline
from attention_residuals.parallel.plan import even_layers
from attention_residuals.parallel.sharding import own_outputs, shard, split_matrices
from attention_residuals.parallel.shards import Saving, begin_saving, load_parts, wait_for
from attention_residuals.parallel.stages import DecoderStage
from attention_residuals.train.checkpoint import position
from attention_residuals.train.config import TrainConfig
from attention_residuals.train.evaluation import document_mask, summed_nats, total_nats
from attention_residuals.train.execution import Executes, Execution
from attention_residuals.train.metrics import Extent
from attention_residuals.train.optimizer import Optimizer, by_layout
from attention_residuals.train.run_folder import RANKS

__all__ = ["OnRanks", "Spread", "Staged", "executes"]


def executes(ranks: Ranks) -> Executes:
    """Makes what ``train`` needs to run on several ranks, each of which calls it.

    Raises:
        ConfigError: When it is called, for a config that cannot be spread so.
    """

    def execution(model: LanguageModel, config: TrainConfig, device: str) -> Execution:
        ranks.parallel.check(config)
        ranks.agree({"train": encode(config)})  # before anything of the model is spread
        kind = Staged if ranks.parallel.pipeline > 1 else Spread
        return kind(model, config, device, ranks)

    return execution


class OnRanks(Execution):
    """What all ways of training on several ranks have in common.

    Args:
        model: The whole model, the same on every rank.
        config: How to train it.
        device: Of this rank.
        ranks: All of them.
    """

    muon = GatheringMuon

    def __init__(self, model: LanguageModel, config: TrainConfig, device: str, ranks: Ranks) -> None:
        self.model, self.config, self.ranks = model, config, ranks
        self.is_lead = ranks.is_lead
        self._saving: Saving | None = None

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns what this rank has of the model's state, by its names in the whole."""

    def parts(self, batch: Batch) -> list[Batch]:
        """Cuts this rank's share of a batch into what it takes at once."""
        size = len(batch.tokens_BT) // self.ranks.parallel.num_data
        first = self.ranks.data_place * size
        return batch.rows(slice(first, first + size)).split(self.ranks.parallel.per_pass(self.config))

    def own_rows(self, batch: Batch) -> Batch:
        """Takes this rank's sequences of a batch of any size, which may be none."""
        return batch.rows(slice(self.ranks.data_place, None, self.ranks.parallel.num_data))

    def gradient_norm(self, parameters: list[Tensor]) -> Tensor:
        """Adds up squares over shards and stages, each number once."""
        total = torch.zeros((), dtype=torch.float64)
        for alike in by_layout(parameters):
            norm = nn.utils.get_total_norm([p.grad for p in alike if p.grad is not None])
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
            total += whole.double().cpu() ** 2
        return total.sqrt()

    def begin(self, step: int) -> None:
        """Notes the step where the other ranks can read it."""
        self.ranks.begin(step)

    def agree(self, what: dict[str, Any]) -> None:
        """Compares it over the store."""
        self.ranks.agree(what)

    def any(self, flag: bool) -> bool:
        """Asks all ranks, which wait for one another here."""
        return self.ranks.sum(float(flag)) > 0

    def describe(self) -> dict[str, Any]:
        """Names the numbers of ranks."""
        parallel = self.ranks.parallel
        counts = {name: getattr(parallel, name) for name in ("replicate", "shard", "pipeline", "tensor")}
        return {RANKS: counts}

    def save(
        self,
        folder: Path,
        *,
        step: int,
        optimizer: Optimizer,
        config: TrainConfig,
        metrics: Extent,
        keep: int,
    ) -> None:
        """Begins to write a checkpoint, once the one before is there; training goes on meanwhile."""
        self.settle()
        self._saving = begin_saving(
            folder,
            {**self.tensors(), **optimizer.tensors()},
            step=step,
            config=config,
            metrics=metrics,
            keep=keep,
            group=self.ranks.background,
        )

    def settle(self) -> None:
        """Waits until the last checkpoint is written."""
        if self._saving is not None:
            wait_for(self._saving)
            self._saving = None

    def abandon(self) -> None:
        """Waits for what is still being written in the background."""
        if self._saving is not None:
            wait([self._saving.done])

    def restore(self, checkpoint: Path, optimizer: Optimizer) -> tuple[int, Extent]:
        """Reads this rank's part of a checkpoint, of whole files or of any number of parts."""
        load_parts(checkpoint, self.tensors(), optimizer)
        return position(checkpoint)


class Spread(OnRanks):
    """Every rank runs all layers: on its share of the batch, with its share of the weights, or both.

    Args:
        model: As for ``OnRanks``.
        config: As for ``OnRanks``.
        device: As for ``OnRanks``.
        ranks: As for ``OnRanks``.
    """

    def __init__(self, model: LanguageModel, config: TrainConfig, device: str, ranks: Ranks) -> None:
        super().__init__(model.to(device), config, device, ranks)
        parallel = ranks.parallel
        self.forward: Callable[..., Tensor] = model
        self.copies: DistributedDataParallel | None = None
        if isinstance(model, Decoder) and parallel.tensor > 1:
            split_matrices(model.layers, ranks.mesh["tensor"])
        if parallel.shard * parallel.tensor > 1:
            assert isinstance(model, Decoder)
            if parallel.num_data > 1:
                shard(model, model.layers, ranks.data_mesh, config.precision)
        elif parallel.replicate > 1:
            self.forward = self.copies = DistributedDataParallel(model)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parts."""
        yield from self.model.named_parameters()

    def tensors(self) -> dict[str, Tensor]:
        """Returns this rank's parts."""
        return dict(self.model.state_dict())

    def backward(self, batch: Batch) -> float:
        """Runs this rank's share; gradients are added up over all shares."""
        nats, num_tokens, parts = 0.0, max(1, batch.num_scored), self.parts(batch)
        # DDP averages over its copies, and what is wanted is the sum.
        scale = num_tokens / (1 if self.copies is None else self.ranks.parallel.num_data)
        for part in parts:
            waits = self.copies is None or part is parts[-1]
            with nullcontext() if waits or self.copies is None else self.copies.no_sync():
                part_nats = self._nats(self.forward, part)
                (part_nats / scale).backward()
            nats += part_nats.item()
        return self._sum(nats)

    @torch.no_grad()
    def nats(self, batch: Batch) -> float:
        """Runs this rank's rows; where it has none it runs the batch all the same, for the sake of the others."""
        own = self.own_rows(batch)
        found = self._nats(self.model, own if len(own.tokens_BT) else batch).item()
        return self._sum(found if len(own.tokens_BT) else 0.0)

    def _nats(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        precision, cross = self.config.precision, self.config.cross_documents
        return total_nats(model, batch, precision=precision, cross_documents=cross)

    def _sum(self, nats: float) -> float:
        """Adds up over shares; ranks that split matrices have the same one."""
        return self.ranks.sum(nats if self.ranks.place("tensor") == 0 else 0.0)


class Staged(OnRanks):
    """Every rank runs some of the layers, on its pipeline's share of the batch.

    Args:
        model: As for ``OnRanks``; what ``cut`` takes.
        config: As for ``OnRanks``.
        device: As for ``OnRanks``.
        ranks: As for ``OnRanks``.
    """

    def __init__(self, model: LanguageModel, config: TrainConfig, device: str, ranks: Ranks) -> None:
        super().__init__(model, config, device, ranks)
        parallel = ranks.parallel
        self.group = ranks.mesh["pipeline"].get_group()
        self.pipeline = Pipeline(
            model,
            even_layers(model.config.num_layers, parallel.pipeline * parallel.stages_per_rank),
            num_microbatches=parallel.num_microbatches,
            schedule=parallel.schedule,
            precision=config.precision,
            loss=summed_nats,
            group=self.group,
            device=device,
        )
        if parallel.num_data > 1:
            for stage in self.pipeline.modules.values():
                assert isinstance(stage, DecoderStage)
                own_outputs(stage)
                shard(stage, stage.layers.values(), ranks.data_mesh, config.precision)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields those of this rank's stages."""
        yield from self.pipeline.named_parameters()

    def tensors(self) -> dict[str, Tensor]:
        """Returns those of this rank's stages."""
        return {k: v for stage in self.pipeline.modules.values() for k, v in stage.state_dict().items()}

    def backward(self, batch: Batch) -> float:
        """Sends this pipeline's share through it, as many sequences at once as ``per_pass`` says."""
        nats, size = 0.0, self.ranks.parallel.num_microbatches
        for part in self.parts(batch):
            self.pipeline.step_number = self.ranks.step
            # The pipeline takes its loss for a mean over microbatches; what is wanted is the sum.
            found = self.pipeline.step(
                part.tokens_BT,
                part.targets_BT,
                mask=self._mask(part),
                share=size / max(1, batch.num_scored),
            )
            nats += found * size
        return self.ranks.sum(nats if self.ranks.place("pipeline") == 0 else 0.0)

    @torch.no_grad()
    def nats(self, batch: Batch) -> float:
        """Sends this pipeline's rows through it, and some others to fill the microbatches."""
        own, size = self.own_rows(batch), self.ranks.parallel.num_microbatches
        number = len(own.tokens_BT)
        # The same for every pipeline, whatever its rows: their shards are gathered together.
        fill = -(-len(batch.tokens_BT) // self.ranks.parallel.num_data)
        filled = -(-fill // size) * size
        rows = torch.arange(filled) % len(batch.tokens_BT)
        rows[:number] = torch.arange(len(batch.tokens_BT))[
            self.ranks.data_place :: self.ranks.parallel.num_data
        ]
        given = Batch(*(whole[rows.to(whole.device)] for whole in batch))
        self.pipeline.step_number = self.ranks.step
        logits = self.pipeline.logits(given.tokens_BT, mask=self._mask(given))
        nats = 0.0
        if logits is not None and number:
            nats = summed_nats(logits[:number], own.targets_BT).item()
        return self.ranks.sum(nats)

    def gradient_norm(self, parameters: list[Tensor]) -> Tensor:
        """Adds up over stages; a matrix that two of them have counts once."""
        is_first = self.pipeline.rank == self.pipeline.plan.layout.rank_of(0)
        twin = None if is_first else self.pipeline.tied_weight()
        counted = [parameter for parameter in parameters if parameter is not twin]
        total = super().gradient_norm(counted) ** 2
        dist.all_reduce(total, group=self.group)
        return total.sqrt()

    def _mask(self, batch: Batch) -> Tensor | None:
        return None if self.config.cross_documents else document_mask(batch.documents_BT)
