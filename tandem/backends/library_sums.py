"""The sum of gradients over ranks where another library makes it."""

from dataclasses import dataclass

from tandem.trainer.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class LibrarySums:
    """``GradientSums`` of a library that sums over ``ranks`` by itself, within its backward passes or after the last one: there is nothing left to do."""

    ranks: Ranks

    def expect(self, backwards: int) -> None: ...

    def end_backward(self) -> None: ...

    def finish(self) -> None: ...
