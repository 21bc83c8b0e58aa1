"""Measure what a dead, hanging or slow server costs training: `python tests/benchmarks/trackers.py [--rounds 15]`.

Each contender is a process of its own that trains a small network by the Trainer and logs a row every 50 steps: without
a tracker, with files, and with MLflow at a port that refuses, at a server that accepts and never answers, and at one
that takes half a second for each answer. They take turns of 500 steps in changing order, so that whatever else the
machine does hits all; a ratio to "no tracker" is taken within each turn, of CPU time (all threads) and of wall time.
What `fit` waits for at its end, when all are told to stop, is shown beside it, in seconds.
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

STEPS, EVERY, WARM_UP = 500, 50, 2  # steps of a turn, steps between two rows, turns that are not counted
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


def contend(contender: str) -> None:
    """Train turn by turn, one for each line on stdin, and print what each took; at the end, what `fit` waited for."""
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

    class Turns(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step % STEPS:
                return
            print(json.dumps([time.process_time() - self.since[0], time.perf_counter() - self.since[1]]), flush=True)
            trainer.should_stop = not sys.stdin.readline().strip()
            self.since = time.process_time(), time.perf_counter()

        since = (0.0, 0.0)

    torch.set_num_threads(1)
    logger = False
    if contender == "CSV and TensorBoard":
        logger = Tracking()
    elif contender != "no tracker":
        uri = f"http://127.0.0.1:{port_of(contender)}"
        logger = Tracking("mlflow", init_kwargs={"mlflow": {"tracking_uri": uri}}, timeout=5)
    data = TensorDataset(torch.randn(16 * STEPS, 32), torch.randint(10, (16 * STEPS,)))
    turns = Turns()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, logger=logger, log_every_n_steps=EVERY, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[turns],
    )
    trainer.fit(Net(), DataLoader(data, batch_size=16))
    print(time.perf_counter() - turns.since[1], flush=True)


class Contender:
    """A process that trains a turn whenever it is told to."""

    def __init__(self, name: str, folder: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
        os.makedirs(place := os.path.join(folder, name.replace(" ", "-")))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--contender", name], cwd=place,
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        self.read()

    def read(self) -> str:
        while line := self.process.stdout.readline():
            if line[0] in "[0123456789":
                return line
        raise RuntimeError("a contender ended")

    def turn(self) -> tuple[float, float]:
        self.process.stdin.write("on\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.read()))

    def end(self) -> float:
        self.process.stdin.close()
        return float(self.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contender", choices=CONTENDERS)
    options = parser.parse_args()
    if options.contender:
        contend(options.contender)
        os._exit(0)  # the thread of a tracker may hang for a while
    with tempfile.TemporaryDirectory() as folder:
        contenders = {name: Contender(name, folder) for name in CONTENDERS}
        turns = []
        for number in range(WARM_UP + options.rounds):
            order = [CONTENDERS[(place + number) % len(CONTENDERS)] for place in range(len(CONTENDERS))]
            turns.append({name: contenders[name].turn() for name in order})
        turns = turns[WARM_UP:]
        waits = {name: one.end() for name, one in contenders.items()}
    print(f"{STEPS} steps a turn, a row every {EVERY}; median of {len(turns)} turns (quartiles)")
    for name in CONTENDERS:
        cells = []
        for place, clock in enumerate(("cpu", "wall")):
            ratios = [turn[name][place] / turn["no tracker"][place] for turn in turns]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{clock} x {middle:.3f} ({low:.3f} to {high:.3f})")
        print(f"{name:<20} {cells[0]:<32} {cells[1]:<32} at the end {waits[name]:.1f} s")


if __name__ == "__main__":
    main()
