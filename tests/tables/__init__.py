"""torch's own tables of operators, modules and optimizers, each entry compiled through the front door."""
