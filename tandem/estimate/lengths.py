"""Distributions of the lengths of prompts and outputs, with the order statistics that a step waits for. Imports no torch."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from tandem.types.errors import UserError

NORMAL = NormalDist()
USUAL_SPREAD = 0.5
"""The standard deviation of the logarithm of lengths where only their mean is known, as in the arrivals of the simulator."""
POINTS = 400
"""Of the integral over a quantile function, by the midpoint rule."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt or of an output, a random variable: lognormal with the mean ``exp(location + spread^2 / 2)``, or, with ``recorded`` (ascending),
    one of these with equal probability. ``most``: longer ones are cut there."""

    location: float = 0.0
    spread: float = 0.0
    most: float = math.inf
    recorded: tuple[int, ...] = ()

    @classmethod
    def around(cls, mean: float, spread: float = USUAL_SPREAD, most: float = math.inf) -> "Lengths":
        """Returns lognormal lengths of ``mean`` (before they are cut at ``most``). ``spread``: the standard deviation of their logarithm, 0: all equal."""
        return cls(math.log(mean) - spread**2 / 2, spread, most)

    @classmethod
    def with_p95(cls, mean: float, p95: float, most: float = math.inf) -> "Lengths":
        """Returns lognormal lengths of ``mean``, of which 95 % have at most ``p95`` tokens. Raises ``UserError`` if there are none."""
        z, ratio = NORMAL.inv_cdf(0.95), math.log(p95 / mean)
        # ln(p95 / mean) = z s - s^2 / 2, of whose two solutions the smaller one has the shorter tail.
        if not 0 <= ratio <= z**2 / 2:
            raise UserError(
                f"a 95th percentile of {p95:,.0f} tokens with a mean of {mean:,.0f} is no lognormal distribution; it must be from {mean:,.0f} to "
                f"{mean * math.exp(z**2 / 2):,.0f}: change one of them"
            )
        return cls.around(mean, z - math.sqrt(z**2 - 2 * ratio), most)

    @classmethod
    def of(cls, values: Iterable[int], most: float = math.inf) -> "Lengths":
        """Returns the lengths that were recorded, each with equal probability."""
        return cls(most=most, recorded=tuple(sorted(values)))

    def quantile(self, share: float) -> float:
        """Returns the smallest length that ``share`` of them (above 0, below 1) do not exceed."""
        if self.recorded:
            length = float(self.recorded[min(len(self.recorded) - 1, int(share * len(self.recorded)))])
        else:
            length = math.exp(self.location + self.spread * NORMAL.inv_cdf(share))
        return min(self.most, length)

    def share_below(self, tokens: float) -> float:
        """Returns the share of lengths of at most ``tokens``."""
        if tokens >= self.most:
            return 1.0
        if self.recorded:
            return bisect_right(self.recorded, tokens) / len(self.recorded)
        if not self.spread:
            return float(tokens >= math.exp(self.location))
        return NORMAL.cdf((math.log(tokens) - self.location) / self.spread) if tokens > 0 else 0.0

    @property
    def mean(self) -> float:
        return self.moment(1)

    def moment(self, order: int) -> float:
        """Returns the mean of the lengths to the power ``order``, of a lognormal distribution that is cut in closed form."""
        if self.recorded:
            return math.fsum(min(self.most, length) ** order for length in self.recorded) / len(self.recorded)
        whole = math.exp(order * self.location + (order * self.spread) ** 2 / 2)
        if self.most == math.inf:
            return whole
        if not self.spread:
            return float(min(self.most**order, whole))
        z = (math.log(self.most) - self.location) / self.spread
        return whole * NORMAL.cdf(z - order * self.spread) + self.most**order * (1 - NORMAL.cdf(z))

    @property
    def variation(self) -> float:
        """The mean square over the square of the mean: 1 for equal lengths."""
        return self.moment(2) / self.moment(1) ** 2

    def mean_longest(self, count: float) -> float:
        """Returns the mean of the longest of ``count`` independent lengths: the integral of Q(u^(1/count)) for u from 0 to 1, where Q is the quantile
        function (David and Nagaraja, 2003, "Order Statistics", section 3.1)."""
        if self.recorded:
            total, size, below = 0.0, len(self.recorded), 0.0
            for rank, length in enumerate(self.recorded, start=1):
                upto = (rank / size) ** count
                total, below = total + min(self.most, length) * (upto - below), upto
            return total
        return math.fsum(self.quantile(((point + 0.5) / POINTS) ** (1 / count)) for point in range(POINTS)) / POINTS

    def cut(self, most: float) -> "Lengths":
        """Returns these lengths, cut at ``most`` tokens too."""
        return Lengths(self.location, self.spread, min(self.most, most), self.recorded)
