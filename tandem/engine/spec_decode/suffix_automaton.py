"""An index of all substrings of several growing texts, for drafts from the longest earlier occurrence of a text's end."""

from array import array
from collections.abc import Callable, Iterable

ROOT = 0
Pays = Callable[[int, float], bool]
_MOST_COUNTED = 32
"""Contexts of a token whose number of occurrences is kept exact; only a text that repeats one short pattern has more."""


class SuffixAutomaton:
    """A suffix automaton (Blumer et al., 1985) of several texts of token ids that grow at their ends, in any order.

    A state stands for substrings that end at the same places. A text is known by the state of all of its tokens, which ``extend`` returns; the suffix
    link of that state is the longest end of the text that occurs elsewhere too, so a match needs no search. Appending a token takes constant time, amortised.
    ``_length``: of a state's longest substring; ``_count``: its occurrences. A state's first transition is in ``_token`` and ``_child``, further ones in
    ``_more``, since few states have any.
    """

    def __init__(self) -> None:
        self._length, self._link, self._count = array("q", [0]), array("q", [-1]), array("q", [0])
        self._token, self._child = array("q", [-1]), array("q", [-1])
        self._more: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        """The number of states, at most two for each token."""
        return len(self._length)

    def extend(self, state: int, tokens: Iterable[int]) -> int:
        """Appends ``tokens`` to the text of ``state`` (``ROOT``: a new one); returns its new state."""
        link, count = self._link, self._count
        for token in tokens:
            state = self._append(state, token)
            ancestor, left = state, _MOST_COUNTED
            while ancestor > ROOT and left:
                count[ancestor] += 1
                ancestor = link[ancestor]
                left -= 1
        return state

    def propose(self, state: int, most: int, factor: float, least: float, pays: Pays = lambda length, frequency: True) -> list[int]:
        """Returns the tokens that followed the longest end of the text of ``state`` that another token follows elsewhere: at each place the most frequent
        one, at most ``factor`` tokens for each one that matches, and ``most``, until the frequency of all of them together falls below ``least`` or the
        next one, after so many matching tokens and with this frequency of its own, does not pay. Beyond the end of a text they go on as after its own
        longest match, so that loops are predicted."""
        # Where a token follows the whole text, it is another text's, which begins in the same way.
        state = self._followed(state)
        match = self._length[state]
        most = min(most, int(factor * match))
        drafts: list[int] = []
        probability = 1.0
        while len(drafts) < most and state > ROOT:
            token, child, share = self._likeliest(state)
            probability *= share
            if probability < least or not pays(match + len(drafts), share):
                break
            drafts.append(token)
            state = self._followed(child)
        return drafts

    def _followed(self, state: int) -> int:
        """Returns the longest end of ``state`` that a token follows; ``ROOT``: none."""
        while state > ROOT and self._child[state] < 0:
            state = self._link[state]
        return max(state, ROOT)

    def _likeliest(self, state: int) -> tuple[int, int, float]:
        """Returns the most frequent next token of ``state``, its state, and its share of the occurrences."""
        token, child = self._token[state], self._child[state]
        more = self._more.get(state)
        if more is None:
            return token, child, 1.0
        count = self._count
        total = best = count[child]
        for other, target in more.items():
            occurrences = count[target]
            total += occurrences
            if occurrences > best:
                token, child, best = other, target, occurrences
        return token, child, best / total

    def _next(self, state: int, token: int) -> int:
        """Returns the state after ``token``; -1: none."""
        if self._token[state] == token:
            return self._child[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def _set_next(self, state: int, token: int, target: int) -> None:
        if self._child[state] < 0 or self._token[state] == token:
            self._token[state], self._child[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def _append(self, state: int, token: int) -> int:
        length, link = self._length, self._link
        known = self._next(state, token)
        if known >= 0:
            # Another text has the same tokens from the beginning on, or their last ones are elsewhere.
            return known if length[known] == length[state] + 1 else self._split(state, token, known)
        new = self._new(length[state] + 1)
        while state >= 0 and (known := self._next(state, token)) < 0:
            self._set_next(state, token, new)
            state = link[state]
        if state >= 0:
            link[new] = known if length[known] == length[state] + 1 else self._split(state, token, known)
        return new

    def _new(self, length: int) -> int:
        self._length.append(length)
        self._link.append(ROOT)
        self._count.append(0)
        self._token.append(-1)
        self._child.append(-1)
        return len(self._length) - 1

    def _split(self, state: int, token: int, known: int) -> int:
        """Gives the substrings of ``known`` that are at most as long as those of ``state`` with ``token`` a state of their own."""
        clone, link = self._new(self._length[state] + 1), self._link
        self._token[clone], self._child[clone] = self._token[known], self._child[known]
        if known in self._more:
            self._more[clone] = dict(self._more[known])
        link[clone], self._count[clone] = link[known], self._count[known]
        link[known] = clone
        while state >= 0 and self._next(state, token) == known:
            self._set_next(state, token, clone)
            state = link[state]
        return clone
