"""Numbers that math functions are made of, for all code generators: coefficients of polynomials, and constants."""
