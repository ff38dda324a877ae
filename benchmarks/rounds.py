"""Contenders that take turns, so that what slows the machine down for a while slows all of them."""

import sys
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Measured = TypeVar("Measured")


def take_turns(
    contenders: Mapping[Name, Callable[[], Measured]],
    rounds: int,
    *,
    warm_ups: int = 0,
    where: str = "",
) -> dict[Name, list[Measured]]:
    """What each contender returns, one value for each round.

    Args:
        contenders: Each runs once and returns its measurement, by name.
        rounds: Rounds that count.
        warm_ups: Rounds before these.
        where: If given, progress on stderr begins with it.
    """
    measured: dict[Name, list[Measured]] = {name: [] for name in contenders}
    for number in range(1 - warm_ups, rounds + 1):
        if where:
            print(f"{where}: round {number} of {rounds}", file=sys.stderr)
        for name, run in contenders.items():
            value = run()
            if number > 0:
                measured[name].append(value)
    return measured
