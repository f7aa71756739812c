import json
import os
import shutil
import subprocess

import pytest
import torch
from conftest import TINY_MODEL, TINY_TASK

from interp import InterpError, build_model, load_checkpoint, save_checkpoint
from interp.checkpoint import checkpoint_names, find_checkpoint, read_checkpoint, save_tensors


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of the tiny checkpoint, to be damaged."""
    return shutil.copytree(tiny, tmp_path / "copy")


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_saved_is_loaded(tmp_path):
    model = build_model(TINY_MODEL, seed=3)
    save_checkpoint(tmp_path / "c", model.state_dict(), TINY_TASK, TINY_MODEL, metrics={"mae_bits": 0.5})
    loaded, task = load_checkpoint(tmp_path / "c")
    assert task == TINY_TASK
    assert loaded.cfg == TINY_MODEL
    assert not loaded.training
    batch = task.sample(3)
    assert torch.equal(loaded(batch.tokens, batch.position), model(batch.tokens, batch.position))
    assert read_checkpoint(tmp_path / "c").metrics == {"mae_bits": 0.5}


def test_shipped_checkpoints_load_by_name_whatever_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint_names()
    for name in checkpoint_names():
        model, task = load_checkpoint(name)
        batch = task.sample(2)
        assert model(batch.tokens, batch.position).shape == batch.posterior.shape


def test_unknown_names_get_the_closest_match():
    with pytest.raises(
        InterpError, match="unknown checkpoint 'bijection-transfomer': did you mean 'bijection-transformer'"
    ):
        load_checkpoint("bijection-transfomer")


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InterpError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load_checkpoint(folder)


def test_flipped_bits_in_weights(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 255
    path.write_bytes(content)
    with pytest.raises(InterpError, match=r"is not the file that config\.json was written with"):
        load_checkpoint(folder)


def test_weights_of_another_model(folder):
    config = json.loads((folder / "config.json").read_text())["model"]
    edit(folder, model={**config, "n_layers": 1})
    with pytest.raises(InterpError, match=r"does not fit the model.*'blocks\.1\..*no such tensor"):
        load_checkpoint(folder)


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(InterpError, match="does not exist; the checkpoint is incomplete"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: edit(f, schema=99), "has schema 99, this windtunnel reads up to 1; install a newer"),
        (
            lambda f: (f / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}'),
            "belongs to another program",
        ),
        (lambda f: (f / "config.json").write_text('{"schema": 1, "task"'), "is not readable JSON"),
        (lambda f: (f / "config.json").unlink(), "not a windtunnel checkpoint"),
        (lambda f: edit(f, task={"name": "bijektion"}), "unknown task 'bijektion': did you mean 'bijection'"),
        (
            lambda f: edit(f, model={"d_vocab": 10, "d_out": 5, "n_ctx": 8, "layers": 3}),
            "does not describe a model",
        ),
        (lambda f: edit(f, model=None), "does not describe a model"),
        (lambda f: edit(f, task={"name": "bijection", "symbols": 1}), "symbols must be at least 2"),
    ],
)
def test_wrong_configs(folder, damage, message):
    damage(folder)
    with pytest.raises(InterpError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_file_is_not_a_folder(folder):
    with pytest.raises(InterpError, match="is a file; expected a checkpoint folder"):
        load_checkpoint(folder / "config.json")


def test_a_hub_id_that_can_not_be_had(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InterpError, match="the hub did not give it"):
        find_checkpoint("nobody/nothing")


def test_a_pickle_is_never_loaded(folder):
    torch.save({"x": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(InterpError, match="not a safetensors file"):
        load_checkpoint(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        path = disk / "model.safetensors"
        save_tensors(path, {"a": torch.ones(100)})
        before = path.read_bytes()
        with pytest.raises(InterpError, match=r"could not write .*; nothing there was changed"):
            save_tensors(path, {"a": torch.ones(1_000_000)})
        assert path.read_bytes() == before
        assert [p.name for p in disk.iterdir()] == ["model.safetensors"]
    finally:
        subprocess.run(["umount", disk], check=True)
