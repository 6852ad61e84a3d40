"""From options to a trained model, in execution order."""

import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from tfaccum.batching import BatchPlan
from tfaccum.train.options import Options, UsageError


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what C++ writes to stderr while TensorFlow is imported.

    TensorFlow 2.21 says at every start that there is no GPU and which CPU
    instructions it was built for, whatever TF_CPP_MIN_LOG_LEVEL is. If the
    import fails, all of it is shown.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


with _quiet():
    import keras
    import tensorflow as tf

    tf.config.list_physical_devices()  # Looks for CUDA, and complains.

from tfaccum import callbacks as progress  # noqa: E402
from tfaccum import feeding  # noqa: E402
from tfaccum import strategy as strategies  # noqa: E402
from tfaccum.model import Model  # noqa: E402
from tfaccum.train import report, verify  # noqa: E402


def run(options: Options) -> int:
    """Trains as asked; returns the exit code.

    Raises:
        UsageError: If the devices, the batch plan, the data or the arguments
            of `compile` turn out to be impossible.
    """
    started = time.perf_counter()
    strategy = _make_strategy(options)
    plan = options.plan(strategies.num_replicas(strategy), _named(strategy))
    worker, _ = strategies.worker_index(strategy)
    say: Callable[..., None] = print if worker == 0 else _say_nothing
    say(_describe(plan, options))

    keras.utils.set_random_seed(options.seed)
    keras.config.set_dtype_policy(options.precision)
    experiment = _load(options)
    with _usage_errors():
        train, validation = experiment.data(
            batch_size=(
                plan.global_batch_size
                if options.cut_batches
                else plan.dataset_batch_size
            ),
            seed=options.seed,
            data_dir=options.data_dir,
        )
    num_updates = _num_updates(train, plan, options)
    if num_updates is not None:
        say(_describe_epochs(train, num_updates, options))

    def compile_arguments() -> dict[str, Any]:
        return experiment.compile_arguments(
            learning_rate=options.learning_rate, num_updates=num_updates
        )

    def compiled(changed: Callable[[dict], dict] = lambda a: a) -> Model:
        """The model, compiled as asked for, with changed arguments."""
        with strategy.scope():
            model = experiment.model()
            if not isinstance(model, Model):
                model = Model.from_keras(model)
            with _usage_errors():
                model.compile(
                    **changed(compile_arguments()),
                    **_accumulation(plan, options),
                    steps_per_execution=options.steps_per_execution,
                    jit_compile=options.jit,
                )
        return model

    model = compiled()
    curves, throughput = progress.Curves(), progress.Throughput()
    initial = verify.InitialWeights()
    history = model.fit(
        train,
        validation_data=validation,
        epochs=options.epochs,
        verbose=0 if worker else (1 if sys.stdout.isatty() else 2),
        callbacks=[
            progress.TensorBoard(options.model_dir / "tensorboard"),
            throughput,
            curves,
            initial,
        ],
    )
    results = report.Results(
        history=history.history,
        updates=curves.num_updates,
        skipped_updates=curves.skipped_updates,
        examples_per_second=throughput.examples_per_second,
        accumulator_bytes=model.accumulator_bytes,
        wall_time=time.perf_counter() - started,
    )
    if worker == 0:
        model.save(options.model_dir / "final.keras")
        report.write(options, plan, results, curves)
        say(report.table(results, options.model_dir))
    if not options.verify_updates:
        return 0
    comparison = verify.compare(
        compiled,
        experiment.model(),
        compile_arguments(),
        initial.weights,
        verify.first_windows(
            train,
            1 if options.cut_batches else plan.gradient_accumulation_steps,
            options.verify_updates,
        ),
    )
    if worker == 0:
        report.add_verification(options.model_dir, comparison)
        say(comparison.describe())
    return 0 if comparison.equal is not False else 1


def _say_nothing(*_: Any) -> None:
    pass


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """The library's refusals of arguments, as one line of the command."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(error) from error


def _make_strategy(options: Options) -> tf.distribute.Strategy:
    devices = list(options.devices) if options.devices else None
    if options.virtual_devices:
        count = options.virtual_devices
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
        devices = [f"CPU:{index}" for index in range(count)]
    if options.strategy == "one_device" and devices is None:
        gpus = tf.config.list_logical_devices("GPU")
        devices = ["GPU:0" if gpus else "CPU:0"]
    with _usage_errors():
        strategy = strategies.make_strategy(devices)
    if options.strategy == "mirrored" and not isinstance(
        strategy, tf.distribute.MirroredStrategy
    ):
        raise UsageError(
            "--strategy=mirrored needs two or more devices. Received: one. "
            "Give --devices or --virtual_devices."
        )
    return strategy


def _named(strategy: tf.distribute.Strategy) -> str:
    """Where the number of replicas comes from."""
    devices = strategies.num_local_replicas(strategy)
    _, workers = strategies.worker_index(strategy)
    return f"{type(strategy).__name__}, {workers} worker(s) x {devices}"


def _load(options: Options) -> Any:
    """Runs the experiment's file as a module."""
    path = options.experiment
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(
            f"--experiment must be Python. Received: --experiment={path}."
        )
    module = importlib.util.module_from_spec(spec)
    # Classes defined there can then be found by their module's name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _accumulation(plan: BatchPlan, options: Options) -> dict[str, Any]:
    """What `compile` is told about the plan."""
    if options.cut_batches:
        return {"micro_batch_size": plan.micro_batch_size}
    return {"gradient_accumulation_steps": plan.gradient_accumulation_steps}


def _describe(plan: BatchPlan, options: Options) -> str:
    if not options.cut_batches:
        return plan.describe()
    product, _, _ = plan.describe().partition(" (")
    return f"{product} (cut from one dataset batch)"


def _num_updates(train: Any, plan: BatchPlan, options: Options) -> int | None:
    """Updates of the whole run; None if the data cannot tell."""
    batches = _num_batches(train)
    if batches is None:
        return None
    per_epoch = batches if options.cut_batches else plan.windows(batches)
    return per_epoch * options.epochs


def _num_batches(train: Any) -> int | None:
    """Dataset batches of one epoch."""
    if isinstance(train, feeding.EpochData):
        train = train.epoch(0, worker=0, num_workers=1)
    batches = int(train.cardinality())
    return batches if batches >= 0 else None


def _describe_epochs(train: Any, num_updates: int, options: Options) -> str:
    return (
        f"{_num_batches(train)} dataset batches, "
        f"{num_updates // options.epochs} updates per epoch, {num_updates} "
        f"updates in {options.epochs} epochs"
    )
