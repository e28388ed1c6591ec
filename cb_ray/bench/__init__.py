"""Benchmarks that a user can repeat: `cb-ray bench NAME`. Each measures ratios in one run; none asserts a time."""
