"""What several stages share. No stage imports another; each may import this package.

In: nodes of a graph, whatever its stage. Out: rules and facts about them.

    attention/      attention that is written out by hand: one matcher, for torch calls and for ATen
    batching/       many small calls of one operator as one call on a stack
    noops, converts, equal_calls, const_scatter, constructors       rules that more than one stage applies
    constants, facts, library, hooks, to_aten                       helpers
"""
