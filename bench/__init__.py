"""Measurements. Each program compares backends in one process, turn by turn, and writes bench/results/."""
