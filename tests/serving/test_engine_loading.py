"""What is done to an engine on its way from a name to a replica."""

from __future__ import annotations

import os
from threading import Thread

from cb_ray.serving.engine_loading import give_way


def test_an_engine_on_the_cpu_gives_way_and_nobody_else_does():
    """The door and the Board share its cores: refusals took a second where engines went first. Only the engine's thread is slowed."""
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def engine() -> None:
        give_way()
        give_way()
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == [max(10, before)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
