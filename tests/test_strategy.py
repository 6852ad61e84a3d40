import json

import pytest
import tensorflow as tf

import tfaccum
from tests import workers
from tfaccum import strategy as strategies
from tfaccum.cluster import Cluster
from tfaccum.rendezvous import StartError


@pytest.mark.parametrize(
    "devices, kind, replicas",
    [
        (None, tf.distribute.OneDeviceStrategy, 1),
        (["CPU:0"], tf.distribute.OneDeviceStrategy, 1),
        (["CPU:1", "/CPU:3"], tf.distribute.MirroredStrategy, 2),
        (["/device:CPU:0", "CPU:2"], tf.distribute.MirroredStrategy, 2),
    ],
)
def test_devices_choose_the_strategy(devices, kind, replicas):
    strategy = tfaccum.make_strategy(devices)
    assert type(strategy) is kind
    assert strategies.num_replicas(strategy) == replicas
    assert strategies.num_local_replicas(strategy) == replicas
    assert strategies.worker_index(strategy) == (0, 1)


@pytest.mark.parametrize(
    "devices", [[], ["CPU:9"], ["GPU:0", "CPU:0"], ["CPU:0", "CPU:0"]]
)
def test_bad_devices_are_refused_with_what_is_visible(devices):
    with pytest.raises(ValueError) as error:
        tfaccum.make_strategy(devices)
    assert f"Received: devices={devices}" in str(error.value)
    assert "'CPU:0', 'CPU:1', 'CPU:2', 'CPU:3'" in str(error.value)


def test_bad_tf_config_is_refused(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{worker: here}")
    with pytest.raises(ValueError, match="TF_CONFIG must be JSON. Received"):
        tfaccum.make_strategy()


def test_devices_beside_a_cluster_are_refused(monkeypatch):
    config = {
        "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
        "task": {"type": "worker", "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        tfaccum.make_strategy(["CPU:0"])


@pytest.mark.parametrize(
    ("communication", "message"),
    [
        ("mpi", "must be one of auto, ring, nccl. Received: communication='m"),
        ("nccl", "without a GPU. Received: communication='nccl'"),
    ],
)
def test_communication_that_cannot_work_is_refused(communication, message):
    cluster = Cluster(("127.0.0.1:1", "127.0.0.1:2"), 0, "a test")
    with pytest.raises(ValueError) as error:
        tfaccum.make_strategy(cluster=cluster, communication=communication)
    assert message in str(error.value)


def test_M2_an_absent_worker_ends_the_start():
    cluster = Cluster(tuple(workers.free_addresses(2)), 0, "a test")
    with pytest.raises(StartError) as error:
        tfaccum.make_strategy(cluster=cluster, start_timeout=1)
    assert f"nothing from worker 1 ({cluster.addresses[1]})" in str(error.value)


def test_a_cluster_may_be_left_alone(monkeypatch):
    config = Cluster(("127.0.0.1:1", "127.0.0.1:2"), 0, "a test").tf_config()
    monkeypatch.setenv("TF_CONFIG", config)
    strategy = tfaccum.make_strategy(cluster="none")
    assert type(strategy) is tf.distribute.OneDeviceStrategy


WORKER = """
import json, os, signal, time
import tensorflow as tf
import tfaccum
from tfaccum import strategy as strategies
from tfaccum.cluster import Cluster

def started(size):
    strategy = tfaccum.make_strategy(
        communication="ring", bytes_per_pack=1000, fingerprint={"a": "b"}
    )

    @tf.function
    def total():
        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.ones([size]))

        return strategy.run(replica)

    found = strategy.experimental_local_results(total())
    place = strategies.worker_index(strategy)
    if place[0] == 0:
        time.sleep(1)  # The other fetches from this one before it goes on.
    return [value.numpy().tolist() for value in found], place

# Three times, as a notebook may.
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
found = [started(2), started(3), started(2)]
try:
    tfaccum.make_strategy(cluster=Cluster(("127.0.0.1:1",), 0, "a test"))
except ValueError as error:
    refusal = str(error)
time.sleep(1)
os.kill(os.getpid(), signal.SIGTERM)
deadline = time.monotonic() + 30
while not signals and time.monotonic() < deadline:
    time.sleep(0.01)
with open(os.environ["TFACCUM_RESULT"], "w") as file:
    json.dump([found, refusal, signals], file)
"""


def test_workers_meet_and_start_and_start_again(tmp_path, run_workers):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    for index, worker in enumerate(run_workers(script, 2, timeout=120)):
        found, refusal, signals = worker.result
        totals, places = zip(*found, strict=True)
        assert totals == ([[2, 2]], [[2, 2, 2]], [[2, 2]])
        assert places == ([index, 2],) * 3
        assert "must be the one that this process has joined" in refusal
        assert "127.0.0.1:1" in refusal
        # Which TensorFlow would have kept for itself; tests/test_faults.py has
        # workers that die of it, because they did not ask for it.
        assert signals == [15]


@pytest.mark.slow
def test_a_worker_that_ends_after_the_meeting_ends_the_start(
    tmp_path, run_workers
):
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys, tensorflow as tf, tfaccum\n"
        "from tfaccum import rendezvous\n"
        "meet = rendezvous.meet\n"
        "def leave(cluster, *args):\n"
        "    meet(cluster, *args)\n"
        "    if cluster.index == 1: sys.exit(3)\n"
        "rendezvous.meet = leave\n"
        "tfaccum.make_strategy(start_timeout=20)\n"
    )
    first, second = run_workers(script, 2, timeout=100, check=False)
    assert (first.returncode, second.returncode) == (1, 3)
    assert "Timeout (0:00:20)!" in first.stderr
    assert "in make_strategy" in first.stderr


def test_M6_parameter_server_is_refused_by_name():
    class ParameterServerStrategyV2:
        """Stands for the real one, which needs a running cluster."""

    with pytest.raises(ValueError) as error:
        strategies.check_supported(ParameterServerStrategyV2())
    assert "strategy=ParameterServerStrategyV2" in str(error.value)
    assert "MirroredStrategy" in str(error.value)


def test_strategies_may_be_made_freely():
    """Each used for a collective of another shape, as Keras cannot."""
    for devices in (["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]):
        strategy = tfaccum.make_strategy(devices)

        @tf.function
        def total(strategy=strategy):
            def replica():
                context = tf.distribute.get_replica_context()
                return context.all_reduce(
                    "SUM", tf.ones([context.num_replicas_in_sync])
                )

            return strategy.run(replica)

        result = strategy.experimental_local_results(total())
        assert [float(r[0]) for r in result] == [len(devices)] * len(devices)
