"""The production scheduler, pool and scaling over simulated time: what would happen, before it does.

A replica is the production `EngineCore` with a runner that only takes time; the pool, its policies, its admission and
`desired_replicas` are the production objects. Nothing here knows torch, Ray, threads or a clock: the only time is the agenda's.
"""
