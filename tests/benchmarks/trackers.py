"""Measure what a dead, hanging or slow server costs training: `python tests/benchmarks/trackers.py [--rounds 7]`.

Each contender is a process of its own that trains a small network by the Trainer and logs a row every 5 steps: without
a tracker, and with MLflow at a port that refuses, at a server that accepts and never answers, and at one that takes half
a second for each answer. They take turns; a ratio to "no tracker" is taken within each turn, of the training thread's CPU
time and of wall time, from the first step to the last. What `fit` waits for at its end is shown beside it, in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

STEPS, EVERY, FIRST = 3000, 5, 200  # steps, between two rows, before the clock starts
CONTENDERS = ("no tracker", "refused port", "never answers", "slow answers", "CSV and TensorBoard")


def listen(answer_after: float | None) -> int:
    """Listen on a free port, and answer each connection with an error after some seconds (None: never)."""
    server = socket.create_server(("127.0.0.1", 0), backlog=100)

    def serve() -> None:
        kept = []
        while True:
            connection, _ = server.accept()
            kept.append(connection)
            if answer_after is not None:
                threading.Timer(answer_after, refuse, [connection]).start()

    def refuse(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1]


def port_of(contender: str) -> int:
    if contender == "refused port":
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            return closed.getsockname()[1]
    return listen(None if contender == "never answers" else 0.5)


def contend(contender: str) -> dict[str, float]:
    """Train once and return the seconds it took."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from drivetrain import Callback, Tracking, Trainer, TrainModule

    class Net(TrainModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Clock(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step in (FIRST, STEPS):
                times.append((time.thread_time(), time.perf_counter()))

    torch.set_num_threads(1)
    times: list[tuple[float, float]] = []
    logger = False
    if contender == "CSV and TensorBoard":
        logger = Tracking()
    elif contender != "no tracker":
        uri = f"http://127.0.0.1:{port_of(contender)}"
        logger = Tracking("mlflow", init_kwargs={"mlflow": {"tracking_uri": uri}}, timeout=5)
    data = TensorDataset(torch.randn(16 * STEPS, 32), torch.randint(10, (16 * STEPS,)))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=logger, log_every_n_steps=EVERY, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[Clock()],
    )
    trainer.fit(Net(), DataLoader(data, batch_size=16))
    end = time.perf_counter()
    (cpu, wall), (cpu_end, wall_end) = times
    return {"cpu": cpu_end - cpu, "wall": wall_end - wall, "end": end - wall_end}


def measured(contender: str) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--contender", contender], cwd=folder, env=environment,
            capture_output=True, text=True, check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contender", choices=CONTENDERS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(contend(options.contender)), flush=True)
        os._exit(0)  # the thread of a tracker may hang for a while
    rounds = []
    for number in range(options.rounds):
        rounds.append({contender: measured(contender) for contender in CONTENDERS})
        print(f"turn {number + 1}: {json.dumps(rounds[-1])}", file=sys.stderr, flush=True)
    print(f"{STEPS - FIRST} steps, a row every {EVERY}; median of {len(rounds)} turns (smallest to largest)")
    for contender in CONTENDERS:
        cells = []
        for clock in ("cpu", "wall"):
            ratios = [turn[contender][clock] / turn["no tracker"][clock] for turn in rounds]
            cells.append(f"{clock} x {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        waits = statistics.median(turn[contender]["end"] for turn in rounds)
        print(f"{contender:<20} {cells[0]:<32} {cells[1]:<32} at the end {waits:.1f} s")


if __name__ == "__main__":
    main()
