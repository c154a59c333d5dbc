"""What the ranks of a Kimi Linear model in stages do in tests; Transformers is imported before they are forked."""

from parallel.kimi_cases import run, trained
from parallel.pipeline_worker import meet
from parallel.rank_processes import fork_groups


def cases(rank, group):
    """Trains models in stages and alone."""
    meet(rank, group)
    return [trained(case) for case in group["cases"]]


WORK = {"cases": cases, "run": run}

if __name__ == "__main__":
    fork_groups(WORK)
