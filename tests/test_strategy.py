import json

import pytest
import tensorflow as tf

import tfaccum
from tfaccum import strategy as strategies


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
