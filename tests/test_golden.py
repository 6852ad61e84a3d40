"""What an earlier version has saved is read, and gone on with."""

import json
import shutil

import numpy as np
import pytest

import tfaccum
from tests.golden import make
from tfaccum.snapshots import Snapshots


@pytest.mark.parametrize("name", ["format_1"])
def test_a_golden_checkpoint_goes_on(name, tmp_path, capsys):
    """From update 4, in the middle of the second of three epochs."""
    copy = tmp_path / "run"
    shutil.copytree(make.HERE / name, copy)
    snapshot, complaints = Snapshots(copy / "checkpoints").newest()
    assert complaints == []
    assert snapshot.facts["update"] == 4
    assert snapshot.facts["position"] == [1, 2]
    expected = json.loads((make.HERE / f"{name}.json").read_text())
    model = make.build()
    history = make.fit(model, copy)
    assert "after update 4, with batch 3 of epoch 2" in capsys.readouterr().out
    assert history.keys() == expected["history"].keys()
    for metric, values in expected["history"].items():
        np.testing.assert_allclose(history[metric], values, rtol=1e-4)
    for mine, wanted in zip(
        model.get_weights(), expected["weights"], strict=True
    ):
        np.testing.assert_allclose(mine.ravel(), wanted, rtol=1e-3, atol=1e-5)
    assert model.optimizer.iterations.numpy() == 9


@pytest.mark.parametrize("name", ["format_1"])
def test_a_golden_model_is_loaded(name):
    model = tfaccum.load(make.HERE / name)
    x, _ = make.data()
    assert np.isfinite(model.predict(x, verbose=0)).all()
