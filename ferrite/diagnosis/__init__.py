"""From what went wrong, or slowly, to why: ways of looking at a compile that run the whole compiler themselves.

    bisect/        "it is wrong", "it fails", "it is slow": one pass, rule, fusion or kernel, and the smallest graph
    explanation    what became of a model, what takes its time, and what to try
    replay         stages again from a dump, edited by hand
    repro          the graph of a repro folder, compiled again

What the compiler writes down as it goes (record, dump, repro folder) is `ferrite.debug`'s.
"""

from ferrite.diagnosis.explanation import Explanation, Share, explain
from ferrite.diagnosis.replay import STAGES, Replayed, replay
from ferrite.diagnosis.repro import compile_again
from ferrite.diagnosis.user_code import load_module

__all__ = ["STAGES", "Explanation", "Replayed", "Share", "compile_again", "explain", "load_module", "replay"]
