"""Random PyTorch programs: made, run, judged against eager, and made smaller when they differ."""
