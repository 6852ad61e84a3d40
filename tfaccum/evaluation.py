"""`evaluate` and `predict` over all replicas and workers."""

import json
from typing import Any

import keras
import tensorflow as tf

from tfaccum import agreement, keras_private
from tfaccum import strategy as strategies
from tfaccum.feeding import Source
from tfaccum.functions import Functions, in_step


class Evaluation(Functions):
    """`evaluate`, `predict` and their one-batch forms."""

    # --- Evaluation --------------------------------------------------------

    @in_step
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Loss and metrics over all replicas and workers; as in Keras."""
        self._check_compiled("evaluate")
        source = self._make_source(
            x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps=steps,
        )
        self._check_same({"data": source})
        callbacks = self._callbacks(callbacks, verbose, source)
        source.begin_epoch(0)
        logs = self._evaluate(source, callbacks)
        return self._batch_result(logs, return_dict)

    def _evaluate(self, source: Source, callbacks: Any) -> dict[str, float]:
        self._build(source.spec)
        self.make_test_function()
        self.stop_evaluating = False
        callbacks.on_test_begin()
        self.reset_metrics()
        total, done, more, stops = source.num_batches, 0, True, False
        logs: dict[str, float] = {}
        while more and (total is None or done < total):
            batches = self.steps_per_execution
            if total is not None:
                batches = min(batches, total - done)
            callbacks.on_test_batch_begin(done)
            results, examples, more, stopped = self.test_function(
                source, batches, stops
            )
            if stopped or (not examples and not more):
                break
            logs = results
            done += batches
            callbacks.on_test_batch_end(done - 1, logs)
            stops = self.stop_evaluating
            if stops and not self._has_other_workers:
                break
        if not more:
            self._say_if_short(source, done, "steps")
        source.end_epoch(done, exhausted=not more)
        callbacks.on_test_end(logs)
        return dict(logs)

    @in_step
    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Loss and metrics of one batch; as in Keras."""
        self._check_compiled("test_on_batch")
        source = self._batch_source(x, y, sample_weight)
        self._build(source.spec)
        self.make_test_function()
        self.reset_metrics()
        source.begin_epoch(0)
        logs, *_ = self.test_function(source, 1)
        return self._batch_result(logs, return_dict)

    # --- Prediction --------------------------------------------------------

    @in_step
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Outputs for all rows, in order, on every worker; as in Keras."""
        source = self._make_source(x, batch_size=batch_size, steps=steps)
        self._check_same({"data": source})
        callbacks = self._callbacks(callbacks, verbose, source)
        self.make_predict_function()
        self.stop_predicting = False
        callbacks.on_predict_begin()
        source.begin_epoch(0)
        total = source.num_batches
        outputs: list[Any] = []
        while total is None or len(outputs) < total:
            callbacks.on_predict_batch_begin(len(outputs))
            batch = self._predict_batch(source)
            if batch is None:
                self._say_if_short(source, len(outputs), "steps")
                break
            outputs.append(batch)
            callbacks.on_predict_batch_end(len(outputs) - 1, {"outputs": batch})
            if self.stop_predicting:
                break
        source.end_epoch(len(outputs), exhausted=False)
        callbacks.on_predict_end()
        return self._all_rows(outputs)

    @in_step
    def predict_on_batch(self, x: Any) -> Any:
        """Outputs for one batch; as in Keras."""
        self.make_predict_function()
        self.stop_predicting = False
        source = self._batch_source(x)
        source.begin_epoch(0)
        return self._all_rows([self._predict_batch(source)])

    def _predict_batch(self, source: Source) -> Any:
        """This worker's outputs for one dataset batch; None without data."""
        strategy = self.distribute_strategy
        parts: list[tuple] = []
        last = False
        while not last:
            found = self.predict_function(source)
            if found is None:
                return None
            last, outputs = found
            flat = [
                strategy.experimental_local_results(output)
                for output in keras.tree.flatten(outputs)
            ]
            parts.extend(zip(*flat, strict=True))
        return keras.tree.pack_sequence_as(
            outputs, [_concat(column) for column in zip(*parts, strict=True)]
        )

    def _all_rows(self, batches: list[Any]) -> Any:
        """Outputs of all batches over all workers, as numpy, in order."""
        strategy = self.distribute_strategy
        mine = json.dumps([len(batches), bool(self.stop_predicting)])
        told = map(json.loads, agreement.exchange(strategy, mine))
        counts, stopped = zip(*told, strict=True)
        if not min(counts):
            raise ValueError(
                "`x` must yield at least one batch on each worker. Received: "
                f"{', '.join(map(str, counts))} batches, by worker."
            )
        # A worker may have less data than others, or a callback that stops.
        number = min(counts) if any(stopped) else max(counts)
        batches = batches[:number]
        if number > len(batches):
            none = keras.tree.map_structure(lambda rows: rows[:0], batches[0])
            batches += [none] * (number - len(batches))
        flat = [keras.tree.flatten(batch) for batch in batches]
        columns = [list(column) for column in zip(*flat, strict=True)]
        if self._has_other_workers:
            columns = [_gathered(strategy, column) for column in columns]
        return keras.tree.pack_sequence_as(
            batches[0],
            [keras_private.concat_outputs(column) for column in columns],
        )


def _concat(parts: Any) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tf.concat(parts, axis=0)


def _gathered(
    strategy: tf.distribute.Strategy, batches: list[tf.Tensor]
) -> list[tf.Tensor]:
    """All workers' rows of each batch, in the order of the workers."""
    _, workers = strategies.worker_index(strategy)
    sizes = tf.constant([[len(batch) for batch in batches]])
    sizes = agreement.gather(strategy, sizes).numpy()
    rows = agreement.gather(strategy, tf.concat(batches, 0))
    pieces = tf.split(rows, sizes.ravel())
    per_worker = [
        pieces[worker * len(batches) : (worker + 1) * len(batches)]
        for worker in range(workers)
    ]
    return [tf.concat(parts, 0) for parts in zip(*per_worker, strict=True)]
