"""`build(args)`: the Serve application `cb-ray` from the values in `deployments/app.yaml`."""

from __future__ import annotations

from .args import AppArgs, EngineArgs, PoolArgs, RouterArgs, RoutingArgs, parse_args

__all__ = ["AppArgs", "EngineArgs", "PoolArgs", "RouterArgs", "RoutingArgs", "parse_args"]
