"""From "it is wrong", "it fails" or "it is slow" to one name: halving over stages, passes, rules, fusions and kernels.

In: a check, which is a function that fails, crashes, or gives a number of seconds. Out: what is to blame, the smallest
graph that shows it, and a folder that shows it by itself. Every try is a child of this process (`probe`), told by
options how far the compiler may go; `search` asks, `shrink` makes the graph smaller, `folder` writes it down.
"""

from ferrite.diagnosis.bisect.checks import compare, differentiate, seconds_of
from ferrite.diagnosis.bisect.finding import Finding
from ferrite.diagnosis.bisect.folder import check_of_folder, rerun, summary
from ferrite.diagnosis.bisect.probe import Prober, TryResult, warm_up
from ferrite.diagnosis.bisect.search import NothingFound, Search, bisect

__all__ = [
    "Finding",
    "NothingFound",
    "Prober",
    "Search",
    "TryResult",
    "bisect",
    "check_of_folder",
    "compare",
    "differentiate",
    "rerun",
    "seconds_of",
    "summary",
    "warm_up",
]
