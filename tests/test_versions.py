import os
import subprocess
import sys

import pytest

from tfaccum import versions


def run(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "package, version",
    [("tensorflow", "2.15.1"), ("keras", "3.13.2"), ("keras", "2.15.0")],
)
def test_P2_old_version_is_refused_by_name(monkeypatch, package, version):
    monkeypatch.setattr(
        versions,
        "installed",
        lambda name: version if name == package else "99.0.0",
    )
    with pytest.raises(ImportError) as error:
        versions.check()
    wanted = {"tensorflow": "2.16", "keras": "3.14"}[package]
    assert f"needs {package} {wanted} or newer" in str(error.value)
    assert f"Received: {package} {version}." in str(error.value)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0rc1", "2.21.0", "3.0"])
def test_P2_supported_tensorflow_is_accepted(monkeypatch, version):
    monkeypatch.setattr(
        versions,
        "installed",
        lambda name: version if name == "tensorflow" else None,
    )
    versions.check()


def test_other_backend_is_refused_at_import():
    done = run("import tfaccum", KERAS_BACKEND="jax")
    assert done.returncode == 1
    assert "Received: KERAS_BACKEND='jax'" in done.stderr


def test_command_checks_its_flags_without_tensorflow():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tfaccum.train", "--nope"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert " tfaccum.train" in done.stderr
    assert " tensorflow" not in done.stderr


def test_every_public_name_is_there():
    import tfaccum

    for name in tfaccum.__all__:
        assert getattr(tfaccum, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Modle'"):
        _ = tfaccum.Modle
