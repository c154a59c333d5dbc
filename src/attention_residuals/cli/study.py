"""The command that runs a whole study."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol, Union, runtime_checkable

import torch
from tyro.conf import arg, subcommand

from attention_residuals.cli.app import INTERRUPTED, Device, command
from attention_residuals.cli.names import device_of
from attention_residuals.contradiction import Study, run_study, study_of
from attention_residuals.errors import ConfigError
from attention_residuals.experiments import STUDIES, Experiment, Results, Scale, run_experiment, write_report
from attention_residuals.experiments.cost import visible_hardware
from attention_residuals.experiments.launchers import Launcher, OneProcess, Torchrun
from attention_residuals.experiments.running import foreseen_cost, price
from attention_residuals.models.weights import read_json
from attention_residuals.parallel.config import Parallel

__all__ = ["COMMANDS", "Command", "Contradiction", "PaperStudy", "study_command"]


@runtime_checkable
class Command(Protocol):
    """What ``attnres study NAME`` does, with its options."""

    def run(self) -> int:
        """Does it, and returns the exit code."""
        ...


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """Does a model look back when a step contradicts an earlier one?

    It trains the models, runs a pilot that says how many items are needed, tests what was preregistered once that is
    committed, and writes report.html, claims.yaml, tables/ (CSV) and figures/ (PNG and SVG). Each call goes on where an
    earlier one stopped.

    For example:
      attnres study contradiction --stage train
      attnres study contradiction --stage pilot
      attnres study contradiction

    Args:
        folder: Receives models, measurements, results and report.
        stage: train, pilot, confirm or report; by default all in order.
        preregistration: The document that must be committed, unchanged, before the confirming run.
        config: The study.json of another folder, to run another study than the one of this package.
        device: auto is cuda where there is one.
    """

    folder: Path = Path("runs/contradiction")
    stage: Literal["train", "pilot", "confirm", "report"] | None = None
    preregistration: Path = Path("studies/contradiction/preregistration.md")
    config: Path | None = None
    device: Device = "auto"

    def run(self) -> int:
        """Runs the stages."""
        study = Study() if self.config is None else _study_in(self.config)
        device = device_of(self.device)
        is_done = run_study(study, self.folder, self.preregistration, stage=self.stage, device=device)
        return 0 if is_done else INTERRUPTED


def _study_in(path: Path) -> Study:
    """Reads a study.json.

    Raises:
        ConfigError: It holds no study.
    """
    told = read_json(path, newest=1).get("study")
    if not isinstance(told, dict):
        raise ConfigError(
            got=f"{path} with study={told!r}",
            expected="a study",
            do="name the study.json of a study's folder",
        )
    return study_of(told)


@dataclass(frozen=True, kw_only=True)
class PaperStudy:
    """Runs a study's queue, then writes tables and figures of its results.

    Each run is a process of its own. Ctrl-C lets all of them save; the same command goes on, and repeats nothing that
    is in the file of results. cost only says what it costs, report only writes report.md and figures, from the file of
    results alone.


    Args:
        scale: smoke (tries the machinery, means nothing), laptop, or paper (the paper's own size, started by torchrun).
        stage: cost, run or report; by default run, then report.
        folder: Receives texts, runs and report; by default runs/NAME-SCALE.
        results: The CSV file of results; by default results.csv in the folder.
        seeds: How many, in place of the study's own; more go on from the same file. The first ones are the pilot: the
            report says how many would be needed.
        workers: Runs at a time, with one thread each; paper scale takes one at a time.
        corpus: The folder of a prepared corpus, for paper scale.
        replicate: Copies of the model, each with its share of a batch; paper scale has 1 unless told.
        shard: GPUs that one copy of the model is spread over, by FSDP2; at paper scale all that are visible, shared
            out among the copies, unless told. Each run is started by torchrun on replicate x shard of them; other
            scales do that, on processors where there are no GPUs, only if one of the two is given.
        again: Try runs once more that diverged, ran out of memory or were killed.
        yes: Start at paper scale; without it the command says what that costs, and stops.
    """

    name: ClassVar[str]

    scale: Scale = "laptop"
    stage: Literal["cost", "run", "report"] | None = None
    folder: Path | None = None
    results: Path | None = None
    seeds: int | None = None
    workers: int = 2
    corpus: Path | None = None
    replicate: int | None = None
    shard: int | None = None
    again: bool = False
    yes: bool = False

    def run(self) -> int:
        """Does what the stage says."""
        experiment = STUDIES[self.name].at(self.scale)
        if self.seeds is not None:
            experiment = experiment.with_seeds(self.seeds)
        folder = self.folder or Path("runs") / f"{self.name}-{self.scale}"
        results = self.results or folder / "results.csv"
        if self.stage == "cost":
            print(self._price(experiment))
            return 0
        code = 0
        if self.stage != "report":
            launcher = self._launcher()
            self._agree(experiment)
            code = self._queue(experiment, folder, results, launcher)
        if self.stage != "run" and code != INTERRUPTED:
            table = Results(results).read()
            if not table.outcomes:
                raise ConfigError(
                    got=f"{results} without a run", expected="results of this study", do="run it first"
                )
            print(f"report: {write_report(experiment.report(table), folder / 'report')}")
        return code

    def _agree(self, experiment: Experiment) -> None:
        """Refuses to start what is expensive without having been told that it may.

        Raises:
            ConfigError: It was not told.
        """
        if self.scale == "paper" and not self.yes:
            raise ConfigError(
                got=f"attnres study {self.name} --scale paper, which costs {self._price(experiment)}",
                expected="--yes from someone who wants to pay that",
                do="pass --yes, or --scale laptop",
            )

    def _price(self, experiment: Experiment) -> str:
        launcher = self._launcher()
        gpus = launcher.parallel.num_ranks if isinstance(launcher, Torchrun) else None
        return price(foreseen_cost(experiment), visible_hardware(gpus=gpus))

    def _launcher(self) -> Launcher:
        """Chooses how runs are started.

        Raises:
            ConfigError: More GPUs are asked for than there are.
        """
        if self.scale != "paper" and self.replicate is None and self.shard is None:
            return OneProcess()
        gpus = torch.cuda.device_count()
        replicate = 1 if self.replicate is None else self.replicate
        shard = max(1, gpus // max(1, replicate)) if self.shard is None else self.shard
        parallel = Parallel(replicate=replicate, shard=shard)
        if 0 < gpus < parallel.num_ranks:
            raise ConfigError(
                got=f"replicate={replicate} x shard={shard}",
                expected=f"at most {gpus}, the GPUs that are visible",
                do="ask for fewer",
            )
        return Torchrun(parallel=parallel, device="cuda" if gpus else "cpu")

    def _queue(self, experiment: Experiment, folder: Path, results: Path, launcher: Launcher) -> int:
        ended = run_experiment(
            experiment,
            folder,
            results,
            corpus=self.corpus,
            workers=1 if self.scale == "paper" else self.workers,
            launcher=launcher,
            note=lambda text: print(text, file=sys.stderr, flush=True),
            again=self.again,
        )
        if ended.is_interrupted:
            return INTERRUPTED
        for name, line in ended.crashed.items():
            print(f"failed: {name}: {line}; its log is in {folder / 'logs'}", file=sys.stderr)
        if ended.elsewhere:
            print(f"another process has {len(ended.elsewhere)} run(s); call again later", file=sys.stderr)
        return 0 if ended.is_finished else 1


class Ablation(PaperStudy):
    """Which residual rules lower the loss at an equal budget? Paper, Table 4 and Fig. 6."""

    name = "ablation"


class Scaling(PaperStudy):
    """How does the loss fall with compute, and how much does attention over depth save? Paper, Table 2 and Fig. 4."""

    name = "scaling"


class ShapeGrid(PaperStudy):
    """Does attention over depth favour deeper, narrower models at fixed compute? Paper, Fig. 7."""

    name = "shape"


class TrainingDynamics(PaperStudy):
    """Loss, output and gradient magnitudes through training. Paper, Fig. 5."""

    name = "dynamics"


class DepthRetrieval(PaperStudy):
    """Do late layers find what early ones have made? k-hop binding and early-feature recall; not in the paper."""

    name = "depth-retrieval"


class Pruning(PaperStudy):
    """Do deep layers matter more with attention over depth? Layers taken out of trained twins; not in the paper."""

    name = "pruning"


class KimiLinear(PaperStudy):
    """Do attention sites read broadly and MLP sites locally in the paper's own architecture? Sections 5.1 and 5.4."""

    name = "kimi-linear"


COMMANDS: dict[str, type[Command]] = {
    "contradiction": Contradiction,
    **{
        study.name: study
        for study in (Ablation, Scaling, ShapeGrid, TrainingDynamics, DepthRetrieval, Pruning, KimiLinear)
    },
}
"""Every study by the name that is typed."""

if TYPE_CHECKING:
    Chosen = Command
else:
    Chosen = Union[tuple(Annotated[command, subcommand(name)] for name, command in COMMANDS.items())]  # noqa: UP007


@command("study")
def study_command(study: Annotated[Chosen, arg(name="")]) -> int:
    """Run a study from its models to its report, or go on where an earlier call stopped.

    attnres study NAME --help tells what each asks, and its options. docs/studies.md has all of them.
    """
    return study.run()
