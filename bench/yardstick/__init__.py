"""Test files that others wrote for torch.compile, run with another backend: see docs/yardstick.md."""
