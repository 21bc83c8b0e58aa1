"""The first part of a run, in a process that kills itself: `python session.py NAME FOLDER OPTIONS`.

It logs steps 1 to 6, with a checkpoint (a flush) after step 4.
"""

from __future__ import annotations

import json
import os
import signal
import sys

CONFIG = {"optim": {"name": "adam", "betas": [0.9, 0.999]}, "layers": [{"width": 4}], "deep": {"er": {"x": True}}}


def row(step):
    return {"epoch": step // 4, "loss": step / 8, "parts": {"a": step * 2.0}}


def log(trackers, steps):
    for step in steps:
        for tracker in trackers:
            tracker.log(row(step), step=step)


def main(name, folder, options):
    from drivetrain.callbacks.tracking.trackers import start_trackers

    trackers = start_trackers(
        name, "project", CONFIG, run_dir=folder, init_kwargs={name: json.loads(options)}, title="run-0001", timeout=60
    )
    log(trackers, range(1, 5))
    trackers[0].flush(60)
    print(trackers[0].wrapped.run_id, flush=True)
    log(trackers, range(5, 7))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
