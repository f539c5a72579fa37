"""Seeing what the compiler did: the record of each compilation, and the repro folder of a failure.

In: what the stages report. Out: objects and files for people. Nothing here changes what is compiled.
"""
