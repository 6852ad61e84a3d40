"""One worker of `benchmarks/network.py`.

Told in JSON what to train, it writes down how long each update took and how
many bytes its network device had sent.
"""

import json
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import namespaces

PORT, PROBE_PORT = 2222, 2223
MICRO_BATCH = 16
# How long a worker waits for the network to be quiet, in seconds.
QUIET = 0.2


def work(text: str) -> None:
    """The main function of a worker: does what it was told to, in JSON."""
    told = json.loads(text)
    limited = [case["mbit"] for case in told["cases"] if case["mbit"]]
    namespaces.limit(told["ends"], limited[0] if limited else None)
    path = probe(told["hosts"], told["index"])
    # Not before: the process that measures needs no TensorFlow.
    import keras
    import tensorflow as tf

    import tfaccum
    from tfaccum import cluster

    strategy = tfaccum.make_strategy(
        cluster=cluster.from_hosts(
            [f"{host}:{PORT}" for host in told["hosts"]], told["index"]
        ),
        bytes_per_pack=told["bytes_per_pack"],
    )
    keras.utils.set_random_seed(0)
    models: dict[tuple, Any] = {}
    found = []
    for case in told["cases"]:
        model = models.get(key(case))
        if model is None:
            with strategy.scope():
                model = models[key(case)] = _model(case, keras, tfaccum)
        found.append(
            {
                "parameters": model.count_params(),
                "seconds": [],
                "cpu_seconds": [],
                "bytes": [],
                "packets": [],
            }
        )
    for _ in range(told["rounds"]):
        for case, results in zip(told["cases"], found, strict=True):
            model = models[key(case)]
            namespaces.limit(told["ends"], case["mbit"])
            rows = case["micro_batch_size"] * len(told["hosts"])
            shape = (rows, model.input_shape[1])
            data = (
                keras.random.normal(shape, seed=1),
                keras.random.randint((rows,), 0, 10, seed=2),
            )
            meter = _meter(keras, told["ends"][0][1], told["updates"])
            model.fit(
                tf.data.Dataset.from_tensors(data).repeat(),
                steps_per_epoch=case["K"] * (told["updates"] + 1),
                callbacks=[meter],
                verbose=0,
            )
            _note(meter.readings, results)
    Path(told["result"]).write_text(json.dumps({"cases": found, "path": path}))


def key(case: dict[str, Any]) -> tuple:
    """Cases with the same key are measured with the same model."""
    return tuple(case[name] for name in case if name != "mbit")


def _model(case: dict[str, Any], keras: Any, tfaccum: Any) -> Any:
    """A perceptron with about so many parameters: n h (h + 1) + 10 (h + 1)."""
    layers = case["layers"]
    half = (layers + 10) / (2 * layers)
    root = ((case["parameters"] - 10) / layers + half**2) ** 0.5
    width = max(1, round(root - half))
    inputs = x = keras.Input((width,))
    for _ in range(layers):
        x = keras.layers.Dense(width, activation="relu")(x)
    model = tfaccum.Model(inputs, keras.layers.Dense(10)(x))
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        gradient_accumulation_steps=case["K"],
        wire_dtype=case["wire_dtype"],
        replica_reduction=case["replica_reduction"],
    )
    return model


def _meter(keras: Any, device: str, updates: int) -> Any:
    """A callback that reads clocks and counters after every update.

    Before the first reading and after the last update it waits, so that what
    was sent for an earlier update is counted there.
    """

    class Meter(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.readings = []

        def on_train_batch_end(self, batch, logs=None):
            if not self.readings:
                time.sleep(QUIET)
            self.readings.append(_reading(device))
            if len(self.readings) == updates + 1:
                time.sleep(QUIET)
                self.readings.append(_reading(device))

    return Meter()


def _reading(device: str) -> tuple[float, float, int, int]:
    """Time, processor time, bytes and packets sent so far."""
    folder = Path("/sys/class/net", device, "statistics")
    return (
        time.perf_counter(),
        time.process_time(),
        int((folder / "tx_bytes").read_text()),
        int((folder / "tx_packets").read_text()),
    )


def _note(readings: list[tuple], results: dict[str, list]) -> None:
    """Differences between readings, added to the results."""
    *updates, quiet = readings
    number = len(updates) - 1
    for before, after in zip(updates[:-1], updates[1:], strict=True):
        results["seconds"].append(after[0] - before[0])
        results["cpu_seconds"].append(after[1] - before[1])
    results["bytes"].append((quiet[2] - updates[0][2]) / number)
    results["packets"].append((quiet[3] - updates[0][3]) / number)


def probe(hosts: Sequence[str], index: int) -> dict[str, float] | None:
    """The path between the first two workers, without TensorFlow.

    Returns:
        On worker 0 the median time of a round trip of one byte, and the
        Mbit/s of payload of one connection; None on the others.
    """
    pings, chunk = 200, bytes(1 << 20)
    if index == 0 and len(hosts) > 1:
        with socket.create_server((hosts[0], PROBE_PORT)) as server:
            server.settimeout(60)
            connection, _ = server.accept()
        with connection, connection.makefile("rb") as received:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(pings):
                began = time.perf_counter()
                connection.sendall(b"a")
                received.read(1)
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
            for _ in range(8):
                received.read(len(chunk))
            seconds = time.perf_counter() - began
        return {
            "round_trip_seconds": statistics.median(times),
            "payload_mbit": 8 * 8 * len(chunk) / seconds / 1e6,
        }
    if index == 1:
        with _connected(hosts[0]) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(pings):
                connection.recv(1)
                connection.sendall(b"b")
            for _ in range(8):
                connection.sendall(chunk)
    return None


def _connected(host: str) -> socket.socket:
    """A connection to the prober, once it listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((host, PROBE_PORT), timeout=60)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    work(sys.argv[1])
