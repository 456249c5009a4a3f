"""The rate of torch's matrix product beside the sides of a run, on as many threads as they have: ``rate``, as ``serve.py`` answers it."""

from lines import answer, command
from serve import matrix_rate

answer(ready=True)
while command()[0] == "rate":
    answer(**matrix_rate(0.1))
