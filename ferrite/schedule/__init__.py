"""Scheduling: a program becomes kernels, and a plan of when each runs and where its memory is."""
