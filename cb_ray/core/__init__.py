"""The pure core: it counts tokens and blocks and decides what runs next. Knows no torch, ray, asyncio, threads or clock."""
