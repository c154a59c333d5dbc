"""The paper's studies as queues of runs that can be stopped at any moment, one CSV file each, and a report made of it.

``STUDIES`` has them by name. ``attnres study NAME`` runs one; ``docs/studies.md`` says what each asks.
"""

from attention_residuals.experiments.ablation import Ablation
from attention_residuals.experiments.cell import Cell, Measure, Text
from attention_residuals.experiments.dynamics import TrainingDynamics
from attention_residuals.experiments.experiment import SCALES, Experiment, Grid, Report, Scale, write_report
from attention_residuals.experiments.kimi_linear import KimiLinear
from attention_residuals.experiments.pruning import Pruning
from attention_residuals.experiments.queue import QueueEnd, run_queue
from attention_residuals.experiments.recipe import KimiPreset, Recipe, Shape
from attention_residuals.experiments.results import Key, Number, Outcome, Results, Table
from attention_residuals.experiments.retrieval import DepthRetrieval
from attention_residuals.experiments.running import opened_texts, run_experiment
from attention_residuals.experiments.scaling import Scaling
from attention_residuals.experiments.shape import ShapeGrid

__all__ = [
    "SCALES",
    "STUDIES",
    "Ablation",
    "Cell",
    "DepthRetrieval",
    "Experiment",
    "Grid",
    "Key",
    "KimiLinear",
    "KimiPreset",
    "Measure",
    "Number",
    "Outcome",
    "Pruning",
    "QueueEnd",
    "Recipe",
    "Report",
    "Results",
    "Scale",
    "Scaling",
    "Shape",
    "ShapeGrid",
    "Table",
    "Text",
    "TrainingDynamics",
    "opened_texts",
    "run_experiment",
    "run_queue",
    "write_report",
]

STUDIES: dict[str, type[Experiment]] = {
    "ablation": Ablation,
    "scaling": Scaling,
    "shape": ShapeGrid,
    "dynamics": TrainingDynamics,
    "depth-retrieval": DepthRetrieval,
    "pruning": Pruning,
    "kimi-linear": KimiLinear,
}
"""Every study by the name that the command uses."""
