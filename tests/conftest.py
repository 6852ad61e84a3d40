"""Sets TensorFlow up once, before anything imports it, and resets Keras."""

import contextlib
import gc
import os

# Worker processes inherit these too.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"


@contextlib.contextmanager
def _without_stderr():
    """Drops what TensorFlow's C++ writes at its start, whatever the level."""
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


with _without_stderr():
    import hypothesis
    import keras
    import pytest
    import tensorflow as tf

    tf.config.list_physical_devices()  # Looks for CUDA, and complains.

from tests import workers  # noqa: E402

SEED = 20240607
NUM_LOGICAL_DEVICES = 4


def _set_up_devices():
    """Makes 4 logical CPU devices, which stand for GPUs.

    One intra-op thread: the models are tiny, the machine has few cores, and
    the order of every sum inside an operation is then fixed. Two inter-op
    threads let two replicas run at once.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * NUM_LOGICAL_DEVICES
    )


_set_up_devices()

# The machine is shared, so that an example may take long; and a run that fails
# fails again.
hypothesis.settings.register_profile(
    "tfaccum", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("tfaccum")


@pytest.fixture(autouse=True, scope="module")
def freed_memory():
    """Collects garbage once a module: after each test it would take 0.3 s."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def fresh_keras():
    """Starts each test with the same seeds, names, dtypes and no graph."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    tf.config.run_functions_eagerly(False)


@pytest.fixture
def run_workers(tmp_path):
    """Runs real worker processes; see `tests.workers.run_workers`."""

    def run(script_or_module, num_workers, timeout=60, **options):
        return workers.run_workers(
            script_or_module,
            num_workers,
            timeout=timeout,
            directory=tmp_path,
            **options,
        )

    return run
