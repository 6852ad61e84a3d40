"""MindSpore's accumulation tutorial, its first program, line by line.

Source: "Gradient Accumulation Algorithm" (repository mindspore-ai/docs,
docs/mindspore/programming_guide/source_en/apply_gradient_accumulation.md),
stand-alone mode: LeNet-5 on MNIST, batches of 32, the sum of the gradients of
4 of them behind one update, Momentum(0.01, 0.9), 10 epochs.

    PYTHONPATH=. python experiments/mindspore_lenet.py --data_dir=DIR

where DIR holds the `mnist` of TensorFlow Datasets, prepared.

| | expected | measured |
|---|---|---|
| accuracy on the test set | 96.31 % | 98.65 % |
| updates in an epoch | 468 | 469 |
| wall time | | 157 s |

Expected is what the tutorial reports, on 9,984 of the 10,000 images. An epoch
has 1,875 batches, that is 468 windows and 3 batches: there they are left over,
and join the first window of the next epoch, which has 7; here they make one
update more. The loss that is logged is the sum of 4, too. The model is that of
`experiments/mnist_lenet.py`, which trains with the mean instead of the sum,
and can do so on several devices.

Measured at commit dc71cdf on 2 cores of Intel(R) Xeon(R) Processor, no GPU,
beside other jobs; TensorFlow 2.21.0, Keras 3.15.1.
"""

import argparse
import json
import time

import keras

import tfaccum
from experiments import mnist_lenet
from tfaccum.train import report

BATCH, STEPS = 32, 4


class SumOfMeans(tfaccum.Model):
    """Adds up the mean gradients of its micro-batches, as there.

    `TrainForwardBackward` adds to `grad_sum`, and `TrainOptim` takes it as it
    is. None says that a loss stays a sum over the window.
    """

    def loss_weight(self, x, y, y_pred, sample_weight):
        """No number that the sum is divided by."""
        return None


def main():
    """Trains, and prints a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    keras.utils.set_random_seed(asked.seed)

    # create_dataset(path, 32)
    train, test = mnist_lenet.data(
        batch_size=BATCH, seed=asked.seed, data_dir=asked.data_dir
    )
    # GradientAccumulation(LeNet5(10), loss, Momentum(params, 0.01, 0.9))
    model = SumOfMeans.from_keras(mnist_lenet.model())
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        gradient_accumulation_steps=STEPS,
    )
    since = time.perf_counter()
    # model.train_process(10, ds_train, 4)
    model.fit(train, epochs=asked.epochs, verbose=2)
    seconds = time.perf_counter() - since
    # save_checkpoint, and eval.py
    logs = model.evaluate(test, return_dict=True, verbose=0)
    row = {
        "what": "mindspore_lenet",
        "epochs": asked.epochs,
        "updates": int(model.optimizer.iterations),
        "accuracy": round(logs["accuracy"], 4),
        "seconds": round(seconds),
        "hardware": report.hardware(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
