"""The UCI handwritten digits as a TFDS dataset: 1,797 images of 8x8.

```python
import tensorflow_datasets as tfds
import tfaccum.datasets.digits  # registers the builder

train = tfds.load("digits", split="train", data_dir="/tmp/data")
```

The data lie beside this file, see `DIGITS.md` for where they come from.
"""

import gzip
import hashlib
import pathlib

import numpy as np
import tensorflow_datasets as tfds

FILE = pathlib.Path(__file__).with_name("digits.csv.gz")
SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"

_DESCRIPTION = """\
1,797 handwritten digits of 13 writers: the test set of "Optical Recognition
of Handwritten Digits" of the UCI repository. An image has 8x8 pixels of 0..16,
each the number of pixels set in a 4x4 block of the scanned 32x32 bitmap.
"""

_CITATION = """\
@misc{alpaydin1998optdigits,
  title={Optical Recognition of Handwritten Digits},
  author={Alpaydin, Ethem and Kaynak, Cenk},
  year={1998},
  publisher={UCI Machine Learning Repository},
  doi={10.24432/C50P49}
}"""


def load() -> tuple[np.ndarray, np.ndarray]:
    """Reads the bundled file.

    Returns:
      Images, uint8 [1797, 8, 8] with values 0..16, and labels, int64 [1797]
      with values 0..9, in the order of the file.

    Raises:
      ValueError: if the file is not the one that was distributed.
    """
    packed = FILE.read_bytes()
    found = hashlib.sha256(packed).hexdigest()
    if found != SHA256:
        raise ValueError(
            f"`{FILE.name}` must have the sha256 {SHA256}. Received: "
            f"sha256={found} of {FILE}. Install the package again."
        )
    lines = gzip.decompress(packed).decode("ascii").splitlines()
    table = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    return table[:, :64].astype(np.uint8).reshape(-1, 8, 8), table[:, 64]


def split_rows(labels: np.ndarray) -> dict[str, np.ndarray]:
    """Says which rows of the file are held out: every fifth, class by class.

    The rows are listed by label, those of one label in the order of the file;
    every fifth of this list, from the fifth on, is the test split. The labels
    of the file follow patterns of ten, so that every fifth row would have
    given a test split of 52 threes and 21 ones.

    Args:
      labels: int64 [1797], in the order of the file.

    Returns:
      `{"train": int64 [1438], "test": int64 [359]}`, rows in ascending order:
      the example at position p of a split is row `split_rows(labels)[split][p]`
      of the file.
    """
    by_label = np.argsort(labels, kind="stable")
    test = np.sort(by_label[4::5])
    train = np.setdiff1d(np.arange(len(labels)), test)
    return {"train": train, "test": test}


class Digits(tfds.core.GeneratorBasedBuilder):
    """TFDS builder `digits`: train (1,438 examples) and test (359).

    An example is `{"image": uint8 [8, 8, 1] of 0..16, "label": int64 []}`.
    The order of the file is kept, in one TFRecord file per split.

    Source: E. Alpaydin, C. Kaynak (1998), Optical Recognition of Handwritten
    Digits, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The file of scikit-learn, every fifth held out."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(
                        shape=(8, 8, 1), dtype=np.uint8
                    ),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://doi.org/10.24432/C50P49",
            citation=_CITATION,
            license="CC BY 4.0",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # the data lie in the package
        images, labels = load()
        return {
            split: self._generate_examples(images, labels, rows)
            for split, rows in split_rows(labels).items()
        }

    def _generate_examples(self, images, labels, rows):
        for row in rows:
            yield (
                int(row),
                {
                    "image": images[row][:, :, np.newaxis],
                    "label": int(labels[row]),
                },
            )
