"""The hands: they compute what a plan says, on torch, and decide nothing. May know the core's values and the ground floor."""
