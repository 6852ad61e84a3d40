"""From options to a trained model, in execution order."""

import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from tfaccum.batching import BatchPlan
from tfaccum.schedule import AccumulationSchedule, Steps
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
from tfaccum.auto_micro_batch import AutoMicroBatch  # noqa: E402
from tfaccum.checkpoint import CHECKPOINTS, Checkpoint  # noqa: E402
from tfaccum.model import Model  # noqa: E402
from tfaccum.run import Preempted  # noqa: E402
from tfaccum.train.report import (  # noqa: E402
    Results,
    add_verification,
    table,
    write,
)
from tfaccum.train.verify import (  # noqa: E402
    Comparison,
    StartFrom,
    compare,
    first_windows,
)


def run(options: Options) -> int:
    """Trains as asked; returns the exit code.

    A run that was asked to end returns `tfaccum.cluster.EXIT_PREEMPTED`.

    Raises:
        UsageError: If the devices, the batch plan, the data or the arguments
            of `compile` turn out to be impossible.
        StartError: If the workers of a cluster cannot start together.
    """
    job = _Job(options)
    try:
        initial = job.train()
    except Preempted as end:
        job.say(
            "Asked to end: saved, and to be taken up by the same command "
            f"with --model_dir={options.model_dir}"
        )
        return int(end.code or 0)
    if not options.verify_updates:
        return 0
    return 0 if job.verify(initial).equal is not False else 1


