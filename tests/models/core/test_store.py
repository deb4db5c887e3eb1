"""Model folders: written in one step, checked when read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.core.store import (
    FORMAT,
    MANIFEST,
    OPERATORS,
    check_estimator,
    check_schema,
    contents_of,
    folder_digest,
    pack,
    pack_tensors,
    predicts_operators,
    read_files,
    read_manifest,
    training_info,
    unpack,
    unpack_tensors,
    write_folder,
)
from opcast.models.cost_model import CostModel
from opcast.models.operators import OpModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "m", {"rows": 3, "own": 1}, {"a.bin": b"one", "sub/b.bin": b"two"})
    return tmp_path / "m"


def test_a_folder_reads_as_it_was_written(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest["format"] == FORMAT and set(manifest["files"]) == {"a.bin", "sub/b.bin"}
    assert read_files(folder, manifest) == {"a.bin": b"one", "sub/b.bin": b"two"}
    assert training_info(manifest, ("own",)) == {"rows": 3}
    assert [p.name for p in folder.parent.iterdir()] == ["m"]  # nothing half-written beside it


def test_a_new_model_replaces_the_old_one_but_nothing_else(folder: Path, tmp_path: Path) -> None:
    write_folder(folder, {}, {"c.bin": b"three"})
    assert sorted(p.name for p in folder.iterdir()) == ["c.bin", MANIFEST]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ModelError, match="will not overwrite"):
        write_folder(tmp_path / "notes", {}, {})
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "a.bin").write_bytes(b"One"),
        lambda folder: (folder / "a.bin").unlink(),
        lambda folder: _edit(folder, files={"../other/a.bin": "0"}),
        lambda folder: _edit(folder, files={"/etc/hostname": "0"}),
        lambda folder: _edit(folder, files=["a.bin"]),
        lambda folder: _edit(folder, format=FORMAT + 1),
        lambda folder: (folder / MANIFEST).write_text("{"),
        lambda folder: (folder / MANIFEST).unlink(),
    ],
)
def test_damage_is_a_model_error(folder: Path, damage: object) -> None:
    assert callable(damage)
    damage(folder)
    with pytest.raises(ModelError):
        read_files(folder, read_manifest(folder))


def _edit(folder: Path, **entries: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | entries))


def test_the_digest_changes_with_any_file(folder: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "n", {"rows": 3, "own": 1}, {"a.bin": b"one", "sub/b.bin": b"Two"})
    first, second = folder_digest(folder), folder_digest(tmp_path / "n")
    assert len({first, second, folder_digest(folder, tmp_path / "n")}) == 3
    assert folder_digest(folder) == first and len(first) == 16


def test_contents_are_of_all_folders_below() -> None:
    def save(root: Path) -> None:
        (root / "x" / "y").mkdir(parents=True)
        (root / "x" / "y" / "z").write_bytes(b"1")
        (root / "w").write_bytes(b"2")

    assert contents_of(save) == {"w": b"2", "x/y/z": b"1"}


def test_manifests_of_other_estimators_and_features_are_refused(tmp_path: Path) -> None:
    check_estimator(tmp_path, {"estimator": "ridge"}, "ridge")
    with pytest.raises(ModelError, match="'ridge' model, not 'forest'"):
        check_estimator(tmp_path, {"estimator": "ridge"}, "forest")
    check_schema(tmp_path, {"graph_schema_hash": "a"}, "a", kind="graph")
    with pytest.raises(ModelError, match="feature schema"):
        check_schema(tmp_path, {"schema_hash": "a"}, "b")


def test_a_manifest_states_whether_its_model_predicts_operators() -> None:
    models: list[CostModel | OpModel] = [CostModel.untrained("roofline"), OpModel()]
    manifests = [model.contents()[0] for model in models]
    assert [predicts_operators(m) for m in manifests] == [False, True]
    assert manifests[1]["kind"] == OPERATORS


def test_arrays_survive_and_objects_are_refused() -> None:
    arrays = {"x": np.arange(6.0).reshape(2, 3), "names": np.array(["a", "b"])}
    back = unpack(pack(arrays))
    np.testing.assert_array_equal(back["x"], arrays["x"])
    np.testing.assert_array_equal(back["names"], arrays["names"])
    with pytest.raises(ValueError, match="pickle"):
        unpack(pack({"x": np.array([{}], object)}))
    for data in (b"", b"PK\x03\x04", pack(arrays)[:-30]):
        with pytest.raises(ValueError, match=r"not a \.npz"):
            unpack(data)


def test_tensors_survive_and_other_bytes_are_refused() -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3).T  # not contiguous
    np.testing.assert_array_equal(unpack_tensors(pack_tensors({"w": weight}))["w"], weight)
    with pytest.raises(ValueError, match="safetensors"):
        unpack_tensors(b"none")
