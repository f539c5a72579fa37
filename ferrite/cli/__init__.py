"""`python -m ferrite`: one file per command, each with `add_parser` and `run`."""