class _Job:
    """Everything that training and verification share."""

    def __init__(self, options: Options):
        self.options = options
        self.started = time.perf_counter()
        self.strategy = _make_strategy(options)
        self.plan = options.plan(
            strategies.num_replicas(self.strategy), _named(self.strategy)
        )
        self.is_chief = strategies.worker_index(self.strategy)[0] == 0
        self.checkpoint = Checkpoint(
            options.model_dir,
            save_every_updates=options.save_every_updates,
            save_best=options.save_best,
            keep=options.keep,
            resume=options.resume,
            max_run_seconds=options.max_run_seconds,
            allow_changes=options.allow_changes,
        )
        self.say(_describe(self.plan, options))
        keras.utils.set_random_seed(options.seed)
        keras.config.set_dtype_policy(options.precision)
        self.experiment = _load(options)
        with _usage_errors(), _quiet_datasets():
            self.data, self.validation = self.experiment.data(
                batch_size=(
                    self.plan.global_batch_size
                    if options.cut_batches
                    else self.plan.dataset_batch_size
                ),
                seed=options.seed,
                data_dir=options.data_dir,
            )
        worker, num_workers = strategies.worker_index(self.strategy)
        if num_workers > 1 and hasattr(self.data, "checksum"):
            print(  # On each, for its log.
                f"worker {worker} of {num_workers}: its share of "
                f"{self.data.checksum()[:12]}",
                flush=True,
            )
        self.num_updates = _num_updates(self.data, self.plan, options)
        if self.num_updates is not None:
            self.say(_describe_epochs(self.data, self.num_updates, options))

    def say(self, text: str) -> None:
        """Prints on the chief."""
        if self.is_chief:
            print(text, flush=True)

    def compile_arguments(self) -> dict[str, Any]:
        """The experiment's own; new objects each time."""
        return self.experiment.compile_arguments(
            learning_rate=self.options.learning_rate,
            num_updates=self.num_updates,
        )

    def compiled(self, changed: Callable[[dict], dict] = lambda a: a) -> Model:
        """A new model, compiled as asked for, with changed arguments."""
        with self.strategy.scope():
            model = self.experiment.model()
            if not isinstance(model, Model):
                model = Model.from_keras(model)
            with _usage_errors():
                model.compile(
                    **changed(self.compile_arguments()),
                    **_accumulation(self.plan, self.options),
                    steps_per_execution=self.options.steps_per_execution,
                    jit_compile=self.options.jit,
                    wire_dtype=self.options.wire_dtype,
                )
        return model

    def train(self) -> list:
        """Trains and reports; returns the weights from which it started."""
        options = self.options
        model = self.compiled()
        if self.is_chief:  # So that a run that ends early may go on here.
            folder = options.model_dir / CHECKPOINTS
            folder.mkdir(parents=True, exist_ok=True)
        curves, throughput = progress.Curves(), progress.Throughput()
        initial = StartFrom()
        every = options.compare_replicas_every
        compares = [progress.CompareReplicas(every)] if every else []
        sums = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self.say(
                "gradient sums take "
                f"{model.accumulator_bytes:,} bytes per replica"
            )
        )
        bar = 1 if sys.stdout.isatty() else 2
        history = model.fit(
            self.data,
            validation_data=self.validation,
            epochs=options.epochs,
            verbose=bar if self.is_chief else 0,
            callbacks=[
                progress.TensorBoard(options.model_dir / "tensorboard"),
                throughput,
                curves,
                initial,
                sums,
                self.checkpoint,
                *compares,
            ],
        )
        results = Results(
            history=history.history,
            updates=curves.num_updates,
            skipped_updates=curves.skipped_updates,
            examples_per_second=throughput.examples_per_second,
            input_wait=throughput.input_wait,
            accumulator_bytes=model.accumulator_bytes,
            wall_time=time.perf_counter() - self.started,
            table_sums=tuple(map(str, model.table_sums)),
        )
        if self.is_chief:
            model.save(options.model_dir / "final.keras")
            write(options, self.plan, results, curves)
            self.say(table(results, options.model_dir))
        return initial.weights or []

    def verify(self, initial: list) -> Comparison:
        """Takes the first updates again, and reports."""
        steps = self.plan.gradient_accumulation_steps
        comparison = compare(
            self.compiled,
            self.experiment.model(),
            self.compile_arguments(),
            initial,
            first_windows(
                self.data,
                1 if self.options.cut_batches else steps,
                self.options.verify_updates,
            ),
        )
        if self.is_chief:
            add_verification(self.options.model_dir, comparison)
            self.say(comparison.describe())
        return comparison


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """The library's refusals of arguments, as one line of the command."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(error) from error


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Keeps TFDS from warning that a dataset is new, and drawing bars."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _make_strategy(options: Options) -> tf.distribute.Strategy:
    devices = list(options.devices) if options.devices else None
    if options.virtual_devices:
        count = options.virtual_devices
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
        if not options.cluster:  # There a worker has all that it sees.
            devices = [f"CPU:{index}" for index in range(count)]
    if options.strategy == "one_device" and devices is None:
        gpus = tf.config.list_logical_devices("GPU")
        devices = ["GPU:0" if gpus else "CPU:0"]
    with _usage_errors():
        strategy = strategies.make_strategy(
            devices,
            cluster=options.cluster or "none",
            start_timeout=options.start_timeout,
            communication=options.communication,
            bytes_per_pack=options.bytes_per_pack,
            collective_timeout=options.collective_timeout,
            fingerprint=options.fingerprint,
        )
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
    spec = importlib.util.spec_from_file_location(
        f"tfaccum_experiment_{path.stem}", path
    )
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
    arguments: dict[str, Any] = {}
    if options.cut_batches:
        arguments["micro_batch_size"] = plan.micro_batch_size
    else:
        arguments["gradient_accumulation_steps"] = _steps(plan, options)
    if options.auto_micro_batch:
        arguments["micro_batch_size"] = AutoMicroBatch(
            start=plan.micro_batch_size, directory=str(options.model_dir)
        )
    return arguments


def _steps(plan: BatchPlan, options: Options) -> Steps:
    """K of the plan, and what it becomes later."""
    steps = plan.gradient_accumulation_steps
    later = options.accumulation_schedule
    return [(0, steps), *later] if later else steps


def _describe(plan: BatchPlan, options: Options) -> str:
    product = text = plan.describe()
    if options.cut_batches:
        product, _, _ = text.partition(" (")
        text = f"{product} (cut from one dataset batch)"
    for update, steps in options.accumulation_schedule:
        text += (
            f"; {plan.dataset_batch_size * steps} from update {update} "
            f"({steps} micro-steps)"
        )
    if options.auto_micro_batch:
        text += "; smaller micro-batches if these do not fit"
    return text


def _num_updates(train: Any, plan: BatchPlan, options: Options) -> int | None:
    """Updates of the whole run; None if the data cannot tell."""
    batches = _num_batches(train)
    if batches is None:
        return None
    if options.cut_batches:
        return batches * options.epochs
    schedule = AccumulationSchedule(_steps(plan, options))
    updates = 0
    for _ in range(options.epochs):
        left = batches
        while left > 0:
            left -= schedule.at(updates)
            updates += 1
    return updates


def _num_batches(train: Any) -> int | None:
    """Dataset batches of one epoch."""
    if isinstance(train, feeding.EpochData):
        train = train.epoch(0, worker=0, num_workers=1)
    batches = int(train.cardinality())
    return batches if batches >= 0 else None


def _describe_epochs(train: Any, num_updates: int, options: Options) -> str:
    per_epoch = f"{num_updates // options.epochs} updates per epoch, "
    if options.accumulation_schedule:
        per_epoch = ""
    return (
        f"{_num_batches(train)} dataset batches, {per_epoch}{num_updates} "
        f"updates in {options.epochs} epochs"
    )
