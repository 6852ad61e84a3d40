"""A model for which memory ends at a number of rows; also on one worker."""

import numpy as np
import tensorflow as tf

import tfaccum
from tests import toy


class Limited(tfaccum.Model):
    """Runs out of memory above `limits[replica]` rows; keeps what has run."""

    def train_step(self, data):
        context = tf.distribute.get_replica_context()

        def allocate(replica, x):
            limit = self.__dict__["limits"][int(replica)]
            if len(x) > limit:
                raise MemoryError(f"{len(x)} rows, and room for {limit}")
            self.sizes_run.append(len(x))

        result = super().train_step(data)
        # In the end, when metrics and statistics have moved already.
        tf.py_function(
            allocate, [context.replica_id_in_sync_group, data[0]], []
        )
        return result

    @property
    def sizes_run(self):
        return self.__dict__.setdefault("sizes", [])


def set_limits(model, limits):
    """Not an ordinary attribute: Keras puts a copy in place of a tuple."""
    model.__dict__["limits"] = limits


def rows():
    rng = np.random.default_rng(1)
    return (rng.normal(size=(48, 1)) + 1).astype("float32")


def worker_1(strategy):
    """Worker 1 has room for 3 rows only."""
    model = toy.toy(
        strategy=strategy, model_class=Limited, micro_batch_size="auto"
    )
    set_limits(model, (100, 3))
    seen = toy.EachUpdate()
    x = rows()
    model.fit(
        x, np.zeros_like(x), 24, shuffle=False, verbose=0, callbacks=[seen]
    )
    return {
        "weight": toy.weight_of(model),
        "tried": model.micro_batch_search.tried,
        "sizes": model.sizes_run[-8:],
        "examples": [u.examples for u in seen.updates],
    }
