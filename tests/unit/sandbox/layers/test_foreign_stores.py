"""Images, layers and their records that were copied from another state: none is used as if it were made here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from policy import errors
from policy.layers import LayerRef
from sandbox.host import erofs_roots
from sandbox.layers import packing
from sandbox.layers.images import HeldImage, RootImages
from sandbox.layers.store import LayerStore
from sandbox.rootfs import erofs_image


def _layer(state: Path, name: str, data: bytes) -> LayerRef:
    def fill(pack: packing.Packing) -> None:
        pack.bytes("/a", data, executable=True)

    return LayerStore(state).pack(name, "test", fill).ref


class _Stores:
    """Two states, each with an image of a layer of its own. ``packer`` says of which kind."""

    def __init__(self, base: Path, packer: Path | None) -> None:
        self.packer = packer
        self.states = [base / "here", base / "there"]
        self.layers = [_layer(state, "own", state.name.encode()) for state in self.states]
        self.images = []
        for state, ref in zip(self.states, self.layers, strict=True):
            with RootImages(state).hold([], [ref], packer=packer) as held:
                held.check.wait()
                self.images.append(held.root.parent)

    def use(self) -> HeldImage:
        with RootImages(self.states[0]).hold([], [self.layers[0]], packer=self.packer) as held:
            held.check.wait()
            return held


@pytest.fixture(params=["tree", "erofs"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> _Stores:
    return _Stores(tmp_path, None if request.param == "tree" else erofs_roots.program())


def test_image_of_foreign_store_is_refused(stores: _Stores) -> None:
    here, there = stores.images
    shutil.rmtree(here)
    shutil.copytree(there, here, symlinks=True)
    (here / "complete").write_text(f"{here.name}\n")
    with pytest.raises(errors.LayerChangedError, match="a copy from elsewhere") as refused:
        stores.use()
    assert "gc --images" in refused.value.hint
    # The fix.
    RootImages(stores.states[0]).collect(unused_seconds=-1)
    assert stores.use().key == here.name


def test_image_under_its_own_name_is_made_again(stores: _Stores) -> None:
    here, there = stores.images
    shutil.rmtree(here)
    shutil.copytree(there, here, symlinks=True)
    stores.use()
    assert (here / "complete").read_text() == f"{here.name}\n"


def _taken_over(stores: _Stores, *records: str) -> None:
    here, there = stores.images
    for record in records:
        (here / record).unlink()
        shutil.copy(there / record, here / record)


@pytest.mark.parametrize("records", [("meta.json",), ("meta.json", "table", "listing")])
def test_record_of_foreign_image_is_refused(stores: _Stores, records: tuple[str, ...]) -> None:
    _taken_over(stores, *records)
    with pytest.raises(errors.LayerChangedError, match="a copy from elsewhere") as refused:
        stores.use()
    assert "gc --images" in refused.value.hint


def test_table_of_foreign_image_is_not_believed(stores: _Stores) -> None:
    """The bytes are read again, and are the image's own."""
    before = (stores.images[0] / "table").read_bytes()
    _taken_over(stores, "table")
    stores.use()
    assert (stores.images[0] / "table").read_bytes() == before


def test_listing_of_foreign_image_is_refused(tmp_path: Path) -> None:
    stores = _Stores(tmp_path, None)
    _taken_over(stores, "listing", "table")
    with pytest.raises(errors.LayerChangedError, match="/a: has other bytes"):
        stores.use()


def test_file_of_foreign_image_is_refused(tmp_path: Path) -> None:
    stores = _Stores(tmp_path, erofs_roots.program())
    _taken_over(stores, erofs_image.NAME, "table")
    with pytest.raises(errors.LayerChangedError, match="a root image was changed"):
        stores.use()


def test_layer_of_foreign_store_is_refused(stores: _Stores) -> None:
    mine, other = stores.layers
    RootImages(stores.states[0]).collect(unused_seconds=-1)
    here = stores.states[0] / "layers" / mine.digest
    shutil.rmtree(here)
    shutil.copytree(stores.states[1] / "layers" / other.digest, here)
    with pytest.raises(errors.LayerError, match="is not in the store"):
        stores.use()
    (here / "complete").write_text(f"{mine.digest}\n")
    with pytest.raises(errors.LayerChangedError, match="is not the one that was packed") as refused:
        stores.use()
    (here / "listing").write_bytes(b"")
    with pytest.raises(errors.LayerChangedError, match="is that of another layer") as record:
        LayerStore(stores.states[0]).listed()
    # The fix of both.
    assert refused.value.hint == record.value.hint == f"rm -r {here}, and build the layer again"
    shutil.rmtree(here)
    assert _layer(stores.states[0], "own", b"here") == mine
    stores.use()


def test_tree_of_foreign_layer_is_refused(stores: _Stores) -> None:
    mine, other = stores.layers
    RootImages(stores.states[0]).collect(unused_seconds=-1)
    here = stores.states[0] / "layers" / mine.digest
    shutil.rmtree(here / "root")
    shutil.copytree(stores.states[1] / "layers" / other.digest / "root", here / "root")
    with pytest.raises(errors.LayerChangedError, match="it is not as it was packed") as refused:
        stores.use()
    assert refused.value.hint
