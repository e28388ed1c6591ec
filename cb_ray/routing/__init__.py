"""Which replica a request goes to, who waits, who is refused and how many replicas there should be: pure counting.

Nothing here reads a clock, draws from global randomness, or knows of Ray, threads or coroutines: `now` is an argument, and every
transition returns what changed. The Board actor adds futures and a clock; a simulator can run the very same objects.
"""
