"""What AdaSum costs: bytes on the wire, and memory, beside the mean.

    python -m benchmarks.adasum

Bytes are read from the interface counters of network namespaces, as root, for
2 and 4 workers. Memory is the peak of a first update, with its tracing, above
what was resident before it, in a process with 2 and 4 replicas. Printed is a
line of JSON for each, with what was expected:

* the mean, a ring of all-reduce: 2 (W - 1) / W x the parameters are sent;
* AdaSum, a gathering: W - 1 x the parameters, and W x the parameters of each
  replica are held while they are combined.
"""

import gc
import json
import subprocess
import sys
from pathlib import Path

import benchmarks
from benchmarks import cost_model, memory, namespaces, network

WORKERS = REPLICAS = (2, 4)
PARAMETERS = 1_000_000
WIDTH = 5000  # Of one layer: 25 million parameters, 100 MB.


def wire(workers):
    """Lines of bytes sent by a worker for one update."""
    cases = [
        network.case(PARAMETERS, 2, dtype, None, way)
        for way in ("mean", "adasum")
        for dtype in (None, "bfloat16")
    ]
    for row in network.measure(cases, workers=workers, rounds=1):
        if row["what"] != "update":
            continue
        size = row["parameters"] * cost_model.WIRE_BYTES[row["wire_dtype"]]
        share = (
            2 * (workers - 1) / workers
            if row["replica_reduction"] == "mean"
            else workers - 1
        )
        sent = row["bytes_sent_per_worker_per_update"]
        yield {
            "benchmark": "adasum_wire",
            "workers": workers,
            "replica_reduction": row["replica_reduction"],
            "wire_dtype": row["wire_dtype"] or "float32",
            "parameters": row["parameters"],
            "bytes": sent,
            "expected_bytes": round(share * size),
            "ratio": sent / (share * size),
        }


def peak(replicas, way):
    """Megabytes that a first update takes above what was there before."""
    import keras
    import tensorflow as tf

    import tfaccum

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
    )
    strategy = tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        inputs = keras.Input((WIDTH,))
        outputs = keras.layers.Dense(WIDTH, use_bias=False)(inputs)
        model = tfaccum.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), "mse", replica_reduction=way)
    x = keras.random.normal((replicas, WIDTH), seed=0)
    gc.collect()
    before = memory.resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model.fit(x, x, replicas, verbose=0)
    return memory.resident("VmHWM") - before


def in_a_process(replicas, way):
    """`peak`, where nothing was before."""
    program = (
        "from benchmarks import adasum; "
        f"print(adasum.peak({replicas}, {way!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def main():
    """Prints the lines."""
    where = benchmarks.where()
    size = WIDTH**2 * 4 / 2**20
    for replicas in REPLICAS:
        for way in ("mean", "adasum"):
            line = {
                "benchmark": "adasum_memory",
                "replicas": replicas,
                "replica_reduction": way,
                "parameters_mb": size,
                "peak_mb": in_a_process(replicas, way),
            }
            print(json.dumps(line | where), flush=True)
    obstacle = namespaces.obstacle()
    if obstacle:
        print(f"No bytes are counted: {obstacle}", file=sys.stderr)
        return
    for workers in WORKERS:
        for line in wire(workers):
            print(json.dumps(line | where), flush=True)


if __name__ == "__main__":
    main()
