"""Lowerings, one file per family of operators, one function per operator."""
