"""How many items a paired test needs, before it is run."""

import math
from statistics import NormalDist

from scipy.special import ncfdtr, stdtrit

from attention_residuals.errors import ConfigError, is_count, is_finite

__all__ = ["check_items", "needed_items", "paired_power"]


def paired_power(dz: float, num_items: int, *, alpha: float = 0.05) -> float:
    """Says how often a two-sided paired t test finds an effect that is there.

    Args:
        dz: The mean effect in standard deviations of the items.
        num_items: 2 or more.
        alpha: Rate of false alarms, between 0 and 1; divide it by the number of tests for Bonferroni.

    Returns:
        Chance of p <= alpha: alpha where dz is 0, to 1.

    Raises:
        ConfigError: A number out of range.

    Example:
        >>> round(paired_power(0.3, 400), 4)
        1.0
        >>> round(paired_power(0.3, 40), 2)
        0.46
    """
    if not is_finite(dz) or not is_count(num_items) or num_items < 2 or not 0 < alpha < 1:
        raise ConfigError(
            got=f"dz={dz}, num_items={num_items}, alpha={alpha}",
            expected="a finite dz, 2 items or more, 0 < alpha < 1",
            do="pass dz=0.3, num_items=400",
        )
    # t is beyond its critical value on either side where t**2, a noncentral F of 1 and n - 1, is beyond its square.
    critical = stdtrit(num_items - 1, 1 - alpha / 2) ** 2
    return 1 - float(ncfdtr(1, num_items - 1, dz**2 * num_items, critical))


def needed_items(dz: float, *, power: float = 0.8, alpha: float = 0.05, num_tests: int = 1) -> int:
    """Says how many items find an effect with the wanted power.

    Args:
        dz: The mean effect in standard deviations of the items, not 0.
        power: Wanted chance of finding it, between alpha and 1.
        alpha: Rate of false alarms in the whole family.
        num_tests: Tests that share alpha equally (Bonferroni).

    Returns:
        The smallest number of items that is enough.

    Raises:
        ConfigError: A number out of range, or over ten million items.

    Example:
        >>> [needed_items(dz) for dz in (0.2, 0.3, 0.5)]
        [199, 90, 34]
        >>> [needed_items(dz, num_tests=50) for dz in (0.2, 0.3, 0.5)]
        [433, 196, 74]
        >>> [needed_items(dz, num_tests=400) for dz in (0.2, 0.3, 0.5)]
        [555, 251, 95]
    """
    if not is_finite(dz) or not is_count(num_tests) or not 0 < alpha < power < 1:
        raise ConfigError(
            got=f"dz={dz}, power={power}, alpha={alpha}, num_tests={num_tests}",
            expected="a finite dz, 0 < alpha < power < 1, one test or more",
            do="pass power=0.8, alpha=0.05",
        )
    each, normal = alpha / num_tests, NormalDist()
    reach = normal.inv_cdf(1 - each / 2) + normal.inv_cdf(power)
    # A normal test needs fewer items than Student's, so the search goes up from there.
    least = (reach / dz) ** 2 if dz else math.inf
    if least > 1e7:
        raise ConfigError(
            got=f"dz={dz:g}", expected="an effect that ten million items can show", do="pass a larger dz"
        )
    enough = max(2, math.ceil(least))
    while paired_power(dz, enough, alpha=each) < power:
        enough += 1
    return enough


def check_items(
    num_items: int, dz: float, *, power: float = 0.8, alpha: float = 0.05, num_tests: int = 1
) -> None:
    """Refuses too few items, and says how many are needed.

    Args:
        num_items: How many there are.
        dz: See ``needed_items``, as the rest.
        power: Wanted.
        alpha: Of the whole family.
        num_tests: That share it.

    Raises:
        ConfigError: There are too few, or a number is out of range.

    Example:
        >>> check_items(100, 0.2)
        Traceback (most recent call last):
        ...
        attention_residuals.errors.ConfigError: got: 100 items for an effect of dz 0.2
        expected: 199 items or more, for 80 % power at alpha 0.05 in 1 test(s)
        do: make 99 more items, or plan for a larger effect and say so
    """
    needed = needed_items(dz, power=power, alpha=alpha, num_tests=num_tests)
    if num_items < needed:
        raise ConfigError(
            got=f"{num_items} items for an effect of dz {dz:g}",
            expected=f"{needed} items or more, for {100 * power:g} % power at alpha {alpha:g} in {num_tests} test(s)",
            do=f"make {needed - num_items} more items, or plan for a larger effect and say so",
        )
